"""Class numbers that follow from the labels: from the names in them, or from labels that are numbers."""

from collections import Counter
from collections.abc import Sequence
from unicodedata import normalize

from datasets.targets.numbering import ByList
from utils.text import first_of, warning


class ByName(ByList):
    """The labels are class names. Their order gives the numbers."""

    def names(self, classes: Sequence[str]) -> tuple[list[str], list[str]]:
        """Sort classes whose names are numbers by value, so that 9 comes before 10."""
        if not are_numbers(classes):
            return list(classes), []
        by_value = sorted(classes, key=lambda name: (int(name), name))
        notes = [f"class names are numbers, so they are sorted by value: {first_of(by_value)}"]
        return by_value, notes * (by_value != list(classes))

    def doubts(self, classes: Sequence[str]) -> list[str]:
        """Warn about names that probably mean the same class, such as cat and Cat, or maine_coon and Maine Coon."""
        spellings: dict[str, list[str]] = {}
        for name in classes:
            plain = normalize("NFC", name).casefold().replace("_", " ").replace("-", " ")
            spellings.setdefault(" ".join(plain.split()), []).append(name)
        alike = [" and ".join(names) for names in spellings.values() if len(names) > 1]
        if not alike:
            return []
        return [warning(f"these are read as different classes: {first_of(alike)}; if they are the same, rename one")]


class ByNumber(ByList):
    """The labels are class numbers. Names are added later: by a list, by a checkpoint, or from folders."""

    are_names, may_lack = False, True

    def __init__(self, of_folders: Sequence[str] = ()):
        """`of_folders`: for each class, the folder with all its images; empty if there are no such folders."""
        self._of_folders = list(of_folders)

    def names(self, classes: Sequence[str]) -> tuple[list[str], list[str]]:
        if not self._of_folders:
            return list(classes), []
        names = first_of(self._of_folders)
        return self._of_folders, [f"the labels are numbers; their classes get the names of their folders: {names}"]

    def numbers(self, own: Sequence[str], classes: Sequence[str]) -> list[int]:
        if are_numbers(classes):
            return super().numbers(own, classes)
        return [number if number < len(classes) else -1 for number in range(len(own))]

    def may_be_renamed(self, new: Sequence[str], gone: Sequence[str]) -> bool:
        return False

    def describe(self, classes: Sequence[str]) -> list[str]:
        if are_numbers(classes):
            return []
        meaning = first_of([f"{number} is {name}" for number, name in enumerate(classes)])
        return [f"the labels are numbers, read as the class numbers of the checkpoint: {meaning}"]

    def folders(self, classes: Sequence[str]) -> Sequence[str]:
        return ()  # other folders may have numbers as names too

    def with_named_classes(self) -> ByList:
        return ByList()


def are_numbers(classes: Sequence[str]) -> bool:
    """Return whether all names are numbers."""
    return all(name.isdecimal() for name in classes)


def distinct(classes: list[str]) -> list[str]:
    """Append the class number to each repeated name. For example, ImageNet has two classes called crane."""
    counts = Counter(classes)
    return [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(classes)]
