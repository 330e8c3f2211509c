"""The command line: every flag, -opts, -h, and mistyped flags."""

import re
import shlex
from difflib import SequenceMatcher

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from configs.load import load
from configs.translate.timm_arguments import SUPPORTED, TIMM_ARGUMENTS
from configs.typed_names import ALIASES, NOT_HERE, suggest_flag, suggest_key
from configs.values import ALL_SETTINGS
from tests.support.cases import cases_of, names_of
from tests.support.configs import load_text, write
from tests.support.properties import examples
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")


EXAMPLE_VALUES = {"DATA.IMAGE_SIZE": "32", "PRECISION.DTYPE": "float16", "TRACK": "['wandb']"}
EXAMPLE_VALUES |= dict.fromkeys(("EVAL", "CHECK", "AMP", "COMPILE"), "true")


def test_flags_with_false_zero_or_none_override_the_file():
    text = "AMP: true\nNAME: a\nMODEL: {PRETRAINED: x.pth}\nTRAIN: {LAST_EPOCH: 5}\nDATA: {NUM_WORKERS: 4}"
    argv = ["-last_epoch", "0", "-num_workers=0", "-pretrained", "none", "-name=", "-amp", "false"]
    config = load_text(text, *argv).config
    assert (config.TRAIN.LAST_EPOCH, config.DATA.NUM_WORKERS) == (0, 0)
    assert (config.MODEL.PRETRAINED, config.NAME, config.AMP) == (None, "", False)


def test_opts_flag_may_be_repeated_anywhere():
    argv = ["-opts", "TRAIN.BASE_LR=0.1", "SAVE=a=b", "-amp", "-opts", "MODEL.FREEZE=[*, !fc.*]", "SEED=5"]
    config = load_text("", "-eval", *argv).config  # a switch without a value is on, whatever follows
    assert config.EVAL
    assert (config.TRAIN.BASE_LR, config.SAVE, config.SEED, config.AMP) == (0.1, "a=b", 5, True)
    assert config.MODEL.FREEZE == ("*", "!fc.*")


def test_last_value_of_a_repeated_flag_is_used():
    for words in ("-epochs 4 -epochs 3", "-opts TRAIN.NUM_EPOCHS=4 SEED=1 -opts TRAIN.NUM_EPOCHS=3"):
        assert load_text("", *words.split()).config.TRAIN.NUM_EPOCHS == 3


@pytest.mark.parametrize("flag", ["-amp_dtype float16", "-opts PRECISION.MODE=naive"])
def test_precision_flag_is_refused_if_settings_file_turns_amp_off(flag):
    for amp in ("-amp false", "-opts AMP=false"):
        (note,) = load_text("", *f"{flag} {amp}".split()).notes
        assert_names(note, "has no effect", "PRECISION", "AMP is false")
    assert not load_text("AMP: true", *flag.split()).notes
    with refused(ConfigError, "add -amp"):
        load_text("AMP: false", *flag.split())


@pytest.mark.parametrize("words", cases_of("mistakes-on_the_command_line"))
def test_command_line_mistake_is_reported_with_remedy(words):
    with refused(ConfigError, *names_of("mistakes-on_the_command_line", words)):
        load_text("", *shlex.split(words.encode().decode("unicode_escape")))


@pytest.mark.slow
def test_suggestions_for_flags_of_other_trainers_name_existing_settings():
    of_timm = [name.replace("-", "_") for each in TIMM_ARGUMENTS.values() for name in (each.name, each.short) if name]
    typed = [name for names in (*ALIASES.values(), *NOT_HERE.values()) for name in names.split()]
    assert len(typed + of_timm) == len({*typed, *of_timm}), "a name must have only one answer"
    for words in (*ALIASES, *(each.setting for each in SUPPORTED)):
        if not words.startswith("-"):
            load_text("", "-opts", "SEED=0", *(word for word in words.split() if "=" in word))
            assert {re.split("=|(?<=KWARGS)[.]", word)[0] for word in words.split()} <= set(ALL_SETTINGS)


OTHER_NAMES = {name for names in (*ALIASES.values(), *NOT_HERE.values()) for name in names.split()}
OTHER_NAMES |= {name.replace("-", "_") for each in TIMM_ARGUMENTS.values() for name in (each.name, each.short) if name}


@pytest.mark.slow
@given(st.sampled_from([*ALL_SETTINGS]), st.integers(0, 30), st.sampled_from(["{1}", "{0}{0}{1}", "{1}{0}", "x{1}"]))
@examples(200)
def test_setting_with_a_typing_mistake_is_suggested(key, place, form):
    """A letter is missing, double, or another letter, or two letters are exchanged."""
    section, dot, name = key.rpartition(".")
    place %= len(name)
    typed = name[:place] + form.format(name[place], name[place + 1 : place + 2]) + name[place + 2 :]
    assume(typed.lower() not in OTHER_NAMES and typed.lower() != name.lower())

    def alikeness(other: str) -> float:
        return SequenceMatcher(None, typed.lower(), other.rpartition(".")[2].lower()).ratio()

    found = suggest_key(f"{section}{dot}{typed}", ALL_SETTINGS).partition("did you mean ")[2].rstrip("?")
    words = suggest_flag(f"--{typed.lower().replace('_', '-')}", {}).partition("-opts ")[2].partition("=")[0]
    for each in (found, words):
        assert each in ALL_SETTINGS if each else alikeness(name) < 0.75
        assert not each or alikeness(each) >= alikeness(name) - 1e-9
    assert found == key or found.rpartition(".")[2] != name, "the section is that of the typed key"


def test_original_paddlevit_command_line_is_accepted():
    write("", "configs/vit.yaml")
    command = """-cfg='./configs/vit.yaml' -dataset='imagenet2012' -batch_size=32 -data_path='/dataset/imagenet'
                 -ngpus=8 -eval -pretrained='./vit_base_patch16_224' -amp"""
    config = load(shlex.split(command)).config
    assert (config.EVAL, config.AMP, config.DATA.BATCH_SIZE, config.NGPUS) == (True, True, 32, 8)
    assert (config.DATA.DATA_PATH, config.MODEL.PRETRAINED) == ("/dataset/imagenet", "./vit_base_patch16_224")
    assert config.MODEL.NUM_CLASSES is None
    for words in ("--local-rank=3", "--local_rank=3", "--local-rank 3"):  # the flag that a launcher passes
        assert load(shlex.split(f"{command} {words}")).config == config
