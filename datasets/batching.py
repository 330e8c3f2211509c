"""Chooses the kind of batches: square images, or images at their own aspect ratio as sequences of patches."""

from configs.schema import Data
from datasets.pixels import pixels_of
from datasets.squares import Squares


def batching_of(data: Data) -> Squares:
    """Return the kind of batches of a run."""
    if data.sequences:
        from datasets.native_aspect.batching import Sequences

        return Sequences(pixels_of(data))
    return Squares(pixels_of(data))
