"""Starts programs as forks of one process that has imported torch already: a start costs milliseconds, not three seconds.

The server imports and does nothing else: no tensor operation, no thread, no CUDA. Each fork leaves `serve` with its
request and becomes that program. `forks.py` is the client.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

MAX_BYTES = 1 << 16
# What runs import, much of it late. Nothing depends on this list but the time that the tests take.
MODULES = (
    "main_single_gpu main_multi_gpu engine.run timm timm.data torchvision.datasets torch.utils.tensorboard "
    "matplotlib.pyplot matplotlib.backends.backend_agg safetensors.torch numpy.random "
    "PIL.JpegImagePlugin PIL.PngImagePlugin"
).split()


class Server:
    def __init__(self, requests: socket.socket):
        self._requests = requests
        self._clients: dict[int, socket.socket] = {}  # {pid: who waits for the end of that fork}
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> dict:
        """Fork for each request. Returns the request, in the fork only. The server ends when the tests have."""
        poll = select.poll()
        poll.register(self._requests, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == self._woken:
                    os.read(self._woken, MAX_BYTES)
                    self._report_ends()
                    continue
                message, (*files,), _, _ = socket.recv_fds(self._requests, MAX_BYTES, 3)
                while message and not message.endswith(b"\n"):
                    message += self._requests.recv(MAX_BYTES)
                if not message:
                    self._end()
                pid = os.fork()
                if not pid:
                    return self._enter(json.loads(message), *files)
                *outputs, client = files
                for each in outputs:
                    os.close(each)
                self._clients[pid] = socket.socket(fileno=client)
                self._clients[pid].send(f"{pid}\n".encode())

    def _report_ends(self) -> None:
        for pid in list(self._clients):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._clients.pop(pid) as client, contextlib.suppress(OSError):  # nobody waits any more
                    client.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())

    def _end(self) -> None:
        for pid in self._clients:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os._exit(0)

    def _enter(self, request: dict, output: int, errors: int, client: int) -> dict:
        """Give the fork a session, files, folder and environment of its own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for each in (output, errors, client, self._woken):
            os.close(each)
        for each in (self._requests, *self._clients.values()):
            each.close()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        return request


def become(request: dict) -> NoReturn:
    """Be the program that was requested, to its end."""
    code = 1
    try:
        run_program(request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # taking down the interpreter with all that the server imported takes half a second


def run_program(request: dict) -> None:
    """As `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` does."""
    for name, arguments in request["faults"].items():
        getattr(importlib.import_module("tests.support.planted"), name)(*arguments)
    program = request["program"]
    sys.argv = [program, *request["arguments"]]
    if program.endswith(".py"):
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for each in MODULES:
        with contextlib.suppress(ImportError):  # some are optional
            importlib.import_module(each)
    gc.collect()
    gc.freeze()  # what is there now stays: a fork that looks for garbage need not copy it
    become(Server(socket.socket(fileno=int(sys.argv[1]))).serve())
