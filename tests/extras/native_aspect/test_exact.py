"""An update has the same images and the same result however it is split."""

import hashlib

import numpy as np
import pytest

from datasets import build_normalize, build_preparation, build_train_data, load_image_sets
from datasets.transforms.mixed import Mixed
from extras.native_aspect.models import length_of
from tests.extras.native_aspect.photos import settings
from tests.support.configs import CPU, replaced
from utils.distributed import Process

pytestmark = pytest.mark.slow

LENGTHS = "DATA.TRAIN_TOKENS=[12,24,40]"
AUGMENTED = (
    f"{LENGTHS} TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.MIXUP_GROUP=6 TRAIN.RANDOM_ERASE_PROB=0.5 "
    "TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 TRAIN.REPEATED_AUG=3 DATA.VFLIP=0.5"
).split()


def seen(config, world_size=1, micro_batches=1, first=0, last=4, **data) -> dict:
    """Return {(step, position in the window): digest of patches and target} of the images that the model gets."""
    found = {}
    size = 32 // world_size // micro_batches
    config = replaced(config, DATA={**data, "BATCH_SIZE": size}, TRAIN={"ACCUM_ITER": micro_batches})
    train_set, prepare = load_image_sets(config)[0], build_preparation(config, build_normalize(config.DATA))
    for rank in range(world_size):
        for window in build_train_data(config, train_set, Process(CPU, rank, world_size=world_size)).windows(
            first, last
        ):
            for batch in window.batches:
                images, targets = prepare(batch)
                assert images["patches"].shape[1] == length_of(config, window.step)
                parts = targets if isinstance(targets, Mixed) else (targets,)
                for number in range(batch.num_samples):
                    content = b"".join(each[number].numpy().tobytes() for each in images.values())
                    content += repr([each[number].item() for each in parts]).encode()
                    key = window.step, batch.piece.first + number
                    assert key not in found
                    found[key] = hashlib.sha1(content).hexdigest()
    return found


@pytest.mark.parametrize(
    "options",
    [AUGMENTED, [LENGTHS, "TRAIN.AUTO_AUGMENT=3a", "TRAIN.COLOR_JITTER=0.3", "DATA.TRAIN_INTERPOLATION=random"]],
    ids=["mixed", "3a"],
)
def test_images_do_not_depend_on_split_start_or_workers(folder, options):
    config = settings(folder, *options, "DATA.DROP_LAST=false")
    whole = seen(config)
    assert len(set(whole.values())) > 0.9 * len(whole)
    assert seen(config, world_size=2) == whole
    later = {key: each for key, each in whole.items() if key[0] >= 1}
    assert seen(config, micro_batches=4, first=1, NUM_WORKERS=2, WORKERS="threads") == later
    assert seen(config, first=1, NUM_WORKERS=2, WORKERS="processes") == later


def test_lengths_of_updates_are_drawn_from_seed_and_step(folder):
    config = settings(folder, LENGTHS)
    drawn = [length_of(config, step) for step in range(300)]
    assert drawn == [length_of(config, step) for step in range(300)]
    assert set(drawn) == {12, 24, 40} and np.bincount(drawn)[[12, 24, 40]].min() > 70
    assert drawn != [length_of(settings(folder, LENGTHS, "SEED=1"), step) for step in range(300)]
    assert {length_of(settings(folder), step) for step in range(20)} == {24}
