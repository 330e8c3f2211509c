"""Network namespaces that simulate two machines, and the ports on which processes listen."""

import contextlib
import ctypes
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def can_make_networks() -> bool:
    tools = shutil.which("ip") and shutil.which("unshare")
    return bool(tools) and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@pytest.fixture
def two_hosts():
    """Two network namespaces connected by a cable. They simulate two machines with a shared disk and host name."""
    names, here = [f"halfstep{os.getpid()}{letter}" for letter in "ab"], os.getpid()
    cables = [f"hs{here}{letter}"[-14:] for letter in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, cables, strict=True))
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def in_network(name: str, make: Callable[[], T]) -> T:
    """Return the result of a function that a thread in a network namespace calls, such as an object with sockets."""

    def call() -> T:
        with open(f"/run/netns/{name}") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0  # only this thread
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


needs_networks = pytest.mark.skipif(
    not can_make_networks(), reason="network namespaces need root and ip (apt-get install iproute2)"
)


LISTEN = "0A"  # a state in /proc/net/tcp


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports on which these processes wait for connections."""
    places = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            own = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
            tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
            lines = [line.split() for table in tables for line in table.splitlines()]
            sockets = [words for words in lines if words[3] == LISTEN and f"socket:[{words[9]}]" in own]
            places |= {place_of(words[1]) for words in sockets}
    return places


def place_of(text: str) -> tuple[str, int]:
    """Return the address and port of a socket in /proc/net/tcp, which has 32-bit words in native byte order."""
    address, port = text.split(":")
    words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
