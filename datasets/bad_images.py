"""Unreadable images: each named once, and too many of them the end of the run."""

from collections.abc import Callable, Iterable

from datasets.types import ImageReadError, ImageSet
from utils.errors import DataError

NUM_EXPLAINED = 10  # the reason costs reading the image once more
NUM_NAMED = 5


class BadImages:
    """Counts the distinct unreadable images of one set, as batches report them."""

    def __init__(self, image_set: ImageSet, most: float, say: Callable[[str], None]):
        """`most`: the share that is borne, DATA.MAX_BAD_FRACTION; `say` is called with a line for each image."""
        self.image_set, self.most, self.say = image_set, most, say
        self.indices: list[int] = []  # in the order in which they turned up
        self._known: set[int] = set()

    def note(self, indices: Iterable[int]) -> None:
        """Take in what one batch reports; DataError when there are now more than are borne."""
        for index in indices:
            if index not in self._known:
                self._known.add(index)
                self.indices.append(index)
                so_far = f"{len(self.indices)} of {len(self.image_set)} so far"
                self.say(f"cannot read {self.image_set.name(index)}{self._reason(index)}; {so_far}")
        if len(self.indices) > self.most * len(self.image_set):
            names = ", ".join(self.image_set.name(index) for index in self.indices[:NUM_NAMED])
            more = ", ..." if len(self.indices) > NUM_NAMED else ""
            raise DataError(
                f"{len(self.indices)} of {len(self.image_set)} images cannot be read, more than DATA.MAX_BAD_FRACTION "
                f"({self.most:g}) bears: {names}{more}; mend or remove them, or set DATA.MAX_BAD_FRACTION higher"
            )

    def _reason(self, index: int) -> str:
        if len(self.indices) > NUM_EXPLAINED:
            return ""
        try:
            self.image_set.read(index)
        except ImageReadError as error:
            return f" ({error})"
        return " (but a second time it could be read)"
