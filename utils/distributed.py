"""One process of a run: its rank, its device, and its collectives with the other processes.

With one process, the collectives return their input, so that callers need not check the number of processes.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from utils.errors import AlreadyReportedError, ConfigError, LostProcess, UserError
from utils.host import available_cores, count_cores, cpu_quota, find_devices, share_of_cores
from utils.program import die_with_parent, exit_code_and_message
from utils.text import counted, format_ranks

if TYPE_CHECKING:
    from utils.launch import LaunchedRank
    from utils.rendezvous import Rendezvous


def choose_device(setting: str, local_rank: int, launcher: str = "torchrun") -> torch.device:
    """Return the device for a process with this local rank. Each process has its own device, except on CPUs."""
    kind, count = find_devices(setting)
    if kind == "cpu":
        return torch.device("cpu")
    if count == 1 and launcher != "torchrun":  # Slurm and others may make one device visible to each process
        return torch.device(kind, 0)
    if local_rank >= count:
        raise ConfigError(
            f"-ngpus: process {local_rank + 1} of this machine needs its own {kind} device, but there "
            f"{'is' if count == 1 else 'are'} {count}; start {counted(count, 'process')} or change CUDA_VISIBLE_DEVICES"
        )
    return torch.device(kind, local_rank)


@dataclass
class Process:
    """One process of a run: its rank, its device, and its collectives with the other processes."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 1  # number of the run's processes on this machine
    launcher: str = "none"
    rendezvous: "Rendezvous | None" = None
    num_cores: int = field(default_factory=lambda: count_cores())  # this process's share of the machine's cores
    max_world_size: int = 0  # the largest number of processes of an elastic run; 0: not elastic
    _host_group: Any = None  # a gloo group, because host-side collectives must not wait for a device
    _vote: tuple[dist.Work, torch.Tensor] | None = None  # the all-reduce that delayed_max started, and its numbers

    @property
    def local_ranks(self) -> range:
        """The ranks of the processes on this machine, which launchers number one after the other."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)

    @classmethod
    def start(cls, device_setting: str, launched: "LaunchedRank | None" = None, timeout: float = 1800.0) -> "Process":
        """Join the other processes of the run, if a launcher started several.

        Wait at most `timeout` seconds for them.
        """
        if launched and launched.parent_is_launcher:
            die_with_parent()
        if launched is None or launched.world_size == 1:
            process = cls.alone(device_setting)
            process.max_world_size = launched.max_world_size if launched else 0
            return process
        from utils.rendezvous import Rendezvous

        joined = Rendezvous(launched, timeout)
        device = choose_device(device_setting, joined.local_rank, launched.launcher)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        process = cls(
            device, launched.rank, joined.local_rank, launched.world_size, joined.local_size, launched.launcher, joined
        )
        process.max_world_size = launched.max_world_size
        process._init_groups(timeout)
        process._share_cores()
        return process

    @classmethod
    def alone(cls, device_setting: str) -> "Process":
        """Return the only process of a command.

        In a container, torch uses no more threads than the quota of its CPUs.
        """
        process = cls(choose_device(device_setting, local_rank=0))
        torch.set_num_threads(min(torch.get_num_threads(), process.num_cores))
        return process

    def _init_groups(self, timeout: float) -> None:
        # Host collectives time out first, because only they can report which rank is missing.
        host_timeout = timedelta(seconds=timeout - self.rendezvous.grace_period)
        backend = {"cuda": "nccl", "xpu": "xccl"}.get(self.device.type, "gloo")
        dist.init_process_group(
            backend,
            store=self.rendezvous.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=host_timeout if backend == "gloo" else timedelta(seconds=timeout),
            device_id=self.device if backend == "nccl" else None,
        )
        self._host_group = (
            dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=host_timeout)
        )

    def _share_cores(self) -> None:
        """Compute this process's share of the machine's cores."""
        hosts, own = self.rendezvous.hosts, available_cores()
        of_processes = zip(hosts, self.join([sorted(own)]), strict=True)
        local = [set(cores) for host, cores in of_processes if host == hosts[self.rank]]
        self.num_cores = max(1, int(min(share_of_cores(own, local), cpu_quota() / len(local))))
        if self.device.type != "cpu":  # torch would use all cores for the few operations on the host
            torch.set_num_threads(min(torch.get_num_threads(), self.num_cores))

    def describe(self) -> str:
        """Return a log line with the number of processes, their machines and their launcher."""
        hosts = list(dict.fromkeys(self.rendezvous.hosts))
        return (
            f"{counted(self.world_size, 'process')} on {counted(len(hosts), 'machine')}, started by {self.launcher}; "
            f"process 0 is on {hosts[0]}"
        )

    def name_lost_ranks(self, error: BaseException) -> BaseException:
        """Return the error itself, or a LostProcess that names the ranks that timed out or disconnected."""
        # gloo has no exception class. Its errors are RuntimeErrors that mention its source files or a closed pair.
        is_lost = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error))
        )
        if self.rendezvous is None or not is_lost:
            return error  # an error of this process, not caused by another process
        timed_out = re.search("timed ?out|timeout", str(error), re.IGNORECASE)
        silent = self.rendezvous.unresponsive_ranks(self.rendezvous.grace_period if timed_out else 1.0)
        if not silent:
            return error
        if timed_out:
            self.rendezvous.kill_local(silent)
        where = ", ".join(sorted({self.rendezvous.hosts[rank] for rank in silent}))
        what = f"did not respond within {self.rendezvous.timeout:g} s (DIST.TIMEOUT)" if timed_out else "disconnected"
        return LostProcess(
            f"{format_ranks(silent)} of {self.world_size}, on {where}, {what}; -resume auto continues from the last "
            "save"
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, task: Callable[[], Any], *types: type) -> Any:
        """Run the task on rank 0, however long it takes. Return its result, or raise its error, on every rank.

        `types`: the named tuples in the result (utils/messages.py).
        """
        result = error = None
        with self._keep_alive():
            try:
                result = task() if self.is_first else None
            except Exception as caught:
                error = caught
        if self._host_group is not None:  # None for a single process, or a process that -check simulates
            from utils import messages

            message = str(error) if isinstance(error, UserError) else "process 0 failed"
            outcome = [result, (message, int(exit_code_and_message(error)[0])) if error else None]
            outcome = messages.broadcast_value(outcome, self._host_group, types)
            if not self.is_first:
                result, error = outcome[0], outcome[1] and AlreadyReportedError(*outcome[1])
        if error is not None:
            raise error
        return result

    def after_first(self, task: Callable[[], Any]) -> Any:
        """Run the task on rank 0, then on one rank per machine, then on the rest. Parallel downloads corrupt files."""
        results = []
        self.first(lambda: results.append(task()))
        with self._keep_alive():
            if not self.is_first and self.local_rank == 0:
                results.append(task())
        return results[0] if results else task()

    @contextlib.contextmanager
    def _keep_alive(self) -> Iterator[None]:
        """Let ranks spend hours in this block. All ranks leave it when the last one is done.

        Until then the ranks exchange heartbeats, because a collective that waits longer than DIST.TIMEOUT fails.
        """
        if self._host_group is None:
            yield
            return
        is_done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(self._send_heartbeats, is_done)
            try:
                yield
            finally:
                is_done.set()
        others.result()

    def _send_heartbeats(self, is_done: threading.Event) -> None:
        num_done = torch.zeros(1)
        while num_done < self.world_size:
            is_done.wait(self.rendezvous.grace_period)
            num_done.fill_(is_done.is_set())
            dist.all_reduce(num_done, group=self._host_group)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum the values over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Compute the elementwise maximum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Broadcast the values of rank 0 to all ranks."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, rows: torch.Tensor, length: int) -> torch.Tensor | None:
        """Return all `length` rows on rank 0's host, and None on others. The last ranks may have shorter shards."""
        padded = rows.new_zeros(-(-length // self.world_size), *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = padded.view(-1).view(torch.uint8)  # sent as bytes, because gloo does not support every type
        received = [torch.empty_like(sent) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(sent, received)
        return torch.cat(received).view(rows.dtype).view(-1, *rows.shape[1:])[:length].cpu() if self.is_first else None

    def join(self, items: list, *types: type) -> list:
        """Return the items of all ranks in rank order. Hosts wait for each other but not for devices.

        `types`: the named tuples in the items (utils/messages.py).
        """
        if self.world_size == 1:
            return items
        from utils import messages

        return [item for values in messages.gather_values(items, self._host_group, types) for item in values]

    def all_true(self, flag: bool) -> bool:
        """Return whether the flag is set on every rank."""
        return bool(self.host_min(int(flag)))

    def host_min(self, number: int) -> int:
        """Return the minimum over all ranks. Hosts wait for each other but not for devices."""
        if self._host_group is None:  # a single process, or a process that -check simulates
            return number
        vote = torch.tensor([number])
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._host_group)
        return int(vote)

    def delayed_max(self, numbers: Sequence[int]) -> list[int]:
        """Return the maximum over all ranks of each number of the *previous* call, or zeros in the first call.

        The result is one call late, so that hosts exchange the numbers while devices compute, without waiting.
        """
        if self.world_size == 1:
            return list(numbers)
        largest = self._wait_for_vote() or [0] * len(numbers)
        vote = torch.tensor(numbers)
        self._vote = (dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._host_group, async_op=True), vote)
        return largest

    def _wait_for_vote(self) -> list[int]:
        """Return the result of the all-reduce in progress, or [] if there is none."""
        if self._vote is None:
            return []
        work, numbers = self._vote
        self._vote = None
        work.wait()
        return numbers.tolist()

    def close(self) -> None:
        """Wait for all processes and leave the process group."""
        if self.world_size > 1:
            self._wait_for_vote()
            dist.barrier(group=self._host_group)
            dist.destroy_process_group()
