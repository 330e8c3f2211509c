"""Random numbers as a function of where the run is, so that a resumed run draws the same ones."""

import contextlib
import hashlib
import random
from collections.abc import Iterator

import torch


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers; Python's own hash() differs between processes."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_rng(purpose: str, *key: int) -> random.Random:
    """A generator that depends on its purpose and some numbers alone. Its hash is not `mix`'s, and both must stay."""
    digest = hashlib.blake2b(" ".join(map(str, (purpose, *key))).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def seed_update(seed: int, step: int, rank: int) -> None:
    """Dropout and drop path of an update depend on these three alone: nothing needs to be saved to resume."""
    torch.manual_seed(mix(seed, step, rank))


@contextlib.contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Random numbers go on afterwards as if none had been drawn."""
    devices = [device] if device.type not in ("cpu", "mps") else []  # mps has no state that fork_rng could read
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def make_deterministic() -> None:
    """Bit-identical results on a GPU, at some cost in speed."""
    import os

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
    torch.backends.cudnn.benchmark = False
