"""The session on a GPU, walked through on the CPU; and what becomes of it when a part or the session itself is cut."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from scripts.benchmarks.session.plan import PARTS
from tests.support.runs import Run, alive, run, wait_until

SESSION = "scripts/benchmarks/gpu_session.py"
PLANTED = "tests.support.programs.planted_session"


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "session.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def dry(tmp_path_factory) -> Path:
    """The folder of a session of all parts, and of a second call for one of them."""
    folder = tmp_path_factory.mktemp("session")
    for words in ((), ("-parts", "float8")):
        ended = run(SESSION, "-output", str(folder), "-dry", *words, faults={"start_python_as_forks": []})
        assert ended.returncode == 0, ended.printed + (folder / "session.log").read_text()[-3000:]
    return folder


# Rows that each part writes, by the first key of the row; what is at least there.
EXPECTED = {
    "machine": {"Python", "torch", "torchvision", "timm", "triton", "CUDA of torch", "cuDNN", "cores", "memory"},
    "probes.kernels": {
        "cuDNN attention, a single query, dropout 0.1",
        "class-token block against the whole, bfloat16",
    },
    "probes.compilation": {"5 updates never wait, compiled", "compiled against eager, residual half"},
    "probes.augmentation": {"augmentation on the device, augmix"},
    "probes.parallel": {"DDP by NCCL: static graph", "DDP by NCCL: compiled, no_sync", "DDP by NCCL: float16 reduce"},
    "probes.times": {
        "ms, patch embedding by convolution",
        "ms, patch embedding by product",
        "images/s, rand-m9-mstd0.5-inc1 on the device",
    },
    "small": {"S tf32, batch 256", "S bf16-residual compiled, batch 512"},
    "large": {"B timm, batch 256", "B timm compiled, batch 256", "L bf16, batch 128"},
    "loader": {"12 threads", "16 processes", "16 threads, decoded cache"},
    "whole_run": {"seconds from the command to the first step", "images/s in epoch 3"},
    "recovery": {"SIGTERM and resume", "batch size auto"},
    "float8": {"B float8 compiled, batch 256"},
}


def test_a_dry_session_writes_the_rows_of_every_part_in_both_forms(dry):
    found = results(dry)
    rows = [row for row in found if "note" not in row or len(row) > 3]
    names = {part: {list(row.values())[2] for row in rows if row["part"] == part} for part in EXPECTED}
    for part, expected in EXPECTED.items():
        assert expected <= names[part], part
    text = (dry / "session.md").read_text()
    for row in rows:
        assert f"| {list(row.values())[2]} |" in text
    for part in PARTS:
        assert f"{part.name}: done after" in text
    assert (dry / "trace.json.gz").stat().st_size and (dry / "gpu_tests.xml").stat().st_size


def test_what_needs_cuda_is_said_to_and_never_passed(dry):
    verdicts = {row["probe"]: row["verdict"] for row in results(dry) if "probe" in row}
    only_on_cuda = (
        "5 updates never wait",
        "DDP by NCCL",
        "ms, ",
        "images/s, ",
        "reduce-overhead, one",
        "batch size auto",
    )
    for name, verdict in verdicts.items():
        allowed = ("needs CUDA",) if name.startswith(only_on_cuda) else ("passed", "unavailable")
        assert verdict in allowed, name
    assert {row["verdict"] for row in results(dry) if row["part"] == "tests" and "test" in row} == {"needs CUDA"}


def test_speeds_are_measured_where_they_can_be(dry):
    rows = {row["case"]: row for row in results(dry) if "case" in row}
    for name in ("S bf16, batch 256", "B bf16, batch 256", "B timm, batch 256"):
        assert float(rows[name]["images/s"].split()[0]) > 0 and 0 < rows[name]["% of measured product"] < 100
        assert rows[name]["% of nominal"] is None  # of a processor nobody knows it
    assert {row["note"] for row in rows.values() if row["images/s"] is None} <= {
        "needs CUDA",
        "not in a dry run",
        "needs torchao",
    }


def test_a_second_call_appends(dry):
    count = Counter(row["part"] for row in results(dry) if "case" in row)
    assert count["float8"] == 4 and count["small"] == 11
    assert (dry / "session.md").read_text().count("\n# Session of ") == 2


def test_a_part_over_its_limit_is_killed_with_all_it_started_and_the_next_begins(tmp_path):
    ended = run(PLANTED, str(tmp_path), "4")
    assert ended.returncode == 1
    assert [row["part"] for row in results(tmp_path) if "note" not in row] == ["first", "slow", "last"]
    assert not alive(int((tmp_path / "hidden").read_text()))
    notes = {row["note"].split(":")[0]: row["note"] for row in results(tmp_path) if "note" in row}
    assert "limit of 4 s" in notes["slow"] and "exit code 3" in notes["last"] and "first" not in notes


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_session_that_is_cut_keeps_what_was_done(tmp_path, how):
    session = Run(PLANTED, str(tmp_path), "600")
    wait_until((tmp_path / "hidden").exists)
    hidden = int((tmp_path / "hidden").read_text())
    wait_until(lambda: [row["part"] for row in results(tmp_path)] == ["first", "slow"])
    os.kill(session.processes[0].pid, how)
    assert session.wait().returncode == (143 if how == signal.SIGTERM else -9)
    assert [row["part"] for row in results(tmp_path)] == ["first", "slow"]
    if how == signal.SIGTERM:
        assert not alive(hidden)
    else:  # nobody can clean up then; a real part ends with its session, a line of shell does not
        for pid in (hidden, int((tmp_path / "part").read_text())):
            os.killpg(pid, signal.SIGKILL)


def test_without_a_gpu_or_with_an_unknown_part_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for words, named in (((), "-dry"), (("-dry", "-parts", "machine,probe"), "probes")):
        ended = run(SESSION, "-output", str(tmp_path / "out"), *words)
        assert ended.returncode == 2 and named in ended.stderr and "Traceback" not in ended.stderr
        assert not (tmp_path / "out").exists()
