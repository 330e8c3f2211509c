"""What this machine, or the container that the program runs in, lets it use: processor cores and memory."""

import ctypes
import os
import sys
from pathlib import Path

import torch

# A container's limit, its usage, and the part of that which can be reclaimed (file cache): cgroup versions 2 and 1.
CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def cores_per_process(world_size: int, device: torch.device) -> int:
    """The available cores, divided among the training processes of this machine."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # With a GPU each, at most as many processes as GPUs run on this machine; the others are elsewhere.
    num_local = min(world_size, torch.cuda.device_count()) if device.type == "cuda" else world_size
    return max(1, num_cores // num_local)


def free_host_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the machine, or the container if it has less, can still give; on macOS all its memory."""
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = [1024 * int(lines["MemAvailable"].split()[0])]
    for limit, used, reclaimable in CGROUP_FILES:
        text = (cgroup / limit).read_text().strip() if (cgroup / limit).exists() else "max"
        if text != "max":
            statistics = dict(
                line.split() for line in (cgroup / used).with_name("memory.stat").read_text().splitlines()
            )
            taken = int((cgroup / used).read_text()) - int(statistics.get(reclaimable, 0))
            free.append(int(text) - taken)
    return max(min(free), 0)


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep memory that it frees, for its next step, where the C library is glibc.

    Else glibc gives large blocks back, and the system has to fill new ones with zeros: 7% of a ViT-Tiny step.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if device.type != "cpu" or not hasattr(library, "mallopt"):  # of other devices torch keeps the memory
        return
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    # Older versions take 32 MiB at most. The first also fixes both thresholds, so it must not stand alone.
    if library.mallopt(mmap, 2**30) or library.mallopt(mmap, 2**25):
        library.mallopt(trim, 2**31 - 1)
