"""Other numbers for the classes of image sets."""

import numpy as np

from datasets.types import ImageSet

Numbered = tuple[list[ImageSet], list[str]]  # the parts, and lines for the log


def renumber(parts: list[ImageSet], classes: list[str]) -> list[ImageSet]:
    """Number the classes of all parts as in `classes`, which must include the class of every image."""
    lookup = np.array(parts[0].meaning.numbering.numbers(parts[0].classes, classes), dtype=np.int32)
    parts = [part.with_facts(classes=list(classes)) for part in parts]
    if np.array_equal(lookup, np.arange(len(lookup))):
        return parts  # without a copy, because all processes share the targets of an index
    renumbered = (part.meaning.renumber(part.targets, lookup) for part in parts)
    return [
        part.with_facts(meaning=kind, targets=targets) for part, (kind, targets) in zip(parts, renumbered, strict=True)
    ]
