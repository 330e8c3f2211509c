"""Trains, evaluates or checks in as many processes as the settings ask for: the file of halfstep train."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code, exit_now, relax_gc  # isort: skip
from configs.load import LoadedConfig
from engine.settings import load_settings
from utils.commands import HALFSTEP


def main(arguments: list[str]) -> int:
    loaded = load_settings(arguments)
    if has_rank(loaded) or (loaded.config.NGPUS or 1) > 1:
        multi = str(HALFSTEP / "main_multi_gpu.py")
        os.execv(sys.executable, [sys.executable, multi, *arguments])  # keeps the process, so that it gets all signals
    return train(loaded)


def has_rank(loaded: LoadedConfig) -> bool:
    """Return whether the settings say which of several processes this is."""
    dist = loaded.config.DIST
    return (dist.URL, dist.WORLD_SIZE, dist.RANK) != (None, None, None)


def train(loaded: LoadedConfig) -> int:
    """Train, evaluate or check in this process."""
    if loaded.config.CHECK:
        from engine.check import check

        return check(loaded)
    from engine.run import run  # imported after the check of the settings, because importing torch takes seconds
    from utils.distributed import Process

    return run(loaded, Process.start(loaded.config.DEVICE))


if __name__ == "__main__":
    relax_gc()
    exit_now(exit_code(main, sys.argv[1:]))
