"""How much the cache of tars may hold, and how much it must."""

import shutil
from pathlib import Path

import numpy as np

from datasets.sources.remote.prefetch import SHARE_AHEAD
from datasets.sources.remote.tar_cache import TarCache
from datasets.sources.shards.source import ShardImages

SHARE_OF_DISK = 0.8  # of what is free, beside what the cache has already


def choose_limit(gigabytes: float | None, total: int, cache: TarCache) -> int:
    """Bytes: those of DATA.REMOTE_CACHE_GB. Not set: all tars, `total` bytes, if the disk has room for them."""
    if gigabytes is not None:
        return int(gigabytes * 1e9)
    return int(min(total / SHARE_AHEAD, SHARE_OF_DISK * (free_bytes(cache.folder) + cache.size())))


def spanned_bytes(images: ShardImages) -> int:
    """The largest tars that DATA.SHUFFLE_BUFFER can mix at any time."""
    starts = images.table.starts if images.rows is None else np.searchsorted(images.rows, images.table.starts)
    counts = np.diff(starts)
    sizes = np.sort(images.table.tar_sizes[counts > 0])
    num_spanned = 2 + np.searchsorted(np.cumsum(np.sort(counts[counts > 0])), 2 * images.shuffle_buffer)
    return int(sizes[::-1][:num_spanned].sum())


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to a folder, which may not exist yet."""
    folder = folder.absolute()
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
