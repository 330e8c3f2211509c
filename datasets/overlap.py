"""Find validation images that are also training images, by the content of all images that a run reads in epoch 1."""

import math
import mmap
from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from datasets.identity import digest
from datasets.image_set import ImageSet
from datasets.passes import read_each
from utils.distributed import Process
from utils.text import warning

MOST_READ = 50  # the most validation images that are read again to confirm a match
MOST_ALIKE = 4  # the most training images with which a validation image is compared
# The approximate number of pixel bytes that a fingerprint hashes. Hashing takes 5 us; reading a photo takes 3,000 us.
NUM_BYTES = 256
# The keys of the state in a checkpoint: the result, or before it [index, fingerprint] of each training image so far.
NUM_IN_TRAINING, FINGERPRINTS = "num_in_training", "fingerprints"


class Fingerprints:
    """The fingerprints of the images that this process and its loader workers have read, and 0 for all other images.

    Workers are forks, so they write to the memory of their parent. A copy that is pickled for another start method
    records nothing.
    """

    def __init__(self, num_images: int):
        self.values = np.frombuffer(mmap.mmap(-1, 8 * num_images), np.uint64) if num_images else np.zeros(0, np.uint64)

    def __getstate__(self) -> dict:
        return {"values": None}

    def add(self, index: int, pixels: np.ndarray) -> None:
        if self.values is not None:
            self.values[index] = digest(pixels, NUM_BYTES)

    def rows(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Return uint64 [N, 2]: index and fingerprint of the images that were read, or of the chosen images."""
        indices = np.flatnonzero(self.values if chosen is None else chosen)
        return np.stack([indices.astype(np.uint64), self.values[indices]], axis=1)


class Overlap:
    """Compares the training images of an epoch with the validation images scored after it, over all processes.

    The result is `watch.num_in_training` of the validation set, in every process. A checkpoint contains it. Before the
    comparison, a checkpoint contains the fingerprints, so that a run that is resumed in epoch 1 compares all images.
    """

    def __init__(
        self, train: ImageSet, val: ImageSet, process: Process, saved: Mapping[str, Any] = MappingProxyType({})
    ):
        """`saved`: the state in the checkpoint that the run continues from."""
        self.train, self.val, self._process = train, val, process
        self._trained: Fingerprints | None = None  # of the training images; None: the comparison is done
        self._scored: Fingerprints | None = None
        if not self.is_open:
            return
        self._trained, self._scored = Fingerprints(len(train)), Fingerprints(len(val))
        train.watch.note, val.watch.note = self._trained.add, self._scored.add
        if FINGERPRINTS in saved and process.is_first:
            index, value = saved[FINGERPRINTS].numpy().view(np.uint64).T
            self._trained.values[index] = value

    @property
    def is_open(self) -> bool:
        """Return whether the comparison is still due."""
        return self.val.watch.num_in_training is None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Collective."""
        if not self.is_open:
            return {NUM_IN_TRAINING: self.val.watch.num_in_training}
        if self._trained is None:  # there was nothing to compare with
            return {}
        rows = np.concatenate(self._process.join([self._trained.rows()]))
        return {FINGERPRINTS: torch.from_numpy(rows.view(np.int64))}

    def compare(self) -> list[str]:
        """Stop recording fingerprints, and count the images in both sets.

        Return a log line if there are any. Collective.
        """
        scored = np.concatenate(self._process.join([self._scored.rows()]))
        trained = self._trained
        alike = trained.values.astype(bool) & np.isin(trained.values, scored[:, 1])
        rows = np.concatenate(self._process.join([trained.rows(alike)]))
        self.train.watch.note = self.val.watch.note = self._trained = self._scored = None
        if not len(scored):
            return []
        by_print = defaultdict(list)
        for index, value in sorted(rows.tolist()):
            by_print[value].append(index)
        alike = {index: by_print[value] for index, value in scored.tolist() if value in by_print}
        self.val.watch.num_in_training, lines = self._process.first(lambda: self._count(alike))
        return lines

    def _count(self, alike: dict[int, list[int]]) -> tuple[int, list[str]]:
        """Count the images that are identical to one with an equal fingerprint. Also return a warning if there are any.

        `alike`: {validation: training indices}.
        """
        if not alike:
            return 0, []
        sample = sorted(alike)[:: math.ceil(len(alike) / MOST_READ)]
        same = read_each(sample, lambda index: self._find(index, alike[index]), "")
        pairs = [(index, other) for index, other in same if isinstance(other, int)]
        if not pairs:
            return 0, []
        count = len(alike) if len(pairs) == len(sample) else len(pairs)
        names = [self.val.target_names(), self.train.target_names()]
        first, other = pairs[0]
        others = sum(names[0][self.val.targets[i]] != names[1][self.train.targets[j]] for i, j in pairs)
        of_others = f", {others:,} of these {len(pairs):,} with another label in training" if others else ""
        return count, [
            warning(
                f"{count:,} of {len(self.val):,} validation images are also training images, such as "
                f"{self.val.name(first)} = {self.train.name(other)}{of_others}; "
                "remove them from one of the two sets, because they distort the scores; -check names them"
            )
        ]

    def _find(self, index: int, others: list[int]) -> int | None:
        """Return the first of the training images `others` that equals validation image `index`, or None."""
        pixels = self.val.read(index)
        return next((i for i in others[:MOST_ALIKE] if np.array_equal(self.train.read(i), pixels)), None)
