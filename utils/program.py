"""The start and end of a program: a faster start, signals that stop it, exit codes, and an immediate exit."""

import atexit
import contextlib
import ctypes
import errno
import gc
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from utils.commands import page, pip
from utils.errors import (
    AFTER_SIGNAL,
    NO_COMPILER,
    OUT_OF_MEMORY,
    AlreadyReportedError,
    ExitCode,
    LostProcess,
    UserError,
    cause_of,
)
from utils.text import cut, printable

MOST_READ = 100_000  # maximum characters of an error message that `printable` processes; `cut` shows fewer

# Errors about file names, which a user can fix, and errors of a disk or a file server.
OF_A_NAME = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP}
OF_THE_DISK = {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EFBIG, errno.ETIMEDOUT}


def relax_gc() -> None:
    """Stop garbage collection during imports, because scanning the million objects they create takes 1 s."""
    gc.disable()


def restore_gc() -> None:
    """Undo `relax_gc`: collect garbage as usual from now on, without scanning the objects from imports."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine's start, or None if that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def when_started() -> float:
    """Return the time.monotonic() at which this process started, before its imports, which may take seconds."""
    ticks = start_ticks(os.getpid())
    if ticks is None:  # this is not Linux
        return time.monotonic() - time.process_time()
    return time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def exit_code(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a program and return its exit code. If the program raises an error, report the error.

    The exit code is 2 after an error that the user can fix, which is reported without a traceback, and 1 after other
    errors. It is 0 if the reader of the program's output has ended (`| head`). A signal such as SIGTERM raises
    KeyboardInterrupt, as Ctrl-C does, so unfinished files are removed; the exit code is 128 + its number.
    """
    open_closed_streams()
    with contextlib.suppress(AttributeError, OSError):  # stdout may be replaced by another object
        sys.stdout.reconfigure(errors="backslashreplace")  # escapes characters that a terminal without UTF-8 lacks
    try:
        with Interrupt():
            arguments = with_one_dash(arguments)
            if "-version" in arguments:
                from utils.environment import describe_environment

                print(describe_environment())
                return 0
            code = program(arguments)
            sys.stdout.flush()
            return code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            return 0
        code, message = exit_code_and_message(error)
        if message is None:
            traceback.print_exc()
        elif message:
            # With its line end in one write, so that errors of several processes do not share a line.
            sys.stderr.write(f"error: {cut(printable(message[:MOST_READ]))}\n")
        return code


def open_closed_streams() -> None:
    """Open /dev/null for standard streams that were closed at the start (`2>&-`).

    Otherwise the next file that the program opens would get the stream's number, and printed text would go into that
    file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # gets the lowest free number
        os.set_inheritable(descriptor, True)  # so that child processes get the stream too
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def with_one_dash(arguments: list[str]) -> list[str]:
    """Return the arguments with halfstep's form of flags: -batch_size for --batch-size.

    Arguments of torch's launcher, and arguments after --, stay unchanged.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    flag = re.compile(r"^--(?!help$|local.rank)([A-Za-z][\w-]*)")
    flags = [flag.sub(lambda match: f"-{match[1].replace('-', '_')}", each) for each in arguments[:end]]
    return flags + arguments[end:]


def exit_code_and_message(error: BaseException) -> tuple[int, str | None]:
    """Return the exit code for an error and its message: '' if it is reported already, None for a bug in halfstep."""
    if isinstance(error, AlreadyReportedError):
        return error.code, ""
    if isinstance(error, UserError):
        return error.code, str(error)
    if isinstance(error, LostProcess):
        return ExitCode.FAILED, str(error)
    if isinstance(error, KeyboardInterrupt):
        return AFTER_SIGNAL + next(iter(error.args), signal.SIGINT), ""
    if isinstance(error, OSError) and error.errno in OF_A_NAME:
        return (
            ExitCode.REFUSED,
            f"{error.filename}: {cause_of(error)}; name another file or folder, or change its permissions",
        )
    if isinstance(error, OSError) and error.errno in OF_THE_DISK:
        return (
            ExitCode.FAILED,
            f"cannot read or write {error.filename or 'a file'} ({cause_of(error)}); start again when the disk works",
        )
    message = _remedy_for(error)
    return ExitCode.REFUSED if message else ExitCode.FAILED, message


def nobody_reads() -> bool:
    """Return whether the reader of stdout has ended, as in `| head`. If so, discard all further output."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    has_gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if has_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds too
    return has_gone


def exit_now(code: int) -> NoReturn:
    """Exit with exactly this code, without tearing down the interpreter.

    A teardown takes half a second, during which gloo's threads may still hold tensors and abort the process
    (pytorch/pytorch#179291). Exit handlers run for at most 10 s, because a tracker's handler may wait for a server.
    """
    run_handlers = atexit._run_exitfuncs  # no public function runs the exit handlers
    handlers = threading.Thread(target=run_handlers, daemon=True)
    handlers.start()
    handlers.join(10.0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _remedy_for(error: BaseException) -> str | None:
    """Return the message for a library's error that the user can fix, or None for any other error."""
    text = str(error)
    if "torchvision::nms" in text:
        return (
            f"the installed torch and torchvision do not match ({text.splitlines()[0]}); run {pip('uninstall')} -y "
            f"torch torchvision, then {pip('install')} -r {page('requirements.txt')}"
        )
    if isinstance(error, MemoryError) or any(each in text for each in OUT_OF_MEMORY):
        how = next(iter(text.splitlines()), type(error).__name__)
        return (
            f"out of memory ({how}); lower DATA.BATCH_SIZE or DATA.IMAGE_SIZE, or choose a smaller model (MODEL.NAME)"
        )
    if os.strerror(errno.EMFILE) in text:  # an OSError, or torch's error with the same text
        return (
            "too many open files for the limit of this shell; raise it, for example with ulimit -n 4096, or lower "
            "-num_workers"
        )
    if any(each in text for each in NO_COMPILER):
        return f"-compile: {text.splitlines()[0]}; install a compiler such as g++, or leave -compile out"
    return None


STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def hangup_is_ignored() -> bool:
    """Return whether this program was started to outlive its terminal, for example by nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


class StopSignal:
    """Records SIGTERM, SIGINT (Ctrl-C), SIGUSR1 (Slurm's warning) or SIGHUP (the terminal was closed).

    A second signal ends the process at once, unless it arrives within 3 s of the first: a signal to the whole group
    reaches a worker twice, because torchrun forwards the signal that it gets.
    """

    SECONDS_TO_REPEAT = 3.0

    def __init__(self):
        self.number = 0
        self._noted = 0.0
        for number in STOPPING:
            if number != signal.SIGHUP or not hangup_is_ignored():
                signal.signal(number, self._note)

    def _note(self, number: int, frame) -> None:
        if self.number and time.monotonic() - self._noted > self.SECONDS_TO_REPEAT:
            os._exit(AFTER_SIGNAL + number)
        if not self.number:
            self.number, self._noted = number, time.monotonic()


class Interrupt(StopSignal, contextlib.AbstractContextManager):
    """Raises KeyboardInterrupt at a signal in the block, until a StopSignal takes its place."""

    def __init__(self):
        self._before = {each: signal.getsignal(each) for each in STOPPING}
        super().__init__()

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        is_first = not self.number
        super()._note(number, frame)
        if is_first:
            raise KeyboardInterrupt(number)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Make Linux send this signal when the launcher dies, even by kill -9, so that no orphan keeps the device."""
    if os.uname().sysname == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, number)
