"""How a program starts sooner and ends at once."""

import atexit
import gc
import os
import sys
from typing import NoReturn


def hurry() -> None:
    """Collect no garbage while importing: a million objects are made that last, and scanning them takes a second."""
    gc.disable()


def settle() -> None:
    """Collect garbage as usual from here on, without scanning what was imported."""
    gc.freeze()
    gc.enable()


def leave(code: int) -> NoReturn:
    """End with this code and no other.

    What is registered for the end runs, but the interpreter is not taken down: that takes half a second, and gloo's
    threads may still hold tensors then, and abort the process (pytorch/pytorch#179291).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
