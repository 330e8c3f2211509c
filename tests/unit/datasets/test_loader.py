"""The order of the data, its windows and pieces, and the workers that read them."""

import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.schema import Config
from datasets import ImageSet, build, build_eval_data, build_order, build_train_data
from datasets.build import Workers, choose_workers, make_loader
from datasets.loading import replacements
from datasets.loading.readers import TrainReader
from datasets.order import sample_rng
from tests.support.configs import CPU, replaced
from tests.support.forks import DEADLINE, ROOT
from tests.support.loading import folder_settings, make_folder, settings, taken, train_data
from tests.support.opened import open_sets
from tests.support.pretend_device import DEVICE, on_pretend_device, pinned, waits
from tests.support.refusals import assert_names, refused
from tests.support.runs import alive, wait_until
from utils.distributed import Process
from utils.errors import DataError

pytestmark = pytest.mark.slow

# --- order ---


def test_sample_random_numbers_are_distinct_and_fixed_across_python_versions():
    assert sample_rng(0, 0, 0).random() == 0.12010089443862726
    others = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, "replacement")]
    others += [(0, 0, 0, "augmentation", repeat) for repeat in (1, 2)]
    assert len({sample_rng(*each).random() for each in others} | {0.12010089443862726}) == 7


# --- windows ---


def test_unread_batches_never_leak_into_next_window():
    data = train_data(settings(BATCH_SIZE=100, accumulate=2))
    whole = taken(data.windows(0, 3))
    windows = data.windows(0, 3)
    next(next(windows).batches)
    assert taken(windows) == whole[2:]


def test_loading_does_not_change_the_global_random_state():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    config = settings(BATCH_SIZE=700)
    taken(train_data(config).windows(0, 2))
    list(build_eval_data(config, open_sets(config)[1], Process(CPU)))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), repr(np.random.get_state()))


# --- evaluation ---


@pytest.mark.parametrize(("world_size", "in_groups"), [(1, False), (3, False), (3, True)])
def test_evaluation_covers_every_image_once(world_size, in_groups):
    """Images in groups, as in Parquet files, are split into one range per process, so each reads few extra groups."""
    config = settings(BATCH_SIZE=50, BATCH_SIZE_EVAL=17)  # 30 images for each of three processes
    _, val = open_sets(config)
    val.storage.is_read_in_groups = in_groups
    shares = [build_eval_data(config, val, Process(CPU, rank, world_size=world_size)) for rank in range(world_size)]
    batches = [batch for share in shares for batch in share]
    assert all(np.ptp(share.share) == len(share.share) - 1 for share in shares) is (in_groups or world_size == 1)
    assert {share.num_samples for share in shares} == {90} and sum(batch.num_samples for batch in batches) == 90
    assert max(len(batch.images) for batch in batches) == 17
    assert len({len(list(share)) for share in shares}) == 1, (
        "processes have equally many batches; the last may be empty"
    )
    counted = [(each.images[: each.num_samples], each.targets[: each.num_samples]) for each in batches]
    shown = [pair for each in counted for pair in zip(*(part.tolist() for part in each), strict=True)]
    whole = [
        (image[None].tolist(), target)
        for image, target in zip(val.storage.images[val.rows], val.targets.tolist(), strict=True)
    ]
    assert sorted(shown) == sorted(whole)


# --- workers and unreadable images ---


UNREADABLE = {2, 11, 18, 19, 20}


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


def test_unreadable_image_is_replaced_preferably_from_its_class(folder):
    config = folder_settings(folder)
    data = train_data(config)
    shown, of_the_third = {}, set()
    for step, window in enumerate(data.windows(0, 5 * data.steps_per_epoch)):
        for piece, batch in zip(data.order.pieces(step, 0), window.batches, strict=True):
            reds = batch.images[:, 0, 0, 0].tolist()
            shown |= dict(zip(piece.indices.tolist(), zip(reds, batch.targets.tolist(), strict=True), strict=True))
            assert set(piece.indices.tolist()) & UNREADABLE <= set(batch.bad) <= UNREADABLE
            of_the_third |= {shown[index][0] for index in piece.indices.tolist() if index == 2}
    assert len(of_the_third) > 1, "it is a random replacement"
    tried = list(replacements._candidates(open_sets(config)[0], seed=0, epoch=0, index=18))
    assert len(tried) == len({*tried}) and {*tried[:2]} == {19, 20}, "no image is tried twice"
    for index, (red, target) in shown.items():
        assert red not in UNREADABLE and target == red // 9
        assert red == index or index in UNREADABLE
        assert target == index // 9 or index >= 18
    assert len(shown) == 21


