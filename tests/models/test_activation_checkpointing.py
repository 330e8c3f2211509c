"""Activation checkpointing: the same bits for less memory, or a refusal."""

import pytest
import torch

from engine.memory.estimate import saved_bytes
from engine.precision.policy import Precision
from models import build_model
from models.transforms.blocks import ActivationCheckpointing
from tests.support.configs import CPU, replaced, small_config
from tests.support.run_hash import state_hash
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

DROPPING = ("MODEL.DEPTH=3", "MODEL.DROPPATH=0.3", "MODEL.DROPOUT=0.2", "MODEL.ATTENTION_DROPOUT=0.1")
BLACK = "PRECISION.CUSTOM_BLACK_LIST=[blocks.*.mlp]"
WAYS = {
    "float32": (),
    "bfloat16": ("AMP=true",),
    "float16": ("AMP=true", "PRECISION.DTYPE=float16"),
    "naive": ("AMP=true", "PRECISION.MODE=naive"),
    "residual": ("AMP=true", "PRECISION.RESIDUAL=half"),
    "lists": ("AMP=true", BLACK),
    "accumulated": ("TRAIN.ACCUM_ITER=2", "TRAIN.MODEL_EMA=true"),
}
RESNET = "MODEL.TYPE=timm MODEL.NAME=resnet18 MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"


def trained(tmp_path, *options) -> tuple[str, int]:
    """The hash of everything after some updates, and how often a block computed."""
    trainer, calls = make_trainer(small_config(tmp_path, *options)), []
    trainer.computing.model.blocks[0].mlp.fc1.register_forward_pre_hook(lambda *call: calls.append(1))
    update(trainer, 3)
    return state_hash(trainer.state_dict() | {"last": trainer.counters.last}), len(calls)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits_with_dropout_and_drop_path(tmp_path, way):
    expected, calls = trained(tmp_path, *DROPPING, *WAYS[way])
    found, more_calls = trained(tmp_path, *DROPPING, *WAYS[way], "TRAIN.GRAD_CHECKPOINTING=true")
    assert found == expected and more_calls == 2 * calls


def test_less_is_kept_for_the_backward_and_the_estimate_of_check_knows(tmp_path):
    options = ("MODEL.DEPTH=8", "MODEL.EMBED_DIM=32", "DATA.BATCH_SIZE=16")
    config = small_config(tmp_path, *options)
    again = replaced(config, TRAIN={"GRAD_CHECKPOINTING": True})
    whole, less = (saved_bytes(each, build_model(each, 10), Precision(each, CPU), 16) for each in (config, again))
    assert less < 0.4 * whole
    model = build_model(again, 10)
    ActivationCheckpointing("vit").apply(model)
    assert less > peak_of(model, again) * 0.8


def peak_of(model, config) -> int:
    """Bytes of the inputs of all blocks but the last, which a recomputing model cannot do without."""
    sizes = []
    for block in model.blocks[:-1]:
        block.register_forward_pre_hook(lambda block, taken: sizes.append(taken[0].nbytes))
    model(torch.zeros(16, 1, 8, 8))
    return sum(sizes)


def test_a_convolutional_model_does_it_as_timm_has_it(tmp_path):
    config = small_config(tmp_path, *RESNET.split())
    model = build_model(config, 10)
    ActivationCheckpointing("resnet18").apply(model)
    assert model.grad_checkpointing


def test_a_model_without_is_refused(tmp_path):
    config = small_config(tmp_path, *RESNET.replace("resnet18", "vgg11").split(), "DATA.IMAGE_SIZE=32")
    with pytest.raises(ConfigError, match="TRAIN.GRAD_CHECKPOINTING is true, but MODEL.NAME vgg11"):
        ActivationCheckpointing("vgg11").apply(build_model(config, 10))
