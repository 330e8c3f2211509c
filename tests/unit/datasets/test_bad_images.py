"""Unreadable images: how many are allowed over all processes together, and retried reads."""

import errno
from collections import Counter

import numpy as np
import pytest

from datasets import BadImages
from datasets.bad_images import num_allowed
from datasets.image_set import ImageSet, Storage
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError
from datasets.sources.images import FileStorage
from datasets.sources.tar import Tar
from tests.support.configs import CPU
from tests.support.image_sets import load, make_folders, make_set
from tests.support.refusals import refused
from utils.distributed import Process
from utils.errors import DataError

ALONE = Process(CPU)


class Numbered(Storage):
    """Images, some of them unreadable. It counts the attempts to read."""

    def __init__(self, count: int, bad: set[int]):
        self.count, self.bad, self.attempts = count, bad, Counter()

    def __len__(self) -> int:
        return self.count

    def name(self, row: int) -> str:
        return f"image {row}"

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        self.attempts[row] += 1
        if row in self.bad:
            raise ImageReadError("it is bad")
        return np.zeros((1, 1, 3), np.uint8)


def test_bad_image_limit_allows_a_few_images_but_never_every_image():
    assert [num_allowed(0.01, count) for count in (1, 2, 3, 89, 146, 399, 400, 10_000)] == [0, 1, 2, 3, 3, 3, 4, 100]
    assert num_allowed(0.0, 1000) == 0 and num_allowed(1.0, 1000) == 999


@pytest.mark.parametrize(
    ("count", "share", "allowed", "ends"),
    [(8, 0.5, 0.01, True), (8, 0.25, 0.01, False), (5000, 0.3, 0.01, True), (5000, 0.008, 0.01, False)]
    + [(5000, 0.13, 0.1, False), (5000, 0.3, 0.1, True)],  # a sample may exceed the share by chance, but not twofold
)
def test_bad_image_check_reads_at_most_128_images(count, share, allowed, ends):
    bad = np.random.default_rng(0).permutation(count)[: round(count * share)].tolist()
    numbered = Numbered(count, {*bad})
    image_set = ImageSet(numbered, np.zeros(count), ["one"], pixels=Pixels(3))
    bad_images = BadImages(image_set, allowed, lambda line: None)
    if ends:
        with refused(DataError, "DATA.MAX_BAD_FRACTION", f"of {min(count, 128)} images"):
            bad_images.check_sample(ALONE)
    else:
        bad_images.check_sample(ALONE)
    assert len(numbered.attempts) == min(count, 128)


def failing(method, number: int, times: int):
    """Return a method that fails with this error this many times before it works, and the list of its calls."""
    calls = []

    def fail(*arguments):
        calls.append(arguments)
        if len(calls) <= times:
            raise OSError(number, "as planted")
        return method(*arguments)

    return fail, calls


@pytest.mark.parametrize("dataset", ["imagefolder", "shards"])
def test_only_transient_read_errors_are_retried(tmp_path, monkeypatch, dataset):
    make_set(tmp_path / "shards")
    make_folders(tmp_path / "imagefolder", {"ant": 10, "bee": 10})
    train, _ = load(dataset, tmp_path / dataset)
    monkeypatch.setattr("datasets.sources.images.RETRY_AFTER", (0.0, 0.0))
    cls, name = (Tar, "read") if dataset == "shards" else (FileStorage, "open_file")
    works, transient = getattr(cls, name), (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    for number, times, attempts in (
        *((each, 2, 3) for each in transient),
        (errno.EIO, 3, 3),
        (errno.EACCES, 9, 1),
        (errno.ENOENT, 9, 1),
    ):
        fails, calls = failing(works, number, times)
        monkeypatch.setattr(cls, name, fails)
        if times == 2:
            assert train.read(0).shape
        else:
            with refused(ImageReadError, "as planted"):
                train.read(0)
        assert len(calls) == attempts
        if dataset == "shards":  # a stale file handle stays stale, so each attempt must reopen the tar
            assert len({id(tar) for tar, *_ in calls}) == attempts
    fails, calls = failing(works, errno.EMFILE, 9)
    monkeypatch.setattr(cls, name, fails)
    with pytest.raises(OSError, match="as planted"):  # not an error of the image, so it is not replaced
        train.read(0)
    assert len(calls) == 1


def test_broken_link_is_reported_with_its_path_once(tmp_path):
    make_folders(tmp_path, {"ant": 10, "bee": 10})
    (tmp_path / "ant" / "link.png").symlink_to(tmp_path / "nothing.png")
    said: list[str] = []
    for part in load("imagefolder", tmp_path):
        BadImages(part, 1.0, said.append).check_sample(ALONE)
    (line,) = said
    assert line.count("link.png") == 1 and "FileNotFoundError: No such file or directory" in line
