"""Lets the processes of a run find each other, and later find a process that no longer responds."""

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

from utils.errors import ConfigError, LostProcess
from utils.launch import LaunchedRank
from utils.text import format_ranks


class Rendezvous:
    """A key-value store shared by all processes of a run, and the list of processes that joined it."""

    def __init__(self, launched: LaunchedRank, timeout: float):
        """Open the store and wait for all processes, at most `timeout` seconds."""
        self.launched, self.timeout = launched, timeout
        self._where = f"{launched.host}:{launched.port}" if launched.host else launched.file or "torchrun's store"
        deadline = time.monotonic() + timeout
        try:
            self.store = self._open_store()
            self.store.set(f"who/{launched.rank}", f"{socket.gethostname()} {os.getpid()}")
        except (RuntimeError, OSError) as error:
            raise self._unreachable_error(error) from error
        members = self._wait_for_all(deadline)
        self.hosts = [host for host, _ in members]
        self._pids = [int(pid) for _, pid in members]
        self._unresponsive: list[int] = []  # written by the thread of unresponsive_ranks

    @property
    def grace_period(self) -> float:
        """The part of the timeout, in seconds, that is reserved for finding the missing process."""
        return min(10.0, self.timeout / 4)

    @property
    def local_rank(self) -> int:
        """The launcher's local rank, or the number of lower ranks on this machine."""
        if self.launched.local_rank is not None:
            return self.launched.local_rank
        return self.hosts[: self.launched.rank].count(self.hosts[self.launched.rank])

    @property
    def local_size(self) -> int:
        """The number of processes on this machine."""
        return self.hosts.count(self.hosts[self.launched.rank])

    def _open_store(self) -> dist.Store:
        launched = self.launched
        if launched.host:
            return _tcp_store(launched.host, launched.port, launched.rank == 0, self.timeout)
        if launched.file:
            return dist.FileStore(launched.file)
        limit = timedelta(seconds=self.timeout)
        store = next(rendezvous("env://", launched.rank, launched.world_size, timeout=limit))[0]
        # torchrun keeps its store across restarts, so each start gets its own key prefix.
        return dist.PrefixStore(f"{launched.restart_count}/{launched.world_size}", store)

    def _unreachable_error(self, error: Exception) -> Exception:
        """Return the error to raise if the store of process 0 cannot be opened or used. `error` says why."""
        rank = self.launched.rank
        reason = next(iter(str(error).splitlines()), "no answer")
        if rank == 0 and re.search("EADDRINUSE|already in use", str(error)):
            return ConfigError(
                f"-dist_url: port {self.launched.port} of this machine is in use ({reason}); choose another port, or "
                "set MASTER_PORT"
            )
        return LostProcess(
            f"-dist_url: process {rank} could not reach process 0 at {self._where} within {self.timeout:g} s "
            f"({reason}); check that process 0 is running, that this is the address of its machine, and that the port "
            "is open between the machines. DIST.TIMEOUT sets how long to wait"
        )

    def _wait_for_all(self, deadline: float) -> list[list[str]]:
        """Wait for all ranks, and return the host name and process id of each. Raise LostProcess after the deadline."""
        keys = [f"who/{rank}" for rank in range(self.launched.world_size)]
        pause = 0.05 + len(keys) / 1000  # seconds; thousands of processes must not overload the store
        try:
            while not self.store.check(keys):
                if time.monotonic() > deadline:
                    raise self._missing_ranks_error(keys)
                time.sleep(pause)  # Python handles signals here, and would not in store.wait
            return [each.decode().split() for each in self.store.multi_get(keys)]
        except RuntimeError as error:  # process 0, which serves the store, has already given up
            raise self._unreachable_error(error) from error

    def _missing_ranks_error(self, keys: list[str]) -> Exception:
        """Return the error to raise after the deadline: it names the ranks that did not join."""
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        return LostProcess(
            f"-world_size: {format_ranks(missing)} of {self.launched.world_size} did not join {self._where} within "
            f"{self.timeout:g} s; start all processes, each with its own rank. DIST.TIMEOUT sets how long to wait"
        )

    def unresponsive_ranks(self, seconds: float) -> list[int]:
        """Return the ranks that do not respond within `seconds`.

        Every rank that notices a loss calls this: it announces itself in the store, and waits for the other ranks.
        """
        # If the store is gone, report rank 0, because rank 0, or torchrun on the machine of rank 0, serves the store.
        self._unresponsive = [0]
        # Poll in a thread, because a request to a hanging store never returns.
        thread = threading.Thread(target=self._poll_ranks, args=(seconds,), daemon=True)
        thread.start()
        thread.join(seconds + 1)
        return self._unresponsive

    def _poll_ranks(self, seconds: float) -> None:
        """Announce this rank, and update `_unresponsive` until every rank is there or the time is over."""
        keys = [f"lost/{rank}" for rank in range(self.launched.world_size)]
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):  # the store is gone
            self.store.set(keys[self.launched.rank], "")
            while True:
                self._unresponsive = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                if not self._unresponsive or time.monotonic() > deadline:
                    return
                time.sleep(0.05)

    def kill_local(self, ranks: list[int]) -> None:
        """Kill these ranks if they run on this machine and have the same launcher as this process.

        Otherwise the launcher would let them hang for 30 s.
        """
        for rank in ranks:
            with contextlib.suppress(OSError):  # the process has already ended, or this is not Linux
                status = Path(f"/proc/{self._pids[rank]}/status").read_text()
                if self.hosts[rank] == self.hosts[self.launched.rank] and f"\nPPid:\t{os.getppid()}\n" in status:
                    os.kill(self._pids[rank], signal.SIGKILL)


def _tcp_store(host: str, port: int, is_host: bool, timeout: float) -> dist.TCPStore:
    """Serve the key-value store in process 0, or connect to it. Process 0 may start later than this process."""
    if not is_host:
        _wait_for_server(host, port, timeout)
    # With wait_for_workers, an error would not name the missing process.
    return dist.TCPStore(host, port, None, is_host, timedelta(seconds=timeout), wait_for_workers=False)


def _wait_for_server(host: str, port: int, timeout: float) -> None:
    """Wait until a server listens at this address. Raise OSError after the timeout."""
    # TCPStore would wait twice as long, and then print a C++ stack trace (torch 2.15).
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
