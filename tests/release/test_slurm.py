"""deploy/slurm.sh on a real Slurm cluster of two nodes with two processes each."""

import contextlib
import sys
from pathlib import Path

import pytest

from tests.support.run_hash import run_hash
from tests.support.runs import ROOT, run, status_of, wait_until
from tests.support.slurm import IS_MISSING, MISSING, Slurm

pytestmark = pytest.mark.skipif(IS_MISSING, reason=f"a real Slurm needs {MISSING}")
PROGRAM = """import sys
from tests.support.forks import run_program
run_program({program!r}, sys.argv[1:], {faults})
"""
FLAGS = ["-dataset", "digits", "-batch_size", "8", "-epochs", "1", "-name", "mine"]
OPTIONS = ["-opts", "SAVE_STEPS=5"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with contextlib.closing(Slurm(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster


def submit(slurm: Slurm, folder: Path, small_yaml: Path, launcher: str, faults: dict, *words: str) -> str:
    """Submit a job that starts the program with these faults from this folder, and return its number."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    program = PROGRAM.format(program=str(ROOT / "main_multi_gpu.py"), faults=faults)
    (folder / "main_multi_gpu.py").write_text(program)
    resources = ["--gpus-per-node=2", "--cpus-per-task=4", "--time=10", "--output=out.txt", *words]
    flags = [*FLAGS, "--output=runs", *OPTIONS]
    environment = {
        "CFG": str(small_yaml),
        "LAUNCHER": launcher,
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    }
    script = str(ROOT / "deploy/slurm.sh")
    return slurm.run("sbatch", "--parsable", *resources, script, *flags, cwd=folder, **environment).strip()


def test_run_matches_unbroken_run_after_slurm_time_limits_and_lost_node(slurm, small_yaml, tmp_path):
    """The job hits its time limit three times and then loses a node, with each launcher."""
    jobs = {}
    for launcher in ("torchrun", "srun"):
        (tmp_path / launcher).mkdir()
        faults = {"hold": [str(tmp_path / launcher), [7, 17, 27, 37]]}
        jobs[launcher] = submit(slurm, tmp_path / launcher, small_yaml, launcher, faults)

    def wait_for(start: int) -> None:
        started = {f"{launcher}/waits.{start}.{rank}" for launcher in jobs for rank in range(4)}
        wait_until(lambda: all((tmp_path / name).exists() for name in started))
        assert [slurm.job(job)["Restarts"] for job in jobs.values()] == [str(start)] * 2

    for start in range(3):
        wait_for(start)
        for job in jobs.values():
            minutes = int(slurm.job(job)["RunTime"].split(":")[1])
            slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
        for job in jobs.values():
            slurm.wait(job, "Restarts", str(start + 1))
            slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    wait_for(3)
    slurm.lose_node()
    for launcher, job in jobs.items():
        (tmp_path / launcher / "go").touch()
        slurm.wait(job, "JobState", "PENDING")
    slurm.bring_node_back()
    flags = ["-cfg", str(small_yaml), *FLAGS, "-output", str(tmp_path / "unbroken"), "-amp", *OPTIONS]
    run("main_multi_gpu.py", *flags, processes=4, faults={"read_all_digits": []}).done()
    for launcher, job in jobs.items():
        ended = slurm.wait(job, "JobState", "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")
        said = (tmp_path / launcher / "out.txt").read_text()
        # A fifth restart happens if Slurm kills the new step instead of the old one when the node returns.
        assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) in (4, 5), said
        assert said.count("stopped by signal") == 3, said
        assert run_hash(tmp_path / launcher / "runs/mine") == run_hash(tmp_path / "unbroken/mine"), said


def test_stuck_or_cancelled_slurm_job_is_not_requeued(slurm, small_yaml, tmp_path):
    """Each job needs all nodes, so they wait for each other. A killed start is restarted once."""
    (tmp_path / "stuck").mkdir(), (tmp_path / "cancelled").mkdir()
    dies, holds = {"signal_at": [3, 9, [1]]}, {"hold": [str(tmp_path / "cancelled"), [7]]}
    stuck = submit(slurm, tmp_path / "stuck", small_yaml, "srun", dies, "--exclusive")
    cancelled = submit(slurm, tmp_path / "cancelled", small_yaml, "torchrun", holds, "--exclusive")
    slurm.wait(cancelled, "Reason", "Resources")
    wait_until(lambda: list((tmp_path / "cancelled").glob("waits.*")))
    slurm.run("scancel", cancelled)
    slurm.wait(cancelled, "JobState", "CANCELLED")
    status = status_of(tmp_path / "cancelled/runs/mine")
    assert status["saved"]["step"] >= 5
    slurm.wait(stuck, "JobState", "FAILED")
    assert [slurm.job(job)["Restarts"] for job in (stuck, cancelled)] == ["1", "0"]
    assert f"job {stuck} is not queued again" in (tmp_path / "stuck/out.txt").read_text()
