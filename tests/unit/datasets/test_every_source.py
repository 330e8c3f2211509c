"""What every data set promises: each row of SOURCES is read from a few small files, one of them no image."""

import pickle
import shutil
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pytest

from configs.tables import SOURCES
from datasets import ImageSet, index
from datasets.fingerprint import data_facts
from datasets.pixels.rules import ImageReadError
from datasets.split import DRAWN, write_split
from tests.support.image_sets import keys_of, settings
from tests.support.opened import open_sets
from tests.support.refusals import refused
from tests.support.runs import rows_of
from tests.support.small_sources import COUNT, MAKERS
from tests.support.torchvision_files import write_cifar
from utils.errors import ConfigError, DataError


class Source:
    """A row of SOURCES and its files."""

    def __init__(self, name: str, root: Path):
        self.name, self.root = name, root

    def load(self, evaluate: bool = False, **data) -> tuple[ImageSet | None, ImageSet]:
        dataset = self.name.replace("NAME", "OxfordIIITPet")
        data = {"SYNTHETIC_SIZE": COUNT, "VAL_FRACTION": 0.3, "SHUFFLE_BUFFER": 3} | data
        config = settings(dataset, self.root, evaluate, **data)
        return open_sets(config)


@pytest.fixture(params=SOURCES)
def source(request, tmp_path, monkeypatch) -> Source:
    name, root = request.param, tmp_path / "data"
    root.mkdir()
    if name in ("cifar10", "cifar100"):
        write_cifar(root, name, monkeypatch)
    elif SOURCES[name].has_files:
        assert name in MAKERS, f"tests/support/small_sources.py: add a function that writes a small {name} to MAKERS"
        MAKERS[name](root)
    return Source(name, root)


def facts(image_set: ImageSet, index: int) -> tuple:
    """Return what an image set says about an image: its names, class and pixels (None: unreadable)."""
    pixels = None
    if not image_set.makes_batches:
        try:
            pixels = image_set.read(index)
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        except ImageReadError:
            pass
    target = image_set.targets[index]
    return (
        image_set.name(index),
        image_set.key(index),
        image_set.classes[target],
        pixels if pixels is None else pixels.tobytes(),
    )


def all_facts(image_set: ImageSet) -> list[tuple]:
    return [facts(image_set, index) for index in range(len(image_set))]


def test_finished_images_cannot_be_changed(source):
    train, val = source.load()
    for part in (train, val):
        with pytest.raises(FrozenInstanceError):
            part.targets = part.targets.copy()
        with pytest.raises(ValueError, match="read-only"):
            part.targets[0] = 0
        with refused(AssertionError, f"{len(part) - 1} targets of {len(part)} images"):
            replace(part, targets=part.targets[1:])


def test_images_are_taken_by_index_or_mask(source):
    for part in source.load():
        mask = np.arange(len(part)) % 2 == 1
        by_index, by_mask = part.take(np.flatnonzero(mask)), part.take(mask)
        assert all_facts(by_index) == all_facts(by_mask)
        # Some names have the position in the part.
        assert [fact[2:] for fact in all_facts(by_mask)] == [fact[2:] for fact in all_facts(part)[1::2]]


def test_labels_are_numbers_of_distinct_classes(source):
    train, val = source.load()
    assert train.classes == val.classes and len({*val.classes}) == len(val.classes) and all(val.classes)
    for part in (train, val):
        assert len(part) == len(part.targets) > 0 and part.targets.dtype.kind == "i" and part.targets.ndim == 1
        assert 0 <= part.targets.min() and part.targets.max() < len(part.classes)
        assert part.count_classes().tolist() == np.bincount(part.targets, minlength=len(part.classes)).tolist()


def test_names_and_keys_identify_the_images_of_a_part(source):
    for part in source.load():
        names = [part.name(index) for index in range(len(part))]
        assert len({*names}) == len({*keys_of(part)}) == len(part) and all(names)
        for some in (part, part.take(np.arange(1, len(part)))):
            assert [key.decode(errors="surrogateescape") for chunk in some.all_keys() for key in chunk] == keys_of(some)


def test_only_the_damaged_image_cannot_be_read(source):
    pixels = [each for part in source.load() for *_, each in all_facts(part)]
    makes_batches = source.name == "synthetic"  # instead of reading images
    assert pixels.count(None) == (len(pixels) if makes_batches else int(source.name in MAKERS))


def test_selected_and_pickled_images_keep_their_names_and_labels(source):
    for part in source.load():
        # An image whose name is a number is numbered in its own set.
        known = [each[2:] if part.storage.names_are_numbers else each for each in all_facts(part)]
        some = part.take(np.arange(len(part))[::-1])
        for image_set, wanted in (
            (some, known[::-1]),
            (pickle.loads(pickle.dumps(some)), known[::-1]),
            (some.take(np.array([1, 0])), known[-2:]),
        ):
            assert [each[-len(known[0]) :] for each in all_facts(image_set)] == wanted


def test_moved_data_keep_keys_parts_labels_and_fingerprint(source, monkeypatch):
    def known(parts):
        return data_facts(*parts), [
            [(key, label, pixels) for _, key, label, pixels in all_facts(part)] for part in parts
        ]

    before = known(source.load())
    for name, small in (("moved – 2", index.SMALL), ("train", 0)):  # also the name of a part, and with an index
        source.root = Path(shutil.move(source.root, source.root.with_name(name)))
        monkeypatch.setattr(index, "SMALL", small)
        assert known(source.load()) == before
    assert known(source.load()) == before, "from the index"


def test_each_image_of_an_undivided_set_is_held_out_in_one_listed_fold(source, tmp_path):
    train, val = source.load()
    if val.split["rule"] not in DRAWN:
        with refused((ConfigError, DataError), "DATA.FOLD"):
            source.load(FOLD="0/3")
        return

    def rows(part):
        return [part.row(index) for index in range(len(part))]

    whole, folds = sorted(rows(train) + rows(val)), [source.load(FOLD=f"{fold}/3") for fold in range(3)]
    assert sorted(row for _, held_out in folds for row in rows(held_out)) == whole
    assert all(sorted(rows(rest) + rows(held_out)) == whole for rest, held_out in folds)
    file = tmp_path / "split.csv"
    write_split(file, *folds[0])
    assert file.exists() is not val.storage.names_are_numbers, "arrays never grow, so their folds are drawn again"
    if file.exists():
        listed = {row["image"]: row["fold"] for row in rows_of(file)}
        assert listed == {key: f"{fold}/3" for fold, (_, held_out) in enumerate(folds) for key in keys_of(held_out)}


def test_every_epoch_has_each_image_once(source):
    for part in source.load():
        assert sorted(part.epoch_order(3, 1).tolist()) == [*range(len(part))]


def test_evaluation_scores_the_validation_images_or_an_undivided_set(source):
    train, val = source.load()
    none, scored = source.load(evaluate=True)
    assert none is None and scored.classes == val.classes
    assert sorted(keys_of(scored)) == sorted(keys_of(val) + keys_of(train) * (val.split["rule"] == "hash"))
