"""Errors that are reported without a traceback, and helpers for messages about names and files."""

import contextlib
import difflib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from enum import IntEnum

from utils.commands import pip

# Texts of out-of-memory errors. Only CUDA and XPU also have an exception class for them.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")
# Messages of torch.compile (on CPUs) and triton (on GPUs) if no compiler is installed.
NO_COMPILER = ("No working C++ compiler found", "Failed to find C compiler")

SIMILAR = 0.75  # minimum similarity of spelling of a suggested name; less similar ones would mislead

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ExitCode(IntEnum):
    """The exit codes of a run. A run that a signal stopped exits with AFTER_SIGNAL + the signal's number."""

    DONE = 0
    FAILED = 1  # an error of the program or of the machine, or the last save failed
    REFUSED = 2  # an error that the user can fix
    NON_FINITE = 3  # too many updates with non-finite gradients
    NO_PROGRESS = 4  # RUN.MAX_TIME or TRAIN.BUDGET ended before the first update; so would another start


AFTER_SIGNAL = 128


class UserError(Exception):
    """An error that the user can fix. It is printed without a traceback, and the program exits with `code`."""

    code = ExitCode.REFUSED


class ConfigError(UserError):
    """An error about a setting, flag or file name. The message contains the name, the value and the remedy."""


class FruitlessStart(ConfigError):
    """An error that ends a run before its first epoch is done. A new folder without a checkpoint is removed."""


class DataError(UserError):
    """An error about data that cannot be used. The message contains the file and the remedy."""


class AlreadyReportedError(UserError):
    """A UserError of rank 0 that is raised on the other ranks, which exit with the same code but print nothing."""

    def __init__(self, message: str, code: int = UserError.code):
        super().__init__(message)
        self.code = code


class StoppedBySignal(UserError):
    """An error for a signal that arrived before there was anything to save. The exit code is 128 + signal number."""

    def __init__(self, number: int, when: str):
        super().__init__(f"stopped by signal {number} {when}; start again to continue")
        self.code = AFTER_SIGNAL + number


class LostProcess(Exception):
    """An error about another rank or a loader process that died or hangs.

    No traceback is printed; the exit code is 1.
    """


def ensure(holds: bool, message: str) -> None:
    """Raise AssertionError if our own code breaks a guarantee. Unlike `assert`, it works even with PYTHONOPTIMIZE=1."""
    if not holds:
        raise AssertionError(message)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean A or B?' with the known names closest to a wrong name, or ''."""
    by_lower_case = {each.lower(): each for each in known}
    cutoff = SIMILAR if len(name) > 4 else 0.6  # a single mistake changes much of a short name
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, cutoff=cutoff)
    return f"; did you mean {' or '.join(by_lower_case[each] for each in nearest)}?" if nearest else ""


def cause_of(error: BaseException | None) -> str:
    """Return the reason for a failed write, from an OSError or the OSError that caused an error of torch.save."""
    beneath = error
    while beneath is not None and not isinstance(beneath, OSError):
        beneath = beneath.__context__
    if beneath is None or beneath.strerror is None:
        return str(error) or type(error).__name__
    return "disk full; free some space" if beneath.errno == errno.ENOSPC else beneath.strerror


@contextlib.contextmanager
def needing(package: str, what: str) -> Iterator[None]:
    """Raise ConfigError with the remedy if an import in the block fails. `what`: the setting that needs the package."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs {package}: {pip('install')} {package} ({error})") from error


@contextlib.contextmanager
def naming_damage(path: object, *also: type[Exception]) -> Iterator[None]:
    """Turn errors that a damaged file causes inside the block into ConfigError. Out-of-memory errors pass unchanged."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, *also) as error:
        if any(each in str(error) for each in OUT_OF_MEMORY):
            raise
        first = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f"{path}: damaged ({type(error).__name__}: {first}); restore it, or use another file"
        ) from error


@contextlib.contextmanager
def naming_output(path: os.PathLike, flag: str = "-output") -> Iterator[None]:
    """Turn an OSError in the `with` block into a ConfigError that names the file or folder of a flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write to {path} ({cause_of(error)}); choose another place") from None


def not_a_file(path: str | os.PathLike | int) -> str | None:
    """Return the kind of a special file, such as `a pipe`; None for a regular file. `path` may be an open descriptor.

    Call this before reading a file that the user names, because reading a pipe may block forever and a device may be
    endless.
    """
    return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
