"""A graph that takes an image with the values of its file (DATA.PIXELS native): limits, resize, crop, model."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from configs.schema import Config, Data
from datasets.pixels import pixels_of
from engine.export.photo import Photo, PhotoSubject
from utils.errors import ConfigError

SHAPES = ((31, 47), (310, 420), (64, 500))  # height and width of drawn images


class NativePhoto(Photo):
    """Images [H, W, C] of uint8, uint16 or float32 to model inputs, float32 [C, side, side], from 0 to 1 between DATA.RANGE."""

    def __init__(self, data: Data):
        super().__init__(data)
        low, high = (torch.from_numpy(each)[:, None, None] for each in pixels_of(data).ends())
        self.register_buffer("low", low)
        self.register_buffer("span", high - low)

    def forward(self, photo: Tensor) -> Tensor:
        sizes = [torch.full((), length, dtype=torch.int64) for length in photo.shape[:2]]
        rows, columns = (
            self._exact_weights(length, size, new)[:-1]
            for length, size, new in zip(photo.shape[:2], sizes, self._sizes(*sizes), strict=True)
        )
        values = ((photo.float().permute(2, 0, 1) - self.low) / self.span).clamp(0, 1)
        return rows @ (values @ columns.T)


class NativePhotoSubject(PhotoSubject):
    """A model to export that takes images with the values of their files."""

    dimensions = {0: Dim("height", min=1), 1: Dim("width", min=1)}

    @staticmethod
    def refuse_page(config: Config) -> None:
        raise ConfigError(
            f"-to web: the page reads photos of 8 bits, not DATA.PIXELS {config.DATA.PIXELS}; write an .onnx file with -photo"
        )

    @property
    def preparation(self) -> Photo:
        return NativePhoto(self.config.DATA)

    @property
    def example(self) -> Tensor:
        return torch.from_numpy(max((pixels for pixels, _ in self.drawn()), key=lambda each: min(each.shape[:2])))

    def drawn(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        pixels, rng = pixels_of(self.config.DATA), np.random.default_rng(0)
        low, high = pixels.ends()
        for shape in SHAPES:
            photo = (low + (high - low) * rng.random((*shape, len(low)))).astype(pixels.dtype)
            yield photo, photo

    def photo_at(self, index: int, pixels: np.ndarray) -> np.ndarray:
        return pixels

    def as_photo(self, pixels: np.ndarray) -> np.ndarray:
        return pixels
