"""Runs programs in a process that goes on afterwards, and then undoes what they have changed in it."""

import atexit
import contextlib
import gc
import importlib
import io
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from PIL import Image

import datasets.identity
import engine.report.plot
import engine.update_times
import utils.host
from datasets.sources import arrays
from tests.support import contracts
from tests.support.forks import ROOT
from utils.program import STOPPING, exit_code

CHANGES = contextlib.ExitStack()  # undoes the changes of planted faults
# Faults that end the process, send it signals, or change it in a way that cannot be undone.
ONLY_IN_FORKS = {
    *("die_when_shown", "kill_after_choice", "kill_at", "kill_before", "kill_before_results", "kill_worker"),
    *("hold", "ignore", "signal_at", "signal_at_image", "signal_at_ranking", "take_at_once", "tell"),
    *("enter_network", "forget_our_modules", "limit_files", "limit_open_files", "limit_shared_memory"),
    *("compile_without_code", "disable_asserts", "end_thread", "list_reads", "set_time_zone", "start_python_as_forks"),
    "run_out_of_memory",  # its hooks keep the trainer, and so the lock on the run's folder
}
# State of the process that a run may set: functions that read and set it, and attributes.
STATE = {
    torch.get_default_dtype: torch.set_default_dtype,
    torch.get_num_threads: torch.set_num_threads,
    torch.get_rng_state: torch.set_rng_state,
    torch.get_float32_matmul_precision: torch.set_float32_matmul_precision,
    torch.are_deterministic_algorithms_enabled: torch.use_deterministic_algorithms,
    torch.is_autocast_cache_enabled: torch.set_autocast_cache_enabled,
    torch.is_grad_enabled: torch.set_grad_enabled,
    random.getstate: random.setstate,
    np.random.get_state: np.random.set_state,
}
ATTRIBUTES = [
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cudnn, "benchmark"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    (Image, "MAX_IMAGE_PIXELS"),
    (sys, "argv"),
]
SIGNALS = (*STOPPING, signal.SIGCHLD)
SHIPPED_DIGITS = arrays.DIGITS
FSYNC, TO_PNG, ARE_NEAR = os.fsync, engine.report.plot.to_png, datasets.identity.are_near
PICTURE = io.BytesIO()
Image.new("RGB", (8, 6)).save(PICTURE, "PNG")
NEAR: dict[tuple, bool] = {}  # {pair of images: whether they are near copies}, of the pairs this process has compared


def change(owner: Any, name: str, value: object) -> None:
    """Replace an attribute of a module or class for the rest of the process, or until `like_a_process` ends."""
    CHANGES.enter_context(mock.patch.object(owner, name, value))


def plant(faults: dict[str, list]) -> None:
    """Call these functions of planted.py."""
    for name, values in faults.items():
        getattr(importlib.import_module("tests.support.planted"), name)(*values)


def save_time() -> None:
    """Leave out what takes long in a short run and hardly depends on it. This is not a fault."""
    # The files of tests need not survive a crash of the machine, and a run would wait for the disk 20 times.
    if os.fsync is FSYNC:  # unless the test has replaced it
        change(os, "fsync", lambda file: None)
    # Each run on a CPU would measure the speed of half precision: a quarter of a short run.
    change(utils.host, "time_products", lambda device, x, weight: 1.0)
    # A check makes updates in float32 and half precision for 3 seconds. Now it makes one in each.
    change(engine.update_times, "SECONDS", 0.0)
    # Drawing the curves takes a third of a short run. The fault draw_curves draws them.
    change(engine.report.plot, "to_png", lambda plot, title: PICTURE.getvalue())
    # Comparing digits that look alike takes longer than training on them, and most tests use the same digits.
    change(datasets.identity, "are_near", compare_once)


def compare_once(one: Image.Image, other: Image.Image, rounds: tuple[tuple, ...]) -> bool:
    """Return whether two images are near copies, and remember it."""
    pair = (rounds, *((each.size, hash(each.tobytes())) for each in (one, other)))
    if pair not in NEAR:
        NEAR[pair] = ARE_NEAR(one, other, rounds)
    return NEAR[pair]


def read_few_digits() -> None:
    """Let the data set `digits` have 45 images of each class: an epoch takes a quarter of the time."""
    arrays.DIGITS = ROOT / "tests/data/digits.npz"


@contextlib.contextmanager
def like_a_process(faults: dict[str, list], environment: dict[str, str]) -> Iterator[None]:
    """Run the block like a new process with these faults and variables, and then undo all that it has changed."""
    state = [(write, read()) for read, write in STATE.items()]
    attributes = [(owner, name, getattr(owner, name)) for owner, name in ATTRIBUTES]
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    variables = dict(os.environ)
    try:
        torch.set_num_threads(1)  # as in forks
        os.environ.clear()
        os.environ.update(environment)
        save_time()
        plant(faults)
        yield
    finally:
        CHANGES.close()
        for write, value in state:
            write(value)
        for owner, name, value in attributes:
            setattr(owner, name, value)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(variables)


def main_of(script: str) -> Callable[[list[str]], int]:
    """Return the function `main` of a program of this checkout."""
    return importlib.import_module(script.removesuffix(".py").replace("/", ".")).main


# --- a process that runs programs one after the other ---


def serve(connection: Connection) -> NoReturn:
    """Run the programs that come through the connection, and send their exit codes, until it is closed."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and shells make background programs ignore signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(EOFError):
        while True:
            code = execute(*connection.recv())
            if torch.distributed.is_initialized():  # after an error, which only the end of this process tells others
                end(code)
            connection.send(code)
    end(0)


def end(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    os._exit(code)


def execute(
    script: str,
    words: Sequence[str],
    outputs: Sequence[str],
    environment: dict[str, str],
    cwd: Path,
    faults: dict[str, list],
) -> int:
    """Run a program that appends to these files for stdout and stderr. Return its exit code."""
    for number, path in enumerate(outputs, start=1):
        with open(path, "ab") as file:
            os.dup2(file.fileno(), number)
    with contextlib.chdir(cwd), like_a_process(faults, environment):
        record_lines()
        code = exit_code(main_of(script), list(words))
    if contracts.BROKEN:  # the program may have caught the error
        print(*contracts.BROKEN, sep="\n", file=sys.stderr)
        contracts.BROKEN.clear()
        code = 1
    gc.collect()  # closes the store, and releases the lock on the run's folder
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def record_lines() -> None:
    """Record which lines the program executes, if the tests of planted mistakes ask for it."""
    if "LINES_FOLDER" in os.environ:
        recorder = importlib.import_module("tests.mistakes.recorder")
        if recorder.RECORDERS:
            recorder.RECORDERS[0].switch(os.environ["LINES_CONTEXT"])
        else:
            recorder.record_program()