def test_images_are_read_only_with_the_channels_they_were_opened_with(folder):
    config = folder_settings(folder)
    _, val = open_sets(config)
    grey = replaced(config, DATA={"IMAGE_CHANNELS": 1, "IMAGENET_MEAN": (0.5,), "IMAGENET_STD": (0.5,)})
    with refused(AssertionError, "other settings"):
        build_eval_data(grey, val, Process(CPU))


def test_evaluation_skips_and_reports_unreadable_images(folder):
    config = folder_settings(folder, BATCH_SIZE_EVAL=1)
    _, val = open_sets(config)
    batches = list(build_eval_data(config, val, Process(CPU)))
    assert [batch.num_samples for batch in batches] == [len(batch.images) for batch in batches] == [1, 1, 0, 1, 1, 0]
    assert [batch.bad for batch in batches] == [[], [], [2], [], [], [5]]
    assert [target for batch in batches for target in batch.targets.tolist()] == [0, 0, 1, 1]
    larger = build_eval_data(replaced(config, DATA={"BATCH_SIZE_EVAL": 4}), val, Process(CPU))
    assert [batch.targets.tolist() for batch in larger] == [[0, 0, 1], [1]]
    (folder / "val" / "ant" / "0.png").write_bytes(b"")  # replaces missing images of other processes, but counts once
    shares = [batch for rank in range(4) for batch in build_eval_data(config, val, Process(CPU, rank, world_size=4))]
    assert sorted(index for batch in shares for index in batch.bad) == [0, 2, 5]
    assert sum(batch.num_samples for batch in shares) == 3


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_data_without_readable_images_raises_data_error_through_workers(folder, kind):
    data = train_data(folder_settings(folder, 1, WORKERS=kind))
    for file in (folder / "train").rglob("*.png"):
        file.unlink()
    with pytest.raises(DataError) as caught:
        taken(data.windows(0, 5))
    assert_names(str(caught.value), "others", "FileNotFoundError", "DATA.DATA_PATH")
    assert "Traceback" not in str(caught.value)


@pytest.mark.long
def test_loader_processes_ignore_signals_and_end_on_close(folder):
    data = train_data(folder_settings(folder, 2, WORKERS="processes"))
    expected = taken(train_data(folder_settings(folder)).windows(0, 100))
    others = {*multiprocessing.active_children()}  # started by earlier tests
    windows = data.windows(0, 100)
    got = taken([next(windows)])
    workers = {*multiprocessing.active_children()} - others
    assert len(workers) == 2
    for worker in workers:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid, each)
    got += taken(next(windows) for _ in range(30))
    assert got == expected[: len(got)]
    windows.close()
    assert not {*multiprocessing.active_children()} - others


def test_worker_processes_augment_images_like_the_main_process(folder):
    config = folder_settings(folder, TRAIN_INTERPOLATION="random")
    config = replaced(config, TRAIN={"AUTO_AUGMENT": "3a", "COLOR_JITTER": 0.3, "REPEATED_AUG": 3})
    processes = replaced(config, DATA={"NUM_WORKERS": 2, "WORKERS": "processes"})
    expected, found = (taken(train_data(each).windows(0, 6)) for each in (config, processes))
    assert found == expected


@pytest.mark.long
def test_loader_processes_leave_no_temporary_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    windows = train_data(folder_settings(folder, 2, WORKERS="processes")).windows(0, 3)
    assert len(taken(windows)) == 3
    windows = train_data(folder_settings(folder, 2, WORKERS="processes")).windows(0, 100)
    taken([next(windows)])
    assert not list(tmp_path.glob("pymp-*"))
    windows.close()


