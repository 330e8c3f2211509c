"""srun's part in a start, on this machine: `srun --ntasks N ... COMMAND` runs N processes with Slurm's variables.

It ends with the highest of their exit codes, as srun does.
"""

import os
import subprocess
import sys

OPTIONS_WITH_VALUE = ("--ntasks", "--ntasks-per-node", "--cpus-per-task")


def main(arguments: list[str]) -> int:
    num_tasks = os.environ.get("SLURM_NTASKS", "1")
    while arguments[0].startswith("--"):
        option = arguments.pop(0)
        value = arguments.pop(0) if option in OPTIONS_WITH_VALUE else ""
        num_tasks = value if option == "--ntasks" else num_tasks
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": num_tasks, "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen(arguments, env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(int(num_tasks))
    ]
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
