"""How a program starts faster, which exit code it returns, and how it ends at once."""

import atexit
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from utils.errors import OUT_OF_MEMORY, AlreadyReportedError, LostProcess, UserError


def relax_gc() -> None:
    """Collect no garbage while importing: a million objects are made that last, and scanning them takes a second."""
    gc.disable()


def restore_gc() -> None:
    """Undo `relax_gc`: collect garbage as usual from here on, without scanning what was imported."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def exit_code(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a program and return its exit code: its own, 2 for a user's mistake, reported without a traceback, or 1. 0 if
    the reader of its output has seen enough (`| head`)."""
    try:
        code = program(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if nobody_reads():
            return 0
        traceback.print_exc()
        return 1
    except AlreadyReportedError as error:
        return error.code
    except UserError as error:
        message, code = str(error), error.code
    except LostProcess as error:
        message, code = str(error), 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        message, code = _remedy_for(error), UserError.code
        if message is None:
            traceback.print_exc()
            return 1
    print(f"error: {message}", file=sys.stderr)
    return code


def nobody_reads() -> bool:
    """Whether the reader of what is printed has gone, as in `| head`. Then all the rest goes nowhere."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also for the interpreter's flush at its end
        return True
    return False


def exit_now(code: int) -> NoReturn:
    """Exit with this code and no other.

    Exit handlers run, but the interpreter is not torn down: that takes half a second, and gloo's threads may still hold
    tensors then and abort the process (pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _remedy_for(error: Exception) -> str | None:
    """The message for a library's error that the user can fix; None for any other."""
    text = str(error)
    if "torchvision::nms" in text:
        return (
            "this torch and this torchvision do not match (operator torchvision::nms does not exist); there is no "
            "torchvision for a +cpu build of torch. Remedy: pip uninstall -y torch torchvision, then "
            "pip install -r requirements.txt; the default builds run on CPUs too"
        )
    if isinstance(error, MemoryError) or any(each in text for each in OUT_OF_MEMORY):
        how = next(iter(text.splitlines()), type(error).__name__)
        return (
            f"out of memory ({how}); lower DATA.BATCH_SIZE, DATA.IMAGE_SIZE or the size of the model (MODEL.EMBED_DIM, "
            "MODEL.DEPTH), or stop other programs that use memory"
        )
    return None
