"""How messages write quantities."""

import math


def format_bytes(count: float) -> str:
    """1.5 GiB, 12 MiB; rounded up below a GiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{math.ceil(count / 2**20):,} MiB"
