"""Measures and checks halfstep on a GPU, in three calls of at most 10 minutes.

Each row is saved as soon as it is known.

    python scripts/benchmarks/gpu_session.py -output FOLDER -parts machine,probes,small,float8
    python scripts/benchmarks/gpu_session.py -output FOLDER -parts large,tests
    python scripts/benchmarks/gpu_session.py -output FOLDER -parts loader,whole_run,recovery
    python scripts/benchmarks/gpu_session.py -output FOLDER -dry    all parts with tiny sizes, without a GPU, in minutes

A part runs a few commands, and is killed if it exceeds its time limit. session.md in FOLDER gets the commands and their
output. All other files are temporary.
"""

import argparse
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.revision import revision  # isort: skip
from utils.program import die_with_parent, exit_code  # isort: skip
from scripts.benchmarks.common import ROOT
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError

PYTHON = shlex.quote(sys.executable)
BENCHMARKS = f"{PYTHON} {shlex.quote(str(ROOT / 'scripts/benchmarks'))}"
TESTS = f"{PYTHON} -m pytest -vv -rs -p no:cacheprovider {{on_cpu}} tests/gpu"
CONFIG = "-cfg configs/vit_{size}_patch16_224.yaml -batch_size {{batch}}"
SMALL, BASE, LARGE = (CONFIG.format(size=size) for size in ("small", "base", "large"))
TURNS = "-rounds {rounds} -steps 3 -seconds {seconds}"
STEPS = f"{BENCHMARKS}/step.py modes {TURNS}"
NO_DROPOUT = "-opts MODEL.DROPOUT=0 MODEL.ATTENTION_DROPOUT=0 MODEL.DROPPATH=0 {tiny}"
RUN = f"{PYTHON} main_single_gpu.py {SMALL} -amp -epochs 3"
PHOTOS = f"{BENCHMARKS}/photos.py -output {{scratch}}/photos -train {{train}} -val {{val}} -drawn {{drawn}}"
OF_PHOTOS = "-dataset imagefolder -data_path {scratch}/photos"
TO_KILL = "-output {scratch}/killed -opts SAVE_STEPS=5 DATA.SYNTHETIC_SIZE={train} {tiny}"
KILLED = f"{RUN} -dataset synthetic -resume auto {TO_KILL}"
# {name: (time limit in seconds, commands)}. The limits are above the usual time on an H100 or H200 with 16 cores.
PARTS = {
    "machine": (15, [f"{PYTHON} -m torch.utils.collect_env"]),
    "probes": (120, [f"{TESTS}/test_probes.py", f"{STEPS} {SMALL} -modes {{features}} {NO_DROPOUT}"]),
    "small": (300, [f"{BENCHMARKS}/step.py peer {TURNS} {SMALL} {{compile}} -opts {{tiny_timm}}",
                    f"{STEPS} {SMALL} -modes {{modes}} "
                    f"{NO_DROPOUT}", f"{STEPS} {SMALL} {{compile}} -modes {{half}} {NO_DROPOUT}"]),
    "large": (150, [f"{STEPS} {LARGE} {{compile}} -modes bf16 {NO_DROPOUT}"]),
    "tests": (330, [f"{TESTS}/test_numbers.py tests/gpu/test_cuda.py"]),
    "loader": (170, [PHOTOS, f"{BENCHMARKS}/loader.py limits -seconds {{seconds}} {SMALL} {OF_PHOTOS} -amp -opts "
                             f"{{tiny}}",
                     f"{BENCHMARKS}/loader.py limits -seconds {{seconds}} {SMALL} {OF_PHOTOS} -amp -opts "
                     f"DATA.CACHE=256 {{tiny}}"]),
    "whole_run": (250, [PHOTOS, f"{RUN} {OF_PHOTOS} {{compile}} -output {{scratch}}/runs -opts {{tiny}}"]),
    "recovery": (130, [f"timeout -s KILL {{alive}} {KILLED}", KILLED,
                       f"{RUN} -dataset synthetic -batch_size {{auto}} -output {{scratch}}/auto -opts "
                       f"DATA.SYNTHETIC_SIZE={{train}} {{tiny}}"]),
    "float8": (120, [f"{STEPS} {BASE} {{compile}} -modes {{float8}} {NO_DROPOUT}"]),
}  # fmt: skip
TINY = "MODEL.EMBED_DIM=48 MODEL.DEPTH=2 MODEL.NUM_HEADS=2 DATA.IMAGE_SIZE=32 DEVICE=cpu"
# {placeholder: (value on a GPU, value with -dry)}. -dry does not compile: each compilation takes a minute on a CPU.
VALUES = {
    **{"rounds": ("3", "1"), "seconds": ("1", "0"), "batch": ("256", "8"), "auto": ("auto", "8"), "alive": ("25", "6")},
    **{"train": ("16384", "64"), "val": ("512", "8"), "drawn": ("160", "10"), "tiny": ("REPORT_FREQ=10", TINY)},
    **{"on_cpu": ("", "--on_cpu"), "compile": ("-compile", ""), "float8": ("bf16 float8", "bf16")},
    **{"half": ("bf16 bf16-residual", "bf16"), "modes": ("bf16 fp32 tf32 fp16 bf16-residual naive-bf16", "bf16")},
    "features": ("bf16 lamb lion laprop EMA LoRA distillation sizes", "LoRA"),
    "tiny_timm": ("REPORT_FREQ=10", "DATA.IMAGE_SIZE=160 MODEL.TYPE=timm MODEL.NAME=test_vit DEVICE=cpu"),
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder for the results; results of earlier calls are kept")
    parts_help = f"parts to run [{','.join(PARTS)}]"
    parser.add_argument("-parts", type=part_names, default=list(PARTS), metavar="NAMES", help=parts_help)
    parser.add_argument("-limit_scale", type=at_least(1), default=1, metavar="N", help="factor for each time limit [1]")
    parser.add_argument("-dry", action="store_true", help="walk through all parts on the CPU, with tiny sizes")
    arguments = parser.parse_args(argv)
    import torch  # local: importing torch takes seconds

    if not (arguments.dry or torch.cuda.is_available()):
        raise ConfigError("gpu_session.py: torch finds no CUDA device here; -dry walks through all parts on the CPU")
    # -dry has higher time limits, so that no part is killed on a small computer.
    scale, kind = (20, "dry, nothing here was measured on a GPU") if arguments.dry else (1, "on a GPU")
    scale *= arguments.limit_scale
    with tempfile.TemporaryDirectory(prefix="halfstep-session-", ignore_cleanup_errors=True) as scratch:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{scratch}/compiled")
        values = {name: each[arguments.dry] for name, each in VALUES.items()} | {"scratch": shlex.quote(scratch)}
        chosen = {name: PARTS[name] for name in arguments.parts}
        parts = {
            name: (scale * limit, [each.format(**values) for each in commands])
            for name, (limit, commands) in chosen.items()
        }
        arguments.output.mkdir(parents=True, exist_ok=True)
        return run_session(arguments.output.resolve() / "session.md", parts, kind)


def part_names(text: str) -> list[str]:
    """Parse the value of -parts: names of parts, separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    return names


def record(path: Path, text: str) -> None:
    """Print a text, and append it to session.md."""
    print(text, flush=True)
    with open(path, "a") as file:
        print(text, file=file)


def run_session(path: Path, parts: dict[str, tuple[float, list[str]]], kind: str) -> int:
    """Run the parts (limit, commands) in turn, and record them in `path`. Return 1 if a part was killed or failed."""
    if sys.platform == "linux":  # orphaned processes of a part become children of this process, even after setsid
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # run_within then kills the running part
    now = time.strftime("%Y-%m-%dT%H:%M:%S")
    record(path, f"\n# Session of {now}: halfstep {revision(ROOT)}, {kind}")
    outcomes: dict[str, str] = {}  # {command: how it ended}
    for name, (limit, commands) in parts.items():
        record(path, f"\n## {name}")
        begin = time.monotonic()
        for command in commands:
            record(path, f"\n`{command}`{' (see above)' if command in outcomes else ''}\n")
            if command not in outcomes:
                outcomes[command] = run_within(command, begin + limit - time.monotonic(), path)
            record(path, f"\n{name}: {outcomes[command]} after {time.monotonic() - begin:.1f} s")
    return int(any(outcome != "done" for outcome in outcomes.values()))


def run_within(command: str, seconds: float, path: Path) -> str:
    """Run a command within a time limit, and kill all processes that it leaves behind. Return how it ended."""
    words = shlex.split(command)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace", "cwd": ROOT}
    options["env"] = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(words, **options, preexec_fn=die_with_parent)

    def record_output() -> None:
        for line in process.stdout:
            record(path, line.rstrip("\n"))

    reader = threading.Thread(target=record_output)
    reader.start()
    try:
        code = process.wait(max(seconds, 0))
        was_killed = words[0] == "timeout" and code in (128 + signal.SIGKILL, -signal.SIGKILL)
        return "done" if code == 0 or was_killed else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        return "killed at the time limit"
    finally:
        kill_children()
        process.wait()
        reader.join()


def kill_children() -> None:
    """Kill the children of this process, and any processes that they leave behind, until none is left."""
    with contextlib.suppress(ChildProcessError):  # no child is left
        while True:
            for path in Path("/proc").glob("[0-9]*/stat"):
                with contextlib.suppress(OSError):  # the process has ended
                    if int(path.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                        os.kill(int(path.parent.name), signal.SIGKILL)
            os.wait()


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
