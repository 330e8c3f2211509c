"""Images at their own aspect ratio as a kind of batch."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.loading.readers import Reader
from datasets.native_aspect.batches import (
    EvalSequenceReader,
    PatchNormalize,
    SequencePreparation,
    SyntheticSequences,
    TrainSequenceReader,
)
from datasets.native_aspect.grids import describe_shapes, image_bytes, pictures_of
from datasets.squares import Squares
from datasets.transforms.crop import Normalize
from datasets.types import ImageSet
from utils.distributed import Process


class Sequences(Squares):
    """Batches of sequences of patches, uint8 [B, patches + 1, values of a patch]."""

    def reader(self, config: Config, image_set: ImageSet, is_training: bool) -> Reader:
        return (TrainSequenceReader if is_training else EvalSequenceReader)(image_set, config)

    def invent(self, config: Config, image_set: ImageSet, batch_size: int, process: Process) -> Callable:
        return SyntheticSequences(config, image_set, batch_size, process.rank, process.device)

    def normalize(self, data: Data, dtype: torch.dtype) -> Normalize:
        return PatchNormalize(data, dtype)

    def preparation(self, config: Config, normalize: Normalize, is_compiled: bool) -> SequencePreparation:
        return SequencePreparation(config, normalize)

    def image_bytes(self, config: Config) -> int:
        return image_bytes(config)

    def describe_shapes(self, config: Config, sides: np.ndarray, is_training: bool) -> Iterator[str]:
        yield describe_shapes(config, sides, is_training)

    def share_enlarged(self, config: Config, sides: np.ndarray) -> float:
        return 0.0

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        return pictures_of(pixels.cpu())
