"""Any allowed value of any setting is the same from a flag, -opts, a file, config.yaml and a checkpoint."""

import io
import math
import string

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from configs.flags import FLAGS, parse
from configs.load import merge, to_yaml
from configs.schema import SIZE, Config, Shape
from configs.values import (
    ALL_SETTINGS,
    OPEN_SECTIONS,
    SETTINGS,
    Setting,
    build,
    describe_allowed,
    flatten,
    is_none,
    unflatten,
    wrong_in,
)
from configs.yaml_files import Layer, read_file
from tests.support.configs import write
from tests.support.properties import examples
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")

# Without shrinking, which takes minutes for the values of all settings. Each failure names its setting.
few = settings(examples(15), phases=[Phase.explicit, Phase.generate])
# Values with a required form. A drawn text almost never has it.
FORMED = ("0/5", "3h30m", "07:00", "a b", "plain")
FORMED_LISTS = ([], ["0:128", "60:160"], ["a b", "c"])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TYPED = ["1e-3", "010", "yes", "12:30", "a: b", "# no", "x=y", "日本", "\\n", "%s"]
AWKWARD = st.sampled_from([*TYPED, "{}", "[a", "'q'", " a "])
PLAIN = st.text(string.ascii_letters + "*!._/-:=#é", min_size=1, max_size=8)
ARGUMENT = st.one_of(st.none(), st.booleans(), st.integers(-9, 9**20), st.floats(-1e300, 1e300), TEXT)


def members_of(setting: Setting, text: st.SearchStrategy[str]) -> st.SearchStrategy:
    if setting.choices:
        return st.sampled_from(setting.choices)
    low, high = setting.bounds or (None, None)
    if setting.form is SIZE:
        sides = st.integers(low, high)
        return sides | st.tuples(sides, sides).map(lambda pair: Shape(*pair).size)
    step = 2 if setting.form else 1  # the only other number with a form must be even
    kinds = {
        int: lambda: st.integers(low // step, high // step).map(lambda number: number * step),
        float: lambda: st.floats(low, high, allow_nan=False, allow_infinity=False),
        bool: st.booleans,
        str: lambda: st.sampled_from(list(filter(setting.form.fits, FORMED))) if setting.form else text,
    }
    one = kinds[setting.kind]().map(lambda value: f"x{value}" if isinstance(value, str) and is_none(value) else value)
    return st.one_of(one, *([st.sampled_from(setting.special)] if setting.special else []))


def values_of(setting: Setting, text: st.SearchStrategy[str]) -> st.SearchStrategy:
    """Return a strategy for the allowed values, as checkpoints store them."""
    if setting.key in OPEN_SECTIONS:
        return st.dictionaries(st.text(string.ascii_lowercase, min_size=1), ARGUMENT | st.lists(ARGUMENT), max_size=3)
    if setting.is_list and setting.form and setting.kind is str:
        return st.sampled_from([each for each in FORMED_LISTS if setting.form.fits(each)])
    one = members_of(setting, text)
    if setting.is_list:
        size = 2 if setting.form else 3
        return st.lists(one, min_size=2 if setting.form else 0, max_size=size).map(sorted if setting.form else list)
    return one | st.none() if setting.optional else one


def all_values(text: st.SearchStrategy[str], names=SETTINGS) -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries({key: values_of(ALL_SETTINGS[key], text) for key in names})


def typed(value) -> str:
    """Return a value as a person types it after -opts or a flag."""
    return f"[{', '.join(map(typed, value))}]" if isinstance(value, list) else str(value)


@pytest.mark.long
@given(all_values(TEXT | AWKWARD))
@few
def test_any_settings_survive_config_yaml_and_a_checkpoint(values):
    values["TRAIN.GRAD_CLIP"] = values["TRAIN.GRAD_CLIP"] or None  # files of other programs write 0
    config = unflatten(values)
    kept = flatten(config)
    write(to_yaml(config, {}))
    merged, _ = merge([Layer("x.yaml", read_file("x.yaml"))])
    for key, value in flatten(build(merged.values)).items():
        assert value == kept[key], key
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert wrong_in(saved) == [] and unflatten(saved) == config


@given(all_values(PLAIN | st.sampled_from(TYPED), [key for key in SETTINGS if key not in OPEN_SECTIONS]))
@few
def test_any_settings_keep_their_values_in_opts(values):
    values["TRAIN.GRAD_CLIP"] = values["TRAIN.GRAD_CLIP"] or None
    words = {key: typed(value) for key, value in values.items()}
    merged, _ = merge(parse(["-opts", *(f"{key}={word}" for key, word in words.items())]).layers)
    for key, value in values.items():
        found = merged.values[key]
        assert (list(found) if isinstance(found, tuple) else found) == value, key


KEYS = {flag: key for group in FLAGS.values() for flag, (key, _) in group.items()}


@given(all_values(PLAIN, KEYS.values()))
@few
def test_any_value_of_a_flag_equals_the_same_opts(values):
    words = {key: typed(value) for key, value in values.items()}
    by_flags, _ = merge(parse([f"{flag}={words[key]}" for flag, key in KEYS.items()]).layers)
    by_opts, _ = merge(parse(["-opts", *(f"{key}={word}" for key, word in words.items())]).layers)
    assert by_flags.values == by_opts.values


def wrong_texts(setting: Setting) -> st.SearchStrategy[str]:
    """Return a strategy of texts that the setting refuses: words, and numbers beyond its bounds."""
    wrong = st.sampled_from(["gone", "1..2", "nan", "0x10", "1 2", "--1"])
    if setting.bounds:
        low, high = setting.bounds
        below = math.floor(math.nextafter(low, -math.inf))  # an integer nearer to -1e30 is read as -1e30
        beyond = st.integers(max_value=below) | st.integers(min_value=2 * math.floor(high) + 1)
        wrong |= beyond.map(str) | st.sampled_from(["1e999", "inf"])
    if setting.kind is int and not setting.choices:
        wrong |= st.sampled_from(["1.5", "1e3", "true"])
    return wrong


STRICT = {
    key: setting for key, setting in ALL_SETTINGS.items() if setting.choices or setting.kind in (int, float, bool)
}


@given(st.fixed_dictionaries({key: wrong_texts(setting) for key, setting in STRICT.items()}))
@few
def test_any_wrong_value_is_refused_with_its_setting(texts):
    for key, text in texts.items():
        with pytest.raises(ConfigError) as caught:
            pytest.fail(f"{key}={text} is {merge([Layer('-opts', {key: text})])[0].values[key]}")
        assert all(word in str(caught.value) for word in ("-opts", key, repr(text), describe_allowed(STRICT[key])))
        assert caught.value.code == 2


CHOICES = [key for key, setting in SETTINGS.items() if setting.choices and setting.kind is str]


@given(st.sets(st.sampled_from(CHOICES)), st.dictionaries(PLAIN.map("NEWER.{}".format), ARGUMENT))
@examples(60)
def test_settings_of_another_release_damage_a_checkpoint_only_if_the_model_needs_them(changed, newer):
    removed = {key: ["gone"] if SETTINGS[key].is_list else "gone" for key in changed}
    saved = flatten(Config()) | removed | newer
    assert {*wrong_in(saved)} == {key for key in changed if SETTINGS[key].role == "model"}
    assert unflatten(flatten(Config()) | newer) == Config()
    older = {key: value for key, value in saved.items() if key not in removed}
    assert wrong_in(older) == [] and unflatten(older) == Config()
