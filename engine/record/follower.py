"""The process that shows a run on a tracker: it follows the tables in the run's folder until the run ends.

It is a process of its own, so that whatever the tracker's library does (import for seconds, wait for a server, crash,
hang in an exit handler) happens outside of the training. The tables are its queue: what a slow server has not taken
yet, or what an earlier start of the run could not send, is still there.
"""

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

from engine.record.board import Board, Row, TrackedRun, pictures_in
from engine.record.board_tables import Tables
from engine.record.secrets import without_secrets

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_TRIES = 60.0  # after the first failure; twice as long after each further one
MOST_BETWEEN_TRIES = 3600.0
SECONDS_AFTER_A_KILL = 10.0  # for what is left to send when the run was killed
ROWS_AT_ONCE = 200
END, FAILED, KILLED = "end", "failed", "killed"  # how the run ends
SAY, WARN, ALIVE = "say", "warn", "alive"  # what this process tells it
BOARDS = {"wandb": "engine.record.wandb.Wandb", "mlflow": "engine.record.mlflow.Mlflow"}


class Parent:
    """The training process: what it says, and what it is told. A thread listens, as a library may block this one."""

    def __init__(self, pid: int, heard: int, told: IO[str]):
        """`heard`: the file descriptor of what it says."""
        self._pid, self._heard, self._told = pid, heard, told
        self.has_ended = threading.Event()
        self.how = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def tell(self, kind: str, text: str = "") -> None:
        with contextlib.suppress(OSError):  # it is gone
            print(json.dumps([kind, text]), file=self._told, flush=True)

    def _listen(self) -> None:
        said = b""
        # Loader processes inherit the other end of the pipe: it can stay open after the training process was killed.
        while not said.endswith(b"\n") and os.getppid() == self._pid:
            if select.select([self._heard], [], [], SECONDS_BETWEEN_LOOKS)[0]:
                piece = os.read(self._heard, 1024)
                if not piece:
                    break
                said += piece
        self.how = said.decode().strip() or KILLED
        self.has_ended.set()
        if self.how == KILLED:
            timer = threading.Timer(SECONDS_AFTER_A_KILL, os.killpg, (0, signal.SIGKILL))
            timer.daemon = True
            timer.start()


def follow(run: TrackedRun, parent: Parent) -> None:
    """Show the run until it ends. A failure is told once; what could not be sent is sent when the tracker is back."""
    pause, is_told = SECONDS_BETWEEN_TRIES, False
    while not parent.has_ended.is_set():
        try:
            return show(run, parent)
        except Exception as error:
            traceback.print_exc()
            if not is_told:
                reason = without_secrets(f"{type(error).__name__}: {error}".split("\n")[0])[:300]
                parent.tell(WARN, f"{run.tracker}: {reason}; training continues, and {run.log} says more")
                is_told = True
        parent.has_ended.wait(pause)
        pause = min(2 * pause, MOST_BETWEEN_TRIES)
    return None


def show(run: TrackedRun, parent: Parent) -> None:
    board = load_board(run)
    parent.tell(SAY, f"{run.tracker}: {without_secrets(board.place)}")
    board.show_settings(run.settings)
    tables = Tables(run.folder, board.epoch, board.step)
    send_new(board, tables, parent)
    board.settle()
    while not parent.has_ended.wait(SECONDS_BETWEEN_LOOKS):
        send_new(board, tables, parent)
    send_new(board, tables, parent, all_epochs=parent.how != KILLED)
    status = tables.status()
    for path in pictures_in(run.folder):
        board.add_picture(path)
        parent.tell(ALIVE)
    if best := status.get("best"):
        board.show_best(best)
    board.end(how_it_ended(parent.how, status))


def load_board(run: TrackedRun) -> Board:
    module, _, name = BOARDS[run.tracker].rpartition(".")
    return getattr(importlib.import_module(module), name)(run)


def send_new(board: Board, tables: Tables, parent: Parent, all_epochs: bool = False) -> None:
    """`all_epochs`: also one that no checkpoint holds."""
    for rows in in_pieces(tables.new_steps()):
        board.add_steps(rows)
        parent.tell(ALIVE)
    for rows in in_pieces(tables.new_epochs(all_epochs)):
        board.add_epochs(rows)
        parent.tell(ALIVE)


def in_pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        yield rows[start : start + ROWS_AT_ONCE]


def how_it_ended(how: str, status: dict) -> str:
    """done, failed, stopped (to be resumed) or killed."""
    state, code = status.get("state"), status.get("exit_code")
    if how == FAILED or state in ("failed", "save_failed") or (state, code) == ("stopped", 3):
        return FAILED
    return state if state in ("done", "stopped") else KILLED


def main(folder: str, tracker: str, pid: str) -> NoReturn:
    """Follow the run in this folder. The first line on stdin has its facts, the next one says that it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job: the run says when it has ended
    facts = b""
    while not facts.endswith(b"\n"):
        facts += os.read(0, 1)
    run = TrackedRun(Path(folder), tracker, **json.loads(facts))
    run.log.parent.mkdir(exist_ok=True)
    # The library and its processes get none of the pipes: whoever holds one keeps the run waiting for its end.
    heard, told = os.dup(0), os.dup(1)
    log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for number, target in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(target, number)
    os.nice(10)
    parent = Parent(int(pid), heard, open(told, "w"))  # noqa: SIM115
    with open(run.state.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process of a start that was killed has ended
        follow(run, parent)
    os._exit(0)  # without the library's exit handlers, which may wait for a server


if __name__ == "__main__":
    main(*sys.argv[1:])
