"""Ports that are free, and the environment that a launcher gives each of its processes."""

import itertools
import os
import socket

# Not those that the system gives to whoever connects to somebody, as another test does in the meantime; each of the
# processes in which tests run looks through them from a place of its own.
_PORTS = itertools.cycle(range(10000, 30000))
_PORTS = itertools.islice(_PORTS, os.getpid() * 101 % 20000, None)


def free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: the ports are a cycle")


def as_ranks(world_size: int) -> list[dict[str, str]]:
    """For each process its variables; none for a single one."""
    if world_size == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank)} for rank in range(world_size)]
