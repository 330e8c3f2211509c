"""A graph that takes an image with the values of its file (DATA.PIXELS native): limits, resize, crop, model."""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from configs.schema import Config, Data
from datasets.image_set import ImageSet
from engine.export.photo import Photo
from utils.errors import ConfigError

SHAPES = ((31, 47), (310, 420), (64, 500))  # height and width of drawn images


class NativePhoto(Photo):
    """Images [H, W, C] of uint8, uint16 or float32 to inputs, float32 [C, *Data.shape]: DATA.RANGE becomes 0 to 1."""

    dimensions: ClassVar[dict[int, Dim]] = {0: Dim("height", min=1), 1: Dim("width", min=1)}

    def __init__(self, data: Data):
        super().__init__(data)
        low, high = (torch.from_numpy(each)[:, None, None] for each in self.pixels.ends())
        self.register_buffer("low", low)
        self.register_buffer("span", high - low)

    def forward(self, photo: Tensor) -> Tensor:
        rows, columns = (self._exact_weights(*each)[:-1] for each in self._sides(photo))
        values = ((photo.float().permute(2, 0, 1) - self.low) / self.span).clamp(0, 1)
        return rows @ (values @ columns.T)

    @staticmethod
    def refuse_page(config: Config) -> None:
        raise ConfigError(
            f"-to web: the page reads photos of 8 bits, not DATA.PIXELS {config.DATA.PIXELS}; write an .onnx file with "
            "-photo"
        )

    def drawn(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        (low, high), rng = self.pixels.ends(), np.random.default_rng(0)
        for shape in SHAPES:
            photo = (low + (high - low) * rng.random((*shape, len(low)))).astype(self.pixels.dtype)
            yield photo, photo

    def photo_at(self, images: ImageSet, index: int, pixels: np.ndarray) -> np.ndarray:
        return pixels

    def as_photo(self, pixels: np.ndarray) -> np.ndarray:
        return pixels
