"""What this machine, or the container that the program runs in, lets it use: cores, memory, its fastest precision."""

import ctypes
import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Collection
from fractions import Fraction
from pathlib import Path

import torch

# Where control groups of versions 2 and 1 are, the controller in the lines of /proc/self/cgroup, and what a group says:
# its limit, its usage, and the part of that which can be reclaimed (file cache).
CGROUPS = (
    (".", "", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

MAX_SECONDS = 0.1  # of the processor, for the measurement of the precision
# Tokens and width of a ViT-Base's Linear layer; of fewer rows a GPU would show how long a start takes.
ROWS, ROWS_ON_DEVICE, WIDTH = 128, 8192, 768

SHARED_MEMORY = Path("/dev/shm")  # on Linux


def available_cores() -> set[int]:
    """The cores that this process may run on: those that a launcher such as srun or mpirun binds it to, else all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """How many cores' time the container or job may take (docker --cpus, Kubernetes limits); infinity: all that it has."""
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
    """The cores that a process can use if it shares them with no other."""
    return max(1, int(min(len(available_cores()), cpu_quota())))


def share_of_cores(own: set[int], local: Collection[set[int]]) -> int:
    """How many of its `own` cores a process gets if it shares each with the others that may run there, at least 1.

    `local`: the cores of each training process of this machine, its own among them.
    """
    return max(1, int(sum(Fraction(1, sum(core in each for each in local)) for core in own)))


def free_host_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes that the machine, or the container or job if it has less, can still give; on macOS all its memory."""
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


def name_of(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The product name of a device, of a CPU the processor's where the system tells it; else its type."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    if device.type == "cpu" and cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return device.type


def has_streams(device: torch.device) -> bool:
    """Whether the device computes while it copies to and from page-locked memory of the host."""
    return device.type not in ("cpu", "mps")


class LateValue:
    """A number of the device that the host reads later: it then waits for what the device had to do until now, no more."""

    def __init__(self, value: torch.Tensor):
        self._value, self._event = value, None
        if has_streams(value.device):
            self._value = value.to("cpu", non_blocking=True)
            self._event = torch.accelerator.current_stream(value.device).record_event()

    def read(self) -> float:
        if self._event:
            self._event.synchronize()
        return self._value.item()


def _own_groups(cgroup: Path, membership: Path, base: str, controller: str) -> list[Path]:
    """The folders of this process's control group and of those around it."""
    lines = [line.split(":", 2)[1:] for line in membership.read_text().splitlines()] if membership.exists() else []
    # In a container its own group is the base; a job of Slurm or systemd is in a group inside it.
    own = next((Path(path.lstrip("/")) for names, path in lines if controller in names.split(",")), Path())
    return [cgroup / base / each for each in (own, *own.parents)]


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


@functools.cache
def half_speedup(device: torch.device, half: torch.dtype) -> float:
    """Return the speed of a Linear layer in half precision relative to float32, its gradients included.

    Many CPUs compute the output in half as fast as in float32, but the gradients 10 to 60 times slower.
    """
    rows = ROWS if device.type == "cpu" else ROWS_ON_DEVICE
    with torch.random.fork_rng([]), torch.no_grad():
        x, weight = (torch.randn(size, WIDTH, device=device) for size in (rows, WIDTH))
    pairs = [(x.to(dtype), weight.to(dtype)) for dtype in (torch.float32, half)]
    start, ratios = time.thread_time(), []
    # One after the other, so that both meet what else the machine does. The first round is slower: it prepares the kernels.
    while len(ratios) < 2 or (len(ratios) < 16 and time.thread_time() - start < MAX_SECONDS):
        whole, halved = (time_products(device, *pair) for pair in pairs)
        ratios.append(whole / halved)
    return statistics.median(ratios[1:])


def time_products(device: torch.device, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return seconds of the device, on a CPU those that this thread was computing: not those in which others were."""
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
    """Compute the products of a Linear layer in training: its output, and the gradients of a quarter of the rows, because
    these take a CPU without half precision up to a second."""
    torch.nn.functional.linear(x, weight)
    gradient = x[: len(x) // 4]  # of the output, which has the shape of the input
    torch.mm(gradient, weight)  # the gradient of the input
    torch.mm(gradient.t(), gradient)  # the gradient of the weights


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()
