"""Checkpoints without a run: random weights of a model, with the metadata that a run writes."""

from pathlib import Path

import torch

from configs.schema import Config, Data, Model
from configs.values import flatten
from models import build_model
from tests.support.weight_files import DEPTH, HEADS, WIDTH, saved

PLAIN = {"NAME": "tiny_test", "PATCH_SIZE": 8, "EMBED_DIM": WIDTH, "DEPTH": DEPTH, "NUM_HEADS": HEADS}
CLASSES = ["ä", "b <i>", "c"]


def checkpoint(
    path: Path,
    model: dict = PLAIN,
    data: dict | None = None,
    classes: list[str] = CLASSES,
    seed: int = 0,
    start: int | None = None,
    **more,
) -> Path:
    """Write a best.pth for a model of these settings. `more`: further contents, such as state_dict_ema.

    `start`: the seed of the weights from which these were fine-tuned; None: they are random.
    """
    images = {"IMAGE_SIZE": 32, "CROP_PCT": 0.9, "IMAGENET_MEAN": (0.1, 0.2, 0.3)} | (data or {})
    config = Config(DATA=Data(**images), MODEL=Model(**model))
    built = build_model(config, len(classes))
    state = random_state(built.state_dict(), seed)
    if start is not None:
        before = random_state(state, start)
        state = {
            name: before[name] + tensor / 10 if tensor.is_floating_point() else tensor for name, tensor in state.items()
        }
    # Variances must not be negative.
    state = {name: tensor.abs() if name.endswith("running_var") else tensor for name, tensor in state.items()}
    images = config.DATA
    content = {
        "state_dict": state,
        "arch": config.MODEL.NAME,
        "epoch": 3,
        "metric": 61.5,
        "class_names": classes,
        "halfstep_version": "0",
        "config": flatten(config),
        "data": {
            "mean": list(images.IMAGENET_MEAN),
            "std": list(images.IMAGENET_STD),
            "crop_pct": images.CROP_PCT,
            "crop_mode": images.CROP_MODE,
            "input_size": [images.IMAGE_CHANNELS, images.IMAGE_SIZE, images.IMAGE_SIZE],
            "interpolation": images.INTERPOLATION,
        },
    }
    return saved(content | more, path)


def random_state(state: dict, seed: int) -> dict:
    """Return tensors of the same names and shapes with random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }
