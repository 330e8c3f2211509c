"""DATA.CACHE: what is read from a cache, and how it is built."""

import fcntl
import os
import pickle
import random
import signal
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs.schema import Config
from datasets import CacheProgress, build_train_data, cache_image_sets, load_image_sets
from datasets.cache import build as cache_build
from datasets.cache import cached_images as cache
from datasets.cache import file as cache_file
from datasets.cache.cached_images import CachedImages
from datasets.cache.file import CacheFile, CacheWriter
from datasets.types import ImageSet
from tests.support.caches import BROKEN, NUM_IMAGES, Messages, cached, config_of, contents, outcome
from tests.support.caches import photos as photos
from tests.support.configs import CPU, replaced
from tests.support.forks import DEADLINE
from tests.support.image_sets import make_set
from tests.support.loading import settings, taken
from utils.distributed import Process
from utils.errors import StoppedBySignal
from utils.program import exit_code

# --- what is read ---


def test_a_decoded_cache_holds_the_same_pixels_targets_names_and_reasons(photos):
    config = config_of(photos)
    files, images = load_image_sets(config)[0], cached(config)
    assert isinstance(images, CachedImages) and len(images) == NUM_IMAGES and images.classes == files.classes
    assert images.targets.tolist() == files.targets.tolist()
    assert [outcome(images, index) for index in range(NUM_IMAGES)] == [
        outcome(files, index) for index in range(NUM_IMAGES)
    ]
    assert [index for index in range(NUM_IMAGES) if isinstance(outcome(images, index), str)] == list(BROKEN)
    # Where worker processes cannot be forked they are sent the set.
    assert outcome(pickle.loads(pickle.dumps(images)), 5) == outcome(files, 5)
    assert [images.name(index) for index in range(NUM_IMAGES)] == [files.name(index) for index in range(NUM_IMAGES)]


