"""Compares the facts that two runs record about their images, as {fact: value}."""

import itertools
from collections.abc import Mapping
from typing import Any

from utils.runs import NUMBERS, SIZES


def changed_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return {fact: both values in words} for the facts that differ between two records.

    A fact in only one of the records is not compared. If the number of training images differs, only this number
    is returned, because it changes all digests of training images. The same holds for validation images.
    """
    changes = {key: _describe(key, then[key], now[key]) for key in now if key in then and then[key] != now[key]}
    follow = {fact for number in NUMBERS.keys() & changes.keys() for fact in NUMBERS[number]}
    return {key: values for key, values in changes.items() if values and key not in follow}


def _describe(key: str, then: Any, now: Any) -> str:
    """Return both values in words, or '' for two lists of file sizes that are mostly equal.

    A few files may have been repaired or replaced. If most sizes differ, the data are different under the same names.
    """
    if not key.startswith(SIZES):
        return f"{then} -> {now}"
    pairs = list(itertools.zip_longest(str(then).split(), str(now).split()))
    number = sum(one != other for one, other in pairs)
    return f"{number} of {len(pairs)} differ" if 2 * number > len(pairs) else ""
