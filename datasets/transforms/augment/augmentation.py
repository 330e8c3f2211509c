"""The augmentation that the settings ask for: what is drawn for an image, and what that makes of it."""

from random import Random

import numpy as np
from PIL import Image
from torch import Tensor

from configs.schema import Config, Data
from datasets.transforms.augment.names import Policy, parse_policy
from datasets.transforms.augment.pixels import carry_out
from datasets.transforms.augment.plan import Operation, Plan
from datasets.transforms.augment.policies import build_policy

REVISION = 2  # of what is drawn and done for given settings; 1: torchvision's operations, with its own draws
RESAMPLE = {  # of rotations and shifts; Pillow has no lanczos for them
    "nearest": (int(Image.Resampling.NEAREST),),
    "bilinear": (int(Image.Resampling.BILINEAR),),
    "bicubic": (int(Image.Resampling.BICUBIC),),
    "lanczos": (int(Image.Resampling.BICUBIC),),
    "random": (int(Image.Resampling.BILINEAR), int(Image.Resampling.BICUBIC)),
}


def build_augmentation(config: Config) -> "Augmentation | None":
    """None if the settings ask for none."""
    return Augmentation(config) if config.TRAIN.augments else None


class Augmentation:
    """A policy, then colour jitter. Several threads may use it at once."""

    def __init__(self, config: Config):
        train, data = config.TRAIN, config.DATA
        policy = parse_policy(train)
        self.policy = build_policy(policy, data.IMAGE_SIZE, RESAMPLE[data.train_interpolation]) if policy else None
        self.jitter = _jitter(train.COLOR_JITTER, policy)
        self.fill = _mean_colour(data)

    def draw(self, rng: Random) -> Plan:
        """What is done to one image. All random numbers come from `rng`."""
        plan = self.policy.draw(rng) if self.policy else Plan()
        return plan._replace(operations=(*plan.operations, *self._draw_jitter(rng)))

    def apply(self, plan: Plan, pixels: np.ndarray) -> np.ndarray:
        """uint8 [H, W, C] changed as planned, which may be the same array. Nothing is drawn."""
        return carry_out(plan, pixels, self.fill)

    def __call__(self, image: Tensor, rng: Random) -> None:
        """Augment uint8 [C, H, W] in place."""
        pixels = image.permute(1, 2, 0).numpy()
        changed = self.apply(self.draw(rng), pixels)
        if changed is not pixels:
            pixels[...] = changed

    def _draw_jitter(self, rng: Random) -> list[Operation]:
        """Changes of the colours as torchvision's ColorJitter makes them: in random order, each by a random factor."""
        names = list(self.jitter)
        operations = []
        while names:
            name = names.pop(int(rng.random() * len(names)))
            operations.append(Operation(name, rng.uniform(*self.jitter[name])))
        return operations


def _jitter(strength: float, policy: Policy | None) -> dict[str, tuple[float, float]]:
    """{operation: smallest and largest factor}. Like timm, only without a policy or with 3-Augment's operations."""
    if not strength or (policy and "3a" not in (policy.name, policy.choice[:2])):
        return {}
    return dict.fromkeys(("brightness", "contrast", "color"), (max(0.0, 1 - strength), 1 + strength))


def _mean_colour(data: Data) -> int | tuple[int, ...]:
    """Fills what a rotation or shift uncovers, as in timm."""
    colour = tuple(min(max(round(255 * mean), 0), 255) for mean in data.IMAGENET_MEAN[: data.IMAGE_CHANNELS])
    return colour if len(colour) > 1 else colour[0]
