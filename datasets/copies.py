"""Decides which copies in a data set are a problem, for -check and halfstep labels."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from datasets.identity import Group, ImageContents
from datasets.image_set import ImageSet

Pair = tuple[int, int]  # an image, and the image of which it is a copy


class Copies(NamedTuple):
    """The images of a group that are the same, and why they are a problem."""

    group: Group
    contradictions: list[Pair]
    in_training: list[Pair]  # validation images; with folds, images with a copy in another fold
    num_repeated: int  # training images with the pixels of an earlier training image


def find_copies(contents: ImageContents, val: ImageSet, folds: Sequence[int] | None = None) -> list[Copies]:
    """Return the copies among the images of `contents`. Those of `val` are validation images.

    `folds`: for a sweep with -folds, the fold that holds out each image (-1: unknown).
    """

    def is_held_out(number: int) -> bool:
        return contents.find(number)[0] is val

    copies = []
    for group in contents.groups():
        if folds is None:
            pairs = copies_in_training(group, is_held_out)
        else:
            known = [number for number in group if folds[number] >= 0]
            pairs = [(number, known[0]) for number in known if folds[number] != folds[known[0]]]
        trained = [first for number, first in group.items() if not is_held_out(number)]
        clashes = contradictions(group, contents.target, val.meaning.near_copies_agree)
        copies.append(Copies(group, clashes, pairs, len(trained) - len({*trained})))
    return copies


def are_equal(group: Group, pair: Pair) -> bool:
    """Return whether the pixels are equal. Otherwise the images are near copies, which only look the same."""
    return group[pair[0]] == group[pair[1]]


def contradictions(group: Group, target_of: Callable[[int], Hashable], near_agree: bool) -> list[Pair]:
    """Return each image with a copy that has another target, and this copy. Equal pixels come first.

    `near_agree`: whether near copies must have the same target, too. They may have near numbers.
    """
    targets, members = {number: target_of(number) for number in group}, defaultdict(list)
    for number, first in group.items():
        members[first].append(number)
    pairs = [pair for each in members.values() for pair in _unlike_the_most(each, targets)]
    if not near_agree:
        return pairs
    named = {number for number, _ in pairs}
    near = _unlike_the_most([*group], targets)
    return pairs + [pair for pair in near if pair[0] not in named and not are_equal(group, pair)]


def _unlike_the_most(numbers: Sequence[int], targets: dict[int, Hashable]) -> list[Pair]:
    """Return the images without the most frequent target, and one image with it."""
    ((most, count),) = Counter(targets[number] for number in numbers).most_common(1)
    if count == len(numbers):
        return []
    usual = next(number for number in numbers if targets[number] == most)
    others = [number for number in numbers if targets[number] != most]
    return [(usual, others[0]), *((number, usual) for number in others)]


def copies_in_training(group: Group, is_held_out: Callable[[int], bool]) -> list[Pair]:
    """Return each validation image with a copy in training, and this copy: an equal image if there is one."""
    trained = [number for number in group if not is_held_out(number)]
    first_equal = {group[number]: number for number in reversed(trained)}
    held_out = (number for number in group if is_held_out(number)) if trained else ()
    return [(number, first_equal.get(group[number], trained[0])) for number in held_out]
