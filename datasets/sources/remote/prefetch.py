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
        self.ahead: Sequence[RemoteTar] = ()  # as they were given
        self._paths: set[Path] = set()
        self._lock, self._num_threads = threading.Lock(), 0
        self._fitting: list[RemoteTar] = []  # the next tars, as many as the cache has room for
        self._begun = 0  # so many of them

    def aim(self, tars: Sequence[RemoteTar]) -> None:
        """The tars that will be read, in their order. Returns at once."""
        sizes = itertools.accumulate(tar.size for tar in tars)
        num_fitting = sum(size <= SHARE_AHEAD * self._cache.limit for size in sizes)
        with self._lock:
            self.ahead, self._fitting, self._begun = tars, tars[:num_fitting], 0
            self._paths = {self._cache.path(tar) for tar in self._fitting}
            while self._num_threads < NUM_THREADS:
                self._num_threads += 1
                # A daemon: the program's end does not wait for it.
                threading.Thread(target=self._work, name="prefetch", daemon=True).start()

    def _work(self) -> None:
        """Pull tars until all that fit have been begun."""
        while tar := self._next():
            # Another process may be pulling it. If it cannot be pulled, the process that needs it says why.
            with contextlib.suppress(DataError, OSError):
                if not self._cache.holds(tar):
                    self._pull(tar, self._paths, False)

    def _next(self) -> RemoteTar | None:
        with self._lock:
            if self._begun < len(self._fitting):
                self._begun += 1
                return self._fitting[self._begun - 1]
            self._num_threads -= 1
            return None
