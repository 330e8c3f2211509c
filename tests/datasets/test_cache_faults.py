"""DATA.CACHE when something goes wrong or changes, and a cache in memory."""

import dataclasses
import errno
import os
from functools import partial
from pathlib import Path

import pytest

from configs.schema import Config
from datasets.cache import build as cache_build
from datasets.cache import cached_images as cache
from datasets.cache import file as cache_file
from datasets.cache.cached_images import CachedImages
from datasets.cache.file import CacheWriter
from tests.support.caches import NUM_IMAGES, Messages, cached, config_of, contents, files_of, outcome
from tests.support.caches import photos as photos
from tests.support.configs import replaced
from tests.support.runs import run
from utils.host import free_host_memory

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
        images.read(0)
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
    older.write_bytes(content.replace(b"halfstep cache 3", b"halfstep cache 2", 1))
    older.with_suffix(".data").write_bytes(b"halfstep cache 2\n")
    index.unlink()
    cached(config, messages := Messages())
    assert not older.exists() and not older.with_suffix(".data").exists()
    assert any("removed" in line for line in messages.lines)


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
def test_a_run_of_two_processes_shares_one_cache_and_leaves_no_memory_behind(photos, tmp_path, small_yaml):
    options = "DATA.CACHE=ram DATA.MAX_BAD_FRACTION=0.5 DATA.IMAGE_CHANNELS=3 DATA.BATCH_SIZE=5 TRAIN.NUM_EPOCHS=1"
    arguments = ["-cfg", str(small_yaml), "-dataset", "imagefolder", "-data_path", str(photos)]
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
