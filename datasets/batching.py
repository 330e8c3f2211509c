"""The two kinds of batches: square images, and images at their own aspect ratio as sequences of patches.

A kind of batch knows how it is read, invented, prepared for the model, and shown. Code that reads, prepares or shows batches asks it.
"""

from configs.schema import Data
from datasets.squares import Squares


def batching_of(data: Data) -> Squares:
    """Return the kind of batches of a run."""
    if data.sequences:
        from datasets.native_aspect.batching import Sequences

        return Sequences()
    return Squares()