PROGRAM = """
import multiprocessing, os, sys, torch
from pathlib import Path
from tests.support.loading import folder_settings, settings, train_data
torch.set_num_threads(2)
config = settings("imagefolder", sys.argv[1], NUM_WORKERS=2, IMAGE_CHANNELS=3, BATCH_SIZE=8, IMAGE_SIZE=224, HFLIP=1.0)
before = len(os.listdir("/proc/self/task"))
windows = train_data(config).windows(0, 50)
for _ in range(20):
    list(next(windows).batches)
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
windows.close()
sys.kept_to_the_end = windows = train_data(folder_settings(Path(sys.argv[1]), 2, WORKERS="processes")).windows(0, 100)
next(next(windows).batches)
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_loader_adds_no_torch_threads_and_its_processes_end_with_program(folder):
    """The images are large enough that torch would flip one with several threads. The program ends in mid-epoch."""
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", PROGRAM, folder]  # torch warns of 2 workers on 1 core
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    threads, workers = (line.split() for line in done.stdout.splitlines())
    assert (done.returncode, done.stderr, threads, len(workers)) == (0, "", ["2", "2"], 2)
    wait_until(lambda: not any(alive(int(pid)) for pid in workers))


@pytest.mark.parametrize("ahead, expected", [(0, [1, 2, 3]), (2, [3, 4, 5])])
def test_loader_threads_prefetch_exactly_the_configured_batches(folder, monkeypatch, ahead, expected):
    config = folder_settings(folder)
    train_set = open_sets(config)[0]
    begun = []
    allocate = TrainReader.allocate
    monkeypatch.setattr(TrainReader, "allocate", lambda *args, **kwargs: begun.append(1) or allocate(*args, **kwargs))
    load = make_loader(TrainReader(train_set, config), Workers("threads", 2, ahead), CPU)
    order = build_order(config, train_set, 1)
    seen = []
    with contextlib.closing(load(piece for step in range(20) for piece in order.pieces(step, 0))) as batches:
        for _ in itertools.islice(batches, 3):
            seen.append(len(begun))
    assert seen == expected


GPU = torch.device("cuda", 0)


def chosen(config: Config, image_set: ImageSet, num_cores: int, device: torch.device = GPU, **sizes: int) -> Workers:
    return choose_workers(config, image_set, Process(device, num_cores=num_cores, **sizes))


@pytest.fixture
def plenty(monkeypatch) -> None:
    """Simulate a host with 1 TiB of free memory, half of it available as shared memory."""
    monkeypatch.setattr(build, "free_host_memory", lambda: 2**40)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**39))
    monkeypatch.setattr(build, "SHARED_MEMORY", Path("/"))


@pytest.mark.usefixtures("plenty")
def test_worker_count_defaults_to_the_cores_of_the_process(folder):
    config, small = folder_settings(folder, None), settings(NUM_WORKERS=None)
    files, in_memory = open_sets(config)[1], open_sets(small)[1]
    processes = replaced(config, DATA={"WORKERS": "processes"})
    for num_cores, beside, on_gpu in [(1, 1, 1), (2, 1, 2), (4, 1, 3), (16, 4, 15), (64, 8, 63)]:
        assert chosen(processes, files, num_cores, CPU).count == beside
        assert chosen(config, files, num_cores, CPU).count == min(8, num_cores)
        assert chosen(config, files, num_cores).count == chosen(small, in_memory, num_cores).count == on_gpu
    assert chosen(small, in_memory, 8, CPU).count == 0
    assert chosen(settings(NUM_WORKERS=3), in_memory, 1, CPU).count == 3


@pytest.mark.usefixtures("plenty")
def test_gpu_loading_uses_processes_where_gil_limits_threads(folder, monkeypatch):
    plain, small = folder_settings(folder, None), settings(NUM_WORKERS=None)
    files, in_memory = open_sets(plain)[0], open_sets(small)[0]
    policy, jitter = (replaced(plain, TRAIN=each) for each in ({"AUTO_AUGMENT": "augmix"}, {"COLOR_JITTER": 0.4}))

    def fewest_processes(config: Config, image_set: ImageSet, **sizes: int) -> int:
        kinds = [chosen(config, image_set, num_cores, **sizes).kind for num_cores in range(1, 20)]
        return kinds.index("processes") + 1 if "processes" in kinds else 0

    cases = [(plain, files), (policy, files), (jitter, files), (small, in_memory)]
    assert [fewest_processes(*case) for case in cases] == [6, 3, 3, 1]
    assert chosen(plain, files, 64, CPU).kind == "threads"
    assert chosen(replaced(plain, DATA={"WORKERS": "threads"}), files, 64).kind == "threads"
    batch = 5 * 3 * 8 * 8
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=60 * batch))
    assert fewest_processes(plain, files) == 6, "5 processes with 2 batches each, for training and for evaluation"
    assert fewest_processes(plain, files, local_size=4) == 0, "not enough memory for all four ranks' processes"


def test_gpu_loader_threads_read_ahead_as_memory_allows(monkeypatch):
    def ahead(free: int, **data) -> int:
        monkeypatch.setattr(build, "free_host_memory", lambda: free)
        config = settings(NUM_WORKERS=2, WORKERS="threads", **data)
        return chosen(config, open_sets(settings())[0], 8, local_size=2).ahead

    photos = {"IMAGE_SIZE": 224, "IMAGE_CHANNELS": 3, "BATCH_SIZE": 256}  # 38.5 MB per batch
    assert [ahead(gib * 2**30, **photos) for gib in (0, 8, 32, 500)] == [2, 3, 12, 16], "pinned memory makes it 64 MiB"
    assert ahead(2**40, **photos | {"BATCH_SIZE": 2048}) == 2 and ahead(2**40, BATCH_SIZE=16) == 32


@on_pretend_device
def test_device_batches_match_cpu_and_never_synchronize(tmp_path, monkeypatch):
    def batches(config, image_set: ImageSet, process: Process) -> list:
        windows = build_train_data(config, image_set, process).windows(0, 6)
        return list(itertools.chain.from_iterable(window.batches for window in windows))

    # torch's own thread pins batches from worker processes, but the pretend device exists only in the main thread.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned(tensor.clone()))
    beside = Process(torch.device(DEVICE), num_cores=3)
    for config, kind in (
        (folder_settings(make_folder(tmp_path), None), "threads"),
        (settings(NUM_WORKERS=None), "processes"),
    ):
        image_set = open_sets(config)[0]
        assert choose_workers(config, image_set, beside)[:2] == (kind, 3)
        with waits() as seen:
            ours = batches(config, image_set, beside)
        assert not seen and not multiprocessing.active_children()
        for batch, plain in zip(ours, batches(config, image_set, Process(CPU)), strict=True):
            assert batch.images.device == batch.targets.device == beside.device
            assert torch.equal(batch.images.cpu(), plain.images) and torch.equal(batch.targets.cpu(), plain.targets)


# --- synthetic ---


def test_synthetic_batches_are_reused_and_follow_the_seed():
    config = settings("synthetic", BATCH_SIZE=16, BATCH_SIZE_EVAL=24, SYNTHETIC_SIZE=40, DROP_LAST=False)
    data = train_data(config)
    batches = [batch for window in data.windows(0, 6) for batch in window.batches]
    assert [batch.num_samples for batch in batches] == [len(batch.images) for batch in batches] == [16, 16, 8] * 2
    assert len({batch.images.data_ptr() for batch in batches}) == 1
    assert batches[0].images.shape == (16, 1, 8, 8) and batches[0].images.dtype == torch.uint8
    assert taken(data.windows(0, 2)) == taken(train_data(config).windows(0, 2))
    for other in (train_data(dataclasses.replace(config, SEED=1)), train_data(config, 1, 2)):
        (batch,) = [batch for window in other.windows(0, 1) for batch in window.batches]
        assert not torch.equal(batch.images, batches[0].images[: len(batch.images)])
    val = build_eval_data(config, open_sets(config)[1], Process(CPU, 1, world_size=2))
    assert val.num_samples == 40 and [batch.num_samples for batch in val] == [20]


def test_synthetic_images_follow_the_size_schedule():
    config = replaced(settings("synthetic", BATCH_SIZE=20, SYNTHETIC_SIZE=20), TRAIN={"SIZE_SCHEDULE": ("0:4", "1:6")})
    windows = train_data(config).windows(0, 2)
    assert [batch.images.shape for window in windows for batch in window.batches] == [(20, 1, 4, 4), (20, 1, 6, 6)]
