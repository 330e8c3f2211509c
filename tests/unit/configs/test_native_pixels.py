"""Settings of images with the values of their files: what follows from them, and what contradicts them."""

import ast
import inspect
import textwrap

import pytest

from configs.rare_checks import check_native_pixels
from tests.support.cases import cases_of, names_of
from tests.support.configs import load_text
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

SETTINGS = "DATA: {DATASET: imagefolder, PIXELS: native%s}\nMODEL: {TYPE: vit}"
FIVE = SETTINGS % ", IMAGE_CHANNELS: 5"


def loaded(text: str, options: str = "", *flags: str):
    return load_text(text, *(["-opts", *options.split()] if options else []), *flags).config


@pytest.mark.parametrize("options", cases_of("native_pixels-mistakes"))
def test_setting_that_contradicts_native_pixels_is_refused(here, options):
    with refused(ConfigError, *names_of("native_pixels-mistakes", options)):
        loaded(FIVE, options)


def test_each_refusal_of_native_pixels_refuses_a_case(here):
    tree = ast.parse(textwrap.dedent(inspect.getsource(check_native_pixels)))
    first = check_native_pixels.__code__.co_firstlineno - 1
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "refuse")
    lines, hit = {first + call.lineno for call in calls}, set()
    for options in cases_of("native_pixels-mistakes"):
        with pytest.raises(ConfigError) as raised:
            loaded(FIVE, options)
        hit.update(
            entry.lineno + 1 for entry in raised.traceback if entry.frame.code.raw is check_native_pixels.__code__
        )
    assert lines and hit == lines


@pytest.mark.parametrize(
    "options",
    [
        "DATA.RANGE=[0,4095]",
        "DATA.RANGE=[-1,0,-2,0,0,1,0,3e38,4,5]",
        "DATA.RGB=[4,0,2]",
        "DATA.RGB=[]",
        "DATA.DATASET=csv",
        "DATA.DATASET=parquet",
        "DATA.DATASET=shards DATA.PIXELS=window",
        "DATA.PIXELS=float32",
        "DATA.IMAGE_CHANNELS=1000",
        "DATA.IMAGE_CHANNELS=2 DATA.RANGE=[0,1,0,2]",
        "TRAIN.COLOR_JITTER=0.4 TRAIN.RANDOM_ERASE_PROB=0.2 TRAIN.CUTMIX_ALPHA=1",
        "TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 -eval",
        "TRAIN.DISTILLATION_TYPE=hard TRAIN.TEACHER_MODEL=a.pth -eval",
    ],
)
def test_setting_that_suits_native_pixels_is_accepted(here, options):
    assert loaded(FIVE, options.replace(" -eval", ""), *["-eval"] * ("-eval" in options)).DATA.is_native


@pytest.mark.parametrize("word", ["DATA.RANGE=[0,255]", "DATA.RGB=[2,1,0]"])
def test_native_setting_without_effect_on_8_bits_is_noted(here, word):
    (note,) = load_text("DATA: {DATASET: imagefolder}", "-opts", word).notes
    assert_names(note, word.partition("=")[0], "DATA.PIXELS", "8bit", "native")


@pytest.mark.parametrize("channels", [1, 2, 5, 12])
def test_default_mean_and_deviation_get_the_number_of_channels(here, channels):
    data = loaded(SETTINGS % f", IMAGE_CHANNELS: {channels}").DATA
    assert len(data.IMAGENET_MEAN) == len(data.IMAGENET_STD) == channels


def test_mean_of_a_file_for_other_channels_is_replaced(here):
    data = loaded(FIVE.replace("PIXELS", "IMAGENET_MEAN: [0.5, 0.4, 0.3], IMAGENET_STD: [0.2, 0.2, 0.2], PIXELS")).DATA
    assert len(data.IMAGENET_MEAN) == len(data.IMAGENET_STD) == 5


def test_mean_for_other_channels_is_refused_with_8_bits(here):
    with refused(ConfigError, "DATA.IMAGENET_MEAN", "DATA.IMAGE_CHANNELS", 3):
        loaded("DATA: {DATASET: imagefolder, IMAGENET_MEAN: [0.5, 0.4]}")


def test_colours_and_grey_images_of_8_bits_keep_their_defaults(here):
    colour, grey = (loaded("DATA: {DATASET: imagefolder}", f"DATA.IMAGE_CHANNELS={each}").DATA for each in (3, 1))
    assert not colour.is_native and colour.RANGE == () and len(colour.IMAGENET_MEAN) == 3
    assert grey.IMAGENET_MEAN == colour.IMAGENET_MEAN[:1] and len(grey.IMAGENET_STD) == 1