def test_pixels_are_not_copied_and_torch_takes_them_without_a_word(photos):
    images = cached(config_of(photos))
    assert images.read(0).base is not None and np.shares_memory(images.read(0), images.read(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(images.read(0))


def test_a_map_larger_than_the_memory_is_not_refused(tmp_path):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    location = cache_file.CacheLocation(tmp_path, "large", {}, 1, persistent=True)
    start, length = len(location.header), 4 * total  # a hole, which takes no room on the disk
    location.data.write_bytes(location.header)
    os.truncate(location.data, start + length)
    entry = np.array([(start, length, 0, 0, cache_file.PIXELS, 0)], cache_file.ENTRY)
    content = location.header + entry.tobytes()
    location.index.write_bytes(content + cache_file.checksum_of(content))
    assert CacheFile(location).data[-1] == 0


@pytest.mark.parametrize(("count", "kind"), [(0, "threads"), (1, "threads"), (3, "threads"), (2, "processes")])
def test_training_sees_the_same_with_and_without_a_cache_for_any_workers(photos, count, kind):
    config = config_of(photos, NUM_WORKERS=count, WORKERS=kind)
    images = [load_image_sets(config)[0], cached(config)]
    plain, kept = (taken(build_train_data(config, each, Process(CPU)).windows(2, 9)) for each in images)
    assert plain == kept and any(batch[5] for batch in kept)


def test_the_jpeg_form_is_close_and_keeps_grey_ones_grey(photos):
    for channels in (3, 1):
        config = config_of(photos, CACHE_FORM="jpeg", IMAGE_CHANNELS=channels)
        files, images = load_image_sets(config)[0], cached(config)
        for index in range(NUM_IMAGES):
            if index not in BROKEN:
                before, after = files.read(index).astype(int), images.read(index).astype(int)
                assert before.shape == after.shape and abs(before - after).mean() < 5
        assert images.cache.entries["kind"].tolist().count(cache_file.JPEG) == NUM_IMAGES - len(BROKEN)


def test_pillow_encodes_where_simplejpeg_is_missing(photos, monkeypatch):
    monkeypatch.setattr(cache_build, "simplejpeg", None)
    config = config_of(photos, CACHE_FORM="jpeg")
    before, after = (each.read(0).astype(int) for each in (load_image_sets(config)[0], cached(config)))
    assert abs(before - after).mean() < 5


def test_images_are_shrunk_to_the_side_and_never_enlarged(photos):
    config = config_of(photos, CACHE_SIDE=24)
    messages = Messages()
    files, images = load_image_sets(config)[0], cached(config, messages)
    assert not messages.warnings
    cached(replaced(config, DATA={"CACHE_SIDE": 15}), messages)
    assert len(messages.warnings) == 1 and "DATA.CACHE_SIDE" in messages.warnings[0]
    for index in set(range(NUM_IMAGES)) - set(BROKEN):
        before, after = files.read(index), images.read(index)
        short = min(before.shape[:2])
        if short <= 24:
            assert np.array_equal(before, after)
        else:
            size = tuple(24 * each // short for each in before.shape[:2])
            wanted = Image.fromarray(before).resize(size[::-1], Image.Resampling.BICUBIC)
            assert after.shape[:2] == size and abs(np.array(wanted).astype(int) - after).max() <= 1


def test_shards_are_cached_too_and_keep_their_own_order(tmp_path):
    make_set(tmp_path / "shards")
    config = settings("shards", tmp_path / "shards", BATCH_SIZE=7, IMAGE_CHANNELS=3, SHUFFLE_BUFFER=4, VAL_FRACTION=0.0)
    config = replaced(config, DATA={"CACHE": "disk", "CACHE_PATH": str(tmp_path / "cache")})
    images = [load_image_sets(config)[0], cached(config)]
    assert isinstance(images[1], CachedImages)
    plain, kept = (taken(build_train_data(config, each, Process(CPU)).windows(1, 9)) for each in images)
    assert plain == kept
    shard = next((tmp_path / "shards").glob("train*.tar"))
    os.utime(shard, ns=(1, 1))
    cached(config, messages := Messages())
    assert messages.lines[0].startswith("cache: writing 30 images")


def test_a_cache_is_for_the_same_pixels_only(photos):
    """Not for those of other rules: of grey images, turned upright, or on another background."""
    given = [{}, {}, {"EXIF": "ignore"}, {"IMAGENET_MEAN": (0.1, 0.1, 0.1)}, {"CACHE_SIDE": 9}, {"CACHE_FORM": "jpeg"}]
    keys = []
    for data in given:
        config = config_of(photos, **data)
        keys.append(str(cache.locate_cache(config, "training", load_image_sets(config)[0]).key))
    assert keys[0] == keys[1] and len(set(keys)) == len(given) - 1


def test_sets_in_memory_or_of_unknown_files_are_left_alone(tmp_path):
    messages, config = Messages(), settings(CACHE="disk", CACHE_PATH=str(tmp_path / "cache"))
    sets = load_image_sets(config)[0], ImageSet([0], ["a"])
    assert cache_image_sets(config, sets, messages.progress) == sets
    assert len(messages.lines) == 2 and not messages.warnings
    assert not (tmp_path / "cache").exists()


# --- being made ---


def test_the_file_does_not_depend_on_the_number_of_threads(photos):
    made = []
    for count in (1, 4):
        config = config_of(photos, NUM_WORKERS=count, CACHE_PATH=str(photos.parent / f"cache{count}"))
        cached(config)
        made.append(contents(config))
    assert made[0] == made[1] and len(made[0]) == 4


def killed_build(config: Config, num_moments: int) -> bool:
    """Build in a process that kills itself at some moment. Returns whether that came before the end."""
    pid = os.fork()
    if not pid:
        moments = iter(range(num_moments))

        def dying(function):
            def moment(*arguments):
                if next(moments, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return moment

        for owner, name in ((CacheWriter, "add"), (CacheWriter, "commit"), (os, "fsync"), (os, "replace")):
            setattr(owner, name, dying(getattr(owner, name)))
        try:
            cached(config)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("ending", ["data", "part"])
@pytest.mark.parametrize("change", [0, -0.5, 9])
def test_builds_that_are_killed_with_files_cut_or_longer_end_in_the_same_bytes(photos, ending, change):
    """A machine that goes down leaves a file that was not on the disk yet shorter, or with anything at its end."""
    whole = config_of(photos, CACHE_PATH=str(photos.parent / "whole"))
    cached(whole)
    config, rng = config_of(photos), random.Random(f"{ending}{change}")
    for _ in range(3):
        assert killed_build(config, rng.randrange(7, 12))
        (path,) = Path(config.DATA.CACHE_PATH).glob(f"*training*.{ending}")
        os.truncate(path, int(path.stat().st_size * (1 + rng.random() * change)))
    cached(config)
    assert contents(config) == contents(whole)


def test_an_unfinished_cache_goes_on_where_it_was(photos):
    config, messages = config_of(photos), Messages()
    assert killed_build(config, 28)
    cached(config, messages)
    assert messages.lines[0].startswith("cache: writing 5 images")


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_a_signal_stops_it_and_only_a_disk_keeps_the_beginning(photos, monkeypatch, kind):
    monkeypatch.setattr(cache, "SHARED_MEMORY", photos.parent)
    config = config_of(photos, CACHE=kind)
    numbers = iter([0] * 9)
    messages = Messages(signal=lambda: next(numbers, signal.SIGTERM))
    with pytest.raises(StoppedBySignal) as caught:
        cached(config, messages)
    assert bool(list(photos.parent.rglob("*.part"))) == (kind == "disk")

    def program(arguments):
        raise caught.value

    assert exit_code(program, []) == 128 + signal.SIGTERM


def test_another_run_that_makes_the_same_cache_is_waited_for(photos, monkeypatch):
    config, waits = config_of(photos), threading.Event()
    cached(config)
    made = contents(config)
    index = next(Path(config.DATA.CACHE_PATH).glob("*training*.index"))
    lock = index.with_name(index.name.rpartition("-")[0] + ".lock")
    index.rename(photos.parent / "not yet")
    found = []
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        progress = CacheProgress(lambda line: waits.set() if "waiting" in line else None, print)
        monkeypatch.setattr(cache, "build_cache", None)
        sets = load_image_sets(config)
        other = threading.Thread(target=lambda: found.append(cache_image_sets(config, sets, progress)[0]))
        other.start()
        assert waits.wait(DEADLINE)
        (photos.parent / "not yet").rename(index)
    other.join()
    assert isinstance(found[0], CachedImages) and contents(config) == made


def test_a_process_that_may_not_build_reads_the_files_until_there_is_a_cache(photos):
    """And then the cache, which is not built a second time."""
    messages = Messages(may_build=False)
    assert not isinstance(cached(config_of(photos), messages), CachedImages) and not (photos.parent / "cache").exists()
    cached(config_of(photos))
    assert isinstance(cached(config_of(photos), messages), CachedImages) and not messages.warnings
