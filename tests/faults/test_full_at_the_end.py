"""The last writes of a run. If the disk is full at any of them, the run's messages match the files on the disk."""

import json
import re
import signal
from pathlib import Path

import pytest

from engine.checkpoint.find import read_checkpoint
from tests.support.refusals import assert_names
from tests.support.runs import Ended, last_sentence, run, run_folder, status_of

pytestmark = pytest.mark.slow

OPTIONS = ("-opts", "VALIDATE_FREQ=1")
# Top-1 and loss of raw and EMA weights after the first epoch, and after the second.
RISING = [[25.0, 1.0]] * 2 + [[50.0, 1.0]] * 2
FULL_AT_THE_SECOND_SAVE = ["open .last.pth.tmp", 2, False]


def last_writes(start, folder: Path, **faults) -> list[tuple[str, int]]:
    """Return the file operations of a run since the start of its last save, each with its count until then."""
    folder.mkdir()
    start(folder / "o", *OPTIONS, score=RISING, list_all_operations=[str(folder / "all")], **faults)
    done = [json.loads(line) for line in (folder / "all").read_text().splitlines()]
    first = max(number for number, (_, what) in enumerate(done) if what == "open .last.pth.tmp")
    return list({what: (what, nth) for nth, what in done[first:]}.values())


def assert_truth(output: Path, ended: Ended) -> dict:
    """Assert that last line, status.json, exit code and checkpoints agree. Return the status."""
    folder, told = run_folder(output), ended.printed
    assert "Traceback" not in told and not list(folder.glob(".*.tmp")), told
    last, best = read_checkpoint(folder / "last.pth"), read_checkpoint(folder / "best.pth")
    sentence = last_sentence(ended.stdout)
    assert (sentence.value, sentence.epoch) == (best["metric"], best["epoch"] + 1), told
    status = status_of(folder)
    if status["state"] == "training":  # it could not be written, and a warning says so
        assert re.search(r"^warning: .*status.json .*(done|stopped|save_failed)$", told, re.M), told
        return status
    assert (status["epoch"], status["step"]) == (last["epoch"] + 1, last["step"]), told
    assert (status["best_top1"], status["best_epoch"]) == (best["metric"], best["epoch"] + 1), told
    assert status["exit_code"] == ended.returncode, told
    failed = "disk full" in sentence.failure
    assert (status["state"] == "save_failed", "disk full" in status.get("reason", "")) == (failed, failed), told
    return status


@pytest.mark.long
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from there on"])
def test_final_message_matches_saved_files_wherever_disk_fills_up(tmp_path, start, lasts):
    writes, states = last_writes(start, tmp_path / "unbroken"), set()
    assert len(writes) >= 10
    for number, (what, nth) in enumerate(writes[::3] if lasts else writes):
        ended = start(tmp_path / str(number), *OPTIONS, score=RISING, find_no_room=[what, nth, lasts])
        status = assert_truth(tmp_path / str(number), ended)
        assert ended.returncode == int(bool(last_sentence(ended.stdout).failure))
        states.add(status["state"])
    assert states == {"training", "done", *([] if lasts else ["save_failed"])}


def test_run_that_never_saved_suggests_no_resume(tmp_path, start):
    ended = start(tmp_path, *OPTIONS, score=RISING, find_no_room=["open .last.pth.tmp", 1, True])
    sentence = last_sentence(ended.stdout)
    assert ended.returncode == 1 and sentence.failure and "-resume" not in " ".join(map(str, sentence)), sentence


def test_run_that_a_signal_stops_on_a_full_disk_does_not_say_that_it_is_saved(tmp_path, start):
    full = {"signal_at": [6, signal.SIGTERM, [0]], "find_no_room": ["open .last.pth.tmp", 2, True]}
    sentence = last_sentence(start(tmp_path, *OPTIONS, score=RISING, **full).stdout)
    assert "disk full" in sentence.failure and "stopped" in sentence.end and "saved" not in sentence.end, sentence


