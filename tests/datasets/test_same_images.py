"""The model sees the same images for every split, kind of worker and start: all sources, policies, crops and mixing."""

import pytest

from configs.schema import Config
from tests.support.seen import NUM_IMAGES, SOURCES, WINDOW, seen, settings

BATCH_MIXES = {"MIXUP_ALPHA": 0.8, "CUTMIX_ALPHA": 1.0, "MIXUP_GROUP": 6}
CASES = {  # settings of DATA and of TRAIN
    "rand": ({"VFLIP": 0.5}, {"AUTO_AUGMENT": "rand", **BATCH_MIXES}),
    "augmix": (
        {"TRAIN_CROP": "simple"},
        {"AUTO_AUGMENT": "augmix", "CUTMIX_MINMAX": (0.2, 0.8), "MIXUP_MODE": "pair", "RANDOM_ERASE_PROB": 0.5},
    ),
    "3a": (
        {"TRAIN_INTERPOLATION": "random"},
        {
            "AUTO_AUGMENT": "3a",
            "COLOR_JITTER": 0.3,
            "REPEATED_AUG": 3,
            **BATCH_MIXES,
            "MIXUP_MODE": "elem",
            "MIXUP_PROB": 0.7,
        },
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> dict:
    return SOURCES["imagefolder"](tmp_path_factory.mktemp("imagefolder"))


def assert_same_however_split_and_started(config: Config) -> dict:
    whole = seen(config)
    assert len(whole) == NUM_IMAGES + WINDOW and len(set(whole.values())) > 0.9 * len(whole)
    assert seen(config, world_size=2, last=2) == {key: each for key, each in whole.items() if key[0] < 2}
    resumed = seen(config, micro_batches=4, first=1, NUM_WORKERS=2, WORKERS="threads")
    assert resumed == {key: each for key, each in whole.items() if key[0] >= 1}
    return whole


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "imagefolder"])
def test_every_data_source_gives_same_images_however_loaded(tmp_path, name):
    config = settings(SOURCES[name](tmp_path), {})
    whole = assert_same_however_split_and_started(config)
    by_processes = seen(config, first=2, NUM_WORKERS=2, WORKERS="processes")
    assert by_processes == {key: each for key, each in whole.items() if key[0] == 2}


@pytest.mark.parametrize("case", CASES)
def test_augmented_images_do_not_depend_on_batch_split_or_starting_point(source, case):
    data, train = CASES[case]
    assert_same_however_split_and_started(settings(source | data, train))


def test_worker_processes_augment_images_like_the_main_process(source):
    data, train = CASES["3a"]
    config = settings(source | data, train)
    assert seen(config, last=2, NUM_WORKERS=2, WORKERS="processes") == seen(config, last=2)
