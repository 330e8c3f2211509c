"""What an evaluation needs of a task: who adds up the results of batches."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from engine.evaluation.scores import Scores
from utils.distributed import Process


class Tally(Protocol):
    """Adds up the results of an evaluation. It is exact for any number of processes."""

    # The results of this process's images; `gather` returns them all or None; `indices` and `groups` are set at the
    # end.
    per_image: Any

    def add(self, outputs: Any, targets: Any, num_excluded: int) -> None:
        """Add a batch: outputs of at least B images, targets of B. B is 0 in a process that has no images left."""

    def result(self, process: Process) -> Scores:
        """Return the scores over the images of all processes. This waits for the device."""


# Returns a Tally for a device, the type of its sums, and the number of images that all processes together will add.
MakeTally = Callable[[torch.device, torch.dtype, int], Tally]


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, because float32 is not precise enough for sums over an epoch. MPS has only float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def joined(process: Process, indices: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Return the indices of the images of all processes, sorted, and their columns in this order. Collective."""
    parts = process.join([(indices, *columns)])
    columns_of_all = [np.concatenate(each) for each in zip(*parts, strict=True)]
    order = np.argsort(columns_of_all[0], kind="stable")
    return [each[order] for each in columns_of_all]
