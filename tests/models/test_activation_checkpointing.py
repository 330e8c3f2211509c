"""Activation checkpointing: the same bits for less memory, or a refusal."""

import pytest
import timm
import torch

from engine.memory.estimate import saved_bytes
from engine.precision.policy import Precision
from models import build_model
from models.transforms.blocks import ActivationCheckpointing
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import refused
from tests.support.run_hash import state_hash
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

DROPPING = ("MODEL.DEPTH=3", "MODEL.DROPPATH=0.3", "MODEL.DROPOUT=0.2", "MODEL.ATTENTION_DROPOUT=0.1")
BLACK = "PRECISION.CUSTOM_BLACK_LIST=[blocks.*.mlp]"
WAYS = {
    "float16": ("AMP=true", "PRECISION.DTYPE=float16"),
    "naive": ("AMP=true", "PRECISION.MODE=naive"),
    "residual, lists": ("AMP=true", "PRECISION.RESIDUAL=half", BLACK),
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


def test_less_is_saved_for_the_backward_and_the_estimate_of_check_knows(tmp_path):
    config = small_config(tmp_path, "MODEL.DEPTH=8", "MODEL.EMBED_DIM=32", "DATA.BATCH_SIZE=16")
    again = replaced(config, TRAIN={"GRAD_CHECKPOINTING": True})
    whole, less = (saved_bytes(each, build_model(each, 10), Precision(each, CPU), 16) for each in (config, again))
    # The inputs of all blocks but the last are needed to recompute: 4 patches and the class token of 32 floats.
    assert 0.8 * 7 * 16 * 5 * 32 * 4 < less < 0.4 * whole


def test_other_models_do_it_as_timm_has_it_or_are_refused(tmp_path):
    model = build_model(small_config(tmp_path, *RESNET.split()), 10)
    ActivationCheckpointing("resnet18").apply(model)
    assert model.grad_checkpointing
    with torch.device("meta"):
        vgg = timm.create_model("vgg11")
    with refused(ConfigError, "TRAIN.GRAD_CHECKPOINTING", "MODEL.NAME", "vgg11"):
        ActivationCheckpointing("vgg11").apply(vgg)
