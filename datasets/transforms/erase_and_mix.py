"""Random erasing, mixup and cutmix: random draws on the host, and the changes of a batch on its device."""

import math
import random
import sys

import torch
from torch import Tensor

from configs.schema import Config, Shape
from datasets.order import Piece, sample_rng
from datasets.transforms.crop import crop_box
from datasets.types import Mixed
from utils.seed import keyed_rng

ERASED_AREA = (0.02, 1 / 3)  # smallest and largest fraction of the image that a box covers
ERASED_RATIO = (0.3, 1 / 0.3)  # smallest and largest width / height of a box
NO_BOX = (0,) * 6
UNMIXED = (1.0, 0.0, 0.0, 0.0, 0.0)  # weight and box of an image that is not mixed


# --- erasing ---


class Boxes:
    """Random boxes to erase. Several threads may draw at once."""

    def __init__(self, config: Config):
        self.settings, self.seed, self.shape = config.TRAIN, config.SEED, config.DATA.shape

    def rows(self, piece: Piece) -> list[list[tuple[int, ...]]]:
        """Return the boxes of each image of a piece; see `row`."""
        return [self.row(piece, position) for position in range(len(piece.indices))]

    def row(self, piece: Piece, position: int) -> list[tuple[int, ...]]:
        """Return TRAIN.RANDOM_ERASE_COUNT boxes for one image, padded with NO_BOX.

        A box is (left, top, width, height, left and top of its noise in the noise tensor).
        """
        index, repeat = int(piece.indices[position]), int(piece.repeats[position])
        rng = sample_rng(self.seed, piece.epoch, index, "erasing", repeat)
        settings, row = self.settings, []
        if rng.random() < settings.RANDOM_ERASE_PROB:
            for box in self.boxes(rng):
                is_noise = settings.RANDOM_ERASE_MODE != "const"
                sides = self.shape[::-1]
                row.append((*box, *(int(rng.random() * side) if is_noise else 0 for side in sides)))
        return row + [NO_BOX] * (settings.RANDOM_ERASE_COUNT - len(row))

    def boxes(self, rng: random.Random) -> list[tuple[int, int, int, int]]:
        """Draw the boxes of one image as (left, top, width, height)."""
        count = 1 + int(rng.random() * self.settings.RANDOM_ERASE_COUNT)
        area = (ERASED_AREA[0] / count, ERASED_AREA[1] / count)
        return [crop_box(self.shape.width, self.shape.height, area, ERASED_RATIO, rng) for _ in range(count)]


class Erasing(Boxes):
    """Random erasing box by box and in place, which is fast on a CPU because the boxes are small.

    TRAIN.RANDOM_ERASE_MODE says what fills a box.
    """

    def __init__(self, config: Config, device: torch.device):
        super().__init__(config)
        # Noise is cut from one large tensor at random positions, because noise drawn on the device would depend on how
        # the window is split.
        shape = (config.DATA.IMAGE_CHANNELS, *(2 * side for side in self.shape))
        self.noise = torch.randn(shape, generator=torch.Generator().manual_seed(config.SEED)).to(device)

    def __call__(self, images: Tensor, table: Tensor) -> Tensor:
        """Erase the boxes of a table [B, RANDOM_ERASE_COUNT, 6] in place. Later boxes cover earlier ones."""
        mode = self.settings.RANDOM_ERASE_MODE
        for image, boxes in zip(images, table.numpy().tolist(), strict=True):
            for left, top, width, height, noise_left, noise_top in boxes:
                if not width:
                    continue
                box = image[:, top : top + height, left : left + width]
                across, down = (width, height) if mode == "pixel" else (1, 1)  # in mode rand, a box has one colour
                noise = self.noise[:, noise_top : noise_top + down, noise_left : noise_left + across]
                box[:] = 0.0 if mode == "const" else noise
        return images


