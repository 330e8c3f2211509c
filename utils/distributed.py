"""Which of the run's processes this one is, on which device, and the few things that they do together.

With one process every method returns its input: nobody else asks how many there are.
"""

import contextlib
import ctypes
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from utils.errors import ConfigError, LostProcess, ToldError, UserError
from utils.launch.launch_env import Asked, find_place
from utils.launch.rendezvous import Meeting, named


def find_devices(setting: str) -> tuple[str, int]:
    """The kind of device to use and how many are visible; `auto` takes the best kind there is."""
    counts = {"cuda": torch.cuda.device_count, "xpu": torch.xpu.device_count, "mps": torch.mps.device_count}
    for kind, count in counts.items():
        if setting in ("auto", kind) and count():
            return kind, count()
    if setting not in ("auto", "cpu"):
        raise ConfigError(f"DEVICE is {setting}, but this machine or this build of torch has none; use DEVICE=auto")
    return "cpu", 1


def choose_device(setting: str, local_rank: int, launcher: str = "torchrun") -> torch.device:
    """The device of one of a machine's processes: each has its own, but for CPUs, which they share."""
    kind, count = find_devices(setting)
    if kind == "cpu":
        return torch.device("cpu")
    if count == 1 and launcher != "torchrun":  # Slurm and others may show each process its own device alone
        return torch.device(kind, 0)
    if local_rank >= count:
        raise ConfigError(
            f"-ngpus: process {local_rank + 1} of this machine has no {kind} device of its own, there are {count}; "
            f"start {count} processes or change CUDA_VISIBLE_DEVICES"
        )
    return torch.device(kind, local_rank)


