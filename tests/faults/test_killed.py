"""A run that is killed or stopped at any point resumes to the result of an uninterrupted run."""

import json
import re
import shutil
import signal

import pytest

from engine.checkpoint.find import read_checkpoint
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder, status_of

pytestmark = pytest.mark.slow

# All settings that use random numbers or keep state between updates. An epoch has four updates in both cases.
ALL = "TRAIN.SMOOTHING=0.1 TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.MIXUP_GROUP=4 TRAIN.RANDOM_ERASE_PROB=0.25"
ALL += " TRAIN.REPEATED_AUG=3 DATA.TRAIN_CROP=simple DATA.VFLIP=0.5 VALIDATE_FREQ=1 SAVE_STEPS=5"
CONFIGURATIONS = {  # {name: (number of processes, settings)}
    "plain": (1, ()),
    "one": (1, ("-opts", *ALL.split())),
    "two": (2, ("-batch_size", "4", "-opts", *ALL.split())),
    "shards": (2, ("-batch_size", "4", "-opts", "DIST.STRATEGY=fsdp2", *ALL.split())),
}
KILLED, TERM, INT, USR1, HUP = -signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
IN_THE_SECOND_EPOCH = {"signal_at": [7, signal.SIGKILL, [0, 1]]}
# The fault, the exit code and the number of saved updates: all updates that had started when the signal came.
STOPS = [
    *[(name, IN_THE_SECOND_EPOCH, KILLED, None) for name in ("two", "shards")],
    ("one", {"tell": [0, "start-up", TERM]}, 143, 0),
    ("one", {"tell": [0, "training", INT]}, 130, 3),
    ("one", {"tell": [0, "accumulation", USR1]}, 138, 3),
    ("one", {"tell": [0, "evaluation", TERM]}, 143, 4),
    ("one", {"tell": [0, "training", HUP]}, 129, 3),  # its terminal was closed
    ("plain", {"ignore": [HUP], "tell": [0, "training", HUP]}, 0, 8),  # like nohup
    ("two", {"tell": [1, "training", HUP]}, 129, 4),
    ("two", {"tell": [1, "training", USR1]}, 138, 4),  # processes agree while the devices compute, so one update later
    ("one", {"count_seconds": []}, 0, 5),
    ("plain", {"jump": [1]}, 0, 8),  # a clock that jumps by a day must not stop the run
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "fault", "code", "step"), STOPS)
def test_stopped_run_resumes_to_the_hash_of_an_unbroken_run(tmp_path, start, unbroken, name, fault, code, step):
    processes, flags = CONFIGURATIONS[name]
    limit = ["RUN.MAX_TIME=8s"] if "count_seconds" in fault else []
    stopped = start(tmp_path, *flags, *limit, processes=processes, **fault)
    assert set(stopped.codes) == {code}, stopped.printed
    folder = run_folder(tmp_path)
    saved, status = read_checkpoint(folder / "last.pth")["step"], status_of(folder)
    if step is None:  # killed during the save of step 5 or after it
        assert status["state"] == "training" and status["step"] <= saved and saved in (4, 5)
    else:
        assert (status["state"], status["step"], saved) == ("done" if step == 8 else "stopped", step, step)
    assert status.get("signal") == (code - 128 if code > 128 else None)
    assert status.get("reason") == ("time limit" if limit else None)
    assert all(0 <= float(each) < 3600 for each in re.findall(r"time: (-?[\d.]+)$", stopped.printed, re.M))
    start(tmp_path, *flags, processes=processes).done()
    assert run_hash(folder) == unbroken(*flags, processes=processes)


def test_resume_after_kill_during_save_matches_unbroken_run(tmp_path, start, unbroken):
    flags = ("-opts", "VALIDATE_FREQ=1", "TRAIN.BASE_LR=3e-2")  # makes each epoch the best so far
    assert start(tmp_path / "listed", *flags, list_operations=[str(tmp_path / "listing")]).returncode == 0
    places = [json.loads(line) for line in (tmp_path / "listing").read_text().splitlines()]
    operations = [what for save, _, what in places if save == 2]
    for kind in "open .last|write .last|fsync|best.pth|checkpoint-2|previous|.tmp last.pth|status".split("|"):
        assert any(kind in what for what in operations)
    assert operations[-1] == "unlink checkpoint-1.pth"
    assert start(tmp_path / "before", *flags, kill_at=[2, 0]).returncode == KILLED
    renamed = operations.index("replace .last.pth.tmp last.pth")
    # Every fourth operation, and those around the rename. test_cut_files.py ends each writer at all of its operations.
    chosen, found = sorted({*range(0, len(operations), 4), renamed, renamed + 1, len(operations) - 1}), []
    for number in chosen:
        output, what = tmp_path / str(number), operations[number]
        shutil.copytree(tmp_path / "before", output)
        assert start(output, *flags, kill_at=[1, number]).returncode == KILLED, what
        folder = run_folder(output)
        found.append(read_checkpoint(folder / "last.pth")["step"])
        assert status_of(folder)["step"] <= found[-1], what
        start(output, *flags).done()
        assert run_hash(folder) == unbroken(*flags), what
        saved = {path.name for path in folder.glob("*.pth")}
        assert {"best.pth", "checkpoint-2.pth", "last.pth", "previous.pth"} <= saved, what
        assert read_checkpoint(folder / "best.pth")["step"] == 8, what
    assert found == [4 if number <= renamed else 8 for number in chosen]


def test_start_without_time_for_an_update_exits_with_4(tmp_path, start):
    ended = start(tmp_path, "-opts", "RUN.MAX_TIME=1s", count_seconds=[])
    status = status_of(run_folder(tmp_path))
    assert ended.returncode == status["exit_code"] == 4 and status["state"] == "stopped"
    assert "RUN.MAX_TIME" in status["reason"] and "next:" not in ended.printed


@pytest.mark.parametrize("number", [TERM, INT, USR1, HUP])
def test_signal_before_the_run_starts_leaves_no_folder(tmp_path, start, number):
    code = start(tmp_path / "o", tell=[0, "before the settings are read", number]).returncode
    assert code in (-number, 128 + number)  # a shell uses the same exit code for both
    assert not (tmp_path / "o").exists()


def test_second_signal_ends_run_at_once_without_saving(tmp_path, start):
    ended = start(tmp_path, take_at_once=[], tell=[0, "accumulation", TERM, INT])
    assert ended.returncode == 128 + INT and "stopped by signal" not in ended.printed
    assert not (run_folder(tmp_path) / "last.pth").exists()
