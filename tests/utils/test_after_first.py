"""Process.after_first: the other processes wait while the first one works, without waiting in one collective."""

import threading
from types import SimpleNamespace

from tests.support.configs import CPU
from tests.support.forks import DEADLINE
from utils import distributed


def test_while_one_process_is_slow_the_others_hear_from_it(monkeypatch):
    """A collective that is waited for too long ends a run; so none may wait until the cache of another is made."""
    at_once = SimpleNamespace(grace_period=0)
    processes = [
        distributed.Process(CPU, rank, 0, world_size=2, rendezvous=at_once) for rank in range(2)
    ]  # on two machines
    signs, enough = [0, 0], [threading.Event(), threading.Event()]
    meeting, values = threading.Barrier(2, timeout=DEADLINE), {}

    def all_reduce(number, group):
        values[group] = float(number)
        meeting.wait()
        number.fill_(sum(values.values()))
        signs[group] += 1
        if signs[group] >= 5:
            enough[group].set()
        meeting.wait()

    def broadcast(content, src, group):
        meeting.wait()

    monkeypatch.setattr(distributed.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    results = {}

    def live(process):
        def slow_task():
            assert enough[process.rank].wait(DEADLINE)
            enough[1 - process.rank].clear()
            signs[1 - process.rank] = 0
            return f"made by {process.rank}"

        process._host_group = process.rank
        results[process.rank] = process.after_first(slow_task)

    threads = [threading.Thread(target=live, args=(process,)) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: "made by 0", 1: "made by 1"}
