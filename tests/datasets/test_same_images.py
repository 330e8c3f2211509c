"""Worker processes give the model the same images as the main process. Splits and starts: tests/test_run_hashes.py."""

from tests.support.seen import SOURCES, seen, settings

TRAIN = {
    **{"AUTO_AUGMENT": "3a", "COLOR_JITTER": 0.3, "REPEATED_AUG": 3},
    **{"MIXUP_ALPHA": 0.8, "CUTMIX_ALPHA": 1.0, "MIXUP_GROUP": 6, "MIXUP_MODE": "elem", "MIXUP_PROB": 0.7},
}


def test_worker_processes_augment_images_like_the_main_process(tmp_path):
    config = settings(SOURCES["imagefolder"](tmp_path) | {"TRAIN_INTERPOLATION": "random"}, TRAIN)
    assert seen(config, last=2, NUM_WORKERS=2, WORKERS="processes") == seen(config, last=2)
