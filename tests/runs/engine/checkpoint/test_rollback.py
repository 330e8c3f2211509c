"""After many skipped updates in a row, a run goes back once and skips their batches."""

import json
import re
import signal

import pytest
import torch

from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.find import find_before
from engine.checkpoint.format import save_checkpoint
from engine.rollback import write_bad_batches
from tests.support.configs import CPU, ema, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import epochs_of, run_folder, status_of, typed
from tests.support.trainers import make_trainer, train, update

pytestmark = pytest.mark.slow

STREAKS = ["PRECISION.MAX_CONSECUTIVE_SKIPS=5", "REPORT_FREQ=1"]
RANDOM = ["MODEL.DROPOUT=0.1", *ema(0.9), "TRAIN.MIXUP_ALPHA=0.8"]


@pytest.fixture
def start(tmp_path, small_yaml):
    """Return a function that runs 22 updates per epoch, some poisoned. It returns exit code, folder and output."""

    def start(name, *options, poisoned=(), processes=1, **faults):
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / name), "-resume", "auto"]
        flags += ["-batch_size", str(16 // processes), "-opts", *STREAKS, *RANDOM, *options]
        faults = {"poison": ["input", [processes - 1], list(poisoned)]} | faults
        ended = typed(script, *flags, processes=processes, faults=faults)
        return ended.returncode, run_folder(tmp_path / name), ended.stdout

    return start


def bad_batches(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "bad_batches.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_resume_after_a_stop_keeps_rollback_across_epoch_end(start):
    # Raw and EMA scores: at the first end of epoch 1, at its second end, and at the end of epoch 2.
    thrown_away, first, second = ([[top1, 1.0]] * 2 for top1 in (50.0, 40.0, 30.0))
    scores = [*thrown_away, *first, *second]
    code, unbroken, said = start("unbroken", "SAVE_STEPS=9", poisoned=range(20, 25), score=scores)
    assert code == 0 and said.count("going back to") == 1
    assert_names(said, unbroken / "previous.pth", "step 18", "19 to 24")
    made = [22 * int(epoch) + int(step) - 22 for epoch, step in re.findall(r"Epoch\[(\d+)/002\], Step\[(\d+)/", said)]
    assert made == [*range(25), 18, *range(25, 44)]
    assert [row["step"] for row in bad_batches(unbroken)] == [19, 20, 21, 22, 23, 24]
    assert len(epochs_of(unbroken)) == 2, "the first epoch ended twice, but counts once"
    assert (status_of(unbroken)["best_top1"], torch.load(unbroken / "best.pth", weights_only=True)["metric"]) == (
        40.0,
        40.0,
    )
    second_time = [18, signal.SIGTERM, [0], 2]
    code, stopped, _ = start(
        "stopped", "SAVE_STEPS=9", poisoned=range(20, 25), signal_at=second_time, score=thrown_away
    )
    assert code == 128 + signal.SIGTERM
    assert status_of(stopped)["step"] == 19 and status_of(stopped)["left_out"] == [[19, 24]]
    code, stopped, said = start("stopped", "SAVE_STEPS=9", poisoned=range(20, 25), score=[*first, *second])
    assert code == 0 and "going back to" not in said
    assert run_hash(stopped) == run_hash(unbroken)


def test_second_streak_of_skipped_updates_ends_the_run_and_its_resume(start):
    full = ["open .bad_batches.jsonl.tmp", 1, False]
    code, folder, said = start("o", "SAVE_STEPS=2", poisoned=range(9, 44), find_no_room=full)
    assert code == 3 and said.count("going back to") == 1
    assert f"warning: cannot write {folder / 'bad_batches.jsonl'}" in said
    assert_names(status_of(folder)["reason"], "step 19")
    assert status_of(folder)["left_out"] == [[8, 13]]
    state = torch.load(folder / "last.pth", weights_only=True)
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())
    code, folder, said = start("o", "SAVE_STEPS=2", poisoned=range(9, 44))
    assert code == 3 and "going back to" not in said
    assert_names(status_of(folder)["reason"], "step 19")


def test_run_with_nonfinite_gradients_stops_if_no_good_checkpoint_exists(start):
    full = ["open .overflow-batch.pth.tmp", 1, False]
    code, folder, said = start("o", "SAVE_STEPS=2", poisoned=range(8), find_no_room=full)
    assert code == 3 and "going back to" not in said and not (folder / "bad_batches.jsonl").exists()
    assert "warning: cannot save the last batch" in said and "halfstep doctor" not in status_of(folder)["reason"]


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("DIST.STRATEGY=fsdp2",)], ids=["ddp", "fsdp2"])
def test_nan_on_one_process_rolls_back_both_processes(start, options):
    options = ("TRAIN.NUM_EPOCHS=1", "SAVE_STEPS=4", *options)
    code, folder, _ = start("o", *options, processes=2, poisoned=range(9, 14))
    assert code == 0
    assert all("going back to" in (folder / f"log_{rank}.txt").read_text() for rank in (0, 1))
    rows = bad_batches(folder)
    assert [(row["step"], row["rank"]) for row in rows] == [(step, rank) for step in range(8, 14) for rank in (0, 1)]
    assert all(len(row["names"]) == 8 for row in rows) and not set(rows[0]["names"]) & set(rows[1]["names"])
    last = torch.load(folder / "last.pth", weights_only=True)
    assert last["step"] == 22 and last["progress"]["left_out"] == [[8, 14]]


