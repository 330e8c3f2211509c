"""How a program starts sooner and ends at once."""

import atexit
import gc
import os
import sys
from typing import NoReturn

_ORDINARY = gc.get_threshold()
_MANY = 100_000  # new objects between two looks for garbage


def hurry() -> None:
    """Importing makes a million objects that last, and no garbage: to look for some again and again takes half a second."""
    gc.set_threshold(_MANY, *_ORDINARY[1:])


def settle() -> None:
    """The program is at work: look for garbage as usual."""
    gc.set_threshold(*_ORDINARY)


def leave(code: int) -> NoReturn:
    """End with this code and no other.

    What is registered for the end runs, but the interpreter is not taken down: that takes half a second, and gloo's
    threads may still hold tensors then, and abort the process (pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
