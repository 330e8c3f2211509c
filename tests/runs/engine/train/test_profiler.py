"""-profile writes a trace for a profiler's viewer."""

import gzip
import json

import pytest

from engine.train.clock import Clock
from engine.train.profiler import Profiler
from tests.support.configs import CPU, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import last_sentence, run_folder, typed
from tests.support.trainers import make_trainer, update

pytestmark = pytest.mark.slow


@pytest.fixture
def start(tmp_path, small_yaml):
    """Return a function that runs the digits and returns the run's folder and output."""

    def start(name: str, *options: str) -> tuple:
        flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / name), "-opts", *options]
        ended = typed("main_single_gpu.py", *flags).done()
        return run_folder(tmp_path / name), ended.stdout

    return start


def trace(folder) -> list[dict]:
    with gzip.open(folder / "trace.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


@pytest.mark.long
def test_profile_writes_trace_without_changing_the_run(start):
    folder, said = start("o", "PROFILE=3", "TRAIN.ACCUM_ITER=2", "TRAIN.NUM_EPOCHS=1", "DATA.BATCH_SIZE=8")
    assert_names(said, folder / "trace.json.gz")
    assert said.index("profile:") < said.index("Step[0020/") and last_sentence(said).end == "done"
    events = trace(folder)
    names = [event["name"] for event in events]
    # After its two micro-batches, each update requests a third.
    expected = {"data": 9, "copy": 6, "forward": 6, "backward": 6, "optimizer": 3, "other": 0, "communication": 0}
    assert {name: names.count(name) for name in expected} == expected
    forward = events[names.index("forward")]
    plain, _ = start("plain", "TRAIN.ACCUM_ITER=2", "TRAIN.NUM_EPOCHS=1", "DATA.BATCH_SIZE=8")
    assert run_hash(folder) == run_hash(plain)
    inside = {e["name"] for e in events if forward["ts"] < e["ts"] < forward["ts"] + forward["dur"]}
    assert "aten::linear" in inside and "aten::_foreach_add_" not in inside


@pytest.mark.parametrize(("batch_size", "num_traced"), [(90, None), (40, 9 - 6)])
def test_run_that_ends_early_saves_partial_trace_or_reports_missing_trace(tmp_path, batch_size, num_traced):
    said, path = [], tmp_path / "trace.json.gz"
    profiler = Profiler(100, path, said.append)
    if num_traced:
        path.write_text("of an earlier start")
    trainer = make_trainer(small_config(tmp_path, f"DATA.BATCH_SIZE={batch_size}"), callbacks=[profiler])
    trainer.clock = Clock.on(CPU, is_traced=True)
    update(trainer, 360 // batch_size)
    profiler.close()
    assert_names(*said, *([path] if num_traced else ["PROFILE", "update 7"]))
    assert path.exists() is bool(num_traced)
    if num_traced:
        assert [event["name"] for event in trace(tmp_path)].count("optimizer") == num_traced


def test_unwritable_profiler_trace_only_causes_a_warning(tmp_path):
    said, path = [], tmp_path / "gone/trace.json.gz"
    profiler = Profiler(1, path, said.append)
    update(make_trainer(small_config(tmp_path), callbacks=[profiler]), 9)
    profiler.close()
    assert_names(*said, "warning", path)
