"""Batches of images with the values of their files: float32, where DATA.RANGE goes from 0 to 1."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from configs.schema import Config, Data
from datasets.pixels.native.values import NativePixels, channels_to_show, limits_of
from datasets.squares import Squares
from datasets.transforms.crop import Normalize


class NativeNormalize(Normalize):
    """Normalization of float32 [B, C, H, W] to (image - mean) / std."""

    def __init__(self, data: Data, dtype: torch.dtype = torch.float32):
        super().__init__(data, dtype)
        self.channels = channels_to_show(data.RGB, data.IMAGE_CHANNELS)
        self.scale *= 255

    def pixels(self, images: Tensor) -> Tensor:
        """Return the channels of normalized images that pictures show, as uint8 [B, 1 or 3, H, W]."""
        return as_bytes((images - self.shift) / self.scale)[:, self.channels]


class NativeSquares(Squares):
    """Batches of square images, float32 [B, C, side, side]."""

    def __init__(self, data: Data):
        self.channels = channels_to_show(data.RGB, data.IMAGE_CHANNELS)
        self.data = data

    @property
    def shown_as(self) -> str:
        low, high = limits_of(self.data)
        return "; shown: " + ", ".join(f"channel {each} from {low[each]:g} to {high[each]:g}" for each in self.channels)

    def normalize(self, data: Data, dtype: torch.dtype) -> Normalize:
        return NativeNormalize(data, dtype)

    def image_bytes(self, config: Config) -> int:
        return super().image_bytes(config) * torch.float32.itemsize

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        return super().pictures(as_bytes(pixels)[:, self.channels])


class RawSquares(NativeSquares):
    """Batches of images with the values of their files, which a graph scales itself."""

    def __init__(self, data: Data):
        super().__init__(data)
        self.native = NativePixels.of(data)

    def pictures(self, pixels: Tensor) -> Sequence[np.ndarray]:
        return [self.native.shown(each.permute(1, 2, 0).cpu().numpy()) for each in pixels]


def as_bytes(images: Tensor) -> Tensor:
    return (255 * images).round().clamp(0, 255).to(torch.uint8)
