"""The former name of a way to call scripts/export.py, which takes the same arguments."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from scripts.export import main
from utils.program import exit_code

if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
