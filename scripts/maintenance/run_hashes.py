"""Prints the run hashes of short training runs with many settings, each started in several ways.

    python scripts/maintenance/run_hashes.py                              # all runs, in this checkout
    python scripts/maintenance/run_hashes.py -tree ../before              # all runs, in another checkout
    python scripts/maintenance/run_hashes.py ema lamb -ways straight      # only these

A change that is not meant to alter training must leave every hash unchanged. Compare only hashes from the same machine
with the same packages. The runs are the rows and ways of tests/support/run_table.py.
All runs took seven minutes on two cores (AMD EPYC) that other programs used as well.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.run_hash import run_hash  # noqa: E402
from tests.support.run_table import ROWS, WAYS, words_of, write_data  # noqa: E402

FIRST = next(iter(ROWS))  # the run whose best.pth is the teacher of other runs
# Starts runs as forks with the programs of the checkout that is the current folder: [script, words, keywords] per line.
STARTER = """
import json, sys
from tests.support.runs import run
for line in sys.stdin:
    script, words, options = json.loads(line)
    ended = run(script, *words, **options)
    print(json.dumps([ended.returncode, ended.stderr]), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"rows to train: {', '.join(ROWS)}")
    ways = [way for way in WAYS if way != "killed"]  # which would be the same as straight
    parser.add_argument("-ways", nargs="+", choices=ways, default=ways, help="how to start each run (default: all)")
    parser.add_argument("-tree", type=Path, default=ROOT, help="checkout whose programs are used (default: this one)")
    arguments = parser.parse_args()
    if unknown := [row for row in arguments.rows if row not in ROWS]:
        parser.error(f"unknown row {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    runs = [(row, way) for row in arguments.rows or ROWS for way in arguments.ways]
    with tempfile.TemporaryDirectory() as output:
        print_hashes(dict.fromkeys([(FIRST, "straight"), *runs]), arguments.tree.resolve(), Path(output))


def print_hashes(runs: list[tuple[str, str]], tree: Path, folder: Path) -> None:
    """Train with the programs of `tree` in this folder, and print a line for each run."""
    write_data(folder)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", STARTER], cwd=tree, env=environment, **pipes) as starter:
        for row, way in runs:
            processes, output = WAYS[way][0], folder / row / way
            script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
            words = [*words_of(row, way, folder / FIRST / "straight/run/best.pth"), f"SAVE={output}", "NAME=run"]
            starter.stdin.write(json.dumps([script, words, {"processes": processes, "cwd": str(folder)}]) + "\n")
            starter.stdin.flush()
            code, errors = json.loads(starter.stdout.readline())
            result = run_hash(output / "run") if code == 0 else f"exit code {code}: {errors.strip().splitlines()[-1]}"
            print(f"{row:24} {way:9} {result}", flush=True)


if __name__ == "__main__":
    main()
