"""The rules by which image files become pixels, and the error if they cannot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from configs.schema import Data


class ImageReadError(Exception):
    """An image cannot be read. This does not end a run; see BadImages."""


class Images(Protocol):
    """The images of an ImageSet, whose class is above this file."""

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> np.ndarray: ...
    def kinds(self, index: int) -> Sequence[str]: ...


@dataclass(frozen=True)
class PixelRules:
    """The rules by which image files become pixels. A cache of pixels is only valid for the same rules."""

    num_channels: int
    applies_exif: bool = False
    background: tuple[int, ...] = (128, 128, 128)  # the RGB colour behind transparent pixels
    max_pixels: int = Data.MAX_PIXELS

    @property
    def exif(self) -> str:
        """Return the value of DATA.EXIF for these rules."""
        return "apply" if self.applies_exif else "ignore"
