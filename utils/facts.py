"""Facts about what a run trains, as {name: value}, and how two records of them differ."""

import itertools
from collections.abc import Mapping
from typing import Any

SIZES = "sizes of the "  # facts that begin with it are the sizes of some files, divided by spaces
OF_A_PART = "names of the {} images", "labels of the {} images", f"{SIZES}{{}} files"
NUMBERS = {f"{part} images": [fact.format(part) for fact in OF_A_PART] for part in ("training", "validation")}
FACTS_OF_IMAGES = [fact for facts in NUMBERS.values() for fact in facts]


def changed_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return {fact: both values in words} of the facts that differ between two records.

    A fact that only one of them has is not compared. If a part has another number of images, only that is returned,
    because all its digests follow from it.
    """
    found = {key: _describe(key, then[key], now[key]) for key in now if key in then and then[key] != now[key]}
    follow = {fact for number in NUMBERS.keys() & found.keys() for fact in NUMBERS[number]}
    return {key: values for key, values in found.items() if values and key not in follow}


def _describe(key: str, then: Any, now: Any) -> str:
    """Return two values in words; nothing for sizes of which most are the same.

    Single files may be repaired or replaced. Where most are others it is other data with the same names.
    """
    if not key.startswith(SIZES):
        return f"{then} -> {now}"
    pairs = list(itertools.zip_longest(str(then).split(), str(now).split()))
    number = sum(one != other for one, other in pairs)
    return f"{number} of {len(pairs)} differ" if 2 * number > len(pairs) else ""
