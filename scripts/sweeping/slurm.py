"""A sweep as a job array of Slurm: the script, and what each of its tasks runs."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from scripts.sweeping.plan import ROOT, Plan, read_plan
from scripts.sweeping.results import DONE, read_result
from utils.errors import ConfigError

SCRIPT = "slurm.sh"
# Of a task of srun: they would be taken for the ranks of a run that starts its processes itself (-ngpus).
OF_A_STEP = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
TEXT = """\
#!/usr/bin/env bash
# One task of this array runs one trial of the sweep. Options of sbatch, and variables such as SBATCH_PARTITION, override
# the lines below: sbatch --time=4:00:00 {script}
# Two minutes before the time is up Slurm sends SIGUSR1: the trial saves and ends, and its task is queued again.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{throttle}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cores}
#SBATCH --gpus-per-node={devices}
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={output}
set -uo pipefail
cd {cwd} || exit 1
folder={folder}
trial=$(printf 'trial-%03d' "$SLURM_ARRAY_TASK_ID")
srun --kill-on-bad-exit=1 {python} {sweep} -run_trial "$folder" "$SLURM_ARRAY_TASK_ID"
code=$?
# srun hides what became of the run; its status.json says it.
if grep -qE '"signal":|"reason": "time limit"' "$folder/$trial/status.json" 2>/dev/null; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
"""


def write_script(plan: Plan, jobs: int | None) -> Path:
    """Write slurm.sh into the folder of the sweep. `jobs`: how many tasks may run at a time."""
    if plan.optuna:
        raise ConfigError("-slurm: the trials of -optuna follow from those before; run the sweep itself in one job")
    text = TEXT.format(
        script=SCRIPT,
        name=shlex.quote(plan.path.name),
        last=plan.num_trials - 1,
        throttle=f"%{jobs}" if jobs else "",
        cores=8 * plan.num_devices,
        devices=plan.num_devices,
        output=shlex.quote(str(plan.path / "slurm-%A_%a.txt")),
        cwd=shlex.quote(plan.cwd),
        folder=shlex.quote(str(plan.path)),
        python=shlex.quote(sys.executable),
        sweep=shlex.quote(str(ROOT / "scripts" / "sweep.py")),
    )
    return plan.write(SCRIPT, text)


def submit(script: Path) -> int:
    """Send the script to Slurm. Returns the exit code."""
    if shutil.which("sbatch") is None:
        raise ConfigError(f"-submit: there is no sbatch here; on a machine of the cluster run sbatch {script}")
    return subprocess.run(["sbatch", str(script)]).returncode


def run_trial(folder: Path, index: int) -> int:
    """Become the run of a trial, so that signals reach it; 0 if it is done already."""
    plan = read_plan(folder)
    if plan is None:
        raise ConfigError(f"-run_trial: {folder} holds no sweep; name the folder of its sweep.json")
    if index >= len(plan.trials):
        raise ConfigError(f"-run_trial: {folder} has trials 0 to {len(plan.trials) - 1}, not {index}")
    trial = plan.trials[index]
    if read_result(plan.folder_of(trial)).state == DONE:
        print(f"{trial.title} of {folder} is done already")
        return 0
    sys.stdout.flush()
    os.chdir(plan.cwd)
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_STEP}
    program = str(ROOT / plan.program)
    os.execve(sys.executable, [sys.executable, program, *plan.arguments(trial)], environment)
