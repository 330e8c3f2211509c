"""Says which share of the images whole groups hold out, and which DATA.VAL_FRACTION would be nearer to it."""

from collections.abc import Callable

import numpy as np

from utils.text import counted

NUM_TRIED = 32  # divisions that are nearest to the wanted share by the hashes alone; classes can move groups
LARGEST, MOST_DIGITS = 0.9, 6  # of a DATA.VAL_FRACTION that is named


def describe_groups(
    hashes: np.ndarray, held_out: np.ndarray, record: dict, hold_out: Callable[[dict], np.ndarray]
) -> str:
    """Return a note about the held-out share. `hashes`: equal in a group. `hold_out`: draws with another fraction."""
    fraction, share = record["fraction"], float(held_out.mean())
    groups = counted(len(np.unique(hashes[held_out])), "whole group")
    text = f"DATA.VAL_FRACTION {fraction:g} holds out {share:.1%} of the images, {groups} of {record['group_by']}"
    ordered, sizes = np.unique(hashes, return_counts=True)
    shares = np.append(0, sizes.cumsum()[:-1]) / len(hashes)  # of no group, of the group with the lowest hash, ...
    # A fraction between two of these bounds holds out such a share.
    bounds = [0.0, *np.minimum(ordered / 2**64, LARGEST).tolist()]
    tried = [(abs(share - fraction), share, fraction)]
    for number in np.argsort(np.abs(shares - fraction), kind="stable")[:NUM_TRIED].tolist():
        if other := shortest_between(*bounds[number : number + 2]):
            reached = float(hold_out({**record, "fraction": other}).mean())
            tried.append((abs(reached - fraction), reached, other))
    _, reached, nearest = min(tried, key=lambda attempt: attempt[0])
    if nearest == fraction:
        return f"{text} (DATA.GROUP_BY)"
    return f"{text} (DATA.GROUP_BY); DATA.VAL_FRACTION={nearest:g} would hold out {reached:.1%}"


def shortest_between(low: float, high: float) -> float | None:
    """Return the shortest decimal number above `low` and at most `high`, or None if it is long."""
    tried = ((int(low * 10**digits) + 1) / 10**digits for digits in range(1, MOST_DIGITS + 1))
    return next((number for number in tried if number <= high), None)
