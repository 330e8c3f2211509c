"""DATA.CACHE: images kept in one file, whatever happens while it is made and afterwards."""

import dataclasses
import errno
import fcntl
import os
import pickle
import random
import signal
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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
from datasets.cache.file import CacheFile, CacheWriter, pack_block
from datasets.types import ImageReadError, ImageSet
from tests.support.configs import CPU, SMALL, replaced
from tests.support.loading import folder_settings, settings, taken
from tests.support.runs import run
from tests.support.shards import make_set
from utils import distributed
from utils.errors import StoppedBySignal
from utils.host import free_host_memory
from utils.program import exit_code

NUM_IMAGES, BLOCK = 21, 4
BROKEN = (2, 11)


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """JPEGs and PNGs of many sizes, two of them cut off; blocks of a cache are small."""
    monkeypatch.setattr(cache_file, "IMAGES_PER_BLOCK", BLOCK)
    root = tmp_path / "photos"
    for part, count in (("train", NUM_IMAGES), ("val", 3)):
        for index in range(count):
            path = root / part / f"class{index % 3}" / f"{index // 3:02}.{'jpg' if index % 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = (20 + index, 40 - index, 3)
            gradient = np.add.outer(np.arange(shape[0]) * 3, np.arange(shape[1]) * 2)[:, :, None] + [0, 40, index]
            Image.fromarray(gradient.astype(np.uint8)).save(path)
    for index, path in enumerate(sorted((root / "train").rglob("*.*g"))):
        if index in BROKEN:
            path.write_bytes(path.read_bytes()[:60])
    return root


class Messages:
    """Keeps the lines and warnings of one start."""

    def __init__(self, **options):
        self.lines, self.warnings = [], []
        self.progress = CacheProgress(self.lines.append, self.warnings.append, **options)


def config_of(photos: Path, **data) -> Config:
    data = {
        "CACHE": "disk",
        "CACHE_PATH": str(photos.parent / "cache"),
        "IMAGE_SIZE": 16,
        "MAX_BAD_FRACTION": 0.5,
        **data,
    }
    return replaced(folder_settings(photos, 2), DATA=data)


def cached(config: Config, messages: Messages | None = None):
    """The training set."""
    return cache_image_sets(config, load_image_sets(config), (messages or Messages()).progress)[0]


def contents(config: Config) -> dict[str, bytes]:
    folder = Path(config.DATA.CACHE_PATH)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def outcome(image_set, index: int):
    try:
        return image_set.read(index).tolist()
    except ImageReadError as error:
        return str(error)


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
    some = np.array([7, 2, 20])
    assert [images.take(some).name(i) for i in range(3)] == [files.name(i) for i in some.tolist()]
    assert [outcome(images.take(some), i) for i in range(3)] == [outcome(files, i) for i in some.tolist()]


