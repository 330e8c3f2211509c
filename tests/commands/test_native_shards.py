"""halfstep make-shards with images that keep the values of their files, read again from the shards."""

import numpy as np
import pytest

from datasets.pixels.native.pixels import measure_pixels
from datasets.sources.tar import Tar
from tests.support.configs import replaced
from tests.support.native_images import CHANNELS, draw, files, settings
from tests.support.opened import open_sets
from tests.support.runs import typed

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(tmp_path):
    draw(tmp_path / "photos")
    for path in files(tmp_path / "photos"):
        if path.stem == "03":
            np.save(path, np.load(path)[:10, :20])
    return tmp_path / "photos"


def shards_of(photos):
    """Write the images as shards, and return the folder."""
    words = ["DATA.PIXELS=native", f"DATA.IMAGE_CHANNELS={CHANNELS}"]
    given = ["-dataset", "imagefolder", "-data_path", photos, "-out", photos.parent / "out", "-samples_per_shard", "5"]
    typed("scripts/make_shards.py", *given, "-opts", *words).done()
    return photos.parent / "out"


def load(folder, dataset: str, photos):
    config = replaced(settings(photos).config, DATA={"DATASET": dataset, "DATA_PATH": str(folder)})
    return config, *open_sets(config)


def contents(images) -> list[tuple]:
    """Return class, type, shape and pixels of all images, in an order that does not depend on the names."""
    found = [(images.classes[images.targets[index]], images.read(index)) for index in range(len(images))]
    return sorted((name, each.dtype.name, each.shape, each.tobytes()) for name, each in found)


def test_shards_keep_type_channels_and_pixels_of_the_files(photos):
    before, after = load(photos, "imagefolder", photos), load(shards_of(photos), "shards", photos)
    for original, copied in zip(before[1:], after[1:], strict=True):
        assert contents(copied) == contents(original) and copied.pixels.kind == "uint16"
    assert measure_pixels(after[0], after[1]).limits == measure_pixels(before[0], before[1]).limits
    names = [member.name for member in Tar(photos.parent / "out" / "train-000000.tar").members()]
    assert sum(name.endswith(".npy") for name in names) == 5
