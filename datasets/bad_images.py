"""Report each unreadable image once, and end the run if there are too many."""

from collections.abc import Callable, Iterable

import numpy as np

from datasets.image_set import ImageSet
from datasets.pixels.rules import ImageReadError
from utils.distributed import Process
from utils.errors import DataError
from utils.text import counted, one_line

ALWAYS_ALLOWED = 3  # unreadable images that any set may have, because one image can be more than 1% of a small set
NUM_SAMPLED = 128  # validation images that are read before training
NUM_EXPLAINED = 10  # images that are reported with a reason; finding the reason takes a second read
NUM_NAMED = 5  # images that the error names


def num_allowed(max_fraction: float, num_images: int) -> int:
    """Return how many images may be unreadable: never all, but at least ALWAYS_ALLOWED unless the fraction is 0."""
    return min(max(int(max_fraction * num_images), ALWAYS_ALLOWED if max_fraction else 0), num_images - 1)


class BadImages:
    """Counts the distinct unreadable images of one set over all processes."""

    def __init__(self, image_set: ImageSet, max_fraction: float, say: Callable[[str], None], known: Iterable[int] = ()):
        """`max_fraction`: DATA.MAX_BAD_FRACTION. `known`: images that were reported before. `say`: prints reports."""
        self.image_set, self.max_fraction, self.say = image_set, max_fraction, say
        self.indices = dict.fromkeys(known)  # in the order in which they were reported
        self._unshared: list[int] = []  # bad images that this process found since the last check

    def note(self, indices: Iterable[int]) -> None:
        """Add the unreadable images of one batch of this process."""
        for index in indices:
            if index not in self.indices:
                self.indices[index] = None
                self._unshared.append(index)
                so_far = f"{len(self.indices)} of {len(self.image_set)} so far"
                reason = self._explain(index) if len(self.indices) <= NUM_EXPLAINED else ""
                self.say(f"cannot read {self._name(index)}{reason}; {so_far}")

    def check(self, process: Process) -> None:
        """Add the unreadable images of other processes. Raise DataError in all processes if there are now too many."""
        self.indices |= dict.fromkeys(process.join(self._unshared))
        self._unshared = []
        if len(self.indices) > num_allowed(self.max_fraction, len(self.image_set)):
            process.first(lambda: self._refuse(len(self.image_set)))

    def check_sample(self, process: Process) -> None:
        """Read a sample of the images, or all images of a small set. Raise DataError if too many are unreadable."""
        if self.image_set.storage.in_memory:
            return
        count = min(len(self.image_set), NUM_SAMPLED)
        sample = np.linspace(0, len(self.image_set) - 1, count, dtype=int)[process.rank :: process.world_size].tolist()
        self.note(self._unreadable(sample))
        self.check(process)
        # A sample may exceed the allowed fraction by chance, so it ends the run only above twice this fraction.
        if len(self.indices) > max(ALWAYS_ALLOWED, 2 * self.max_fraction * count):
            process.first(lambda: self._refuse(count))

    def forget_repaired(self, process: Process) -> None:
        """Read the known bad images again, because they may have been repaired since the run ended."""
        if self.indices:
            self.indices = process.first(lambda: dict.fromkeys(self._unreadable(list(self.indices))))

    def _unreadable(self, indices: list[int]) -> list[int]:
        from datasets.passes import read_each  # imported here: images in memory are not read in threads

        return [index for index, error in read_each(indices, self._try, "") if error]

    def _refuse(self, num_tried: int) -> None:
        first = next(iter(self.indices))
        named = [f"{self._name(first)}{self._explain(first)}"]
        named += [self._name(index) for index in list(self.indices)[1:NUM_NAMED]]
        more = ", ..." if len(self.indices) > NUM_NAMED else ""
        raise DataError(
            f"{len(self.indices)} of {counted(num_tried, 'image')} cannot be read, more than DATA.MAX_BAD_FRACTION "
            f"({self.max_fraction:g}) allows: {', '.join(named)}{more}; repair or remove them, "
            "or raise DATA.MAX_BAD_FRACTION"
        )

    def _name(self, index: int) -> str:
        return one_line(self.image_set.name(index))

    def _explain(self, index: int) -> str:
        return f" ({self._try(index) or 'but a second attempt succeeded'})"

    def _try(self, index: int) -> ImageReadError | None:
        try:
            self.image_set.read(index)
        except ImageReadError as error:
            return error
        return None
