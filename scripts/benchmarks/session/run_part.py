"""The process of one part of a session: gpu_session.py starts it as run_part.py PART[,PART...] FOLDER [-dry]."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.benchmarks.session.journal import Journal
from scripts.benchmarks.session.plan import GROUPS, PARTS, Context
from scripts.benchmarks.session.probes.checks import COLUMNS
from utils.signals import die_with_parent


def main(names: str, folder: str, *dry: str) -> None:
    die_with_parent()  # gpu_session.py may be killed
    functions = {part.name: part.function for part in PARTS}
    for name in names.split(","):
        is_group = name in GROUPS  # whose table is open
        journal = Journal(Path(folder), name, COLUMNS if is_group else ())
        module, function = (f"{name}:run_probes" if is_group else functions[name]).split(":")
        measure = getattr(importlib.import_module(f"scripts.benchmarks.session.{module}"), function)
        measure(Context(journal, Path(folder), bool(dry)))


if __name__ == "__main__":
    main(*sys.argv[1:])