def test_best_epoch_is_updated_after_a_failed_save(tmp_path, start):
    scores = [*RISING, [40.0, 1.0], [40.0, 1.0]]
    ended = start(tmp_path, *OPTIONS, "-epochs", "3", score=scores, find_no_room=FULL_AT_THE_SECOND_SAVE).done()
    assert_names(ended.stdout, "warning", "last.pth", "disk full")
    status = assert_truth(tmp_path, ended)
    assert (status["state"], status["best_top1"], status["best_epoch"]) == ("done", 40.0, 3)


@pytest.mark.long
def test_failed_save_on_one_rank_is_reported_on_all(tmp_path, start):
    sharded = ("-batch_size", "4", *OPTIONS, "DIST.STRATEGY=fsdp2")
    full = ["open .2-of-2.pth.tmp", 2, False]
    ended = start(tmp_path, *sharded, processes=2, score=RISING, find_no_room=full)
    assert ended.codes == [1, 1], ended.printed
    status = assert_truth(tmp_path, ended)
    assert (status["state"], status["best_epoch"]) == ("save_failed", 1)
    for rank in (0, 1):
        assert "disk full" in last_sentence((run_folder(tmp_path) / f"log_{rank}.txt").read_text()).failure


def test_resume_reports_missing_best_pth_and_replaces_it(tmp_path, start):
    assert start(tmp_path, *OPTIONS, score=RISING, signal_at=[6, signal.SIGTERM, [0]]).returncode == 143
    (run_folder(tmp_path) / "best.pth").unlink()
    ended = start(tmp_path, *OPTIONS, score=RISING[:2])
    assert_names(ended.stdout, "the best epoch was 1", run_folder(tmp_path) / "best.pth")
    assert assert_truth(tmp_path, ended)["best_epoch"] == 2


def test_metrics_row_whose_write_failed_is_written_at_end(tmp_path, start):
    full = ["replace .metrics.csv.tmp metrics.csv", 2, False]
    ended = start(tmp_path, *OPTIONS, score=RISING, find_no_room=full).done()
    assert "warning: " in ended.stdout
    for name, num_lines in (("metrics.csv", 3), ("metrics.jsonl", 2)):
        assert len((run_folder(tmp_path) / name).read_text().splitlines()) == num_lines


REPORTS = ("-opts", "REPORT=true", "PRECISION.MAX_CONSECUTIVE_SKIPS=2")


def test_unwritable_reports_only_warn_and_run_ends_normally(tmp_path, tiny):
    full = [f"open .{name}.tmp" for name in ("report.html", "predictions.csv", "train_batch.png")]
    words = ["-cfg", str(tiny), "-output", str(tmp_path), *REPORTS]
    ended = run("main_single_gpu.py", *words, faults={"find_no_room": [full, 1, False]})
    folder = run_folder(tmp_path)
    assert ended.returncode == 0 and status_of(folder)["state"] == "done"
    assert ended.printed.count("disk full") == 3 and (folder / "best.pth").exists()
    assert_names(
        ended.printed, f"warning: cannot write {folder / 'report.html'} (disk full", folder / "train_batch.png"
    )
    assert not list(folder.glob(".*.tmp"))
    assert not {"report.html", "train_batch.png", "results.json"} & {path.name for path in folder.iterdir()}


def test_run_stopped_by_nonfinite_gradients_writes_a_report(tmp_path, start):
    ended = start(tmp_path / "stopped", "-epochs", "3", *REPORTS, poison=["input", [0], list(range(5, 12))])
    assert ended.returncode == 3, ended.printed
    assert "gradients were not finite" in (run_folder(tmp_path / "stopped") / "report.html").read_text()
    ended = start(tmp_path / "told", *REPORTS, signal_at=[5, signal.SIGTERM, [0]])
    assert ended.returncode == 128 + signal.SIGTERM
    assert not (run_folder(tmp_path / "told") / "report.html").exists()
