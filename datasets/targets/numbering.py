"""Where the class numbers of the data come from. by_label.py has those that follow from the labels."""

from collections.abc import Sequence
from unicodedata import normalize


class ByList:
    """The data have a list of class names in the order of their numbers."""

    are_names = True  # whether the labels are names of classes
    may_lack = False  # whether the data may lack classes of a checkpoint; labels that are numbers always leave gaps

    def names(self, classes: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return the classes of a new run in the order of their numbers, and lines for the log."""
        return list(classes), []

    def doubts(self, classes: Sequence[str]) -> list[str]:
        """Return warnings about the names of the classes."""
        return []

    def numbers(self, own: Sequence[str], classes: Sequence[str]) -> list[int]:
        """Return the number in `classes` of each class of the data, or -1 if it is missing."""
        known = {normalize("NFC", name): number for number, name in enumerate(classes)}
        return [known.get(normalize("NFC", name), -1) for name in own]

    def may_be_renamed(self, new: Sequence[str], gone: Sequence[str]) -> bool:
        """Return whether a new class can be a class of the checkpoint under another name."""
        return len(new) == len(gone) == 1

    def describe(self, classes: Sequence[str]) -> list[str]:
        """Return lines for the log about labels that are read with the classes of a checkpoint."""
        return []

    def folders(self, classes: Sequence[str]) -> Sequence[str]:
        """Return the names of the folders that are class folders wherever they occur in a path."""
        return classes

    def with_named_classes(self) -> "ByList":
        """Return the numbering after DATA.CLASSES has named the classes."""
        return self
