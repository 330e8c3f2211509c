"""Probes of augmentation on the device: the pixels that the host makes, without a wait for the device."""

import random

import numpy as np
import torch

from scripts.benchmarks.session.plan import Context
from scripts.benchmarks.session.probes.checks import Probes, require

POLICIES = ("rand-m9-mstd0.5-inc1", "rand-m15-n4-p1-mmax20-mstd1", "original", "augmix", "augmix-b1", "ta_wide", "3a")
JITTER = 0.3  # after 3a only


def run_probes(context: Context) -> None:
    probes = Probes(context)
    for policy in POLICIES:
        probes.check(f"augmentation on the device, {policy}", lambda: compare(context, policy))  # noqa: B023
    probes.end()


def compare(context: Context, policy: str) -> str:
    """Pixels of all images against Pillow's."""
    case = Case(policy, *context.pick((64, 224), (12, 24)))
    images = case.images.to(context.device)
    if context.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        changed = case.on_device(images)
    finally:
        if context.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    errors = np.abs(changed.permute(0, 2, 3, 1).cpu().numpy().astype(int) - case.on_host())
    figure = f"largest difference {errors.max()} of 255, {(errors > 0).mean():.2%} of the values differ"
    return require(errors.max() <= 1, figure)


class Case:
    """A batch of images and what is drawn for them."""

    def __init__(self, policy: str, count: int, side: int):
        from configs.schema import Config, Data, Train
        from datasets import Draws
        from datasets.transforms.augment import build_augmentation
        from datasets.transforms.on_device.rows import OperationRows
        from datasets.types import ImageDraws

        train = Train(AUTO_AUGMENT=policy, COLOR_JITTER=JITTER)
        self.augmentation = build_augmentation(Config(DATA=Data(IMAGE_SIZE=side), TRAIN=train))
        rows = OperationRows(self.augmentation, side)
        self.draws = Draws.of([ImageDraws([], *rows.draw(random.Random(number), number)) for number in range(count)])
        # Slopes of several directions, with noise.
        rng = np.random.default_rng(0)
        slopes = rng.uniform(-2, 2, (count, 3, 2, 1, 1)) * np.mgrid[0:side, 0:side]
        pixels = 128 + slopes.sum(2) + rng.normal(0, 12, (count, 3, side, side))
        self.pixels = np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1))
        self.images = torch.from_numpy(self.pixels).permute(0, 3, 1, 2)

    def on_device(self, images: torch.Tensor) -> torch.Tensor:
        from datasets.transforms.on_device.augmentation import carry_out
        from datasets.transforms.preparation import copied

        return carry_out(images, self.draws, lambda numbers: copied(numbers, images.device))

    def on_host(self) -> np.ndarray:
        draw, apply = self.augmentation.draw, self.augmentation.apply
        return np.stack([apply(draw(random.Random(number)), each) for number, each in enumerate(self.pixels)])
