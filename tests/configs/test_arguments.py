"""A section of arguments (MODEL.KWARGS): what its values are read as, how files add to it, and that it comes back."""

import pickle

import pytest

from configs.load import to_yaml
from configs.values import flatten, unflatten
from tests.support.configs import load_text, write

pytestmark = pytest.mark.usefixtures("here")

READ_AS = {
    "4": 4,
    "1e-5": 1e-5,
    ".5": 0.5,
    "true": True,
    "False": False,
    "null": None,
    "None": None,
    "none": "none",
    "avg": "avg",
    "on": "on",
    "'4'": "4",
    '""': "",
    "[1, 2.5, [x, '3']]": (1, 2.5, ("x", "3")),
    "(0.9, 0.95)": (0.9, 0.95),
}


@pytest.mark.parametrize(("text", "value"), READ_AS.items())
def test_an_argument_is_read_alike_in_files_and_opts_and_comes_back_from_the_saved_settings(text, value):
    in_file = load_text(f"MODEL: {{KWARGS: {{some_name: {text}}}}}") if text[0] != "(" else None
    in_opts = load_text("", "-opts", f"MODEL.KWARGS.some_name={text}")
    again = load_text(to_yaml(in_opts.config, in_opts.origins))
    copies = [unflatten(flatten(in_opts.config)), pickle.loads(pickle.dumps(in_opts.config))]
    for config in (in_opts.config, again.config, *([in_file.config] if in_file else []), *copies):
        found = config.MODEL.KWARGS["some_name"]
        assert found == value and type(found) is type(value)
        assert hash(config) == hash(in_opts.config)


def test_files_add_arguments_by_name_and_null_removes_those_before():
    write("MODEL: {KWARGS: {a: 1, b: 2}}", "base.yaml")
    loaded = load_text("BASE: base.yaml\nMODEL: {KWARGS: {b: 3}}", "-opts", "MODEL.KWARGS.c=4")
    assert dict(loaded.config.MODEL.KWARGS) == {"a": 1, "b": 3, "c": 4}
    assert [loaded.origins[f"MODEL.KWARGS.{name}"] for name in "abc"] == ["base.yaml", "x.yaml", "-opts"]
    loaded = load_text("BASE: base.yaml", "-opts", "MODEL.KWARGS=null", "MODEL.KWARGS.c=4")
    assert dict(loaded.config.MODEL.KWARGS) == {"c": 4}
