"""Random numbers as a function of the position in a run, so that a resumed run draws the same numbers."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import torch


def mix(*numbers: int) -> int:
    """Return one 63-bit seed from several numbers. Python's own hash() differs between processes."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_rng(purpose: str, *key: int) -> random.Random:
    """Return a random generator whose seed depends only on its purpose and some numbers.

    The seed is hashed differently than in `mix`. Neither hash may change, because results depend on both.
    """
    digest = hashlib.blake2b(" ".join(map(str, (purpose, *key))).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def seed_update(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch for an update.

    Dropout and drop path depend only on these numbers, so a resume needs no saved state.
    """
    number = mix(seed, step, rank)
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)  # torch.manual_seed takes a millisecond to look for other devices
    else:
        torch.manual_seed(number)


@contextlib.contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Restore the random state at the end of the block, as if no numbers had been drawn inside."""
    devices = [device] if device.type not in ("cpu", "mps") else []  # fork_rng cannot read the state of mps
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def make_deterministic() -> None:
    """Make repeated runs on a GPU bit-identical, at some cost in speed."""
    import os

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory takes time, and halfstep never reads such memory.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
