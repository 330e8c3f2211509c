"""DATA.CACHE: reading from a cache, building and rebuilding it, and errors."""

import fcntl
import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

import datasets.cache as cache_module
from configs.schema import Config
from datasets import build_train_data
from datasets.cache import CacheFile, CacheLocation, CacheProgress, cache_image_sets, locate_cache
from datasets.image_set import ImageSet
from datasets.index import IndexBuilder
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError
from datasets.sources.torchvision_sets import TorchvisionStorage
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced
from tests.support.image_sets import draw, make_set, noise, settings
from tests.support.loading import folder_settings, taken
from tests.support.opened import open_sets
from tests.support.refusals import assert_names, flip
from utils.distributed import Process

NUM_IMAGES, BROKEN = 21, (2, 11)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Write JPEGs and PNGs of many sizes, two of them truncated."""
    for part, count in (("train", NUM_IMAGES), ("val", 3)):
        for index in range(count):
            path = tmp_path / "photos" / part / f"class{index % 3}" / f"{index // 3:02}.{'jpg' if index % 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise(20 + index, 40 - index).save(path)
    for index, path in enumerate(sorted((tmp_path / "photos" / "train").rglob("*.*g"))):
        if index in BROKEN:
            path.write_bytes(path.read_bytes()[:60])
    return tmp_path / "photos"


class Messages:
    """The lines and warnings of one start."""

    def __init__(self, **options):
        self.lines, self.warnings = [], []
        self.progress = CacheProgress(self.lines.append, self.warnings.append, **options)


def config_of(photos: Path, **data) -> Config:
    defaults = {"CACHE": "disk", "CACHE_PATH": str(photos.parent / "cache"), "IMAGE_SIZE": 16, "MAX_BAD_FRACTION": 0.5}
    return replaced(folder_settings(photos, 2), DATA=defaults | data)


def cached(config: Config, messages: Messages | None = None):
    """Return the training set."""
    return cache_image_sets(config, open_sets(config), (messages or Messages()).progress)[0]


def is_cached(image_set: ImageSet) -> bool:
    return image_set.read_cached is not None


def outcomes(image_set) -> list:
    """Return the pixels of each image, or the reason why it cannot be read."""
    found = []
    for index in range(len(image_set)):
        try:
            found.append(image_set.read(index).tolist())
        except ImageReadError as error:
            found.append(str(error))
    return found


def files_of(config: Config) -> set[str]:
    """Return the names of the cache of the training images."""
    name = locate_cache(config, open_sets(config)[0]).data_set
    return {path.name for path in Path(config.DATA.CACHE_PATH).glob("*") if path.name.startswith(name)}


# --- reading ---


@pytest.mark.slow
def test_cache_returns_the_images_targets_and_names_of_the_files(photos):
    missing = sorted((photos / "train").rglob("*.*g"))[BROKEN[0]]
    missing.unlink()
    missing.symlink_to("gone.png")
    config = config_of(photos, NUM_WORKERS=2, WORKERS="processes")
    files, images = open_sets(config)[0], cached(config)
    assert is_cached(images) and len(images) == NUM_IMAGES and images.classes == files.classes
    assert images.targets.tolist() == files.targets.tolist() and outcomes(images) == outcomes(files)
    assert [index for index, each in enumerate(outcomes(images)) if isinstance(each, str)] == list(BROKEN)
    # Worker processes that are not forked receive the set by pickle.
    assert outcomes(pickle.loads(pickle.dumps(images))) == outcomes(files)
    for index in range(NUM_IMAGES):
        of_cache, of_files = ((each.name(index), each.key(index), each.table_name(index)) for each in (images, files))
        assert of_cache == of_files
    assert images.read(0).base is not None, "must not be a copy"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(images.read(0))
    assert_trains_alike(config, files, images)


def assert_trains_alike(config: Config, *image_sets) -> None:
    plain, from_cache = (taken(build_train_data(config, each, Process(CPU)).windows(2, 9)) for each in image_sets)
    assert plain == from_cache


def test_cache_larger_than_memory_is_accepted(tmp_path):
    size = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    location = CacheLocation(tmp_path, "large", "key")
    location.data.touch()
    os.truncate(location.data, size)  # a hole, which uses no disk space
    builder = IndexBuilder(cache_module.COLUMNS)
    builder.finish({"begun": "x", "size": size, "channels": 3, "type": "uint8"}).save(location.index)
    assert CacheFile(location).data[-1] == 0


def test_cached_images_are_shrunk_but_never_enlarged(photos):
    config, messages = config_of(photos, CACHE=24), Messages()
    files, images = open_sets(config)[0], cached(config, messages)
    assert not messages.warnings
    cached(replaced(config, DATA={"CACHE": 15}), messages)
    assert len(messages.warnings) == 1 and "DATA.CACHE" in messages.warnings[0]
    for index in set(range(NUM_IMAGES)) - set(BROKEN):
        before, after = files.read(index), images.read(index)
        short = min(before.shape[:2])
        if short <= 24:
            assert np.array_equal(before, after)
        else:
            size = tuple(24 * each // short for each in before.shape[:2])
            wanted = Image.fromarray(before).resize(size[::-1], Image.Resampling.BICUBIC)
            assert after.shape[:2] == size and abs(np.array(wanted).astype(int) - after).max() <= 1


@pytest.mark.slow
def test_cached_shards_are_shuffled_like_the_original_shards(tmp_path):
    make_set(tmp_path / "shards")
    config = settings("shards", tmp_path / "shards", BATCH_SIZE=7, IMAGE_CHANNELS=3, SHUFFLE_BUFFER=4, VAL_FRACTION=0.0)
    config = replaced(config, DATA={"CACHE": "disk", "CACHE_PATH": str(tmp_path / "cache")})
    assert is_cached(images := cached(config))
    assert_trains_alike(config, open_sets(config)[0], images)
    os.utime(next((tmp_path / "shards").glob("train*.tar")), ns=(1, 1))
    cached(config, messages := Messages())
    assert any(line.startswith("cache: writing 10 images") for line in messages.lines), "those of the changed tar"


def test_cache_is_reused_only_if_pixels_would_be_identical(photos):
    """Other rules for grey images, orientation or background need another cache."""
    given = [{}, {}, {"EXIF": "ignore"}, {"IMAGENET_MEAN": (0.1, 0.1, 0.1)}, {"CACHE": 9}]
    given.append({"CACHE": 9, "INTERPOLATION": "bilinear"})
    configs = [config_of(photos, **data) for data in given]
    keys = [locate_cache(each, open_sets(each)[0]).key for each in configs]
    assert keys[0] == keys[1] and len(set(keys)) == len(given) - 1
    without_effect = config_of(photos, INTERPOLATION="bilinear")
    assert locate_cache(without_effect, open_sets(without_effect)[0]).key == keys[0]


def test_image_sets_in_memory_or_of_unknown_kind_are_not_cached(tmp_path):
    messages, config = Messages(), settings("digits", CACHE="disk", CACHE_PATH=str(tmp_path / "cache"))
    unknown = ImageSet(TorchvisionStorage([], "x"), np.zeros(0), ["a"], pixels=Pixels(3))
    sets = open_sets(config)[0], unknown
    assert cache_image_sets(config, sets, messages.progress) == sets
    assert len(messages.lines) == 2 and not messages.warnings
    assert not (tmp_path / "cache").exists()


# --- building ---


def test_cached_image_files_are_synced_to_disk(photos, monkeypatch):
    config, synced, fsync = config_of(photos), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino) or fsync(file))
    cached(config)
    assert {path.stat().st_ino for path in Path(config.DATA.CACHE_PATH).glob("*.data")} < {*synced}


def test_run_reads_files_while_another_run_builds_the_cache(photos):
    config, messages = config_of(photos), Messages()
    location = locate_cache(config, open_sets(config)[0])
    location.folder.mkdir()
    with open(location.folder / f"{location.data_set}.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not is_cached(cached(config, messages)) and not messages.warnings
    assert is_cached(cached(config))


def test_process_that_may_not_build_reads_files_until_cache_exists(photos):
    messages = Messages(may_build=False)
    assert not is_cached(cached(config_of(photos), messages)) and not (photos.parent / "cache").exists()
    cached(config_of(photos))
    assert is_cached(cached(config_of(photos), messages)) and not messages.warnings


# --- errors ---


NO_CACHE = {
    "the disk is too small": lambda patch, cache: patch.setattr(cache_module, "free_bytes", lambda folder: 20_000),
    "a file has its name": lambda patch, cache: cache.write_text(""),
}


@pytest.mark.parametrize("fault", cases_of("cache-mistakes_of_a_cache"))
def test_failed_cache_build_warns_and_leaves_no_files(photos, monkeypatch, fault):
    NO_CACHE[fault](monkeypatch, photos.parent / "cache")
    config, messages = config_of(photos), Messages()
    images = cached(config, messages)
    assert not is_cached(images) and images.read(0).shape
    assert_names(messages.warnings[0], *names_of("cache-mistakes_of_a_cache", fault))
    assert not files_of(config)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


DAMAGED = [("data", cut), ("index", cut), ("index", partial(flip, place=0)), ("index", partial(flip, place=60))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_damaged_cache_is_detected_and_rebuilt(photos, name, damage):
    config, messages = config_of(photos), Messages()
    wanted = outcomes(cached(config))
    damage(locate_cache(config, open_sets(config)[0]).data.with_suffix(f".{name}"))
    assert outcomes(cached(config, messages)) == wanted and not messages.warnings
    assert any(line.startswith("cache: writing 21 images") for line in messages.lines)


def test_cache_notices_changes_behind_links_to_the_images(photos, tmp_path):
    (linked := tmp_path / "linked").mkdir()
    for path in photos.rglob("*.*g"):
        (place := linked / path.relative_to(photos)).parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    config = config_of(linked)
    before = outcomes(cached(config))
    changed = sorted((photos / "train").rglob("*.jpg"))[0]
    draw(changed, 200)
    after = outcomes(cached(config))
    assert after == outcomes(open_sets(config)[0]) != before


def written(messages: Messages) -> list[str]:
    """Return how many images each message says are written."""
    return [line.split()[2] for line in messages.lines if line.startswith("cache: writing")]


def test_only_new_and_changed_images_are_added(photos):
    config = config_of(photos)
    images = cached(config)
    wanted, before = outcomes(images), files_of(config)
    changed = sorted((photos / "train").rglob("*.jpg"))[0]
    draw(changed, 200)
    draw(photos / "train" / "class1" / "new.png", 100)
    now = cached(config, messages := Messages())
    assert written(messages) == ["2"] and files_of(config) == before
    assert outcomes(now) == outcomes(open_sets(config)[0]) and outcomes(images) == wanted, "an open cache stays valid"
    cached(config, messages := Messages())
    assert not written(messages)


def test_entry_is_found_only_by_its_whole_stamp(photos):
    config = config_of(photos)
    file = cached(config).read_cached.__self__.file
    stamps = np.array(file.index.rows("stamp", len(file.starts)))
    assert file.places(stamps).tolist() == list(range(len(stamps)))
    for column in range(2):
        others = stamps.copy()
        others[:, column] ^= 1
        assert set(file.places(others)) == {cache_module.NONE}


@pytest.mark.long
def test_folds_and_evaluations_share_the_entries_of_a_folder(photos):
    for path in [*photos.rglob("val/*/*")]:
        path.unlink()
    config = config_of(photos / "train", FOLD="0/3")
    for fold, count in (("0/3", [str(NUM_IMAGES)]), ("1/3", []), ("2/3", [])):
        config = replaced(config, DATA={"FOLD": fold})
        sets = cache_image_sets(config, open_sets(config), (messages := Messages()).progress)
        assert written(messages) == count and all(map(is_cached, sets))
        for part, files in zip(sets, open_sets(config), strict=True):
            assert outcomes(part) == outcomes(files)
            assert outcomes(part.take(np.array([3, 1]))) == outcomes(files.take(np.array([3, 1])))
    assert len(files_of(config)) == 2


@pytest.mark.long
def test_cache_begins_again_if_most_of_its_images_are_gone(photos):
    for path in [*photos.rglob("val/*/*")]:
        path.unlink()
    config = config_of(photos / "train")
    before = b""
    for number, count in enumerate([str(NUM_IMAGES)] * 3):
        for path in (photos / "train").rglob("*.*g"):
            os.utime(path, ns=(number, number))
        train, _ = cache_image_sets(config, open_sets(config), (messages := Messages()).progress)
        assert written(messages) == [count]
        assert any("removed" in line for line in messages.lines) == (number > 0)
        before = pickle.dumps(train) if number == 0 else before
    with pytest.raises(FileNotFoundError):  # another cache has other places
        pickle.loads(before)
    assert len(files_of(config)) == 2


def test_cache_of_a_training_folder_begins_again_but_not_for_an_evaluation(photos):
    config = config_of(photos)
    for number in range(2):
        for path in (photos / "train").rglob("*.*g"):
            os.utime(path, ns=(number, number))
        cached(config, messages := Messages())
        assert any("removed" in line for line in messages.lines) == (number > 0)
    for path in sorted((photos / "val").rglob("*.*g")):
        os.utime(path, ns=(1, 1))
    _, val = open_sets(config)
    cache_image_sets(config, (None, val), (messages := Messages()).progress)
    assert written(messages) == ["3"] and not any("removed" in line for line in messages.lines)


def test_images_that_cannot_be_added_leave_the_cache_as_it_was(photos, monkeypatch):
    config = config_of(photos)
    cached(config)
    data = locate_cache(config, open_sets(config)[0]).data
    size = data.stat().st_size
    draw(photos / "train" / "class1" / "z.png", 100)
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "sync", Mock(side_effect=OSError(28, "No space left on device")))
        assert not is_cached(cached(config, messages := Messages())) and messages.warnings
    assert data.stat().st_size == size and is_cached(cached(config))


def test_bytes_that_a_killed_run_left_behind_the_entries_are_overwritten(photos):
    config = config_of(photos)
    wanted = outcomes(cached(config))
    data = locate_cache(config, open_sets(config)[0]).data
    size = data.stat().st_size
    with open(data, "ab") as file:
        file.write(b"left by a killed run" * 999)
    cached(config, messages := Messages())
    assert not written(messages) and outcomes(cached(config)) == wanted
    draw(photos / "train" / "class1" / "z.png", 100)
    assert outcomes(cached(config)) == outcomes(open_sets(config)[0]) and data.stat().st_size < size + 999


@pytest.mark.slow
def test_other_settings_replace_the_cache_and_other_folders_have_their_own(photos):
    config = config_of(photos)
    folder = Path(config.DATA.CACHE_PATH)
    images = cached(config)
    wanted, before = outcomes(images), files_of(config)
    older = folder / f"{next(iter(before)).rpartition('-')[0]}-{'0' * 16}.index"
    for path in (older, older.with_suffix(".data")):
        path.write_bytes(b"halfstep cache 3\n")
    stranger = folder / f"{older.stem}-x.index"
    stranger.write_bytes(b"not ours")
    smaller = replaced(config, DATA={"CACHE": 20})
    cached(smaller, messages := Messages())
    after = files_of(config) - {stranger.name}
    assert len(after) == 2 and not after & before and sum("removed" in line for line in messages.lines) == 3
    assert stranger.exists() and outcomes(images) == wanted
    photos.rename(photos.parent / "others")  # another data set with the same layout
    others = replaced(smaller, DATA={"DATA_PATH": str(photos.parent / "others")})
    cached(others)
    assert after <= {path.name for path in folder.iterdir()} and len(files_of(others)) == 2


# --- in -check ---


def test_check_reports_expected_cache_size_or_existing_cache_location(photos, tmp_path, monkeypatch):
    folder, config = tmp_path / "cache", config_of(photos)

    def told(given=config) -> str:
        messages = Messages(is_check=True)
        cached(given, messages)
        return "\n".join([*messages.lines, *(f"warning: {each}" for each in messages.warnings)])

    assert_names(told(), f"{NUM_IMAGES} images, about 1 MiB in", "3 images, about 1 MiB in", "are free")
    assert not folder.exists()
    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "free_bytes", lambda place: 100)
        patch.setattr(cache_module, "estimate_bytes", lambda *given: 101)
        assert told().count("warning: ") == 2 and "DATA.CACHE=256" in told()
    cached(config)
    assert f"{NUM_IMAGES} training images, 1 MiB, in {folder}" in told() and "about" not in told()
    (tmp_path / "file").write_text("")
    below_a_file = told(replaced(config, DATA={"CACHE_PATH": f"{tmp_path}/file/cache"}))
    assert_names(below_a_file, "warning", "DATA.CACHE_PATH", f"{tmp_path}/file/cache")
    assert "which are in memory already" in told(replaced(config, DATA={"DATASET": "digits"}))
