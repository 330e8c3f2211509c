"""The hashes of image names that decide the part of each image."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Set

import numpy as np

HASH_BYTES = 8
MARK = re.compile(rb"\.moved-[0-9]+(?=\.[^./]+$)")  # in the name of a file that release 1.1.0 moved to a taken name


def hashes_of(keys: Iterable[list[bytes]], seed: int, folders: Set[bytes] = frozenset()) -> np.ndarray:
    """Return a uint64 hash of each key, without the first of its folders that is in `folders`, and without MARK.

    Names are normalized first, because a Mac writes umlauts as two characters.
    """
    with_seed, hashes = hashlib.blake2b(digest_size=HASH_BYTES, key=str(seed).encode()), []

    def digest(name: bytes) -> bytes:
        hashed = with_seed.copy()
        hashed.update(name)
        return hashed.digest()

    for chunk in keys:
        together = b"".join(chunk)
        names = chunk if together.isascii() else [composed(name) for name in chunk]
        names = [MARK.sub(b"", name) for name in names] if b".moved-" in together else names
        names = [without_first(folders, name) for name in names] if folders else names
        hashes.append(np.frombuffer(b"".join(map(digest, names)), dtype=">u8").astype(np.uint64))
    return np.concatenate([*hashes, np.empty(0, np.uint64)])


def without_first(folders: Set[bytes], name: bytes) -> bytes:
    """Return a name without the first of its folders that is in `folders`."""
    first, _, below = name.partition(b"/")
    if first in folders and below:
        return below
    *parents, file = name.split(b"/")
    place = next((place for place, parent in enumerate(parents) if parent in folders), len(parents))
    return b"/".join([*parents[:place], *parents[place + 1 :], file])


def composed(name: bytes) -> bytes:
    text = unicodedata.normalize("NFC", name.decode(errors="surrogateescape"))
    return text.encode(errors="surrogateescape")
