"""Text is converted to values by the type in the schema, for each of PyYAML's pitfalls, and converted back to text."""

import functools
import pickle
import re

import pytest
import yaml

from configs.load import to_yaml
from configs.schema import Config
from configs.values import SETTINGS, flatten, unflatten
from tests.support.cases import cases_of, names_of, value_of
from tests.support.configs import load_text, write
from tests.support.refusals import refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize("word", cases_of("texts_as_values"))
def test_text_value_in_file_or_command_line_converts_to_schema_type(word):
    key, _, text = word.partition("=")
    *sections, name = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    in_file = load_text("\n".join([*lines, f"{'  ' * len(sections)}{name}: {text}"])).config
    in_opts = load_text("", "-opts", "TRAIN.LR_SCHEDULER.NAME=step", "AMP=true", word).config
    for config in (in_file, in_opts):
        assert repr(functools.reduce(getattr, key.split("."), config)) == value_of("texts_as_values", word)


@pytest.mark.parametrize("word", cases_of("mistakes-values"))
def test_error_for_wrong_value_lists_allowed_values(word):
    with refused(ConfigError, *names_of("mistakes-values", word)):
        load_text("", "-opts", word)


def test_saved_values_keep_origin_and_yaml_type():
    text = "TRAIN: {BASE_LR: 1e-6}\nMODEL: {FREEZE: ['*', '!fc.*']}"
    loaded = load_text(text, "-seed", "3", "-output", "true", "-opts", "AMP=true")
    saved = to_yaml(loaded.config, loaded.origins)
    origin = dict(re.findall(r"^ *(FREEZE|SEED|AMP|DEPTH): .*  # (.*)$", saved, re.MULTILINE))
    assert origin == {"FREEZE": "x.yaml", "SEED": "flag -seed", "AMP": "-opts", "DEPTH": "default"}
    assert len(re.findall("  # ", saved)) == len(SETTINGS)
    plain = yaml.safe_load(saved)
    for key, value in flatten(loaded.config).items():
        found = plain
        for part in key.split("."):
            found = found[part]
        assert found == value


def test_settings_of_one_start_in_a_saved_run_have_no_effect():
    assert unflatten({"EVAL": True, "MODEL.RESUME": "auto", "RUN.MAX_TIME": "1s", "SEED": 4}) == Config(SEED=4)


# A section of arguments (MODEL.KWARGS) whose types are not in the schema.
@pytest.mark.parametrize("text", cases_of("texts_as_arguments"))
def test_model_argument_has_same_value_from_any_source_and_after_saving(text):
    in_file = load_text(f"MODEL: {{KWARGS: {{some_name: {text}}}}}") if text[0] != "(" else None
    in_opts = load_text("", "-opts", f"MODEL.KWARGS.some_name={text}")
    again = load_text(to_yaml(in_opts.config, in_opts.origins))
    copies = [unflatten(flatten(in_opts.config)), pickle.loads(pickle.dumps(in_opts.config))]
    for config in (in_opts.config, again.config, *([in_file.config] if in_file else []), *copies):
        assert repr(config.MODEL.KWARGS["some_name"]) == value_of("texts_as_arguments", text)
        assert hash(config) == hash(in_opts.config)


def test_model_argument_tuples_split_by_yaml_are_refused():
    with refused(ConfigError, "MODEL.KWARGS.a"):
        load_text("MODEL: {KWARGS: {a: [(1, 2), (3, 4)]}}")


def test_model_arguments_of_files_are_merged_and_null_clears_them():
    write("MODEL: {KWARGS: {a: 1, b: 2}}", "base.yaml")
    loaded = load_text("BASE: base.yaml\nMODEL: {KWARGS: {b: 3}}", "-opts", "MODEL.KWARGS.c=4")
    assert dict(loaded.config.MODEL.KWARGS) == {"a": 1, "b": 3, "c": 4}
    assert [loaded.origins[f"MODEL.KWARGS.{name}"] for name in "abc"] == ["base.yaml", "x.yaml", "-opts"]
    loaded = load_text("BASE: base.yaml", "-opts", "MODEL.KWARGS=null", "MODEL.KWARGS.c=4")
    assert dict(loaded.config.MODEL.KWARGS) == {"c": 4}
