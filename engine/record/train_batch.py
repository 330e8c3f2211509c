"""train_batch.png: images of the first update as the model gets them: cropped, augmented, erased and mixed."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from configs.schema import Config
from datasets import Batch, Mixed, Normalize, build_preparation
from engine.record.image_tables import Names
from engine.train.counters import Report
from engine.train.trainer import Callback, Trainer
from utils.contact_sheet import Tile, contact_sheet, write_picture
from utils.errors import cause_of
from utils.log import Log
from utils.text import first_of

FILE = "train_batch.png"
NUM_SHOWN = 36  # even: neighbours are mixed with each other


class TrainBatch(Callback):
    """Draws the sheet at the first report of a new run.

    The batch is prepared once more, on the host: the device computes nothing but a copy of some pixels, a compiled
    preparation gets no batch of another size, and no generator is used that the run uses.
    """

    def __init__(self, config: Config, folder: Path, classes: list[str], log: Log):
        self._config, self._path, self._log = config, folder / FILE, log
        self._names = Names(classes)
        self._batch: Batch | None = None
        self._is_taken = False

    def on_micro_batch(self, trainer: Trainer, batch: Batch, share: float) -> None:
        if trainer.step == 0 and not self._is_taken:
            part = batch.parts(NUM_SHOWN)[0]
            # Copies: a device may reuse the memory of a batch once the update has read it.
            self._batch = part._replace(images=part.images.clone(), targets=part.targets.clone())
            self._is_taken = True

    def on_report(self, trainer: Trainer, report: Report) -> None:
        if self._batch is None:
            return
        batch, self._batch = self._batch, None
        try:
            write_picture(self._draw(batch), self._path)
        except (OSError, Image.DecompressionBombError) as error:  # as in ResultFiles
            self._log.warn(f"cannot write {self._path} ({cause_of(error)}); training continues")

    def _draw(self, batch: Batch) -> Image.Image:
        pixels, targets = prepared(self._config, batch)
        tiles = [
            Tile(image.permute(1, 2, 0).numpy(), [caption])
            for image, caption in zip(pixels, self._captions(targets), strict=True)
        ]
        return contact_sheet(tiles, title="images of the first update, as the model gets them")

    def _captions(self, targets: Tensor | Mixed) -> list[str]:
        if not isinstance(targets, Mixed):
            return [self._name(target) for target in targets]
        return [
            self._name(first)
            if share > 0.995
            else f"{share:.0%} {self._name(first)}, {1 - share:.0%} {self._name(second)}"
            for first, second, share in zip(targets.first, targets.second, targets.share.tolist(), strict=True)
        ]

    def _name(self, target: Tensor) -> str:
        """Of a class number, or of all labels."""
        numbers = target.nonzero()[:, 0].tolist() if target.ndim else [int(target)]
        return first_of([self._names[number] for number in numbers]) or "no label"


def prepared(config: Config, batch: Batch) -> tuple[Tensor, Tensor | Mixed]:
    """A training batch as the model gets it, as uint8 [B, C, H, W] on the host, with its targets."""
    batch = batch._replace(images=batch.images.cpu(), targets=batch.targets.cpu())
    normalize = Normalize(config.DATA, torch.float32)
    images, targets = build_preparation(config, normalize)(batch)
    return ((images - normalize.shift) / normalize.scale).round().clamp(0, 255).to(torch.uint8), targets