@dataclass
class Process:
    """One process of a run."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_size: int = 1  # processes on this machine
    launcher: str = "none"
    _meeting: Meeting | None = None
    _host_group: Any = None  # gloo: what the hosts tell each other must not wait for a device
    _vote: tuple = field(default=(None, None))

    @classmethod
    def start(cls, device_setting: str, environment: Mapping[str, str], asked: Asked | None = None) -> "Process":
        """The process that the launcher's environment or the flags describe, joined to the others."""
        asked = asked or Asked()
        place = find_place(environment, asked)
        if place is None or place.world_size == 1:
            return cls(choose_device(device_setting, 0))
        meeting = Meeting(place, asked.timeout)
        device = choose_device(device_setting, meeting.local_rank, place.launcher)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        process = cls(
            device, place.rank, meeting.local_rank, place.world_size, meeting.local_size, place.title, meeting
        )
        if place.is_watched:
            die_with_parent()
        process._join(asked.timeout)
        return process

    def _join(self, timeout: float) -> None:
        # Hosts lose patience before devices do, as they alone can say whom they wait for.
        of_hosts = timedelta(seconds=timeout - self._meeting.patience)
        backend = {"cuda": "nccl", "xpu": "xccl"}.get(self.device.type, "gloo")
        dist.init_process_group(
            backend,
            store=self._meeting.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=of_hosts if backend == "gloo" else timedelta(seconds=timeout),
            device_id=self.device if backend == "nccl" else None,
        )
        self._host_group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend="gloo", timeout=of_hosts)

    def describe(self) -> str:
        """How many processes there are, and who started them."""
        hosts = list(dict.fromkeys(self._meeting.hosts))
        return (
            f"{self.world_size} processes on {len(hosts)} machine{'s' * (len(hosts) > 1)}, started by {self.launcher}; "
            f"process 0 is on {hosts[0]}"
        )

    def explain(self, error: BaseException) -> BaseException:
        """The error, or one that names the processes that were waited for in vain or broke off."""
        # gloo has no error of its own: these are RuntimeErrors that name its files, or the second that fails for the first.
        is_lost = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and re.search("gloo|pair closure", str(error))
        )
        if self._meeting is None or not is_lost:
            return error  # this process's own
        timed_out = re.search("timed ?out|timeout", str(error), re.IGNORECASE)
        silent = self._meeting.find_silent(self._meeting.patience if timed_out else 1.0)
        if not silent:
            return error
        if timed_out:
            self._meeting.kill(silent)
        where = ", ".join(sorted({self._meeting.hosts[rank] for rank in silent}))
        what = f"did not arrive within {self._meeting.timeout:g} s (DIST.TIMEOUT)" if timed_out else "broke off"
        return LostProcess(
            f"{named(silent)} of {self.world_size}, on {where}, {what}; -resume auto goes on from the last save"
        )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first(self, task: Callable[[], Any]) -> Any:
        """Rank 0 does the task, however long it takes; all get its result, or its error."""
        with self._all_wait():
            result, error = self._attempt(task) if self.is_first else (None, None)
        if self.world_size > 1:
            facts = (str(error), error.code) if isinstance(error, UserError) else ("process 0 failed",)
            told = [result, facts if error else None]
            dist.broadcast_object_list(told, src=0, group=self._host_group)
            if not self.is_first:
                result, error = told[0], told[1] and ToldError(*told[1])
        if error is not None:
            raise error
        return result

    def after_first(self, task: Callable[[], Any]) -> Any:
        """All do the task, rank 0 before the others, then one process a machine: many that download one file corrupt it."""
        results = []
        self.first(lambda: results.append(task()))
        with self._all_wait():
            if not self.is_first and self.local_rank == 0:
                results.append(task())
        return results[0] if results else task()

    @contextlib.contextmanager
    def _all_wait(self) -> Iterator[None]:
        """What is done in here takes some processes hours; all leave it when the last one is done.

        Meanwhile they tell each other that they live: a collective that waits for half an hour is an error.
        """
        if self.world_size == 1:
            yield
            return
        is_done = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(self._tell_until_all_are, is_done)
            try:
                yield
            finally:
                is_done.set()
        others.result()

    def _tell_until_all_are(self, is_done: threading.Event) -> None:
        num_done = torch.zeros(1)
        while num_done < self.world_size:
            is_done.wait(self._meeting.patience)
            num_done.fill_(is_done.is_set())
            dist.all_reduce(num_done, group=self._host_group)

    @staticmethod
    def _attempt(task: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return task(), None
        except Exception as error:
            return None, error

    def wrap(self, model: torch.nn.Module, accumulates: bool, reduce: torch.dtype | None = None) -> torch.nn.Module:
        """The model with its gradients averaged over the processes, to which they travel as `reduce`, or as they are."""
        if self.world_size == 1:
            return model
        replica = torch.nn.parallel.DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            # A static graph must be the same in every pass; with accumulation passes differ in whether they sync.
            static_graph=not accumulates,
        )
        if reduce is not None:
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

            compress = {torch.float16: hooks.fp16_compress_hook, torch.bfloat16: hooks.bf16_compress_hook}
            replica.register_comm_hook(None, compress[reduce])
        return replica

    def sync_gradients(self, model: torch.nn.Module, now: bool):
        """Around forward and backward: gradients are averaged only when `now`, else kept for later."""
        return contextlib.nullcontext() if now or self.world_size == 1 else model.no_sync()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of all processes, each number by itself."""
        if self.world_size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, rows: torch.Tensor, length: int) -> torch.Tensor | None:
        """On process 0's host: the tensor of so many rows that each process has its share of, the last ones less."""
        padded = rows.new_zeros(-(-length // self.world_size), *rows.shape[1:])
        padded[: len(rows)] = rows
        sent = padded.view(-1).view(torch.uint8)  # whatever the type: gloo does not know all of them
        received = [torch.empty_like(sent) for _ in range(self.world_size)] if self.is_first else None
        dist.gather(sent, received)
        return torch.cat(received).view(rows.dtype).view(-1, *rows.shape[1:])[:length].cpu() if self.is_first else None

    def all_say(self, yes: bool) -> bool:
        """Whether every process says so."""
        return bool(self.smallest(int(yes)))

    def smallest(self, number: int) -> int:
        """Of the numbers of all processes. All hosts wait for each other, and for no device."""
        if self.world_size == 1:
            return number
        vote = torch.tensor([number])
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=self._host_group)
        return int(vote)

    def agree_on(self, number: int) -> int:
        """The largest number that any process gave in the *previous* call, the same on every process.

        One call late, so that hosts exchange it while their devices compute and nobody waits.
        """
        if self.world_size == 1:
            return number
        work, votes = self._vote
        if work is not None:
            work.wait()
        vote = torch.tensor([number])
        self._vote = (dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._host_group, async_op=True), vote)
        return int(votes) if work is not None else 0

    def close(self) -> None:
        """Leave the others in good order."""
        if self.world_size > 1:
            self.agree_on(0)  # waits for the vote under way
            self._vote[0].wait()
            dist.destroy_process_group()


def die_with_parent() -> None:
    """Linux: be killed when the launcher is, even by kill -9, so that no orphan holds the device."""
    if os.uname().sysname == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
