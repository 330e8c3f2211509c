"""Every model transform, and the list of all, can be reverted completely; recomputed blocks keep all numbers."""

import copy

import pytest
import timm
import torch
from torch import nn

from models import build_model
from models.transforms import ModelTransforms, choose_transforms
from models.transforms.blocks import ActivationCheckpointing
from models.transforms.gpu_kernels import GpuKernels
from tests.support.configs import CPU, small_config
from tests.support.refusals import refused
from tests.support.run_hash import state_hash
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

# Every transform at once: overrides, class token, kernels, float8 (blocks.1.mlp.fc1), checkpointing, residual.
OPTIONS = ("MODEL.DEPTH=3", "MODEL.MLP_RATIO=66", "MODEL.DROPOUT=0.1", "AMP=true", "PRECISION.MODE=float8") + (
    "PRECISION.CUSTOM_BLACK_LIST=[blocks.0.mlp,softmax]",
    "PRECISION.CUSTOM_WHITE_LIST=[blocks.0.norm1]",
    "PRECISION.RESIDUAL=half",
    "TRAIN.GRAD_CHECKPOINTING=true",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return small_config(tmp_path_factory.mktemp("transforms"), *OPTIONS)


@pytest.fixture(scope="module")
def chosen(config) -> ModelTransforms:
    return choose_transforms(config, CPU, torch.bfloat16, training=True)


def computed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return logits and gradients of a training step with dropout under autocast, by name."""
    torch.manual_seed(1)
    model.train().zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.linspace(-1, 1, 128).view(2, 1, 8, 8))
    logits.float().square().sum().backward()
    return {"logits": logits.detach(), **{name: each.grad.clone() for name, each in model.named_parameters()}}


def makeup(model: nn.Module) -> dict[str, dict[str, str]]:
    """Return how each module computes: its class, its attributes and its hooks."""
    tensors = ("_parameters", "_buffers", "_modules")
    return {
        path: {"class": repr(type(module))}
        | {name: str(value) for name, value in vars(module).items() if name not in tensors}
        for path, module in model.named_modules()
    }


NAMES = ("OpOverrides", "ClassTokenBlock", "CpuKernels", "Float8", "ActivationCheckpointing", "HalfResidual")


def test_all_model_transforms_are_chosen_in_a_fixed_order(chosen):
    assert tuple(type(each).__name__ for each in chosen.transforms) == NAMES


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, "GpuKernels", "all"])
@pytest.mark.parametrize("is_copy", [False, True], ids=["itself", "copy"])
def test_reverting_transforms_restores_the_model(config, chosen, name, is_copy):
    transforms = tuple(each for each in (*chosen.transforms, GpuKernels()) if name in ("all", type(each).__name__))
    transforms = ModelTransforms(transforms)
    torch.manual_seed(0)
    model = build_model(config, 10)
    model.blocks[1].attn.fused_attn = False  # by default timm's attention is fused
    before, plain, state = computed(model), makeup(model), list(model.state_dict())
    transforms.apply(model)
    changed = computed(model)
    assert list(model.state_dict()) == state and makeup(model) != plain
    model = copy.deepcopy(model) if is_copy else model
    transforms.revert(model)
    after, found = computed(model), makeup(model)
    assert list(model.state_dict()) == state
    # torchao's layers leave attributes that nothing reads.
    assert all(found[path] | attributes == found[path] for path, attributes in plain.items())
    assert all(torch.equal(after[each], before[each]) for each in before)
    is_exact = name == "ActivationCheckpointing"  # it only saves memory
    if name != "GpuKernels":  # rounding may differ
        assert all(torch.equal(changed[each], before[each]) for each in before) is is_exact


def test_blocks_are_called_again_after_reverting_transforms_that_bypass_modules(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    model = timm.create_model("vit_tiny_r_s16_p8_224", img_size=32, depth=1)  # it has convolutions before its blocks
    transforms = choose_transforms(small_config(tmp_path), torch.device("cuda"), None, training=False)
    transforms.apply(model)
    called = []
    model.blocks[-1].register_forward_hook(lambda *_: called.append(model))
    for expected in ([], [model]):
        model(torch.zeros(1, 3, 32, 32))
        assert called == expected
        transforms.that_bypass_modules().revert(model)


DROPPING = ("MODEL.DEPTH=3", "MODEL.DROPPATH=0.3", "MODEL.DROPOUT=0.2", "MODEL.ATTENTION_DROPOUT=0.1")
BLACK = "PRECISION.CUSTOM_BLACK_LIST=[blocks.*.mlp]"
WAYS = {
    "float16": ("AMP=true", "PRECISION.DTYPE=float16"),
    "naive": ("AMP=true", "PRECISION.MODE=naive"),
    "residual": ("AMP=true", "PRECISION.RESIDUAL=half"),
    "residual, lists": ("AMP=true", "PRECISION.RESIDUAL=half", BLACK),
    "accumulated": ("TRAIN.ACCUM_ITER=2", "TRAIN.MODEL_EMA=true"),
}
RESNET = "MODEL.TYPE=timm MODEL.NAME=resnet18 MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"


def trained(tmp_path, *options) -> tuple[str, int]:
    """Return the hash of the complete state after some updates, and the number of forwards of a block."""
    trainer, calls = make_trainer(small_config(tmp_path, *options)), []
    trainer.computing.model.blocks[0].mlp.fc1.register_forward_pre_hook(lambda *call: calls.append(1))
    update(trainer, 3)
    return state_hash(trainer.state_dict() | {"last": trainer.counters.last}), len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_grad_checkpointing_is_bitwise_exact_with_dropout(tmp_path, way):
    expected, calls = trained(tmp_path, *DROPPING, *WAYS[way])
    found, more_calls = trained(tmp_path, *DROPPING, *WAYS[way], "TRAIN.GRAD_CHECKPOINTING=true")
    assert found == expected and more_calls == 2 * calls


def test_grad_checkpointing_uses_timm_support_or_is_refused(tmp_path):
    model = build_model(small_config(tmp_path, *RESNET.split()), 10)
    ActivationCheckpointing("resnet18").apply(model)
    assert model.grad_checkpointing
    ActivationCheckpointing("resnet18").revert(model)
    assert not model.grad_checkpointing
    with torch.device("meta"):
        vgg = timm.create_model("vgg11")
    with refused(ConfigError, "TRAIN.GRAD_CHECKPOINTING", "MODEL.NAME", "vgg11"):
        ActivationCheckpointing("vgg11").apply(vgg)
