"""Unreadable images: each is reported once, and too many of them end the run."""

from collections.abc import Callable, Iterable

from datasets.types import ImageReadError, ImageSet
from utils.errors import DataError
from utils.text import counted

NUM_EXPLAINED = 10  # to give the reason, the image is read once more
NUM_NAMED = 5


class BadImages:
    """Counts the distinct unreadable images of one set, as batches report them."""

    def __init__(self, image_set: ImageSet, max_fraction: float, say: Callable[[str], None]):
        """`max_fraction`: DATA.MAX_BAD_FRACTION; `say` is called with a line for each image."""
        self.image_set, self.max_fraction, self.say = image_set, max_fraction, say
        self.indices: list[int] = []  # in the order in which they were reported
        self._known: set[int] = set()

    def note(self, indices: Iterable[int]) -> None:
        """Add the images that one batch reports; DataError when there are now too many."""
        for index in indices:
            if index not in self._known:
                self._known.add(index)
                self.indices.append(index)
                so_far = f"{len(self.indices)} of {len(self.image_set)} so far"
                self.say(f"cannot read {self.image_set.name(index)}{self._reason(index)}; {so_far}")
        if len(self.indices) > self.max_fraction * len(self.image_set):
            names = ", ".join(self.image_set.name(index) for index in self.indices[:NUM_NAMED])
            more = ", ..." if len(self.indices) > NUM_NAMED else ""
            raise DataError(
                f"{len(self.indices)} of {counted(len(self.image_set), 'image')} cannot be read, more than DATA.MAX_BAD_FRACTION "
                f"({self.max_fraction:g}) allows: {names}{more}; repair or remove them, or raise DATA.MAX_BAD_FRACTION"
            )

    def _reason(self, index: int) -> str:
        if len(self.indices) > NUM_EXPLAINED:
            return ""
        try:
            self.image_set.read(index)
        except ImageReadError as error:
            return f" ({error})"
        return " (but a second attempt succeeded)"