class BatchedErasing(Erasing):
    """Random erasing of a whole batch at once, with the same result. On GPUs, one operation per box is slower."""

    def __call__(self, images: Tensor, table: Tensor) -> Tensor:
        noise = self.noise.to(images.dtype)
        for boxes in table.unbind(1):
            left, top, width, height, *noise_at = boxes.unbind(1)
            filling = self._fillings(noise, left, top, *noise_at)
            images = torch.where(inside_box(left, top, width, height, self.shape), filling, images)
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
        starts = noise_top - top, noise_left - left
        rows, columns = (
            (start[:, None] + torch.arange(side, device=noise.device)).clamp(0, 2 * side - 1)
            for start, side in zip(starts, self.shape, strict=True)
        )
        channels = torch.arange(len(noise), device=noise.device)
        return noise[channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


# --- mixing ---


class Mixing:
    """Mixup and cutmix of the neighbours 2k and 2k + 1 in the window. `Order` keeps neighbours in one piece.

    A last image without a neighbour is not mixed. TRAIN.MIXUP_MODE says which images share a draw (`rows`). A draw
    (`_draw`) depends on TRAIN.MIXUP_PROB, TRAIN.MIXUP_ALPHA, TRAIN.CUTMIX_ALPHA and TRAIN.MIXUP_SWITCH_PROB, and a box
    (`_box`) on TRAIN.CUTMIX_MINMAX.
    """

    def __init__(self, config: Config):
        self.settings, self.seed, self.shape = config.TRAIN, config.SEED, config.DATA.shape

    def is_on(self, piece: Piece) -> bool:
        """Return whether images of this epoch are mixed (TRAIN.MIXUP_OFF_EPOCH)."""
        return not self.settings.MIXUP_OFF_EPOCH or piece.epoch < self.settings.MIXUP_OFF_EPOCH

    def rows(self, piece: Piece) -> list[tuple[float, ...]]:
        """Return for each image: its partner's position, its own weight outside of the partner's box, and that box."""
        count = len(piece.indices)
        positions = range(piece.first, piece.first + count)
        group = self.settings.MIXUP_GROUP or sys.maxsize
        units = {
            "batch": [each // group for each in positions],
            "pair": [each // 2 for each in positions],
            "elem": positions,
        }
        units = units[self.settings.MIXUP_MODE]
        draws = {unit: self._draw(piece.step, unit) for unit in set(units)}
        rows = [(float(position ^ 1), *draws[unit]) for position, unit in enumerate(units)]
        if count % 2:
            rows[-1] = (count - 1.0, *UNMIXED)
        return rows

    def __call__(self, images: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """Mix images [B, C, H, W] according to the table [B, 6] from `rows`, and round the result to `dtype`."""
        _, factor, *box = table.unbind(1)
        weight = torch.where(inside_box(*box, self.shape), 0.0, factor[:, None, None, None]).to(images.dtype)
        mixed, paired = torch.empty_like(images, dtype=dtype), len(images) // 2 * 2
        first, second = slice(0, paired, 2), slice(1, paired, 2)
        for own, partner in ((first, second), (second, first)):  # slices, because images[partners] would copy the batch
            if dtype == images.dtype and not torch.compiler.is_compiling():
                # `out=` avoids a copy, but cannot change the type or write to a slice in a compiled graph.
                torch.lerp(images[partner], images[own], weight[own], out=mixed[own])
            else:
                mixed[own].copy_(torch.lerp(images[partner], images[own], weight[own]))
        mixed[paired:] = images[paired:]
        return mixed

    def targets(self, targets: Tensor, table: Tensor) -> Mixed:
        """Return each image's target, its partner's target, and the weight of the image's target."""
        partners, factor, _, _, width, height = table.unbind(1)
        return Mixed(targets, targets[partners.long()], factor * (1 - width * height / math.prod(self.shape)))

    def _draw(self, step: int, unit: int) -> tuple[float, ...]:
        """Draw an image's own weight outside of its partner's box, and that box: left, top, width, height."""
        settings, rng = self.settings, keyed_rng("mixing", self.seed, step, unit)
        cutmix_alpha = 1.0 if settings.CUTMIX_MINMAX else settings.CUTMIX_ALPHA
        if rng.random() >= settings.MIXUP_PROB:
            return UNMIXED
        if not settings.MIXUP_ALPHA or (cutmix_alpha and rng.random() < settings.MIXUP_SWITCH_PROB):
            return 1.0, *self._box(rng.betavariate(cutmix_alpha, cutmix_alpha), rng)
        return rng.betavariate(settings.MIXUP_ALPHA, settings.MIXUP_ALPHA), 0.0, 0.0, 0.0, 0.0

    def _box(self, share: float, rng: random.Random) -> tuple[float, ...]:
        """Draw a box with a random centre and 1 - `share` of the image's area, and clip it to the image.

        With CUTMIX_MINMAX, draw a box of random size inside the image instead.
        """
        sides = self.shape[::-1]  # width, height
        if self.settings.CUTMIX_MINMAX:
            low, high = self.settings.CUTMIX_MINMAX
            box = [round(side * (low + (high - low) * rng.random())) for side in sides]
            return *(int(rng.random() * (side - length + 1)) for side, length in zip(sides, box, strict=True)), *box
        cuts = [int(side * math.sqrt(1 - share)) for side in sides]
        starts = [int(rng.random() * side) - cut // 2 for side, cut in zip(sides, cuts, strict=True)]
        left, top = (max(start, 0) for start in starts)
        right, bottom = (min(start + cut, side) for start, cut, side in zip(starts, cuts, sides, strict=True))
        return left, top, right - left, bottom - top


def inside_box(left: Tensor, top: Tensor, width: Tensor, height: Tensor, shape: Shape) -> Tensor:
    """Return a mask of the pixels inside a box of each image, bool [B, 1, *shape], from four tensors [B]."""
    rows, columns = (torch.arange(side, device=left.device) for side in shape)
    across = (columns >= left[:, None]) & (columns < (left + width)[:, None])  # [B, W]
    down = (rows >= top[:, None]) & (rows < (top + height)[:, None])  # [B, H]
    return down[:, None, :, None] & across[:, None, None, :]
