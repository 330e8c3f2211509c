"""The order of the data, its cutting into windows and pieces, and the workers that read them."""

import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from configs.schema import Config
from datasets import build_eval_data, build_train_data, load_image_sets
from datasets.loader import count_workers
from datasets.order import Order, sample_rng
from tests.helpers import ROOT, replaced
from utils.errors import DataError

CPU = torch.device("cpu")


def order(num_images=100, batch_size=8, world_size=1, num_accumulated=1, drop_last=True, seed=0) -> Order:
    return Order(num_images, batch_size, world_size, num_accumulated, drop_last, seed)


def settings(dataset: str = "digits", path: Path | str = "", seed: int = 0, accumulate: int = 1, **data) -> Config:
    data = {"IMAGE_SIZE": 8, "IMAGE_CHANNELS": 1, "BATCH_SIZE": 100, "NUM_WORKERS": 0, **data}
    config = replaced(Config(), DATA={"DATASET": dataset, "DATA_PATH": str(path), **data})
    return dataclasses.replace(replaced(config, TRAIN={"ACCUM_ITER": accumulate}), SEED=seed)


def train_data(config: Config, rank: int = 0, world_size: int = 1):
    return build_train_data(config, load_image_sets(config)[0], rank, world_size, CPU)


def taken(windows) -> list[tuple]:
    """All that windows hold, as plain values that can be compared."""
    return [
        (window.step, window.num_samples, batch.images.tolist(), batch.targets.tolist(), batch.num_samples, batch.bad)
        for window in windows
        for batch in window.batches
    ]


# --- order ---


def test_every_window_is_cut_exactly_whatever_the_sizes():
    rng = random.Random(0)
    for _ in range(300):
        sizes = {"batch_size": rng.randint(1, 6), "world_size": rng.randint(1, 4), "num_accumulated": rng.randint(1, 3)}
        cut = order(rng.randint(1, 60), **sizes, drop_last=rng.random() < 0.5)
        whole = order(cut.num_images, cut.global_batch, drop_last=cut.drop_last)
        assert cut.steps_per_epoch == whole.steps_per_epoch
        seen = []
        for step in range(cut.steps_per_epoch):
            window = cut.window(step)
            assert window.tolist() == whole.window(step).tolist() and len(window) == cut.window_size(step)
            ranks = [cut.pieces(step, rank) for rank in range(cut.world_size)]
            num_micro_batches = -(-len(window) // (cut.batch_size * cut.world_size))
            assert {len(pieces) for pieces in ranks} == {num_micro_batches} == {cut.num_micro_batches(step)}
            in_order = [pieces[micro] for micro in range(num_micro_batches) for pieces in ranks]
            counted = [index for piece in in_order for index in piece.indices[: piece.num_samples]]
            assert counted == window.tolist()
            assert all(piece.num_samples == len(piece.indices) <= cut.batch_size for piece in in_order if piece.num_samples)
            assert all(piece.indices.tolist() == [window[0]] for piece in in_order if not piece.num_samples)
            seen += counted
        assert len(set(seen)) == len(seen)
        left_out = cut.num_images - len(seen)
        assert left_out == (cut.num_images % cut.global_batch if cut.drop_last and cut.num_images >= cut.global_batch else 0)


def test_drop_last_never_leaves_an_epoch_without_a_step():
    assert order(100, 8, drop_last=True).steps_per_epoch == 12
    assert order(100, 8, drop_last=False).steps_per_epoch == 13
    assert order(5, 8, drop_last=True).steps_per_epoch == 1
    assert order(5, 8, drop_last=True).window_size(7) == 5


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    def epoch(number: int, seed: int) -> list[int]:
        cut = order(96, 8, seed=seed)
        return [index for step in range(12) for index in cut.window(12 * number + step).tolist()]

    assert sorted(epoch(0, 0)) == sorted(epoch(3, 5)) == list(range(96))
    orders = [epoch(0, 0), epoch(1, 0), epoch(0, 1), epoch(1, 1), list(range(96))]
    assert all(first != second for first in orders for second in orders if first is not second)


def test_the_randomness_of_a_sample_is_its_own_and_the_same_in_every_version_of_python():
    assert sample_rng(0, 0, 0).random() == GOLDEN
    others = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, "replacement")]
    assert len({sample_rng(*each).random() for each in others} | {GOLDEN}) == 5


