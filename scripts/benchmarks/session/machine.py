"""What the session runs on: versions, GPUs and how they are connected, cores, and which attention kernel torch chooses."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.benchmarks.parts.common import GIB, machine
from scripts.benchmarks.session.plan import Context
from utils.text import counted

PACKAGES = ("torch", "torchvision", "timm", "triton", "torchao", "pillow", "simplejpeg", "numpy")


def describe(context: Context) -> None:
    journal = context.journal
    journal.row(what="machine", value=machine())
    for name, value in versions().items():
        journal.row(what=name, value=value)
    for name, value in cores().items():
        journal.row(what=name, value=value)
    if not context.dry:
        for number in range(torch.cuda.device_count()):
            journal.row(what=f"GPU {number}", value=describe_gpu(number))
    for dropout in (0.0, 0.1):
        for queries in (1, 197):
            where = f"attention kernel, {counted(queries, 'token')} to 197, dropout {dropout:g}"
            journal.row(what=where, value=attention_kernel(context.device, queries, dropout))
    if not context.dry:
        for command in ("nvidia-smi topo -m", "nvidia-smi"):
            journal.note(f"`{command}`:\n\n```\n{output_of(command)}\n```")


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["CUDA of torch"] = str(torch.version.cuda)
    found["cuDNN"] = str(torch.backends.cudnn.version())
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = output_of("nvidia-smi --query-gpu=driver_version --format=csv,noheader").splitlines()[0]
    return found


def cores() -> dict[str, str]:
    """Cores that this process may use, memory, and which cores are near which memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    found = {"cores": f"{usable} of {os.cpu_count()}", "memory": f"{memory:.0f} GiB"}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")):
        found[f"NUMA {path.parent.name}"] = f"cores {path.read_text().strip()}"
    return found


def describe_gpu(number: int) -> str:
    found = torch.cuda.get_device_properties(number)
    size = f"{found.total_memory / GIB:.1f} GiB, {found.multi_processor_count} multiprocessors"
    return f"{found.name}, {size}, compute capability {found.major}.{found.minor}"


def attention_kernel(device: str, num_queries: int, dropout: float) -> str:
    """The kernel that scaled_dot_product_attention takes for a head of 64 in training."""
    q, k, v = (
        torch.randn(8, 6, tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for tokens in (num_queries, 197, 197)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return ", ".join(attention_calls(lambda: attend(q, k, v, dropout_p=dropout))) or "none found"


def attention_calls(run: Callable[[], object]) -> list[str]:
    """The kernels of scaled_dot_product_attention that run, one for each call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    prefix = "aten::_scaled_dot_product_"
    return [event.name.removeprefix(prefix) for event in profiled.events() if event.name.startswith(prefix)]


def output_of(command: str) -> str:
    try:
        return subprocess.run(command.split(), capture_output=True, text=True, timeout=10).stdout.strip() or "no output"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command}: {error}"
