"""Measures and checks halfstep on a GPU: one command that writes all results into a folder while it goes on.

    python scripts/benchmarks/gpu_session.py -output FOLDER                      everything, at most 15 minutes
    python scripts/benchmarks/gpu_session.py -output FOLDER -parts probes,small  two parts; the next call adds others
    python scripts/benchmarks/gpu_session.py -output FOLDER -dry                 all parts with tiny sizes, without a GPU

FOLDER gets session.md and session.jsonl, which every result is appended to at once, session.log with all else that the parts
print, trace.json.gz and compiled kernels. A part that exceeds its limit of time is killed, and the next begins.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from scripts.benchmarks.parts.common import ROOT
from scripts.benchmarks.session.journal import Journal, now
from scripts.benchmarks.session.limits import adopt_orphans, run_within
from scripts.benchmarks.session.plan import PARTS, Part
from scripts.command_line import Parser, at_least
from utils.errors import ConfigError, did_you_mean
from utils.program import exit_code, revision


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_output("FOLDER", "folder for the results; those of earlier calls stay")
    names = ",".join(part.name for part in PARTS)
    parser.add_argument("-parts", type=choose_parts, default=PARTS, metavar="NAMES", help=f"[{names}]")
    parser.add_argument(
        "-limit_scale", type=at_least(1), metavar="N", help="multiplies every limit of time [1, dry: 20]"
    )
    parser.add_argument("-dry", action="store_true", help="walk through all parts on the CPU, with tiny sizes")
    arguments = parser.parse_args(argv)
    if not arguments.dry:
        check_gpu()
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        scale = arguments.limit_scale or (20.0 if arguments.dry else 1.0)  # small computers are no reason to cut
        return run_session(arguments.output.resolve(), arguments.parts, arguments.dry, scale)
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {arguments.output} ({error}); choose another folder") from error


def choose_parts(text: str) -> tuple[Part, ...]:
    """The type of -parts."""
    by_name = {part.name: part for part in PARTS}
    for name in text.split(","):
        if name not in by_name:
            raise argparse.ArgumentTypeError(f"no part {name!r}{did_you_mean(name, by_name)}")
    return tuple(by_name[name] for name in text.split(","))


def check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "gpu_session.py: this machine or this build of torch has no CUDA device; run it on a machine with one, or "
            "with -dry, which walks through all parts on the CPU"
        )


def run_session(folder: Path, parts: tuple[Part, ...], dry: bool = False, limit_scale: float = 1.0) -> int:
    """All parts in turn. 1 if one of them did not come to its end or one of its checks failed."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the part that runs is killed
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), **os.environ}
    journal = Journal(folder, "session")
    kind = "dry, nothing here was measured on a GPU" if dry else "on a GPU"
    journal.heading(f"# Session of {now()}: halfstep {revision(ROOT)}, {kind}")
    outcomes = {}
    with open(folder / "session.log", "a") as log:
        for part in parts:
            journal.heading(f"## {part.title} ({part.name})")
            limit = part.seconds * limit_scale
            outcome, seconds = run_within(part.command(folder, dry), limit, log, environment)
            outcomes[part.name] = outcome
            if outcome != "done":
                journal.note(f"{part.name}: {outcome}; {folder / 'session.log'} has what it said")
            journal.heading(f"{part.name}: {outcome} after {seconds:.1f} s")
    return int(any(outcome != "done" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
