"""Pulls tars before they are needed, in threads of the training processes; nothing waits for it or depends on it."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from datasets.sources.remote.tar_cache import RemoteTar, TarCache
from utils.errors import DataError

NUM_THREADS = 4  # of each process, a tar each
MOST_AHEAD = 256  # tars
SHARE_AHEAD = 0.8  # of the cache's limit: what other tars, of validation for example, leave


class Prefetcher:
    """Keeps the next tars of the epoch in the cache, as many as fit.

    Every process of a host does so. A tar that one is pulling is passed over by the others, so they share the work, and
    none has a part that the others lack.
    """

    def __init__(self, cache: TarCache, pull: Callable[[RemoteTar, Collection[Path], bool], bool]):
        """`pull`: TarCache.pull with its check."""
        self._cache, self._pull = cache, pull
        self.pid = os.getpid()
        self.ahead: Sequence[RemoteTar] = ()
        self._lock, self._num_threads = threading.Lock(), 0

    def aim(self, tars: Sequence[RemoteTar]) -> None:
        """The tars that will be read, in their order. Returns at once."""
        with self._lock:
            self.ahead = tars
            while self._num_threads < NUM_THREADS:
                self._num_threads += 1
                # A daemon: the program's end does not wait for it.
                threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def _work(self) -> None:
        """Pull tars until all that fit are there."""
        passed: set[RemoteTar] = set()  # another process pulls it, or it cannot be pulled: who needs it says why
        try:
            while True:
                fitting = self._fitting()
                tar = next((tar for tar in fitting if tar not in passed and not self._cache.holds(tar)), None)
                if tar is None:
                    return
                passed.add(tar)
                with contextlib.suppress(DataError):
                    self._pull(tar, {self._cache.path(each) for each in fitting}, False)
        finally:
            with self._lock:
                self._num_threads -= 1

    def _fitting(self) -> Sequence[RemoteTar]:
        """The next tars, as many as the cache has room for."""
        tars = self.ahead[:MOST_AHEAD]
        sizes = itertools.accumulate(tar.size for tar in tars)
        return tars[: sum(size <= SHARE_AHEAD * self._cache.limit for size in sizes)]
