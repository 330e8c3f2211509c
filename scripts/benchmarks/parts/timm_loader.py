"""timm's loader, as loader.py timm compares it."""

from collections.abc import Iterator
from pathlib import Path

from PIL import Image


def timm_batches(folder: Path, batch_size: int, num_workers: int, policy: str | None) -> Iterator[int]:
    """Endless training batches by the settings of timm's train.py without jitter and erasing; yields how many images."""
    import torch
    from timm.data import auto_augment, create_dataset, create_loader

    for name in ("Posterize", "PosterizeIncreasing"):
        auto_augment.NAME_TO_OP[name] = posterize
    loader = create_loader(
        create_dataset("", root=str(folder), split="train"),
        input_size=(3, 224, 224),
        batch_size=batch_size,
        is_training=True,
        hflip=0.5,
        color_jitter=0.0,
        auto_augment=policy,
        interpolation="bicubic",
        num_workers=num_workers,
        device=torch.device("cpu"),
        persistent_workers=True,
    )
    while True:
        for images, _ in loader:
            yield len(images)


def posterize(image: Image.Image, bits: int, **options) -> Image.Image:
    """timm's, also where it keeps no bit, which ends its run with Pillow 13: black, as with older ones."""
    from timm.data.auto_augment import posterize

    return posterize(image, bits) if bits else Image.new(image.mode, image.size)
