"""Starts the Python programs of another program as forks, which need not import torch again (three seconds)."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tests.support.forks import run_to_the_end


class ForkingPopen(subprocess.Popen):
    """A Popen that runs `python FILE.py ...` and `python -m MODULE ...` in a fork of this process."""

    def __init__(self, args: Sequence[str], *rest, env: Mapping[str, str] | None = None, **options):
        if args[0] == sys.executable and (args[1] == "-m" or args[1].endswith(".py")):
            words = args[2:] if args[1] == "-m" else args[1:]
            environment = dict(os.environ if env is None else env)
            before = options.get("preexec_fn", lambda: None)
            options["preexec_fn"] = lambda: (before(), become_child(words[0], words[1:], environment))
            sys.stdout.flush()  # otherwise the fork would write buffered text again
            sys.stderr.flush()
        super().__init__(args, *rest, env=env, **options)


def become_child(program: str, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Run the program in the fork, as a new interpreter would. Popen has already set its pipes, group and folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    # Redirect the parent's files. If they were closed, the parent's objects could later close new files of that number.
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2 and number != nothing:
            os.dup2(nothing, number, inheritable=False)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python does at its start
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    run_to_the_end(program, arguments, environment, {})
