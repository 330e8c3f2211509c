"""Where trials run at the same time: the device or the share of the cores that each of them gets."""

import contextlib
import os
import subprocess
from collections.abc import Mapping

from configs.schema import Config
from utils.errors import ConfigError
from utils.text import counted


def choose_slots(config: Config, jobs: int, environment: Mapping[str, str]) -> tuple[list[dict[str, str]], str]:
    """For each of the trials at a time its variables, and a line that says how they share the machine."""
    if jobs == 1:
        return [{}], ""
    per_job = config.START.NGPUS or 1
    devices = visible_devices(environment) if config.DEVICE in ("auto", "cuda") else []
    if not devices:
        threads = max(1, _num_cores() // (jobs * per_job))
        if "OMP_NUM_THREADS" in environment:
            return [{} for _ in range(jobs)], ""
        return [
            {"OMP_NUM_THREADS": str(threads)} for _ in range(jobs)
        ], f"{jobs} trials at a time, {counted(threads, 'thread')} a process"
    if per_job > 1 and jobs * per_job > len(devices):
        raise ConfigError(
            f"-jobs: {jobs} trials of {per_job} devices each (-ngpus) need {jobs * per_job}, and there are {len(devices)}; "
            f"set -jobs {max(1, len(devices) // per_job)}"
        )
    places = [[devices[(job * per_job + each) % len(devices)] for each in range(per_job)] for job in range(jobs)]
    shared = ", several share one" if jobs * per_job > len(devices) else ""
    line = f"{jobs} trials at a time on {len(devices)} devices{shared}"
    return [{"CUDA_VISIBLE_DEVICES": ",".join(place)} for place in places], line


def visible_devices(environment: Mapping[str, str]) -> list[str]:
    """CUDA devices by the names that CUDA_VISIBLE_DEVICES takes, without importing torch."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        return [
            name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",") if name.strip() not in ("", "-1")
        ]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return found.stdout.split()
    return []


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
