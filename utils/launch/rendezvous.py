"""How the processes of a run find each other, and how those that are left learn which one does not answer."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from utils.errors import ConfigError
from utils.launch.launch_env import Place


class Meeting:
    """A store that all processes of a run reach, and who has come to it."""

    def __init__(self, place: Place, timeout: float):
        """Wait for all, no longer than `timeout` seconds."""
        self.place, self.timeout = place, timeout
        self._where = f"{place.host}:{place.port}" if place.host else "torchrun's store"
        deadline = time.monotonic() + timeout
        try:
            # torchrun keeps its store when it starts its processes again: each start has keys of its own.
            self.store = dist.PrefixStore(f"{place.attempt}/{place.world_size}", self._connect())
            self.store.set(f"who/{place.rank}", f"{socket.gethostname()} {os.getpid()}")
        except (RuntimeError, OSError) as error:
            raise ConfigError(self._why_unreachable(error)) from error
        members = self._wait_for_all(deadline)
        self.hosts = [host for host, _ in members]
        self._pids = [int(pid) for _, pid in members]

    @property
    def patience(self) -> float:
        """How many of the seconds are kept back to find out who is missing."""
        return min(10.0, self.timeout / 4)

    @property
    def local_rank(self) -> int:
        """How many processes with a lower rank are on this machine."""
        place = self.place
        return self.hosts[: place.rank].count(self.hosts[place.rank]) if place.local_rank is None else place.local_rank

    @property
    def local_size(self) -> int:
        """How many processes there are on this machine."""
        return self.hosts.count(self.hosts[self.place.rank])

    def _connect(self) -> dist.Store:
        place, limit = self.place, timedelta(seconds=self.timeout)
        if not place.host:
            return next(rendezvous("env://", place.rank, place.world_size, timeout=limit))[0]
        if place.rank:
            self._wait_for_port()
        # Without its own waiting for all: that does not say who is missing.
        return dist.TCPStore(
            place.host, place.port, place.world_size, place.rank == 0, timeout=limit, wait_for_workers=False
        )

    def _wait_for_port(self) -> None:
        """Until process 0 listens; the store would wait too, but tells of every attempt at length."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                socket.create_connection((self.place.host, self.place.port), timeout=self.timeout).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _why_unreachable(self, error: Exception) -> str:
        place, (reason, *_) = self.place, str(error).splitlines() or ["no answer"]
        if place.rank == 0 and re.search("EADDRINUSE|already in use", str(error)):
            return (
                f"-dist_url: port {place.port} of this machine is in use ({reason}); choose another, or set MASTER_PORT"
            )
        return (
            f"-dist_url: process {place.rank} could not reach process 0 at {self._where} within {self.timeout:g} s ({reason}); is "
            "it running, is that its machine, and is the port open between the machines? DIST.TIMEOUT is how long to wait"
        )

    def _wait_for_all(self, deadline: float) -> list[list[str]]:
        """The machine of each process, and its number there."""
        place = self.place
        keys = [f"who/{rank}" for rank in range(place.world_size)]
        try:
            self.store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            return [each.decode().split() for each in self.store.multi_get(keys)]
        except RuntimeError as error:
            raise ConfigError(self._who_is_missing(keys, error)) from error

    def _who_is_missing(self, keys: list[str], error: RuntimeError) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:  # process 0, which keeps the store, has given up already
            return self._why_unreachable(error)
        return (
            f"-world_size: {named(missing)} of {self.place.world_size} did not come to {self._where} within "
            f"{self.timeout:g} s; start all, each with its own rank. DIST.TIMEOUT is how long to wait"
        )

    def find_silent(self, seconds: float) -> list[int]:
        """Say that this process has lost the others, wait for them to say so too, and return those that do not."""
        silent = [0]  # if nobody answers: process 0, or torchrun on its machine, keeps the store
        # A store that hangs does so for ever.
        thread = threading.Thread(target=self._call_the_roll, args=(silent, seconds), daemon=True)
        thread.start()
        thread.join(seconds + 1)
        return silent

    def _call_the_roll(self, silent: list[int], seconds: float) -> None:
        keys = [f"lost/{rank}" for rank in range(self.place.world_size)]
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.store.set(keys[self.place.rank], "")
            while True:
                silent[:] = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if not silent or time.monotonic() > deadline:
                    return
                time.sleep(0.05)

    def kill(self, ranks: list[int]) -> None:
        """End those of them that the same launcher started here: it would let one that hangs live on for half a minute."""
        for rank in ranks:
            with contextlib.suppress(OSError):  # gone already, or no Linux
                status = Path(f"/proc/{self._pids[rank]}/status").read_text()
                if self.hosts[rank] == self.hosts[self.place.rank] and f"\nPPid:\t{os.getppid()}\n" in status:
                    os.kill(self._pids[rank], signal.SIGKILL)


def named(ranks: list[int]) -> str:
    """process 1, or processes 1, 2."""
    return f"process{'es' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"
