"""Checks of one fact each, as rows: passed or failed with a figure. A check that fails does not end the others."""

import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from scripts.benchmarks.session.plan import GROUPS, Context, part_command

COLUMNS = ("probe", "verdict", "figure", "seconds")


class Unavailable(Exception):
    """What the probe is about does not exist here; the message says why."""


class Probes:
    """Runs probes one by one. A probe returns its figure, or raises."""

    def __init__(self, context: Context):
        self._context, self._num_failed = context, 0

    def check(self, name: str, probe: Callable[[], str], only_on_cuda: bool = False) -> None:
        """`only_on_cuda`: what it checks cannot go wrong elsewhere, so that a dry run only runs its code."""
        begin = time.monotonic()
        is_real = not (only_on_cuda and self._context.dry)
        try:
            figure, verdict = probe(), "passed" if is_real else "needs CUDA"
        except Unavailable as error:
            figure, verdict = str(error), "unavailable" if is_real else "needs CUDA"
        except Exception as error:
            traceback.print_exc()
            figure, verdict = f"{type(error).__name__}: {first_line(error)}", "FAILED"
            self._num_failed += 1
        seconds = round(time.monotonic() - begin, 2)
        self._context.journal.row(probe=name, verdict=verdict, figure=figure, seconds=seconds)

    def end(self) -> None:
        if self._num_failed:
            sys.exit(1)


def first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:200]


def require(condition: bool, figure: str) -> str:
    """The figure, or a failure with it."""
    if not condition:
        raise AssertionError(figure)
    return figure


def run_all(context: Context) -> None:
    """All groups at once, but the one that measures times after the others."""
    context.journal.columns(*COLUMNS)
    groups = context.pick(GROUPS, [",".join(GROUPS)])  # a dry run spends most of its time on importing torch
    *together, alone = (part_command(name, context.folder, context.dry) for name in groups)
    processes = [subprocess.Popen(command) for command in together]
    codes = [process.wait() for process in processes]
    codes.append(subprocess.run(alone).returncode)
    sys.exit(int(any(codes)))