def test_excluded_updates_are_counted_but_never_applied(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "SAVE_STEPS=1", "TRAIN.NUM_EPOCHS=1"))
    trainer.left_out = [range(7, 11)]
    windows = trainer.data.windows(0, 11, trainer.left_out)
    weights, saves, image_set, was_read = [], [], trainer.data.image_set, set()
    read = image_set.storage.read
    image_set.storage.read = lambda row, pixels: was_read.add(row) or read(row, pixels)

    def keep():
        saves.append(trainer.step)
        weights.append(trainer.model.head.weight.clone())
        if trainer.step == 7:
            trainer.counters.skips_in_a_row += 3

    report = train(trainer, windows, save=keep)
    assert saves == list(range(1, 11)) and trainer.step == 11 and report.skipped == 4
    assert was_read == {image_set.row(index) for step in range(7) for index in trainer.data.order.window(step)}
    assert not torch.equal(weights[5], weights[6]) and torch.equal(weights[6], weights[-1])
    assert report.lr == trainer.schedule(10) and report.skips_in_a_row == 0


def test_rollback_excludes_skipped_updates_and_unsaved_update_before_them(tmp_path):
    trainer = update(make_trainer(small_config(tmp_path)), 3)
    trainer.roll_back(trainer.state_dict(), range(7, 9))
    assert trainer.step == 3 and trainer.left_out == [range(6, 9)]
    trainer.roll_back(trainer.state_dict(), range(3, 5))
    assert trainer.left_out == [range(6, 9), range(3, 5)]
    other = make_trainer(small_config(tmp_path))
    other.load_state_dict(trainer.state_dict())
    assert other.left_out == trainer.left_out


def saved(step: int, skips: int) -> dict:
    return {"epoch": 0, "step": step, "progress": {"skips_in_a_row": torch.tensor(float(skips))}}


def test_saves_during_skipped_updates_keep_the_previous_checkpoint(tmp_path):
    saver = AsyncSaver(tmp_path, keep=1, device=CPU, warn=pytest.fail)
    found = []
    steps_and_skips = [(10, 0), (15, 5), (30, 20), (40, 0), (50, 2), (60, 0), (70, 11)]
    for state in (saved(step, skips) for step, skips in steps_and_skips):
        saver.save(state, [])
        saver.wait()
        path = find_before(tmp_path, int(state["step"] - state["progress"]["skips_in_a_row"]), pytest.fail)
        found.append((path.stem, torch.load(path, weights_only=True)["step"]))
    expected = [("last", 10), ("previous", 10), ("previous", 10), ("last", 40), ("previous", 40)]
    assert found == [*expected, ("last", 60), ("previous", 50)], "step 60, inside the streak, is excluded"


def test_search_for_earlier_checkpoint_skips_damaged_files(tmp_path):
    assert find_before(tmp_path, 100, pytest.fail) is None
    save_checkpoint(tmp_path / "last.pth", saved(10, 0))
    save_checkpoint(tmp_path / "last.pth", saved(20, 0))
    (tmp_path / "last.pth").write_bytes(b"PK\x03\x04 nothing whole")
    said = []
    assert find_before(tmp_path, 30, said.append).name == "previous.pth"
    assert_names(said[0], tmp_path / "last.pth")
    assert find_before(tmp_path, 9, said.append) is None


def test_bad_batches_file_lists_images_once_after_rewrite(tmp_path):
    data = make_trainer(small_config(tmp_path, "TRAIN.REPEATED_AUG=2")).data
    for _ in range(2):
        write_bad_batches(tmp_path, data, [range(1, 3), range(5, 6)])
    rows = bad_batches(tmp_path)
    assert [(row["step"], row["rank"]) for row in rows] == [(1, 0), (2, 0), (5, 0)]
    for row in rows:
        window = dict.fromkeys(data.order.window(row["step"]).tolist())
        assert len(window) == 16 and row["names"] == [data.image_set.name(index) for index in window]
