"""Finds images whose copies have another label, and validation images with copies in training."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from datasets.copies import are_equal, contradictions, copies_in_training
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
    copies = []
    for group in groups:
        found = contradictions(group, data.label, data.val.meaning.near_copies_agree)
        copies += [_copy(group, pair, data, f", labelled {data.label(pair[1])}", True) for pair in found]
        if found:
            continue
        pairs, where = copies_in_training(group, lambda number: bool(data.is_held_out[number])), "in training"
        if folds is not None:
            known, where = [number for number in group if folds[number] >= 0], "in another fold"
            pairs = [(number, known[0]) for number in known if folds[number] != folds[known[0]]]
        copies += [_copy(group, pair, data, f" {where}", False) for pair in pairs]
    return copies


def _copy(group: Group, pair: tuple[int, int], data: DataSet, what: str, has_other_label: bool) -> Copy:
    how = "equal" if are_equal(group, pair) else "nearly equal"
    return Copy(pair[0], f"{how} to {data.name(pair[1])}{what}", has_other_label)
