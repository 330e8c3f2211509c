"""Chooses the kind of batches: square images, or images at their own aspect ratio as sequences of patches."""

from configs.schema import Data
from datasets.squares import Squares


def batching_of(data: Data) -> Squares:
    """Return the kind of batches of a run."""
    if data.sequences:
        from datasets.native_aspect.batching import Sequences

        return Sequences()
    if data.is_native:
        from datasets.pixels.native.batches import NativeSquares

        return NativeSquares(data)
    return Squares()
