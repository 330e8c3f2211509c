"""How processes meet, and how messages name a rank that does not join or respond."""

import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from engine.check import simulated_process
from tests.support.configs import CPU
from tests.support.forks import DEADLINE
from tests.support.refusals import assert_names, refused
from tests.support.runs import free_port
from utils import distributed, messages
from utils.distributed import Process
from utils.errors import ConfigError, LostProcess
from utils.launch import LaunchedRank
from utils.rendezvous import Rendezvous


def test_process_takes_the_only_visible_device_except_under_torchrun(monkeypatch):
    monkeypatch.setattr(distributed, "find_devices", lambda setting: ("cuda", 1))
    assert distributed.choose_device("auto", 3, "Slurm") == torch.device("cuda", 0)
    assert simulated_process("auto", world_size=1, local_size=1).device == torch.device("cuda", 0)
    with refused(ConfigError, "-ngpus", "process 4", "cuda"):
        distributed.choose_device("auto", 3, "torchrun")


def test_incompatible_driver_is_reported_instead_of_using_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(ConfigError, "DEVICE is auto", "driver", "DEVICE=cpu"):
        distributed.find_devices("auto")


@pytest.mark.parametrize(("rank", "names"), [(0, ["-world_size", "process 1 of 2"]), (1, ["-dist_url", "process 0"])])
def test_absent_process_is_named_within_the_timeout(rank, names):
    port = free_port()
    with refused(LostProcess, *names, f"127.0.0.1:{port}", "1 s", "DIST.TIMEOUT"):
        Rendezvous(LaunchedRank("test", rank, 2, None, "127.0.0.1", port), timeout=1.0)


def test_signal_is_handled_while_a_process_waits_for_others():
    """If it were handled only after the timeout, the other process would be missing then."""
    port = free_port()

    def join(*_) -> None:
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
        store.set("who/1", "other 2")

    before = signal.signal(signal.SIGUSR2, join)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        joined = Rendezvous(LaunchedRank("test", 0, 2, None, "127.0.0.1", port), timeout=10.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert joined.hosts == [socket.gethostname(), "other"]


def test_error_names_port_used_by_another_program():
    with (
        socket.create_server(("", 0)) as other,
        refused(ConfigError, "-dist_url", other.getsockname()[1], "MASTER_PORT"),
    ):
        Rendezvous(LaunchedRank("test", 0, 2, None, "127.0.0.1", other.getsockname()[1]), timeout=1.0)


@pytest.mark.parametrize("error", [socket.gaierror("unknown name"), TimeoutError(), OSError("no route to host")])
def test_rank_retries_until_the_address_of_rank_0_works(monkeypatch, error):
    """A job's host names may resolve, and its network may be up, only after its processes have started."""
    store = dist.TCPStore("127.0.0.1", free_port(), None, is_master=True, wait_for_workers=False)
    store.set("who/0", "host 1")
    connect, errors = socket.create_connection, [error]

    def fail_first(*arguments, **options):
        if errors:
            raise errors.pop()
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", fail_first)
    joined = Rendezvous(LaunchedRank("test", 1, 2, None, "127.0.0.1", store.port), timeout=DEADLINE)
    assert joined.hosts == ["host", socket.gethostname()] and not errors


def test_ranks_started_without_launcher_find_their_local_ranks():
    ranks = [LaunchedRank("test", rank, 3, None, "127.0.0.1", port) for port in [free_port()] for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(lambda rank: Rendezvous(rank, timeout=DEADLINE), ranks))
        assert [each.local_rank for each in joined] == [0, 1, 2]
        # The second and third lost the others and say so; the first does not.
        list(pool.map(lambda each: each.unresponsive_ranks(0.5), joined[1:]))
    assert joined[1].unresponsive_ranks(0.0) == [0]


def test_hanging_rank_is_killed_only_on_the_same_machine(monkeypatch):
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    own, pid, port = threading.local(), os.getpid(), free_port()
    monkeypatch.setattr(socket, "gethostname", lambda: own.host)
    monkeypatch.setattr(os, "getpid", lambda: getattr(own, "pid", pid))
    monkeypatch.setattr(os, "getppid", lambda: pid)

    def join(rank: int) -> Rendezvous:
        own.host, own.pid = "ab"[rank // 2], children[rank].pid  # two ranks on each machine
        return Rendezvous(LaunchedRank("test", rank, 4, None, "127.0.0.1", port), timeout=DEADLINE)

    try:
        with ThreadPoolExecutor(4) as pool:
            joined = list(pool.map(join, range(4)))
        joined[2].kill_local([0, 3])
        assert children[3].wait(DEADLINE) == -signal.SIGKILL and children[0].poll() is None
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_process_with_its_own_error_blames_no_other_process():
    process = distributed.Process(torch.device("cpu"), 1, 1, 2, rendezvous=object())
    error = RuntimeError("CUDA out of memory")
    assert process.name_lost_ranks(error) is error


@pytest.mark.parametrize(
    ("text", "timed_out"),
    [
        ("[/third_party/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", True),
        ("Application timeout caused pair closure", True),
        ("[/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:80", False),
    ],
)
def test_silent_process_is_named_for_any_gloo_error(text, timed_out):
    killed = []
    rendezvous = SimpleNamespace(
        timeout=9.0,
        grace_period=0.1,
        hosts=["a", "b"],
        unresponsive_ranks=lambda seconds: [1],
        kill_local=killed.extend,
    )
    process = distributed.Process(torch.device("cpu"), world_size=2, rendezvous=rendezvous)
    error = process.name_lost_ranks(RuntimeError(text))
    assert isinstance(error, LostProcess)
    assert_names(str(error), "process 1 of 2", "b", *["DIST.TIMEOUT"] * timed_out)
    assert killed == [1] * timed_out, "a hanging process is killed; a disconnected one has already ended"


def test_slow_process_keeps_sending_heartbeats_to_others(monkeypatch):
    """A run ends if a collective waits too long, so no process may wait silently while another builds a cache."""
    at_once = SimpleNamespace(grace_period=0)
    processes = [
        distributed.Process(CPU, rank, 0, world_size=2, rendezvous=at_once) for rank in range(2)
    ]  # on two machines
    signs, enough, made = [0, 0], [threading.Event(), threading.Event()], []
    meeting, values = threading.Barrier(2, timeout=DEADLINE), {}

    def all_reduce(number, group):
        values[group] = float(number)
        meeting.wait()
        number.fill_(sum(values.values()))
        signs[group] += 1
        if signs[group] >= 5:
            enough[group].set()
        meeting.wait()

    def broadcast(value, group, types):
        meeting.wait()
        return value

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(messages, "broadcast_value", broadcast)

    def live(process):
        def slow_task():
            made.append(process.rank)
            assert enough[process.rank].wait(DEADLINE)
            enough[1 - process.rank].clear()
            signs[1 - process.rank] = 0
            return f"made by {process.rank}"

        process._host_group = process.rank
        return process.after_first(slow_task)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(live, processes)) == ["made by 0", "made by 1"] and made == [0, 1]


def test_delayed_maximum_is_returned_by_the_next_call(monkeypatch):
    class Work:
        def __init__(self, vote):
            self.vote = vote

        def wait(self):
            self.vote.fill_(15)

    process = Process(CPU)
    monkeypatch.setattr(process, "world_size", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda vote, *arguments, **options: Work(vote))
    assert process.delayed_max([0]) == [0]
    assert process.delayed_max([0]) == [15]