# --- windows ---


def test_windows_of_two_processes_hold_what_one_process_sees():
    whole = taken(train_data(settings(BATCH_SIZE=200, DROP_LAST=False)).windows(0, 16))
    ranks = [taken(train_data(settings(BATCH_SIZE=50, DROP_LAST=False, NUM_WORKERS=0, ), rank, 2).windows(0, 32)) for rank in (0, 1)]
    assert len(ranks[0]) == len(ranks[1])


def test_a_run_that_starts_in_mid_epoch_sees_the_tail_of_the_whole_run():
    config = settings(BATCH_SIZE=100, accumulate=2, DROP_LAST=False)
    whole = taken(train_data(config).windows(0, 20))  # eight steps an epoch
    resumed = taken(train_data(config).windows(11, 20))
    assert resumed == [batch for batch in whole if batch[0] >= 11]
    assert {batch[0] for batch in whole} == set(range(20))


def test_what_nobody_took_from_a_window_does_not_turn_up_in_the_next():
    data = train_data(settings(BATCH_SIZE=100, accumulate=2))
    whole = taken(data.windows(0, 3))
    windows = data.windows(0, 3)
    next(next(windows).batches)
    assert taken(windows) == whole[2:]


def test_loading_leaves_the_global_random_numbers_alone():
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    config = settings(BATCH_SIZE=700)
    taken(train_data(config).windows(0, 2))
    list(build_eval_data(config, load_image_sets(config)[1], 0, 1, CPU))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), repr(np.random.get_state()))


def test_a_process_without_images_of_its_own_gets_one_that_does_not_count():
    data = [train_data(settings(BATCH_SIZE=719, DROP_LAST=False), rank, 2) for rank in (0, 1)]
    assert data[0].num_samples == 1438
    odd = [train_data(settings(BATCH_SIZE=479, DROP_LAST=False), rank, 3) for rank in range(3)]  # 1437 and 1
    last = [next(each.windows(1, 2)) for each in odd]
    batches = [next(window.batches) for window in last]
    assert [window.num_samples for window in last] == [1, 1, 1]
    assert sorted(batch.num_samples for batch in batches) == [0, 0, 1]
    assert all(torch.equal(batch.images, batches[0].images) and len(batch.images) == 1 for batch in batches)


# --- evaluation ---


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_covers_every_image_once(world_size):
    config = settings(BATCH_SIZE=50, BATCH_SIZE_EVAL=32)
    _, val = load_image_sets(config)
    shares = [build_eval_data(config, val, rank, world_size, CPU) for rank in range(world_size)]
    batches = [batch for share in shares for batch in share]
    assert {share.num_samples for share in shares} == {359} and sum(batch.num_samples for batch in batches) == 359
    assert max(len(batch.images) for batch in batches) == 32
    shown = [(image, target) for batch in batches for image, target in zip(batch.images.tolist(), batch.targets.tolist(), strict=True)]
    whole = [(image[None].tolist(), target) for image, target in zip(val.images, val.targets.tolist(), strict=True)]
    assert sorted(shown) == sorted(whole)


# --- workers and unreadable images ---


