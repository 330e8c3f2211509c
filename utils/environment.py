"""The version and commit of halfstep, and the text of -version: versions, hardware, and the speed of half precision."""

import os
import platform
import subprocess
from pathlib import Path

from utils import VERSION


def describe_environment() -> str:
    """Return versions and hardware as text for a bug report."""
    import torch  # imported here, because importing torch or timm takes seconds

    from utils.host import count_cores, find_devices, half_speedup, name_of
    from utils.torch_internals import import_timm

    kind, count = find_devices("auto")
    cpu, device = torch.device("cpu"), torch.device(kind)
    half = torch.float16 if kind == "cuda" else torch.bfloat16  # the default type of -amp
    speedup = half_speedup(device, half)
    advice = "" if speedup >= 1 else ": leave -amp out"
    rows = [
        ("halfstep", revision()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("timm", import_timm().__version__),
        ("device", f"{kind}, {count} of {name_of(device)}"),
        ("processor", f"{name_of(cpu)}, {count_cores()} cores"),
        (
            "precision",
            f"{str(half).removeprefix('torch.')} multiplies matrices {speedup:.1f} times as fast as float32{advice}",
        ),
    ]
    return "\n".join(f"{name:<11}{value}" for name, value in rows)


def revision(folder: Path = Path(__file__).parent.parent) -> str:
    """Return the version of halfstep. In a git checkout, add the commit, with `dirty` if files were changed."""
    if not (folder / ".git").exists():
        return VERSION
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        # git takes no lock here, so that no git command of the user fails in the meantime.
        options = {"env": os.environ | {"GIT_OPTIONAL_LOCKS": "0"}, "timeout": 10, "check": True}
        commit = subprocess.run(command, capture_output=True, text=True, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is missing, or refuses a folder of another user
        return f"{VERSION}, commit unknown"
    return f"{VERSION}, commit {commit}"
