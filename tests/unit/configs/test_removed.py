"""A removed setting or flag is refused with its remedy. Most table rows here are made up."""

import pytest

from configs.load import to_yaml
from configs.removed import REMOVED, REMOVED_FLAGS, REMOVED_VALUES, Removed
from configs.values import flatten, unflatten
from scripts.command_line import Parser
from tests.support.configs import load_text, yaml_of
from tests.support.refusals import refused
from tests.support.runs import typed
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")
GONE = "TRAIN.GONE"


@pytest.fixture
def gone(monkeypatch):
    """Add a removed setting TRAIN.GONE, whose default was 0."""
    monkeypatch.setitem(REMOVED, GONE, Removed("0", "set TRAIN.SMOOTHING"))


@pytest.mark.usefixtures("gone")
def test_removed_setting_at_its_default_loads_but_is_dropped():
    loaded = load_text(yaml_of({GONE: "0"}))
    assert loaded.config == load_text("").config
    assert GONE not in to_yaml(loaded.config, loaded.origins)


@pytest.mark.usefixtures("gone")
def test_error_for_removed_setting_names_its_remedy():
    with refused(ConfigError, "x.yaml", GONE, "TRAIN.SMOOTHING"):
        load_text(yaml_of({GONE: "3"}))
    with refused(ConfigError, "-opts", GONE, "TRAIN.SMOOTHING"):
        load_text("", "-opts", f"{GONE}=3")


@pytest.mark.usefixtures("gone")
def test_removed_setting_in_a_checkpoint_is_ignored():
    saved = flatten(load_text("").config)
    assert unflatten(saved | {GONE: 3}) == load_text("").config


@pytest.mark.parametrize("key", [key for key, row in REMOVED.items() if row.default])
def test_default_of_a_setting_that_a_release_removed_loads(key):
    assert load_text(yaml_of({key: REMOVED[key].default})).config == load_text("").config


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REMOVED_VALUES.items() for value in values])
def test_removed_value_is_refused_unless_a_checkpoint_has_it(key, value):
    with refused(ConfigError, "x.yaml", key, value, "3.0.0"):
        load_text(yaml_of({key: value}))
    assert unflatten(flatten(load_text("").config) | {key: value}) == load_text("").config


def test_error_for_removed_script_flag_names_its_replacement(monkeypatch):
    monkeypatch.setitem(REMOVED_FLAGS, "-gone", "give -output twice")
    with refused(ConfigError, "-gone", "-output"):
        Parser("a script").parse_args(["-gone", "3"])


def test_explain_precision_is_refused_unless_it_is_false():
    ended = typed("main_single_gpu.py", "-explain_precision")
    assert ended.returncode == 2 and "halfstep doctor" in ended.stderr
    with pytest.raises(ConfigError, match=r"PRECISION\.EXPLAIN"):
        load_text("PRECISION: {EXPLAIN: true}")
    assert load_text("PRECISION: {EXPLAIN: false}").config == load_text("").config


def test_file_for_each_channel_is_refused_and_one_file_is_named_instead():
    with refused(ConfigError, "DATA.CHANNEL_FILES", "3.0.0", "one file", ".npy"):
        load_text("", "-opts", "DATA.CHANNEL_FILES={id}_{B02,B03}.tif")
    assert load_text("DATA: {CHANNEL_FILES: null}").config == load_text("").config
