"""DATA.DATA_PATH as a URL: a folder, one tar, or many by WebDataset's braces."""

import re
from typing import NamedTuple

from utils.errors import DataError

MAX_TARS = 1_000_000
NUMBERS = re.compile(r"(\d+)\.\.(\d+)")


class Address(NamedTuple):
    """The folder on the server, and the names of the tars in it; None: those that the server lists."""

    folder: str
    names: list[str] | None


def parse_address(url: str) -> Address:
    """`https://server/{train-{000000..000146},val-{00..06}}.tar`, one tar, or a folder."""
    before = url.partition("{")[0]
    if before == url and not url.lower().endswith(".tar"):
        return Address(url.rstrip("/"), None)
    folder, _, pattern = url[: len(before)].rpartition("/")
    names = sorted(set(expand(pattern + url[len(before) :])))
    if wrong := next((name for name in names if not name.lower().endswith(".tar")), None):
        raise DataError(f"DATA.DATA_PATH: {url} names {wrong!r}, which is no .tar; correct it, or name the folder")
    if outside := next((name for name in names if ".." in name.split("/")), None):
        raise DataError(
            f"DATA.DATA_PATH: {url} names {outside!r}, which leads out of the folder; name a folder above it"
        )
    return Address(folder, names)


def expand(pattern: str) -> list[str]:
    """The texts that a pattern means: {000..146} is a range with leading zeros, {train,val} a choice; both may nest."""
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    depth, commas = 0, []
    for end in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        if depth == 1 and pattern[end] == ",":
            commas.append(end)
        if depth == 0:
            break
    else:
        raise DataError(
            f"DATA.DATA_PATH: a brace in {pattern!r} is not closed; write for example train-{{000000..000146}}.tar"
        )
    edges = [start, *commas, end]
    choices = [pattern[left + 1 : right] for left, right in zip(edges, edges[1:], strict=False)]
    if not commas and (numbers := NUMBERS.fullmatch(choices[0])):
        first, last = numbers.groups()
        width = len(first) if first.startswith("0") else 0
        _check_number(pattern, int(last) - int(first) + 1)
        choices = [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]
    else:
        choices = [each for choice in choices for each in expand(choice)]
    rest = expand(pattern[end + 1 :])
    _check_number(pattern, len(choices) * len(rest))
    return [f"{pattern[:start]}{choice}{each}" for choice in choices for each in rest]


def _check_number(pattern: str, number: int) -> None:
    if not 0 < number <= MAX_TARS:
        raise DataError(f"DATA.DATA_PATH: {pattern!r} means {number:,} tars; write from 1 to {MAX_TARS:,} of them")
