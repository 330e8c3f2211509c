"""Compares the outputs of all commands on small stored runs with the expected ones, or writes them again.

    python scripts/maintenance/outputs.py                        # print the lines that differ
    python scripts/maintenance/outputs.py -write                 # after an intended change; review it with git diff
    python scripts/maintenance/outputs.py predict_vit -write     # only this row
    python scripts/maintenance/outputs.py -tree ../before # a checksum for each row, from the programs of this checkout

The rows are in tests/support/output_table.py, and the expected outputs in tests/data/outputs. Two checkouts whose
outputs are equal have equal checksums on the same machine.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows of the table [all]")
    parser.add_argument("-write", action="store_true", help="write the expected outputs")
    parser.add_argument(
        "-tree", type=Path, metavar="FOLDER", help="print a checksum for each row with this checkout's programs"
    )
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import tests  # noqa: F401  the table of this checkout, even with the programs of another one

    sys.path.insert(0, str((arguments.tree or ROOT).resolve()))
    from tests.support.forks import put_halfstep_on_path
    from tests.support.output_table import EXPECTED, ROWS, difference, make_root, outputs_of

    if unknown := [row for row in arguments.rows if row not in ROWS]:
        parser.error(f"unknown row {', '.join(unknown)}; choose from {', '.join(ROWS)}")
    num_changed = 0
    with tempfile.TemporaryDirectory() as folder:
        put_halfstep_on_path(Path(folder))
        root = make_root(Path(folder) / "root")
        for row in arguments.rows or ROWS:
            printed = outputs_of(ROWS[row], root, Path(folder) / row)
            path = EXPECTED / f"{row}.txt"
            if arguments.tree:
                print(f"{row:26} {hashlib.sha256(printed.encode()).hexdigest()[:16]}", flush=True)
                continue
            changed = difference(path.read_text(encoding="utf-8") if path.exists() else "", printed, row)
            num_changed += bool(changed)
            if arguments.write and changed:
                EXPECTED.mkdir(exist_ok=True)
                path.write_text(printed, encoding="utf-8")
            state = "equal"
            if changed:
                state = "written" if arguments.write else "differs"
            print(f"{row:26} {state}", flush=True)
            if changed and not arguments.write:
                print(changed)
    return int(num_changed > 0 and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