def test_pixels_are_not_copied_and_torch_takes_them_without_a_word(photos):
    images = cached(config_of(photos))
    assert images.read(0).base is not None and np.shares_memory(images.read(0), images.read(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.from_numpy(images.read(0))


def test_a_map_larger_than_the_memory_is_not_refused(tmp_path):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    location = cache_file.CacheLocation(tmp_path, "large", {}, 1, persistent=True)
    start, length = len(location.data_header), 4 * total  # a hole, which takes no room on the disk
    location.data.write_bytes(location.data_header)
    os.truncate(location.data, start + length)
    location.index.write_bytes(location.header + pack_block([(start, length, 0, 0, cache_file.PIXELS, 0)]))
    assert CacheFile(location).data[-1] == 0


@pytest.mark.parametrize(("count", "kind"), [(0, "threads"), (1, "threads"), (3, "threads"), (2, "processes")])
def test_training_sees_the_same_with_and_without_a_cache_for_any_workers(photos, count, kind):
    config = config_of(photos, NUM_WORKERS=count, WORKERS=kind)
    images = [load_image_sets(config)[0], cached(config)]
    plain, kept = (taken(build_train_data(config, each, 0, 1, CPU).windows(2, 9)) for each in images)
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
    plain, kept = (taken(build_train_data(config, each, 0, 1, CPU).windows(1, 9)) for each in images)
    assert plain == kept
    shard = next((tmp_path / "shards").glob("train*.tar"))
    os.utime(shard, ns=(1, 1))
    cached(config, messages := Messages())
    assert messages.lines[0].startswith("cache: writing 30 images")


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


def test_a_second_start_makes_nothing(photos, monkeypatch):
    cached(config_of(photos))
    monkeypatch.setattr(cache, "build_cache", None)
    assert isinstance(cached(config_of(photos)), CachedImages)


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
        assert waits.wait(20)
        (photos.parent / "not yet").rename(index)
    other.join()
    assert isinstance(found[0], CachedImages) and contents(config) == made


def test_a_process_that_may_not_build_reads_the_files_until_there_is_a_cache(photos):
    messages = Messages(may_build=False)
    assert not isinstance(cached(config_of(photos), messages), CachedImages) and not (photos.parent / "cache").exists()
    cached(config_of(photos))
    assert isinstance(cached(config_of(photos), messages), CachedImages) and not messages.warnings


# --- what goes wrong ---


def test_a_full_disk_is_told_and_nothing_is_left(photos, monkeypatch):
    def full(writer, image):
        if writer.num_done == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(writer, image)

    add, messages = CacheWriter.add, Messages()
    monkeypatch.setattr(CacheWriter, "add", full)
    config = config_of(photos)
    images = cached(config, messages)
    assert not isinstance(images, CachedImages) and images.read(0).shape
    assert "DATA.CACHE" in messages.warnings[0] and "No space left" in messages.warnings[0]
    assert not any("training" in name for name in contents(config))


def test_what_will_not_fit_is_not_begun(photos, monkeypatch):
    monkeypatch.setattr(cache_build, "free_bytes", lambda location: 20_000)
    config, messages = config_of(photos), Messages()
    assert not isinstance(cached(config, messages), CachedImages)
    assert "21 images, about 1 MiB" in messages.warnings[0] and "DATA.CACHE_SIDE" in messages.warnings[0]
    assert not any("training" in name for name in contents(config))


def test_a_cache_in_memory_stays_within_the_limit_of_the_container(photos, monkeypatch):
    monkeypatch.setattr(cache, "SHARED_MEMORY", photos.parent)
    group = photos.parent / "cgroup"
    group.mkdir()
    for name, text in (("memory.max", "100000"), ("memory.current", "90000"), ("memory.stat", "inactive_file 0")):
        (group / name).write_text(text)
    monkeypatch.setattr(cache_build, "free_host_memory", partial(free_host_memory, cgroup=group))
    messages = Messages()
    assert not isinstance(cached(config_of(photos, CACHE="ram"), messages), CachedImages) and messages.warnings
    assert isinstance(cached(config_of(photos, CACHE="disk")), CachedImages)
    (group / "memory.max").write_text("max")
    images = cached(config_of(photos, CACHE="ram"), messages := Messages())
    assert isinstance(images, CachedImages) and not messages.warnings


def test_a_folder_that_cannot_be_written_is_told(photos):
    (photos.parent / "file").write_text("")
    messages = Messages()
    assert not isinstance(cached(config_of(photos, CACHE_PATH=str(photos.parent / "file")), messages), CachedImages)
    assert str(photos.parent / "file") in messages.warnings[0]
    assert "DATA.CACHE_PATH" in messages.warnings[0] and "DATA.CACHE_SIDE" not in messages.warnings[0]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flip(position: int):
    def flip_a_byte(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return flip_a_byte


@pytest.mark.parametrize(
    ("name", "damage"),
    [("data", cut), ("index", cut), ("data", flip(0)), ("index", flip(0)), ("index", flip(-40)), ("index", flip(-300))],
)
def test_a_damaged_cache_is_noticed_told_and_made_anew(photos, name, damage):
    config, messages = config_of(photos), Messages()
    cached(config)
    made = contents(config)
    damage(next(Path(config.DATA.CACHE_PATH).glob(f"*training*.{name}")))
    cached(config, messages)
    assert len(messages.warnings) == 1 and str(Path(config.DATA.CACHE_PATH)) in messages.warnings[0]
    assert contents(config) == made


@pytest.mark.parametrize("form", ["decoded", "jpeg"])
def test_a_damaged_image_is_noticed_when_it_is_read_and_the_others_go_on(photos, form):
    config = config_of(photos, CACHE_FORM=form)
    whole = cached(config)
    before = [outcome(whole, index) for index in range(NUM_IMAGES)]
    entry = whole.cache.entries[7]
    (path,) = Path(config.DATA.CACHE_PATH).glob("*training*.data")
    flip(int(entry["start"] + entry["length"] // 2))(path)
    messages = Messages()
    damaged = cached(config, messages)
    assert not messages.warnings
    after = [outcome(damaged, index) for index in range(NUM_IMAGES)]
    assert str(path) in after[7]
    assert outcome(damaged, 7) == after[7], "a second look finds it too"
    assert after[:7] + after[8:] == before[:7] + before[8:]


def test_an_image_is_compared_with_its_checksum_once(photos, monkeypatch):
    images, compared = cached(config_of(photos)), []
    crc32 = cache_file.zlib.crc32
    monkeypatch.setattr(cache_file.zlib, "crc32", lambda content: compared.append(1) or crc32(content))
    for _ in range(3):
        images.read(0), images.take(np.array([5, 0])).read(1)
    assert len(compared) == 1


@pytest.mark.parametrize("seconds", [0, 10**6])
def test_progress_is_told_at_most_once_in_so_many_seconds(photos, monkeypatch, seconds):
    monkeypatch.setattr(cache_build, "SECONDS_BETWEEN_LINES", seconds)
    cached(config_of(photos), messages := Messages())
    lines = [line for line in messages.lines if line.endswith(f" of {NUM_IMAGES} images")]
    assert len(lines) == (0 if seconds else 9)


def test_a_cache_of_an_older_form_goes_when_one_of_this_form_is_made(photos):
    config = config_of(photos)
    cached(config)
    (index,) = Path(config.DATA.CACHE_PATH).glob("*training*.index")
    content, name = index.read_bytes(), index.name.rpartition("-")[0]
    older = index.with_name(f"{name}-{'0' * 16}.index")
    older.write_bytes(content.replace(b"halfstep cache 2", b"halfstep cache 1", 1))
    older.with_suffix(".data").write_bytes(b"halfstep cache 1\n")
    index.unlink()
    cached(config, messages := Messages())
    assert not older.exists() and not older.with_suffix(".data").exists()
    assert any("removed" in line for line in messages.lines)


def files_of(config: Config, part: str = "training") -> set[str]:
    return {name for name in contents(config) if part in name}


def test_changed_files_or_settings_make_a_new_cache_and_only_the_old_one_goes(photos, tmp_path):
    config = config_of(photos)
    folder = Path(config.DATA.CACHE_PATH)
    cached(config)
    before, val = files_of(config), files_of(config, "validation")
    stranger = folder / next(name for name in before if name.endswith(".index")).replace("training", "training-x")
    stranger.write_bytes(b"not ours")
    lookalike = folder / f"{next(iter(before)).rpartition('-')[0]}-{'0' * 16}.index"
    lookalike.write_bytes(b"not ours either\n")
    path = next((photos / "train").rglob("*.jpg"))
    os.utime(path, ns=(1, 1))
    for changed in (config, replaced(config, DATA={"CACHE_SIDE": 20}), replaced(config, DATA={"CACHE_FORM": "jpeg"})):
        cached(changed)
        after = files_of(config) - {stranger.name, lookalike.name}
        assert len(after) == 2 and not after & before
        assert stranger.exists() and lookalike.exists() and files_of(config, "validation") >= val or changed != config
        before = after


def test_a_cache_in_use_is_not_removed(photos):
    config = config_of(photos)
    images, before = cached(config), files_of(config)
    cached(replaced(config, DATA={"CACHE_SIDE": 20}))
    assert files_of(config) > before
    del images
    cached(replaced(config, DATA={"CACHE_SIDE": 22}))
    assert not files_of(config) & before


def test_another_data_set_of_the_same_layout_has_a_cache_of_its_own(photos):
    config, other = config_of(photos), photos.parent / "others"
    cached(config)
    photos.rename(other)
    with_other = replaced(config, DATA={"DATA_PATH": str(other)})
    cached(with_other)
    assert len(files_of(config)) == 4


# --- in memory ---


def test_a_cache_in_memory_goes_with_the_last_that_uses_it(photos, monkeypatch):
    monkeypatch.setattr(cache, "SHARED_MEMORY", photos.parent)
    config = config_of(photos, CACHE="ram")
    first, second = cached(config), cached(config)
    folder = photos.parent / f"halfstep-{os.getuid()}"
    assert folder.stat().st_mode & 0o77 == 0
    assert len(list(folder.glob("*training*.data"))) == 1
    del first
    assert len(list(folder.glob("*training*.data"))) == 1
    del second
    assert not list(folder.iterdir())


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_a_run_of_two_processes_shares_one_cache_and_leaves_no_memory_behind(photos, tmp_path):
    config = tmp_path / "small.yaml"
    config.write_text(SMALL)
    options = "DATA.CACHE=ram DATA.MAX_BAD_FRACTION=0.5 DATA.IMAGE_CHANNELS=3 DATA.BATCH_SIZE=5 TRAIN.NUM_EPOCHS=1"
    arguments = ["-cfg", str(config), "-dataset", "imagefolder", "-data_path", str(photos)]
    arguments += ["-output", str(tmp_path / "out"), "-opts", "DEVICE=cpu", *options.split()]
    done = run("main_multi_gpu.py", *arguments, processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("cache: writing 21 images") == 1
    logs = list((tmp_path / "out").glob("train-*/log_*.txt"))
    assert len(logs) == 2 and all("cache: 21 training images" in log.read_text() for log in logs)
    left = Path(f"/dev/shm/halfstep-{os.getuid()}").iterdir()
    root = next(line for line in done.stdout.splitlines() if "cache: 21" in line).rpartition("-training-")[2][:8]
    assert not [path for path in left if root in path.name]


def test_settings_without_effect_do_not_change_the_cache():
    data = Config().DATA
    other = dataclasses.replace(data, CACHE_QUALITY=50, INTERPOLATION="bilinear")
    assert cache_build.CacheEncoder(data).key == cache_build.CacheEncoder(other).key


# --- the other processes meanwhile ---


def test_while_one_process_is_slow_the_others_hear_from_it(monkeypatch):
    """A collective that is waited for too long ends a run; so none may wait until the cache of another is made."""
    at_once = SimpleNamespace(grace_period=0)
    processes = [
        distributed.Process(CPU, rank, 0, world_size=2, rendezvous=at_once) for rank in range(2)
    ]  # on two machines
    signs, enough = [0, 0], [threading.Event(), threading.Event()]
    meeting, values = threading.Barrier(2, timeout=20), {}

    def all_reduce(number, group):
        values[group] = float(number)
        meeting.wait()
        number.fill_(sum(values.values()))
        signs[group] += 1
        if signs[group] >= 5:
            enough[group].set()
        meeting.wait()

    def broadcast(content, src, group):
        meeting.wait()

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    results = {}

    def live(process):
        def slow_task():
            assert enough[process.rank].wait(20)
            enough[1 - process.rank].clear()
            signs[1 - process.rank] = 0
            return f"made by {process.rank}"

        process._host_group = process.rank
        results[process.rank] = process.after_first(slow_task)

    threads = [threading.Thread(target=live, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "made by 0", 1: "made by 1"}
