"""Processes simulated by threads of the test."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.support.configs import CPU
from utils.distributed import Process


class Threads:
    """Simulated processes, one thread each. Their collectives exchange values in memory."""

    def __init__(self, count: int):
        self.processes = [self.Rank(CPU, rank=rank, world_size=count) for rank in range(count)]
        self.given, self.barrier = [None] * count, threading.Barrier(count)
        for each in self.processes:
            each.threads = self

    class Rank(Process):
        def join(self, items):
            threads = self.threads
            threads.given[self.rank] = items
            threads.barrier.wait(10)
            found = [item for each in threads.given for item in each]
            threads.barrier.wait(10)
            return found

        def sum(self, values):
            return torch.stack(self.join([values])).sum(0)

    def run(self, task):
        with ThreadPoolExecutor(len(self.processes)) as pool:
            return list(pool.map(task, self.processes))
