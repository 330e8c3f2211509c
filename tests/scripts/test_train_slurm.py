"""scripts/train_slurm.sh, on a PATH with stand-ins for Slurm's commands."""

import os
import subprocess

import pytest

from tests.support.runs import ROOT


@pytest.fixture
def cluster(tmp_path):
    """A PATH on which sbatch runs a script at once, and srun and scontrol write down how they were called."""
    tools = {
        "sbatch": "export SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=17 SLURM_NNODES=2 SLURM_GPUS_ON_NODE=8\n"
        'export SLURM_CPUS_PER_TASK=64 SLURM_JOB_NODELIST="gpu[1-2]"; exec bash "$@"',
        "srun": 'echo "srun $*" >> calls; mkdir -p output/job17\n'
        'echo "$STATUS" > output/job17/status.json; exit "$CODE"',
        "scontrol": 'echo "scontrol $*" >> calls; [ "$1" = requeue ] || printf "gpu1\\ngpu2\\n"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in tools.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def submit(*flags: str, **environment: str) -> tuple[int, list[str]]:
        (tmp_path / "calls").unlink(missing_ok=True)
        variables = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"} | environment
        script = ["sbatch", str(ROOT / "scripts/train_slurm.sh"), *flags]
        code = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True).returncode
        calls = tmp_path / "calls"
        return code, calls.read_text().splitlines() if calls.exists() else []

    return submit


def test_the_slurm_script_starts_both_ways_and_queues_again_what_was_told_to_stop(cluster):
    code, calls = cluster("-batch_size", "64", CODE="1", STATUS='{"signal": 10}')
    assert code == 1 and calls[0] == "scontrol show hostnames gpu[1-2]" and calls[2] == "scontrol requeue 17"
    assert "torchrun --nnodes 2 --nproc_per_node 8 " in calls[1] and " --rdzv_endpoint gpu1:29500 " in calls[1]
    assert "SIGUSR1 main_multi_gpu.py " in calls[1] and calls[1].endswith("-resume auto -amp -batch_size 64")
    code, calls = cluster(CODE="138", STATUS='{"signal": 10}', LAUNCHER="srun")
    assert code == 138 and calls[1:] == ["scontrol requeue 17"]
    assert "--ntasks 16 --ntasks-per-node 8 --cpus-per-task 8 python -u main_multi_gpu.py " in calls[0]
    _, limited = cluster(CODE="0", STATUS='{"state": "stopped", "reason": "time limit"}', LAUNCHER="srun")
    assert limited[1:] == ["scontrol requeue 17"]
    assert cluster(CODE="0", STATUS='{"state": "done"}', LAUNCHER="srun") == (0, calls[:1])
    assert cluster(CODE="0", STATUS="", LAUNCHER="mpi") == (2, [])


def test_the_slurm_script_asks_for_the_warning_and_to_be_queued_again():
    lines = (ROOT / "scripts/train_slurm.sh").read_text().splitlines()
    assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue"} <= set(lines)
