"""SIGTERM, SIGINT and SIGUSR1 at every moment of a run, a second one, and one that reaches one process of two."""

import itertools
import json
import signal

import pytest

from engine.checkpoint.format import read_checkpoint
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
OPTIONS = ["-opts", "VALIDATE_FREQ=1"]
# The updates that are saved: all that were begun when the signal came. An epoch has four.
SAVED = {"start-up": 0, "training": 3, "accumulation": 3, "evaluation": 4}


def status(folder) -> dict:
    return json.loads((folder / "status.json").read_text())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, start) -> str:
    output = tmp_path_factory.mktemp("unbroken") / "o"
    assert start(output, *OPTIONS).returncode == 0
    return run_hash(run_folder(output))


@pytest.mark.parametrize(("moment", "number"), list(zip(SAVED, itertools.cycle(SIGNALS), strict=False)))
def test_told_to_stop_a_run_loses_no_update_says_why_and_goes_on_to_the_same_end(
    tmp_path, start, unbroken, number, moment
):
    """Every moment and every signal; one handler takes them all."""
    stopped = start(tmp_path / "o", *OPTIONS, tell=[0, moment, number])
    assert stopped.returncode == 128 + number, stopped.printed
    folder = run_folder(tmp_path / "o")
    assert read_checkpoint(folder / "last.pth")["step"] == SAVED[moment]
    told = status(folder)
    assert (told["state"], told["signal"], told["step"]) == ("stopped", number, SAVED[moment])
    assert start(tmp_path / "o", *OPTIONS).returncode == 0 and run_hash(folder) == unbroken


@pytest.mark.parametrize("number", SIGNALS)
def test_told_to_stop_before_it_is_a_run_it_ends_and_leaves_nothing(tmp_path, start, number):
    code = start(tmp_path / "o", tell=[0, "before the settings are read", number]).returncode
    assert code in (-number, 128 + number)  # a shell calls both by the same number
    assert not (tmp_path / "o").exists()


def test_a_second_signal_ends_it_at_once_without_a_save(tmp_path, start, second=signal.SIGINT):
    ended = start(tmp_path / "o", take_at_once=[], tell=[0, "accumulation", signal.SIGTERM, second])
    assert ended.returncode == 128 + second and "told to stop" not in ended.printed
    folder = run_folder(tmp_path / "o")
    assert status(folder)["state"] == "training" and not (folder / "last.pth").exists()


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_update(tmp_path, start, number=signal.SIGUSR1):
    """It is agreed on while the devices compute: one update later."""
    flags = ["-batch_size", "4", *OPTIONS]
    stopped = start(tmp_path / "o", *flags, processes=2, tell=[1, "training", number])
    assert stopped.codes == [128 + number] * 2, stopped.printed
    folder = run_folder(tmp_path / "o")
    told = status(folder)
    assert (told["state"], told["signal"]) == ("stopped", number)
    assert read_checkpoint(folder / "last.pth")["step"] == told["step"] == 4
