"""Random erasing: boxes are drawn on the host and erased on the device of the batch."""

import random

import torch
from torch import Tensor

from configs.schema import Config
from datasets.order import Piece, sample_rng
from datasets.transforms.crop import crop_box, inside_box

ERASED_AREA = (0.02, 1 / 3)  # smallest and largest fraction of the image that a box covers
ERASED_RATIO = (0.3, 1 / 0.3)  # smallest and largest width / height of a box
NO_BOX = (0,) * 6


class Boxes:
    """Random boxes to erase. Several threads may draw at once."""

    def __init__(self, config: Config):
        self.settings, self.seed, self.side = config.TRAIN, config.SEED, config.DATA.IMAGE_SIZE

    def rows(self, piece: Piece) -> list[list[tuple[int, ...]]]:
        """Return the boxes of each image of a piece; see `row`."""
        return [self.row(piece, position) for position in range(len(piece.indices))]

    def row(self, piece: Piece, position: int) -> list[tuple[int, ...]]:
        """Return RANDOM_ERASE_COUNT boxes for one image, padded with NO_BOX.

        A box is (left, top, width, height, left and top of its noise in the noise tensor).
        """
        index, repeat = int(piece.indices[position]), int(piece.repeats[position])
        rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
        settings, row = self.settings, []
        if rng.random() < settings.RANDOM_ERASE_PROB:
            for box in self.boxes(rng):
                is_noise = settings.RANDOM_ERASE_MODE != "const"
                row.append((*box, *(int(rng.random() * self.side) if is_noise else 0 for _ in range(2))))
        return row + [NO_BOX] * (settings.RANDOM_ERASE_COUNT - len(row))

    def boxes(self, rng: random.Random) -> list[tuple[int, int, int, int]]:
        """Draw the boxes of one image as (left, top, width, height)."""
        count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
        area = (ERASED_AREA[0] / count, ERASED_AREA[1] / count)
        return [crop_box(self.side, self.side, area, ERASED_RATIO, rng) for _ in range(count)]


class Erasing(Boxes):
    """Random erasing box by box and in place, which is fast on a CPU because the boxes are small."""

    def __init__(self, config: Config, device: torch.device):
        super().__init__(config)
        # Noise is cut from one large tensor at random positions, because noise drawn on the device would depend on how
        # the window is split.
        shape = (config.DATA.IMAGE_CHANNELS, 2 * self.side, 2 * self.side)
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(config.SEED)).to(device)

    def __call__(self, images: Tensor, table: Tensor) -> Tensor:
        """Erase the boxes of a table [B, RANDOM_ERASE_COUNT, 6] in place. Later boxes cover earlier ones."""
        for image, boxes in zip(images, table.numpy().tolist(), strict=True):
            for left, top, width, height, *noise_at in boxes:
                if width:
                    image[:, top : top + height, left : left + width] = self._filling(width, height, *noise_at)
        return images

    def _filling(self, width: int, height: int, left: int, top: int) -> Tensor | float:
        mode = self.settings.RANDOM_ERASE_MODE
        if mode == "const":
            return 0.0
        if mode == "rand":
            width = height = 1
        return self.noise[:, top : top + height, left : left + width]


class BatchedErasing(Erasing):
    """Random erasing of a whole batch at once, with the same result. On GPUs, one operation per box is slower."""

    def __call__(self, images: Tensor, table: Tensor) -> Tensor:
        noise = self.noise.to(images.dtype)
        for boxes in table.unbind(1):
            left, top, width, height, *noise_at = boxes.unbind(1)
            filling = self._fillings(noise, left, top, *noise_at)
            images = torch.where(inside_box(left, top, width, height, self.side), filling, images)
        return images

    def _fillings(
        self, noise: Tensor, left: Tensor, top: Tensor, noise_left: Tensor, noise_top: Tensor
    ) -> Tensor | float:
        """Return the values that fill each image's box: [B, C, H, W], or [B, C, 1, 1] if each box has one colour.

        The values outside of the box are arbitrary.
        """
        mode = self.settings.RANDOM_ERASE_MODE
        if mode == "const":
            return 0.0
        if mode == "rand":
            return noise[:, noise_top, noise_left].T[:, :, None, None]
        pixels = torch.arange(self.side, device=noise.device)
        starts = noise_top - top, noise_left - left
        rows, columns = ((start[:, None] + pixels).clamp(0, 2 * self.side - 1) for start in starts)
        channels = torch.arange(len(noise), device=noise.device)
        return noise[channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def build_erasing(config: Config, device: torch.device) -> Erasing:
    """Return the implementation of random erasing that is faster on this device."""
    return Erasing(config, device) if device.type == "cpu" else BatchedErasing(config, device)
