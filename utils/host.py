"""Resources of this machine or container: cores, memory, devices, and the speed of half precision."""

import ctypes
import functools
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path

import torch

from utils.errors import ConfigError

# Control groups of versions 2 and 1: their folder, the name of the controller in /proc/self/cgroup, the files with the
# memory limit and usage, and the row of memory.stat with the part of the usage that can be reclaimed (file cache).
CGROUPS = (
    (".", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

MAX_SECONDS = 0.1  # CPU time after which no further round of the measurement of half precision starts
# Numbers of tokens (on a CPU, on other devices) and width of a ViT-Base's Linear layer. With fewer tokens, a timing on
# a GPU would show only the time to launch a kernel.
ROWS, ROWS_ON_DEVICE, WIDTH = 256, 8192, 768

SHARED_MEMORY = Path("/dev/shm")  # the folder of shared memory on Linux


def available_cores() -> set[int]:
    """Return the cores that this process may run on: all, unless a launcher such as srun or mpirun binds it to some."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU time limit of the container or job in cores (docker --cpus, Kubernetes limits), or infinity."""
    quotas = [math.inf]
    for group in _own_groups(cgroup, membership, ".", ""):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
            quotas.append(math.inf if quota == "max" else int(quota) / int(period))
    for group in _own_groups(cgroup, membership, "cpu", "cpu"):
        if (group / "cpu.cfs_quota_us").exists():
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            quotas.append(quota / period if quota > 0 else math.inf)
    return min(quotas)


def count_cores() -> int:
    """Return the number of cores that a process can use if it does not share them."""
    return max(1, int(min(len(available_cores()), cpu_quota())))


def share_of_cores(own: set[int], local: Collection[set[int]]) -> int:
    """Return a process's share of its `own` cores, at least 1. The processes that may use a core share it equally.

    `local` has the cores of each training process of this machine, including this one.
    """
    return max(1, int(sum(Fraction(1, sum(core in each for each in local)) for core in own)))


def free_host_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Return the free memory in bytes of the machine, or of its container or job if smaller; on macOS, all memory."""
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = [1024 * int(lines["MemAvailable"].split()[0])]
    for base, controller, limit, used, reclaimable in CGROUPS:
        for group in _own_groups(cgroup, membership, base, controller):
            text = (group / limit).read_text().strip() if (group / limit).exists() else "max"
            if text != "max":
                statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                taken = int((group / used).read_text()) - int(statistics.get(reclaimable, 0))
                free.append(int(text) - taken)
    return max(min(free), 0)


def find_devices(setting: str) -> tuple[str, int]:
    """Return the kind of device to use, and the number of visible devices. `auto` means the best available kind."""
    counts = {"cuda": torch.cuda.device_count, "xpu": torch.xpu.device_count, "mps": torch.mps.device_count}
    for kind, count in counts.items():
        if setting in ("auto", kind) and count():
            if kind == "cuda" and not torch.cuda.is_available():
                raise ConfigError(
                    f"DEVICE is {setting}: there is a GPU, but its driver cannot run this torch "
                    f"(built for CUDA {torch.version.cuda}); install a newer driver or a torch for an older CUDA, "
                    "or use DEVICE=cpu"
                )
            return kind, count()
    if setting not in ("auto", "cpu"):
        raise ConfigError(
            f"DEVICE is {setting}, but this machine or this build of torch does not have this device; use DEVICE=auto"
        )
    return "cpu", 1


def name_of(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the product name of a device or processor, or the device type if the system does not report it."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return device.type


def has_streams(device: torch.device) -> bool:
    """Return whether the device can compute while it copies to and from page-locked host memory."""
    return device.type not in ("cpu", "mps")


def _own_groups(cgroup: Path, membership: Path, base: str, controller: str) -> list[Path]:
    """Return the folders of this process's control group and of its parents."""
    lines = [line.split(":", 2)[1:] for line in membership.read_text().splitlines()] if membership.exists() else []
    # In a container, the group of the process is the base. A job of Slurm or systemd is in a group below the base.
    own = next((Path(path.lstrip("/")) for names, path in lines if controller in names.split(",")), Path())
    return [cgroup / base / each for each in (own, *own.parents)]


def keep_freed_memory(device: torch.device) -> None:
    """Let this process keep freed host memory for its next step, if the C library is glibc.

    Otherwise glibc returns large blocks to the system, and the system fills each new block with zeros. This takes 7% of
    a ViT-Tiny step.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if device.type != "cpu" or not hasattr(library, "mallopt"):  # torch keeps the memory of other devices itself
        return
    trim, mmap = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    # Older versions of glibc accept at most 32 MiB. Setting mmap also fixes the trim threshold, so both must be set.
    if library.mallopt(mmap, 2**30) or library.mallopt(mmap, 2**25):
        library.mallopt(trim, 2**31 - 1)


@functools.cache
def half_speedup(device: torch.device, half: torch.dtype) -> float:
    """Return the speed of a Linear layer in half precision relative to float32, including its gradients.

    Many CPUs compute the output in half precision as fast as in float32, but the gradients 10 to 60 times slower.
    """
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([]), torch.no_grad():
        x, weight = (torch.randn(size, WIDTH, device=device) for size in (ROWS if is_cpu else ROWS_ON_DEVICE, WIDTH))
    pairs = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, half)]
    fewest, most = (1, 10) if is_cpu else (2, 8)  # the first round on a GPU also loads libraries
    start, rounds, num_threads = time.thread_time(), [], torch.get_num_threads()
    # With several threads, CPU time includes busy waiting, which takes longer than the products if other programs run.
    torch.set_num_threads(1)
    try:
        while len(rounds) < fewest or (len(rounds) < most and time.thread_time() - start < MAX_SECONDS):
            whole, halved = (time_products(device, *pair) for pair in pairs)
            rounds.append((whole, halved))
    finally:
        torch.set_num_threads(num_threads)
    return speedup_of(rounds)


def speedup_of(rounds: Sequence[tuple[float, float]]) -> float:
    """Return the speed of half precision relative to float32, from the seconds of both in each round.

    The shortest times are compared, because other programs disturbed them least.
    """
    whole, halved = (min(times) for times in zip(*rounds, strict=True))
    return whole / halved


def time_products(device: torch.device, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the seconds that the device takes for `_multiply`; on a CPU, the CPU time of the thread."""
    if device.type in ("cuda", "xpu"):
        start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record()
        _multiply(x, weight)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    before = clock()
    _multiply(x, weight)
    synchronize(device)
    return clock() - before


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Compute the matrix products of a Linear layer in training.

    The gradients are computed for a quarter of the rows, because they take up to a second on a CPU without half
    precision.
    """
    torch.nn.functional.linear(x, weight)
    gradient = x[: len(x) // 4]  # replaces the output's gradient: the weight is square, so x is as wide as the output
    torch.mm(gradient, weight)  # the gradient of the input
    torch.mm(gradient.t(), gradient)  # the gradient of the weights


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
