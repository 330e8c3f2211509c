"""Sizes, pixels, logits and updates equal those of timm's NaFlex loader and model."""

import random

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data.naflex_dataset import NaFlexCollator
from timm.data.naflex_loader import NaFlexPrefetchLoader, create_naflex_loader
from timm.data.naflex_transforms import Patchify, RandomResizedCropToSequence
from timm.models.naflexvit import checkpoint_filter_fn

from datasets import build_eval_data, build_normalize, build_train_data
from datasets.native_aspect.batches import SequenceTransform
from datasets.native_aspect.grids import grids_of, new_batch, pictures_of
from models import build_model
from tests.datasets.native_aspect.photos import VIT, settings
from tests.support.configs import CPU, replaced
from tests.support.opened import open_sets
from tests.support.trainers import make_trainer, update
from utils.distributed import Process


class Listed(torch.utils.data.Dataset):
    """The files of an image set in its order, as timm's loaders take them."""

    transform = None

    def __init__(self, image_set):
        self.image_set = image_set

    def __len__(self):
        return len(self.image_set)

    def __getitem__(self, index):
        image = Image.fromarray(self.image_set.read(index))
        return self.transform(image) if self.transform else image, int(self.image_set.targets[index])


def ours(config) -> tuple[torch.Tensor, dict]:
    """Return the validation images as one batch, before and after normalization."""
    _, val = open_sets(config)
    (batch,) = build_eval_data(replaced(config, DATA={"BATCH_SIZE": len(val)}), val, Process(CPU))
    return batch.images, build_normalize(config.DATA)(batch.images)


def timms(config, pixels: torch.Tensor | None = None) -> dict:
    """Return the validation images as timm's loader gives them, or the given uint8 patches prepared by timm's objects."""
    data, patch = config.DATA, config.MODEL.KWARGS["patch_size"]
    facts = {"mean": data.IMAGENET_MEAN, "std": data.IMAGENET_STD, "device": CPU}
    if pixels is None:
        listed = Listed(open_sets(config)[1])
        common = {"patch_size": patch, "max_seq_len": data.TOKENS, "batch_size": len(listed), "num_workers": 0}
        loader = create_naflex_loader(listed, interpolation=data.INTERPOLATION, pin_memory=False, **common, **facts)
    else:
        patchify = Patchify(patch)
        samples = [(patchify(torch.from_numpy(each).permute(2, 0, 1)), 0) for each in pictures_of(pixels)]
        loader = NaFlexPrefetchLoader(
            [NaFlexCollator(pixels.shape[1] - 1)(samples)], channels=data.IMAGE_CHANNELS, **facts
        )
    ((images, _),) = loader
    return images


WIDE = "MODEL.KWARGS.embed_dim=64", "DATA.TOKENS=40"


@pytest.fixture(scope="module")
def config(folder):
    return settings(folder, *WIDE)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_has_grids_and_pixels_of_timms_loader(config, interpolation):
    config = replaced(config, DATA={"INTERPOLATION": interpolation, "TRAIN_INTERPOLATION": "nearest"})
    _, images = ours(config)
    expected = timms(config)
    for name in ("patch_coord", "patch_valid"):
        assert torch.equal(images[name], expected[name])
    torch.testing.assert_close(images["patches"], expected["patches"], rtol=0, atol=1e-6)


def test_mean_grid_of_random_crops_equals_timms(config):
    """The aspect ratio of a crop is relative to the aspect ratio of the image."""
    theirs = RandomResizedCropToSequence(8, 64)
    transform = SequenceTransform(replaced(config, DATA={"CROP_RATIO": (0.8, 1.25)}), 8)
    shape = (60, 240, 3)
    found, expected = [], []
    random.seed(0)
    for seed in range(400):
        out = new_batch(1, 64, 8, 3)
        transform(np.zeros(shape, np.uint8), random.Random(seed), out[0])
        found.append(grids_of(out)[0])
        size = theirs.get_params(
            torch.zeros(3, 60, 240), theirs.scale, theirs.ratio, max_seq_len=64, patch_h=8, patch_w=8
        )[1]
        expected.append([each // 8 for each in size])
    means = np.mean(found, 0), np.mean(expected, 0)
    np.testing.assert_allclose(*means, rtol=0.03)


def test_random_weights_are_distributed_as_in_the_plain_vit(folder):
    config = settings(folder, *VIT, "DATA.TOKENS=16", "MODEL.PATCH_SIZE=4")
    plain = build_model(replaced(config, DATA={"TOKENS": None}), 5)
    model = build_model(config, 5)
    expected = checkpoint_filter_fn(plain.state_dict(), model)
    large = {name: weight for name, weight in model.state_dict().items() if weight.numel() >= 1000}
    assert len(large) == 10
    for name, weight in large.items():
        assert weight.std().item() == pytest.approx(expected[name].std().item(), rel=0.1), name


def test_losses_and_weights_of_ten_updates_equal_timms(folder):
    from timm.optim import create_optimizer_v2  # imported late, because it imports torch's compiler

    config = settings(folder, "TRAIN.OPTIMIZER.NAME=AdamW", "TRAIN.LR_SCHEDULER.NAME=constant")
    trainer, losses = make_trainer(config), []
    theirs = timm.create_model(config.MODEL.NAME, num_classes=10, **config.MODEL.KWARGS)
    theirs.load_state_dict(trainer.model.state_dict())
    optimizer = create_optimizer_v2(theirs, opt="adamw", lr=1e-3, weight_decay=0.05)
    data = build_train_data(config, open_sets(config)[0], Process(CPU))
    for window in data.windows(0, 10):
        (batch,) = window.batches
        loss = torch.nn.functional.cross_entropy(theirs(timms(config, batch.images)), batch.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = []
    for _ in range(10):
        update(trainer)
        found.append(trainer.report().loss)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=0, atol=1e-6)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(trainer.model.state_dict()[name], weight, rtol=0, atol=1e-6)