def make_folder(root: Path) -> Path:
    """Two classes of nine images, of which one in each is cut off, and one class with nothing readable."""
    for part, count in (("train", 9), ("val", 3)):
        for label, name in enumerate(["ant", "bee"]):
            for number in range(count):
                file = root / part / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng([label, number]).integers(256, size=(12, 14, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(file)
                if number == 2:
                    file.write_bytes(file.read_bytes()[:-200])
    for number in range(3):
        file = root / "train" / "wasp" / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"nothing")
    return root


@pytest.fixture
def folder(tmp_path) -> Path:
    return make_folder(tmp_path)


def folder_settings(folder: Path, num_workers: int = 0, **data) -> Config:
    return settings("imagefolder", folder, BATCH_SIZE=5, NUM_WORKERS=num_workers, IMAGE_CHANNELS=3, DROP_LAST=False, **data)


def test_images_and_replacements_are_the_same_for_any_number_of_workers(folder):
    none, one, two = (taken(train_data(folder_settings(folder, num)).windows(3, 13)) for num in (0, 1, 2))
    assert none == one == two  # five steps an epoch: from the middle of one into the next but one
    # Each epoch meets all five unreadable images.
    per_epoch = [{index for batch in none if batch[0] // 5 == epoch for index in batch[5]} for epoch in range(3)]
    assert per_epoch[1] == {2, 11, 18, 19, 20}


def test_an_unreadable_image_is_replaced_by_one_of_its_class_and_then_by_any(folder):
    config = folder_settings(folder, CROP_SCALE=(1.0, 1.0), HFLIP=0.0)
    data = train_data(config)
    originals = {}
    for index in range(len(data.image_set)):
        if index not in (2, 11, 18, 19, 20):
            originals[data._load.keywords["reader"].transform(data.image_set.read(index), random.Random(0)).numpy().tobytes()] = index
    order, seen = data.order, {}
    for step in range(5):
        for piece, batch in zip(order.pieces(step, 0), next(data.windows(step, step + 1)).batches, strict=True):
            for index, image, target in zip(piece.indices.tolist(), batch.images, batch.targets.tolist(), strict=True):
                seen[index] = (originals.get(image.contiguous().numpy().tobytes()), target)
    assert len(seen) == 21


def test_evaluation_leaves_out_what_it_cannot_read_and_reports_it(folder):
    config = folder_settings(folder, BATCH_SIZE_EVAL=1)
    _, val = load_image_sets(config)
    batches = list(build_eval_data(config, val, 0, 1, CPU))
    assert [batch.num_samples for batch in batches] == [len(batch.images) for batch in batches] == [1, 1, 0, 1, 1, 0]
    assert [batch.bad for batch in batches] == [[], [], [2], [], [], [5]]
    assert [target for batch in batches for target in batch.targets.tolist()] == [0, 0, 1, 1]


def test_when_nothing_can_be_read_any_more_the_error_comes_through_the_worker_as_it_is(folder):
    data = train_data(folder_settings(folder, 1))
    for file in (folder / "train").rglob("*.png"):
        file.unlink()
    with pytest.raises(DataError) as caught:
        taken(data.windows(0, 5))
    assert "cannot be read, nor can 16 others (FileNotFoundError" in str(caught.value)
    assert "Traceback" not in str(caught.value) and str(caught.value).endswith("look whether DATA.DATA_PATH is still there")


def test_signals_to_all_processes_leave_the_workers_at_work_and_closing_ends_them(folder):
    data = train_data(folder_settings(folder, 2))
    expected = taken(train_data(folder_settings(folder)).windows(0, 100))
    windows = data.windows(0, 100)
    got = taken([next(windows)])
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid, each)
    got += taken(next(windows) for _ in range(30))
    assert got == expected[: len(got)]
    start = time.monotonic()
    windows.close()
    assert multiprocessing.active_children() == [] and time.monotonic() - start < 4


def test_a_program_that_ends_in_the_middle_of_an_epoch_ends_its_workers(folder):
    program = f"""
import sys, multiprocessing
from tests.test_loader import *
windows = train_data(folder_settings(Path({str(folder)!r}), 2)).windows(0, 100)
keep = [windows, next(windows)]
sys.keep = keep
print(*[child.pid for child in multiprocessing.active_children()], flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    workers = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == 0 and len(workers) == 2, done.stderr
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_workers_are_the_cores_shared_out_unless_set():
    _, files = None, dataclasses.replace  # noqa: F841
GOLDEN = 0
