"""Trains, evaluates or checks in as many processes as the settings ask for: the file of halfstep train."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code, exit_now, relax_gc  # isort: skip


def main(arguments: list[str]) -> int:
    from engine.settings import load_settings
    from main_single_gpu import has_rank, train

    loaded = load_settings(arguments)
    if has_rank(loaded) or (loaded.config.START.NGPUS or 1) > 1:
        multi = str(Path(__file__).resolve().parent.parent / "main_multi_gpu.py")
        os.execv(sys.executable, [sys.executable, multi, *arguments])  # keeps the process, so that it gets all signals
    return train(loaded)


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
