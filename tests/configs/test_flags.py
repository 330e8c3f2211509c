"""The command line: every flag, -opts, -h, and what is mistyped."""

import shlex

import pytest

from configs.flags import FLAGS
from configs.load import load
from configs.typed_names import ALIASES, NOT_HERE
from configs.values import ALL_SETTINGS, START_SETTINGS, flatten, to_text
from tests.support.configs import load_text
from tests.support.mistakes import ON_THE_COMMAND_LINE
from tests.support.refusals import refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


EXAMPLE_VALUES = {
    "DATA.IMAGE_SIZE": "32",
    "PRECISION.DTYPE": "float16",
    "EVAL": "true",
    "CHECK": "true",
    "AMP": "true",
    "PRECISION.EXPLAIN": "true",
    "COMPILE": "true",
    "TRACK": "['wandb']",
}


@pytest.mark.parametrize(("flag", "key"), [(flag, key) for group in FLAGS.values() for flag, (key, _) in group.items()])
def test_every_flag_sets_its_setting_with_a_blank_or_an_equals_sign(flag, key):
    text = EXAMPLE_VALUES.get(key, "7")
    for argv in ([flag, text], [f"{flag}={text}"]):
        loaded = load_text("", *argv)
        changed = {name for name, origin in loaded.origins.items() if origin != "default"}
        assert changed == {key} and loaded.origins[key] == f"flag {flag}"
        start = loaded.config.START
        value = getattr(start, key.split(".")[-1]) if key in START_SETTINGS else flatten(loaded.config)[key]
        assert str(value).lower() == text


def test_the_flags_are_paddlevits_and_ours():
    paddlevits = """-dataset -data_path -output -batch_size -batch_size_eval -image_size -accum_iter -num_classes -ngpus
                    -pretrained -resume -last_epoch -eval -amp"""
    ours = """-amp_dtype -check -check_images -explain_precision -epochs -seed -num_workers -compile -profile -name
              -track -dist_url -world_size -rank"""
    assert {flag for group in FLAGS.values() for flag in group} == set(f"{paddlevits} {ours}".split())


def test_flags_override_when_they_were_given_not_when_they_are_truthy():
    text = "AMP: true\nNAME: a\nMODEL: {PRETRAINED: x.pth}\nTRAIN: {LAST_EPOCH: 5}\nDATA: {NUM_WORKERS: 4}"
    argv = ["-last_epoch", "0", "-num_workers=0", "-pretrained", "", "-name=", "-amp", "false"]
    config = load_text(text, *argv).config
    assert (config.START.LAST_EPOCH, config.DATA.NUM_WORKERS) == (0, 0)
    assert (config.MODEL.PRETRAINED, config.START.NAME, config.AMP) == (None, "", False)


def test_opts_may_come_several_times_and_anywhere():
    argv = ["-opts", "TRAIN.BASE_LR=0.1", "SAVE=a=b", "-amp", "-opts", "MODEL.FREEZE=[*, !fc.*]", "SEED=5"]
    config = load_text("", "-eval", *argv).config  # a switch alone is on, whatever follows
    assert config.START.EVAL
    assert (config.TRAIN.BASE_LR, config.SAVE, config.SEED, config.AMP) == (0.1, "a=b", 5, True)
    assert config.MODEL.FREEZE == ("*", "!fc.*")


@pytest.mark.parametrize(("words", "names"), ON_THE_COMMAND_LINE.items())
def test_a_mistake_on_the_command_line_is_named_with_the_remedy(words, names):
    with refused(ConfigError, *names.split()):
        load_text("", *shlex.split(words))


def test_names_of_other_trainers_lead_to_settings_that_exist():
    typed = [name for names in (*ALIASES.values(), *NOT_HERE) for name in names.split()]
    assert len(typed) == len(set(typed)), "one name, one answer"
    for words in ALIASES:
        if not words.startswith("-"):
            load_text("", "-opts", "SEED=0", *(word for word in words.split() if "=" in word))
            assert {word.partition("=")[0] for word in words.split()} <= set(ALL_SETTINGS)


@pytest.mark.parametrize("text", ["LOCAL_RANK=0", "TRAIN.MODEL_EMA_FORCE_CPU=None", "TRAIN.RANDOM_ERASE_SPLIT=False"])
def test_a_key_that_is_ignored_may_be_typed_with_the_value_that_changes_nothing(text):
    key = text.partition("=")[0]
    assert any(key in note for note in load_text("", "-opts", text).notes)


@pytest.mark.parametrize("flag", ["-h", "--help", "-help"])
def test_help_shows_each_flag_with_its_setting_and_default_and_four_commands(flag, capsys):
    with pytest.raises(SystemExit) as ending:
        load([flag])
    assert ending.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group in FLAGS.values():
        for name, (key, _) in group.items():
            default = ALL_SETTINGS[key].default
            assert f" {name} " in text
            assert f"[{key}={'none' if default in (None, '') else to_text(default)}]" in text
    assert "local" not in text
    assert text.partition("examples:")[2].count("python main_") == 4
