"""The errors that are reported without a traceback, and what their messages say about names and files."""

import contextlib
import difflib
import errno
import functools
import os
import stat
from collections.abc import Iterable, Iterator
from enum import IntEnum

# CUDA and XPU have an exception class; libraries, MPS and the CPU's allocator only say so in the message.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
# Of torch.compile on CPUs, of triton on GPUs.
NO_COMPILER = ("No working C++ compiler found", "Failed to find C compiler")

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ExitCode(IntEnum):
    """The exit codes of a run. One that a signal stopped exits with AFTER_SIGNAL + the signal's number."""

    DONE = 0
    FAILED = 1  # a fault of the program or of the machine, or the last save failed
    REFUSED = 2  # what the user can fix
    NON_FINITE = 3  # too many updates with non-finite gradients
    NO_PROGRESS = 4  # RUN.MAX_TIME was up before the first update: the same start again would end so too


AFTER_SIGNAL = 128


class UserError(Exception):
    """What the user can fix: printed without a traceback, and the program exits with this code."""

    code = ExitCode.REFUSED


class ConfigError(UserError):
    """A wrong setting, flag or file name. The message has its name, its value and the remedy."""


class DataError(UserError):
    """Data that cannot be used. The message has the file and the remedy."""


class AlreadyReportedError(UserError):
    """A UserError of rank 0, raised on the other ranks, which exit with the same code but print nothing."""

    def __init__(self, message: str, code: int = UserError.code):
        super().__init__(message)
        self.code = code


class StoppedBySignal(UserError):
    """A signal before there was anything to save. The program exits with 128 + the signal."""

    def __init__(self, number: int, when: str):
        super().__init__(f"told to stop (signal {number}) {when}; the next start goes on from there")
        self.code = AFTER_SIGNAL + number


class LostProcess(Exception):
    """Another rank or a loader process died or hangs: printed without a traceback, exit code 1."""


def ensure(holds: bool, message: str) -> None:
    """Raise AssertionError if a promise of our own code is broken. Unlike `assert`, it also runs with PYTHONOPTIMIZE=1."""
    if not holds:
        raise AssertionError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean A or B?' for the known names closest to a wrong one, or an empty text."""
    by_lower_case = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case)
    return f"; did you mean {' or '.join(by_lower_case[each] for each in nearest)}?" if nearest else ""


def cause_of(error: BaseException | None) -> str:
    """Why something could not be written, in words: the OSError itself, or the one that torch.save failed on."""
    beneath = error
    while beneath is not None and not isinstance(beneath, OSError):
        beneath = beneath.__context__
    if beneath is None or beneath.strerror is None:
        return str(error) or type(error).__name__
    return "disk full; make room on it" if beneath.errno == errno.ENOSPC else beneath.strerror


@contextlib.contextmanager
def needing(package: str, what: str) -> Iterator[None]:
    """ConfigError with the remedy if a package that is imported inside is not there. `what`: the setting that needs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs {package}: pip install {package} ({error})") from error


@contextlib.contextmanager
def naming_damage(path: object, *also: type[Exception]) -> Iterator[None]:
    """ConfigError for what Python, torch or another library raises over values that no file holds, unless memory runs out."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, *also) as error:
        if any(each in str(error) for each in OUT_OF_MEMORY):
            raise
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{path}: damaged ({type(error).__name__}: {first}); restore it, or use another file"
        ) from error


def not_a_file(path: str | os.PathLike | int) -> str | None:
    """What the path is if not a regular file, such as `a pipe`; None for a file. `path` may be an open descriptor.

    Call it before reading a file that the user names: reading a pipe may block forever, and a device may have no end.
    """
    status = os.stat(path)
    of_the_kernel = "a file of the kernel" if status.st_dev in _kernel_devices() else None
    return KINDS.get(stat.S_IFMT(status.st_mode), of_the_kernel)


@functools.cache
def _kernel_devices() -> set[int]:
    """Where Linux shows itself as files: some block forever, though they look like any other."""
    folders = ("/proc", "/sys", "/sys/kernel/debug", "/sys/kernel/tracing")
    return {os.stat(each).st_dev for each in folders if os.path.ismount(each)}
