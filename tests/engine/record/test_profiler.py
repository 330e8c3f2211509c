"""PROFILE: the trace for a profiler's viewer."""

import gzip
import json
from unittest import mock

import pytest

from engine.record.timing import Timing
from tests.support.configs import CPU, SMALL, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import ending, run, run_folder
from tests.support.trainers import make_trainer, update


@pytest.fixture
def start(tmp_path):
    """A run on the digits; returns its folder and what it printed."""

    def start(name: str, *options: str) -> tuple:
        (tmp_path / "small.yaml").write_text(SMALL)
        flags = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / name)]
        ended = run("main_single_gpu.py", *flags, "-opts", *options)
        assert ended.returncode == 0, ended.stderr
        return run_folder(tmp_path / name), ended.stdout

    return start


def trace(folder) -> list[dict]:
    with gzip.open(folder / "trace.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_profile_writes_a_trace_with_the_phases_and_the_run_goes_on(start):
    folder, said = start("o", "PROFILE=3", "TRAIN.ACCUM_ITER=2", "TRAIN.NUM_EPOCHS=1")
    assert_names(said, folder / "trace.json.gz")
    assert said.index("profile:") < said.index("Step[0020/") and ending(said).startswith("done;")
    events = trace(folder)
    names = [event["name"] for event in events]
    # After its two micro-batches each update asks for one more.
    expected = {"data": 9, "copy": 6, "forward": 6, "backward": 6, "optimizer": 3, "other": 0, "communication": 0}
    assert {name: names.count(name) for name in expected} == expected
    forward = events[names.index("forward")]
    inside = {e["name"] for e in events if forward["ts"] < e["ts"] < forward["ts"] + forward["dur"]}
    assert "aten::linear" in inside and "aten::_foreach_add_" not in inside


def test_a_profiled_run_ends_as_one_without(start):
    options = ("TRAIN.NUM_EPOCHS=1", "DATA.BATCH_SIZE=128")
    (profiled, _), (plain, _) = start("profiled", "PROFILE=2", *options), start("plain", *options)
    assert run_hash(profiled) == run_hash(plain)


def test_a_run_too_short_for_a_trace_says_so(start):
    folder, said = start("o", "PROFILE=3", "DATA.BATCH_SIZE=700", "TRAIN.NUM_EPOCHS=2")
    assert_names(said, "PROFILE", "update 7")
    assert not (folder / "trace.json.gz").exists()


def test_a_run_that_ends_within_a_trace_keeps_what_there_is(start):
    folder, _ = start("o", "PROFILE=100", "DATA.BATCH_SIZE=160", "TRAIN.NUM_EPOCHS=1")
    assert [event["name"] for event in trace(folder)].count("optimizer") == 8 - 6


def test_without_profile_no_range_is_opened(tmp_path):
    trainer = make_trainer(small_config(tmp_path), callbacks=[Timing.on(CPU)])
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError("a range was opened")):
        update(trainer)
