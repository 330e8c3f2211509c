"""Measures and checks halfstep on a GPU: one command that writes all results into a folder while it goes on.

    python scripts/benchmarks/gpu_session.py -output FOLDER                     everything, at most 20 minutes
    python scripts/benchmarks/gpu_session.py -output FOLDER -parts tests,small  two parts; the next call adds others
    python scripts/benchmarks/gpu_session.py -output FOLDER -dry                all parts with tiny sizes, without a GPU

Each part is a command, which session.md names and which can be typed alone. FOLDER gets session.md, to which all that the
parts print is appended at once, session.log with their errors, and compiled kernels. A part that exceeds its limit of time
is killed, and the next begins.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import die_with_parent, exit_code, revision  # isort: skip
from scripts.benchmarks.common import ROOT
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, did_you_mean

PYTHON = shlex.quote(sys.executable)
BENCHMARKS = f"{PYTHON} {shlex.quote(str(ROOT / 'scripts/benchmarks'))}"
STEPS = f"{BENCHMARKS}/step.py modes -rounds {{rounds}} -steps 3 -seconds {{seconds}} -cfg configs/vit"
NO_DROPOUT = "-opts MODEL.DROPOUT=0 MODEL.ATTENTION_DROPOUT=0 MODEL.DROPPATH=0 {tiny}"
PHOTOS = "-cfg configs/vit_small_patch16_224.yaml -dataset imagefolder -data_path {folder}/photos -num_workers {workers} -batch_size {batch}"
# Name: the limit in seconds, more than it should take on an H200 with 16 cores, and the command.
PARTS = {
    "machine": (60, f"{PYTHON} -m torch.utils.collect_env"),
    "tests": (300, f"{PYTHON} -m pytest -vv -rs -p no:cacheprovider tests/gpu {{on_cpu}}"),
    "small": (180, f"{STEPS}_small_patch16_224.yaml -batch_size {{batch}} {{modes}} {NO_DROPOUT}"),
    "compiled": (180, f"{STEPS}_small_patch16_224.yaml -batch_size {{batch}} {{compiled}} {NO_DROPOUT}"),
    "large": (150, f"{STEPS}_large_patch16_224.yaml -batch_size {{batch}} -modes bf16 {NO_DROPOUT}"),
    "float8": (90, f"{STEPS}_base_patch16_224.yaml -batch_size {{batch}} {{float8}} {NO_DROPOUT}"),
    "peer": (120, f"{BENCHMARKS}/step.py peer -rounds {{rounds}} -batch_size {{batch}} -opts {{compile}} {{tiny_timm}}"),
    "photos": (90, f"{BENCHMARKS}/photos.py -output {{folder}}/photos -train {{train}} -val {{val}} -drawn 510"),
    "loader": (90, f"{BENCHMARKS}/loader.py limits {PHOTOS} -amp -opts {{tiny}}"),
    "cache": (90, f"{BENCHMARKS}/loader.py limits {PHOTOS} -amp -opts DATA.CACHE=256 {{tiny}}"),
    "run": (150, f"{PYTHON} main_single_gpu.py {PHOTOS} -amp -epochs 3 -profile 3 -output {{folder}}/runs -opts {{compile}} {{tiny}}"),
}  # fmt: skip
REAL = {
    **{"rounds": "3", "seconds": "1", "batch": "256", "workers": "16", "train": "16384", "val": "512", "on_cpu": ""},
    "modes": "-modes bf16 fp32 tf32 fp16 bf16-residual naive-bf16",
    "compiled": "-compile -modes bf16 bf16-residual",
    "float8": "-compile -modes bf16 float8",
    **{"compile": "COMPILE=true", "tiny": "REPORT_FREQ=10", "tiny_timm": "REPORT_FREQ=10"},
}
TINY = "MODEL.EMBED_DIM=48 MODEL.DEPTH=2 MODEL.NUM_HEADS=2 DATA.IMAGE_SIZE=32 DEVICE=cpu"
DRY = {  # compiling takes a CPU a minute each
    **{"rounds": "1", "seconds": "0", "batch": "8", "workers": "1", "train": "64", "val": "8", "on_cpu": "--on_cpu"},
    **dict.fromkeys(("modes", "compiled", "float8"), "-modes bf16"),
    **{"compile": "COMPILE=false", "tiny": TINY, "tiny_timm": "DATA.IMAGE_SIZE=160 MODEL.NAME=test_vit DEVICE=cpu"},
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder for the results; those of earlier calls stay")
    parser.add_argument("-parts", type=part_names, default=list(PARTS), metavar="NAMES", help=f"[{','.join(PARTS)}]")
    scale_help = "multiplies every limit of time [1, dry: 20]"
    parser.add_argument("-limit_scale", type=at_least(1), metavar="N", help=scale_help)
    parser.add_argument("-dry", action="store_true", help="walk through all parts on the CPU, with tiny sizes")
    arguments = parser.parse_args(argv)
    import torch  # which takes seconds

    if not (arguments.dry or torch.cuda.is_available()):
        raise ConfigError(
            "gpu_session.py: this machine or this build of torch has no CUDA device; run it on a machine with one, or "
            "with -dry, which walks through all parts on the CPU"
        )
    scale = arguments.limit_scale or (20 if arguments.dry else 1)  # small computers are no reason to cut
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        folder = arguments.output.resolve()
        values = (DRY if arguments.dry else REAL) | {"folder": shlex.quote(str(folder))}
        parts = {name: (PARTS[name][0] * scale, PARTS[name][1].format(**values)) for name in arguments.parts}
        kind = "dry, nothing here was measured on a GPU" if arguments.dry else "on a GPU"
        return run_session(folder, parts, kind)
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {arguments.output} ({error}); choose another folder") from error


def part_names(text: str) -> list[str]:
    """The type of -parts."""
    for name in text.split(","):
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name!r}{did_you_mean(name, PARTS)}")
    return text.split(",")


def run_session(folder: Path, parts: dict[str, tuple[float, str]], kind: str) -> int:
    """Run the parts (limit, command) in turn. 1 if one of them did not come to its end or one of its checks failed."""
    if sys.platform == "linux":  # what parts leave becomes children of this process, also what has a session of its own
        set_child_subreaper = 36  # PR_SET_CHILD_SUBREAPER
        ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the part that runs is killed
    outcomes = []
    with open(folder / "session.md", "a") as results:

        def note(text: str) -> None:
            print(text, file=results, flush=True)
            print(text, flush=True)

        note(f"\n# Session of {time.strftime('%Y-%m-%dT%H:%M:%S')}: halfstep {revision(ROOT)}, {kind}")
        for name, (limit, command) in parts.items():
            note(f"\n## {name}\n\n`{command}`\n")
            begin = time.monotonic()
            outcomes.append(run_within(command, limit, folder))
            note(f"\n{name}: {outcomes[-1]} after {time.monotonic() - begin:.1f} s")
    return int(any(outcome != "done" for outcome in outcomes))


def run_within(command: str, seconds: float, folder: Path) -> str:
    """Run a command within a limit of time, leaving none of its processes behind. Returns how it ended."""
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "PYTHONUNBUFFERED": "1", **os.environ}
    with open(folder / "session.md", "a") as results, open(folder / "session.log", "a") as log:
        words = shlex.split(command)
        process = subprocess.Popen(
            words, stdout=results, stderr=log, env=environment, cwd=ROOT, preexec_fn=die_with_parent
        )
    try:
        code = process.wait(seconds)
        return "done" if code == 0 else f"exit code {code}, see session.log"
    except subprocess.TimeoutExpired:
        return f"killed at its limit of {seconds:g} s"
    finally:
        kill_children()
        process.wait()


def kill_children() -> None:
    """Linux: kill the children of this process, and what they leave to it, until nothing is left: it would hold the GPU's memory."""
    while running := list(find_children()):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def find_children() -> Iterator[int]:
    """The children of this process that have not ended."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z" and int(parent) == os.getpid():
                yield int(path.parent.name)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
