"""The two mistakes a user can make, what messages say of names and files, and what a program ends with."""

import difflib
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterable

# CUDA and XPU have an error of their own; libraries, MPS and the CPU's allocator say it in words.
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "DefaultCPUAllocator")

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UserError(Exception):
    """What the user can mend. Printed as one message without a traceback; the program ends with this exit code."""

    code = 2


class ConfigError(UserError):
    """A setting, flag or file name is wrong. The message names it, its value and the remedy."""


class DataError(UserError):
    """The data is not as it must be. The message names the file and the remedy."""


class ToldError(UserError):
    """A UserError of process 0, raised on the others too, which end as it does but say nothing."""

    def __init__(self, message: str, code: int = UserError.code):
        super().__init__(message)
        self.code = code


class StoppedBySignal(UserError):
    """Told to stop when there was nothing to save yet. The program ends with 128 + the signal."""

    def __init__(self, number: int, when: str):
        super().__init__(f"told to stop (signal {number}) {when}; the next start goes on from there")
        self.code = 128 + number


class LostProcess(Exception):
    """Another process of the run, or a loader process, died or hangs. Told without a traceback; the program ends with exit code 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean A or B?' for the known names nearest to a wrong one, or nothing."""
    by_lower_case = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_lower_case[each] for each in nearest)}?" if nearest else ""


def not_a_file(path: str | os.PathLike | int) -> str | None:
    """What there is in place of a file, `a pipe` for instance; None for a file. `path` may be an open descriptor.

    To be asked before a file of the user's is read: a pipe may keep whoever does that waiting for ever, and a device may
    have no end.
    """
    return KINDS.get(stat.S_IFMT(os.stat(path).st_mode))


def exit_code(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a program and return what it ends with: its own code, 2 for a user's mistake, told in one message, or 1."""
    try:
        return program(arguments)
    except ToldError as error:
        return error.code
    except UserError as error:
        message, code = str(error), error.code
    except LostProcess as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        message, code = _of_the_machine(error), UserError.code
        if message is None:
            traceback.print_exc()
            return 1
    print(f"error: {message}", file=sys.stderr)
    return code


def _of_the_machine(error: Exception) -> str | None:
    """What to say of an error in a library that the user can mend; None for any other."""
    text = str(error)
    if "torchvision::nms" in text:
        return (
            "this torch and this torchvision do not fit each other (operator torchvision::nms does not exist); a +cpu build "
            "of torch has no torchvision here. Remedy: pip uninstall -y torch torchvision, then "
            "pip install -r requirements.txt; the ordinary builds run on CPUs too"
        )
    if isinstance(error, MemoryError) or any(each in text for each in OUT_OF_MEMORY):
        how = next(iter(text.splitlines()), type(error).__name__)
        return (
            f"memory ran out ({how}); lower DATA.BATCH_SIZE, DATA.IMAGE_SIZE or the size of the model (MODEL.EMBED_DIM, "
            "MODEL.DEPTH), or end what else uses memory"
        )
    return None
