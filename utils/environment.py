"""Builds the text of -version: versions, hardware, and the speed of half precision."""

import platform

from utils.revision import revision


def describe_environment() -> str:
    """Return versions and hardware as text for a bug report."""
    import torch  # imported here, because importing torch or timm takes seconds

    from utils.host import count_cores, find_devices, half_speedup, name_of
    from utils.torch_internals import import_timm

    kind, count = find_devices("auto")
    cpu, device = torch.device("cpu"), torch.device(kind)
    half = torch.float16 if kind == "cuda" else torch.bfloat16  # the default type of -amp
    speedup = half_speedup(device, half)
    rows = [
        ("halfstep", revision()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("timm", import_timm().__version__),
        ("device", f"{kind}, {count} of {name_of(device)}"),
        ("processor", f"{name_of(cpu)}, {count_cores()} cores"),
        (
            "precision",
            f"{str(half).removeprefix('torch.')} multiplies matrices {speedup:.1f} times as fast as float32; "
            "-amp auto measures the model of a run",
        ),
    ]
    return "\n".join(f"{name:<11}{value}" for name, value in rows)
