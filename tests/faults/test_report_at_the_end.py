"""What a run leaves for people to read: for every end but that by a signal, and no burden on the run."""

import signal

from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder, status_of

OPTIONS = ("-opts", "REPORT=true", "PRECISION.MAX_CONSECUTIVE_SKIPS=2")


def test_report_tables_and_pictures_that_find_no_room_are_each_a_warning_and_the_run_ends_as_without_them(
    tmp_path, tiny
):
    full = [f"open .{name}.tmp" for name in ("report.html", "predictions.csv", "train_batch.png")]
    words = ["-cfg", str(tiny), "-output", str(tmp_path), *OPTIONS]
    ended = run("main_single_gpu.py", *words, faults={"find_no_room": [full, 1, False], "draw_no_curves": []})
    folder = run_folder(tmp_path)
    assert ended.returncode == 0 and status_of(folder)["state"] == "done"
    assert ended.printed.count("disk full") == 3 and (folder / "best.pth").exists()
    assert_names(
        ended.printed, f"warning: cannot write {folder / 'report.html'} (disk full", folder / "train_batch.png"
    )
    assert not list(folder.glob(".*.tmp"))
    assert not {"report.html", "train_batch.png", "results.json"} & {path.name for path in folder.iterdir()}


def test_a_run_that_stops_for_non_finite_gradients_has_a_report_and_one_ended_by_a_signal_none(tmp_path, start):
    ended = start(tmp_path / "stopped", "-epochs", "3", *OPTIONS, poison=["input", [0], list(range(5, 12))])
    assert ended.returncode == 3, ended.printed
    assert "gradients were not finite" in (run_folder(tmp_path / "stopped") / "report.html").read_text()
    ended = start(tmp_path / "told", *OPTIONS, signal_at=[5, signal.SIGTERM, [0]])
    assert ended.returncode == 128 + signal.SIGTERM
    assert not (run_folder(tmp_path / "told") / "report.html").exists()
