"""Settings without effect are named in one line with the reason, and no others."""

import pytest

from tests.support.configs import SMALL, load_text
from tests.support.mistakes import WITHOUT_EFFECT
from tests.support.refusals import assert_names


@pytest.mark.parametrize(("words", "names"), WITHOUT_EFFECT.items())
def test_settings_without_effect_are_told_in_one_line_with_the_reason(here, words, names):
    unused, beside = (text.split() for text in words)
    (note,) = load_text(SMALL, "-opts", *unused, *beside).notes
    assert_names(note, *[word.replace("=", " ") for word in unused], *names.split())


def test_settings_that_take_effect_are_not_spoken_of(here):
    options = "AMP=true PRECISION.RESIDUAL=half PRECISION.CUSTOM_BLACK_LIST=[head] PRECISION.SHADOW_STEPS=5"
    options += " PROFILE=3 COMPILE=true DATA.CACHE=disk"
    options += " DATA.CACHE_PATH=x TRAIN.RAND_AUGMENT=true TRAIN.RAND_AUGMENT_LAYERS=3"
    options += " TRAIN.COLOR_JITTER=0.1 DATA.AUGMENT_ON=device"
    options += " TRAIN.CUTMIX_MINMAX=0.2,0.8 TRAIN.MIXUP_MODE=elem TRAIN.MODEL_EMA=true TRAIN.MODEL_EMA_DECAY=0.9"
    assert load_text(SMALL, "-opts", *options.split()).notes == []


@pytest.mark.parametrize("dataset", ["csv", "imagefolder", "imagenet2012", "parquet", "shards"])
def test_the_folder_of_caches_takes_effect_where_an_index_may_lie_in_it(here, dataset):
    assert load_text(SMALL, "-opts", f"DATA.DATASET={dataset}", "DATA.CACHE_PATH=x").notes == []
