"""report.html at the end of a run: for every end but that by a signal, and no burden on the run."""

import json
import signal

from tests.support.refusals import assert_names
from tests.support.runs import run_folder

OPTIONS = (
    "-opts",
    "REPORT=true",
    "PRECISION.DOCTOR_SKIPS=null",
    "PRECISION.MAX_CONSECUTIVE_SKIPS=2",
    "PRECISION.ROLLBACKS=0",
)


def test_a_full_disk_is_a_warning_and_the_run_ends_as_without_a_report(tmp_path, start):
    ended = start(tmp_path, *OPTIONS, find_no_room=["open .report.html.tmp", 1, False])
    folder = run_folder(tmp_path)
    assert ended.returncode == 0 and json.loads((folder / "status.json").read_text())["state"] == "done"
    assert_names(ended.printed, f"warning: cannot write {folder / 'report.html'} (disk full")
    assert not (folder / "report.html").exists() and not list(folder.glob(".*.tmp"))


def test_a_run_that_stops_for_non_finite_gradients_has_a_report_and_one_ended_by_a_signal_none(tmp_path, start):
    ended = start(tmp_path / "stopped", *OPTIONS, poison=["input", [0], list(range(5, 9))])
    assert ended.returncode == 3, ended.printed
    assert "gradients were not finite" in (run_folder(tmp_path / "stopped") / "report.html").read_text()
    ended = start(tmp_path / "told", *OPTIONS, signal_at=[5, signal.SIGTERM, [0]])
    assert ended.returncode == 128 + signal.SIGTERM
    assert not (run_folder(tmp_path / "told") / "report.html").exists()
