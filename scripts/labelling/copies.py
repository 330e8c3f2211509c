"""Finds images whose copies have another label, and validation images with copies in training."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from datasets.identity import Group
from scripts.labelling.data import DataSet


class Copy(NamedTuple):
    """An image that is like another image, and why that is a problem."""

    image: int
    reason: str
    has_other_label: bool


def find_copies(groups: Iterable[Group], data: DataSet, folds: Sequence[int] | None = None) -> list[Copy]:
    """Return images whose copies have another label, and validation images with copies in training.

    `folds`: for a sweep with -folds, the fold that holds out each image (-1: unknown). With folds, a copy in another
    fold is a copy in training.
    """
    return [copy for group in groups for copy in _other_labels(group, data) or _across(group, data, folds)]


def _other_labels(group: Group, data: DataSet) -> list[Copy]:
    """Return the images without the most frequent label of their group, and one image with it."""
    labels = {number: data.label(number) for number in group}
    counts = Counter(labels.values())
    if len(counts) == 1:
        return []
    most = counts.most_common(1)[0][0]
    usual = next(number for number, label in labels.items() if label == most)
    others = [number for number, label in labels.items() if label != most]
    pairs = [(usual, others[0]), *((number, usual) for number in others)]
    return [
        Copy(one, f"{_how(group, one, other)} to {data.name(other)}, labelled {labels[other]}", True)
        for one, other in pairs
    ]


def _across(group: Group, data: DataSet, folds: Sequence[int] | None) -> list[Copy]:
    """Return validation images with copies in training, or with folds, images outside the fold of the first image."""
    if folds is not None:
        known = [number for number in group if folds[number] >= 0]
        pairs = [(number, known[0], "in another fold") for number in known if folds[number] != folds[known[0]]]
    else:
        trained = next((number for number in group if not data.is_held_out[number]), None)
        pairs = [
            (number, trained, "in training") for number in group if data.is_held_out[number] and trained is not None
        ]
    return [Copy(one, f"{_how(group, one, other)} to {data.name(other)} {where}", False) for one, other, where in pairs]


def _how(group: Group, one: int, other: int) -> str:
    return "equal" if group[one] == group[other] else "nearly equal"
