"""Runs of the real programs, each process a fork of this one, which has torch in memory already: with a fault where asked.

python -m tests.support.forked FLAGS, flags of a run that goes first and imports all that runs import late. Then told one
run a line on standard input, as JSON, and answering one line each:
{"flags": [...], "processes": 1 or more, "faults": {name: arguments}} ->
{"codes": exit code or minus the signal of each process, "told": what they printed}
"""

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import traceback

import main_multi_gpu
import main_single_gpu
from engine.report.plot import Plotter
from tests.support import planted
from utils.program import exit_code

Plotter.draw = lambda *arguments, **options: None  # pictures take longer than these runs


def in_forks(flags: list[str], processes: int, faults: dict) -> dict:
    with tempfile.TemporaryFile("w+") as told:
        places = [None] if processes == 1 else meeting(processes)
        children = [fork(flags, place, faults, told.fileno()) for place in places]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        told.seek(0)
        return {"codes": [os.waitstatus_to_exitcode(status) for status in statuses], "told": told.read()}


def meeting(processes: int) -> list[dict[str, str]]:
    """What a launcher tells each of so many processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    return [shared | {"RANK": str(rank)} for rank in range(processes)]


def fork(flags: list[str], place: dict[str, str] | None, faults: dict, told: int) -> int:
    """Start a process of a run; `place`: among the others, if there are others. Returns its number."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        os.dup2(told, 1)
        os.dup2(told, 2)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)  # the first run has set its own
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(place or {})
        for name, arguments in faults.items():
            getattr(planted, name)(*arguments)
        code = exit_code((main_multi_gpu if place else main_single_gpu).main, flags)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        assert main_single_gpu.main(sys.argv[1:]) == 0
    for line in sys.stdin:
        print(json.dumps(in_forks(**json.loads(line))), flush=True)
