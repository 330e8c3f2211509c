"""PaddleViT's settings files and commands, in three dialects, give the same settings here."""

import dataclasses

import pytest

from configs.schema import Config
from configs.translate.paddlevit import KEYS, VALUES, is_paddlevits
from configs.translate.paddlevit_files import IGNORED, RENAMED, REPLACED, WORDS
from configs.values import ALL_SETTINGS, flatten
from engine.settings import load_settings
from tests.support.cases import cases_of, content_of, names_of, value_of
from tests.support.configs import load_text
from tests.support.refusals import refused
from tests.support.weight_files import saved
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")

SAME = "PATCH_SIZE: 32, EMBED_DIM: 64, MLP_RATIO: 3.0, DEPTH: 5, NUM_HEADS: 4, QKV_BIAS: false"
MID_2021 = "HYBRID: False, PATCH_SIZE: 32, HIDDEN_SIZE: 64, MLP_DIM: 192, NUM_LAYERS: 5, NUM_HEADS: 4, QKV_BIAS: false"
DIALECTS = {
    "flat": f"MODEL: {{TYPE: vit, {SAME}}}",
    "late 2021": f"MODEL: {{TYPE: ViT, TRANS: {{{SAME}}}}}",
    "mid 2021": f"MODEL: {{TYPE: ViT, TRANS: {{{MID_2021}}}}}",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_paddlevit_dialect_gives_the_same_model(dialect):
    loaded = load_text(DIALECTS[dialect])
    fields = {"PATCH_SIZE": 32, "EMBED_DIM": 64, "MLP_RATIO": 3.0, "DEPTH": 5, "NUM_HEADS": 4, "QKV_BIAS": False}
    assert loaded.config == dataclasses.replace(Config(), MODEL=dataclasses.replace(Config().MODEL, **fields))
    assert loaded.origins["MODEL.DEPTH"] == "x.yaml"
    assert loaded.notes == []


def test_mlp_width_in_oldest_dialect_becomes_exact_ratio():
    for width, hidden in ((60, 123), (448, 453), (768, 3072)):
        config = load_text(f"MODEL: {{TRANS: {{HIDDEN_SIZE: {width}, MLP_DIM: {hidden}, NUM_HEADS: 1}}}}").config
        assert int(width * config.MODEL.MLP_RATIO) == hidden


def test_paddlevit_values_are_translated_with_notes():
    train = "GRAD_CLIP: 0, AUTO_AUGMENT: True, LR_SCHEDULER: {NAME: warmupcosine, MILESTONES: '30, 60, 90'}"
    loaded = load_text(f"NGPUS: -1\nTRAIN: {{{train}}}")
    assert (loaded.config.NGPUS, loaded.config.TRAIN.GRAD_CLIP) == (None, None)
    assert loaded.config.TRAIN.AUTO_AUGMENT == "original"
    assert loaded.config.TRAIN.LR_SCHEDULER.NAME == "cosine"
    assert loaded.config.TRAIN.LR_SCHEDULER.MILESTONES == (30, 60, 90)
    assert sum(" is read as " in note for note in loaded.notes) == 4


@pytest.mark.parametrize("text", cases_of("paddlevit-settings_of_paddlevit"))
def test_paddlevit_setting_is_replaced_by_the_corresponding_setting(text):
    usual = flatten(load_text("").config)
    found = {key: value for key, value in flatten(load_text(text).config).items() if value != usual[key]}
    assert str(found) == value_of("paddlevit-settings_of_paddlevit", text)


@pytest.mark.parametrize("text", cases_of("paddlevit-mistakes_of_paddlevits_settings"))
def test_paddlevit_setting_without_replacement_is_refused(text):
    with refused(ConfigError, *names_of("paddlevit-mistakes_of_paddlevits_settings", text)):
        load_text(content_of(text))


@pytest.mark.parametrize("text", cases_of("paddlevit-ignored_settings"))
def test_paddlevit_setting_without_effect_is_reported_in_one_line(text):
    (note,) = load_text(text).notes
    assert note == value_of("paddlevit-ignored_settings", text)


def test_program_recognizes_every_setting_the_paddlevit_extra_translates():
    keys = {*RENAMED, *IGNORED, *REPLACED}
    assert KEYS <= keys and all(is_paddlevits(key, "x") for key in keys - {*ALL_SETTINGS})
    assert {setting: {*words} for setting, words in VALUES.items()} == {key: {*words} for key, words in WORDS.items()}


def test_depth_in_2021_dialect_overrides_model_of_the_weights(here, weights):
    content = {"state_dict": weights, "config": flatten(Config()) | {"MODEL.EMBED_DIM": 24}}
    saved(content, here / "w.pth")
    for words, width in (([], 24), (["-opts", "MODEL.TRANS.DEPTH=3"], 768)):
        (here / "bare.yaml").write_text("")
        loaded = load_settings(["-cfg", "bare.yaml", "-pretrained", "w.pth", *words])
        assert loaded.config.MODEL.EMBED_DIM == width


@pytest.mark.parametrize(
    ("file", "word", "policy"),
    [
        ("{RAND_AUGMENT: true, AUTO_AUGMENT: true}", "RAND_AUGMENT_MAGNITUDE=7", "rand-m7-n2-mstd0.5-inc1"),
        ("{RAND_AUGMENT: true, RAND_AUGMENT_LAYERS: 3}", "RAND_AUGMENT_LAYERS=2", "rand-m9-n2-mstd0.5-inc1"),
        ("{RAND_AUGMENT: true}", "AUTO_AUGMENT=3a", "3a"),
        ("{RAND_AUGMENT: true}", "RAND_AUGMENT=false", None),
    ],
)
def test_rand_augment_policy_combines_values_from_file_and_command_line(file, word, policy):
    assert load_text(f"TRAIN: {file}", "-opts", f"TRAIN.{word}").config.TRAIN.AUTO_AUGMENT == policy
