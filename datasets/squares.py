"""Square images as a kind of batch, which knows how it is read, invented, prepared for the model, and shown."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.loading.readers import EvalReader, Reader, TrainReader
from datasets.pixels import Pixels
from datasets.transforms.crop import Normalize
from datasets.transforms.preparation import Preparation, SizedPreparation
from datasets.types import ImageSet
from utils.distributed import Process


class Squares:
    """Batches of square images [B, C, side, side], usually uint8."""

    def __init__(self, pixels: Pixels):
        self.pixels = pixels

    def reader(self, config: Config, image_set: ImageSet, is_training: bool) -> Reader:
        return (TrainReader if is_training else EvalReader)(image_set, config)

    def invent(self, config: Config, image_set: ImageSet, batch_size: int, process: Process) -> Callable:
        """Return the function that makes batches of random images on the device from pieces of the order."""
        return image_set.makes_batches(config, batch_size, process.rank, process.device)

    def normalize(self, data: Data, dtype: torch.dtype) -> Normalize:
        return Normalize(data, dtype)

    def preparation(self, config: Config, normalize: Normalize, is_compiled: bool) -> Preparation:
        return (SizedPreparation if config.TRAIN.SIZE_SCHEDULE else Preparation)(config, normalize, is_compiled)

    def image_bytes(self, config: Config) -> int:
        """Return the bytes of the largest image in a batch."""
        return config.DATA.IMAGE_CHANNELS * config.DATA.IMAGE_SIZE**2 * self.pixels.dtype_in_batch.itemsize

    def describe_shapes(self, config: Config, sides: np.ndarray, is_training: bool) -> Iterator[str]:
        """Yield the text of -check about the shapes of images, if they matter. `sides`: height and width, int [N, 2]."""
        yield from ()

    def share_enlarged(self, config: Config, sides: np.ndarray) -> float:
        """Return the share of images that are smaller than the model's."""
        return float((sides.min(axis=1) < config.DATA.IMAGE_SIZE).mean())

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        """Return the images of a batch as uint8 [H, W, 1 or 3]."""
        return self.pixels.to_bytes(pixels).permute(0, 2, 3, 1).cpu().numpy()
