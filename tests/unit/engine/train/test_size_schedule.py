"""TRAIN.SIZE_SCHEDULE: an epoch equals an epoch of a run with its image size, however updates are split.

Models with a fixed size refuse a schedule.
"""

import pytest
import torch

from configs.schema import Arguments
from datasets import Normalize, build_preparation, build_train_data
from models import build_model
from models.transforms import choose_transforms
from tests.support.configs import CPU, replaced, small_config
from tests.support.opened import open_sets
from tests.support.refusals import refused
from utils.distributed import Process
from utils.errors import ConfigError
from utils.torch_internals import TorchDispatchMode

CHANGES = (
    "TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.AUTO_AUGMENT=rand-m9 "
    "DATA.TRAIN_CROP=simple"
).split()
SCHEDULE = "TRAIN.SIZE_SCHEDULE=[0:4, 1:12]"
FIELDS = {"PATCH_SIZE": 16, "EMBED_DIM": 768, "DEPTH": 12, "NUM_HEADS": 12}


def first_images(config, epoch: int) -> torch.Tensor:
    """Return the prepared images of the first update of an epoch."""
    data = build_train_data(config, open_sets(config)[0], Process(CPU))
    step = epoch * data.steps_per_epoch
    (window,) = ([next(each.batches)] for each in data.windows(step, step + 1))
    return build_preparation(config, Normalize(config.DATA))(window[0])[0]


@pytest.mark.parametrize(("epoch", "side"), [(0, 4), (1, 12), (5, 12)])
def test_scheduled_image_size_gives_same_images_as_fixed_size(tmp_path, epoch, side):
    images = first_images(small_config(tmp_path, SCHEDULE, *CHANGES), epoch)
    assert images.shape == (32, 1, side, side)
    assert torch.equal(images, first_images(small_config(tmp_path, f"DATA.IMAGE_SIZE={side}", *CHANGES), epoch))


def test_resized_position_embedding_gives_the_same_output_as_timm(tmp_path):
    config = small_config(tmp_path, SCHEDULE)
    plain = build_model(config, 5).eval()
    chosen = build_model(config, 5).eval()
    chosen.load_state_dict(plain.state_dict())
    choose_transforms(config, CPU, None, training=True).apply(chosen)
    for side in (4, 8, 12):
        images = torch.randn(2, 1, side, side)
        torch.testing.assert_close(chosen(images), plain(images))
    assert plain.pos_embed.shape == build_model(small_config(tmp_path), 5).pos_embed.shape


class LikeCuda(TorchDispatchMode):
    """Refuses the gradient for which CUDA has no deterministic kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "upsample" not in str(func) or "backward" not in str(func), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_deterministic_resize_of_position_embedding_matches_default_resize(tmp_path, is_compiled):
    config = small_config(tmp_path, SCHEDULE, "DETERMINISTIC=true", "MODEL.DEPTH=1")
    plain = build_model(config, 5).eval()
    chosen = build_model(config, 5).eval()
    chosen.load_state_dict(plain.state_dict())
    chosen.double()
    transforms = choose_transforms(config, torch.device("cuda"), None, training=True)
    transforms.apply(chosen)
    if is_compiled:
        chosen.compile(backend="eager", dynamic=False, fullgraph=True)
    for side in (4, 12):
        images = torch.randn(2, 1, side, side)
        total = chosen(images.double()).square().sum()
        with LikeCuda():
            total.backward()
        plain(images).square().sum().backward()
    torch.testing.assert_close(chosen.pos_embed.grad.float(), plain.pos_embed.grad, rtol=1e-4, atol=1e-5)


def test_fixed_size_models_refuse_a_size_schedule(tmp_path):
    config = replaced(small_config(tmp_path, "TRAIN.SIZE_SCHEDULE=[0:32]", "DATA.IMAGE_SIZE=64"), MODEL=FIELDS)
    with refused(ConfigError, "TRAIN.SIZE_SCHEDULE", "levit_128"):
        build_model(replaced(config, MODEL={"TYPE": "timm", "NAME": "levit_128"}), 5)
    small = Arguments({"embed_dim": 24, "depth": 1, "num_heads": 2})
    for name, kwargs in (("vit_tiny_patch16_224", small), ("test_resnet", Arguments())):
        model = build_model(replaced(config, MODEL={"TYPE": "timm", "NAME": name, "KWARGS": kwargs}), 5).eval()
        assert model(torch.randn(1, 1, 32, 32)).shape == model(torch.randn(1, 1, 64, 64)).shape
