"""CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST: the actual types of outputs, in eager, copied and compiled models."""

import copy

import pytest
import timm
import torch
import yaml
from torch import nn

from models import build_model
from models.transforms import ModelTransforms, choose_transforms
from models.transforms.gpu_kernels import GpuKernels
from models.transforms.operator_lists import OpOverrides
from tests.support.cases import cases_of, names_of
from tests.support.configs import ema, replaced, small_config
from tests.support.refusals import refused
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

HALF, FLOAT = torch.bfloat16, torch.float32
IMAGES = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def listed(tmp_path):
    """Return a function that makes a small ViT of two blocks with lists, prepared as by the trainer."""

    def make(black=(), white=(), half=HALF, fused=False):
        torch.manual_seed(0)
        model = build_model(small_config(tmp_path), 10)
        for block in model.blocks:
            block.attn.fused_attn = fused
        OpOverrides(black, white, "cpu", half).apply(model)
        return model

    return make


def output_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the type of every module's output. blocks.N.attn.core is the output of the attention functions."""
    types: dict[str, torch.dtype] = {}
    handles = []
    for path, module in model.named_modules():

        def note(module, args, output, path=path):
            types[path] = output.dtype
            if path.endswith("attn.norm"):  # an Identity after attention
                types[path.replace("norm", "core")] = args[0].dtype

        handles.append(module.register_forward_hook(note))
    with torch.autocast("cpu", dtype=HALF):
        model(IMAGES).float().sum().backward()
    for handle in handles:
        handle.remove()
    return types


def inside(path: str, *names: str) -> set[str]:
    return {path, *(f"{path}.{name}" for name in names)}


MLP = ("fc1", "act", "fc2", "norm")
ATTN = ("qkv", "q_norm", "k_norm", "core", "norm", "proj")
BLACK_CASES = {
    "blocks.1.mlp": inside("blocks.1.mlp", *MLP) | {"blocks.1.ls2"},
    "blocks.1.attn": inside("blocks.1.attn", *ATTN) | {"blocks.1.ls1"},
    "blocks.1.m*": inside("blocks.1.mlp", *MLP) | {"blocks.1.ls2"},
    "blocks.0.*": inside("blocks.0.mlp", *MLP) | inside("blocks.0.attn", *ATTN) | {"blocks.0.ls1", "blocks.0.ls2"},
    "conv2d": {"patch_embed", "patch_embed.norm", "patch_embed.proj"},
    "head": {"", "head"},
    "gelu": {"blocks.0.mlp.act", "blocks.0.mlp.norm", "blocks.1.mlp.act", "blocks.1.mlp.norm"},
    "softmax": {f"blocks.{n}.attn.{name}" for n in (0, 1) for name in ("core", "norm")},
    "Attention": {p for n in (0, 1) for p in inside(f"blocks.{n}.attn", *ATTN) | {f"blocks.{n}.ls1"}},
}


@pytest.mark.parametrize("entry", BLACK_CASES)
def test_black_list_entry_runs_named_parts_in_float32(listed, entry):
    fused = entry in ("softmax", "blocks.1.attn")  # these entries affect another function if attention is fused
    types, before = (output_types(listed(black=black, fused=fused)) for black in ((entry,), ()))
    found = {path: types[path] for path in types if types[path] is not before[path] and "drop" not in path}
    assert found == dict.fromkeys(BLACK_CASES[entry], FLOAT)


@pytest.mark.parametrize(("white", "head"), [((), FLOAT), (("head",), HALF)])
def test_head_of_numbers_is_in_float32_unless_it_is_listed(tmp_path, white, head):
    model, settings = build_model(small_config(tmp_path), 2), {"CUSTOM_WHITE_LIST": white}
    config = replaced(small_config(tmp_path), TRAIN={"OBJECTIVE": "numbers"}, PRECISION=settings)
    choose_transforms(config, torch.device("cpu"), HALF).apply(model)
    found = output_types(model)
    assert found["head"] is head and found["blocks.1.mlp.fc1"] is HALF


@pytest.mark.parametrize("entry", ["LayerNorm", "layer_norm"])
def test_white_listed_norms_return_half_and_keep_float32_weights(listed, entry):
    model = listed(white=(entry,))
    found = output_types(model)
    assert {found[path] for path in ("blocks.0.norm1", "blocks.1.norm2", "norm")} == {HALF}
    assert found["blocks.0"] is FLOAT  # the residual stream
    weight = dict(model.named_parameters())["norm.weight"]
    assert weight.dtype is FLOAT and weight.grad.dtype is FLOAT
    assert model.state_dict()["norm.weight"].dtype is FLOAT


@pytest.mark.parametrize("entry", ["blocks.1", "blocks.1*"])
def test_white_listed_block_computes_everything_in_half(listed, entry):
    found = output_types(listed(white=(entry,)))
    assert {dtype for path, dtype in found.items() if path.startswith("blocks.1")} == {HALF}
    assert found["blocks.0"] is FLOAT and found["blocks.0.norm1"] is FLOAT


# Lists, and the resulting types of some outputs.
INNER = {
    "white in black in white": (
        ("*.attn", "*.mlp"),
        ("blocks.1", "blocks.1.attn.q_norm", "blocks.1.mlp.fc2"),
        # In blocks.1.attn.core, queries are in half precision, and keys are not.
        {"blocks.0.norm1", "blocks.0.attn.core", "blocks.1.attn.qkv", "blocks.1.attn.core", "blocks.1.attn"}
        | {"blocks.1.mlp.fc1", "blocks.1.mlp.act"},
        {"blocks.1.norm1", "blocks.1.attn.q_norm", "blocks.1.norm2", "blocks.1.mlp.fc2"},
    ),
    "an operator in black": (("blocks.1",), ("softmax",), {"blocks.1.mlp.act"}, {"blocks.1.attn.core"}),
    "an operator in white": (("matmul_v2",), ("blocks.1",), {"blocks.1.attn.core"}, {"blocks.1.norm1"}),
    "the more exact entry": (
        ("Linear", "blocks.1.mlp.*"),
        ("matmul_v2", "blocks.1.mlp.fc1", "head"),
        {"blocks.1.mlp.fc2", "blocks.0.mlp.fc1"},
        {"head", "blocks.1.mlp.fc1", "blocks.0.attn.core"},
    ),
    "softmax before products": (("softmax",), ("matmul_v2",), {"blocks.1.attn.core"}, {"blocks.1.attn.qkv"}),
    "products behind softmax": (("matmul_v2",), ("softmax",), {"blocks.1.attn.qkv"}, {"blocks.1.attn.core"}),
}


@pytest.mark.parametrize("case", INNER)
def test_innermost_and_most_exact_list_entry_takes_effect(listed, case):
    black, white, in_float, in_half = INNER[case]
    found = output_types(listed(black=black, white=white))
    assert {path: found[path] for path in in_float | in_half} == {path: FLOAT for path in in_float} | {
        path: HALF for path in in_half
    }


@pytest.mark.long
def test_operator_lists_survive_compilation_and_copies_without_graph_breaks(listed):
    """fullgraph=True raises an error if the graph breaks."""
    black = ("blocks.1", "blocks.0.attn.proj", "conv2d", "gelu")
    model = listed(black=black, white=("blocks.*.attn", "matmul_v2", "layer_norm"))
    torch._dynamo.reset()
    assert output_types(copy.deepcopy(model)) == output_types(model)
    copied = copy.deepcopy(model).eval()
    copied.compile(fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=HALF), torch.no_grad():
        torch.testing.assert_close(copied(IMAGES), model(IMAGES), rtol=0, atol=0)


@pytest.mark.parametrize("lists", cases_of("operator_lists-mistakes_of_lists_of_modules"))
def test_impossible_entries_in_operator_lists_are_refused(listed, lists):
    given = {name: tuple(entries) for name, entries in yaml.safe_load(f"{{{lists}}}").items()}
    for half in (HALF, None):
        with refused(ConfigError, *names_of("operator_lists-mistakes_of_lists_of_modules", lists)):
            listed(**given, half=half)


def test_listed_operator_missing_from_the_model_is_refused():
    with refused(ConfigError, "gelu"):
        OpOverrides(("gelu",), (), "cpu", HALF).apply(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))


def test_batch_norms_in_operator_lists_keep_float32_statistics():
    for black, white, expected in ((("BatchNorm2d",), (), FLOAT), ((), ("BatchNorm2d",), HALF)):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
        OpOverrides(black, white, "cpu", HALF).apply(model)
        assert output_types(model)["1"] is expected
        assert model[1].running_mean.dtype is FLOAT and model[1].running_mean.abs().sum() > 0
        model.eval()
        assert output_types(model)["1"] is expected


def test_swin_supports_operator_lists():
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, img_size=56, depths=(1, 2), embed_dim=24)
    OpOverrides(("matmul_v2",), ("*.1", "LayerNorm"), "cpu", HALF).apply(model)
    with torch.autocast("cpu", dtype=HALF):
        logits = model(torch.randn(2, 3, 56, 56))
    logits.sum().backward()
    assert logits.dtype is FLOAT and all(p.grad is not None for p in model.parameters())


def test_black_listed_block_trains_where_float16_overflows(tmp_path):
    weights = {}
    for black in ((), ("blocks.1.mlp",)):
        config = replaced(
            small_config(tmp_path, "AMP=true", *ema(0.5)),
            PRECISION={"DTYPE": "float16", "INIT_LOSS_SCALING": 16.0, "CUSTOM_BLACK_LIST": black},
        )
        trainer = make_trainer(config)
        for model in (trainer.model, trainer.ema.model):
            with torch.no_grad():
                model.blocks[1].mlp.fc1.weight.mul_(1e7)  # outputs exceed 65504
                model.blocks[1].mlp.fc2.weight.mul_(1e-7)
        before = trainer.model.blocks[0].mlp.fc1.weight.clone()
        update(trainer, 4)
        weights[black] = trainer.report().skipped, torch.equal(before, trainer.model.blocks[0].mlp.fc1.weight)
        with trainer.precision.autocast(), torch.no_grad():
            logits = [model.eval()(IMAGES) for model in (trainer.model, trainer.ema.model)]
        weights[black] += tuple(bool(each.isfinite().all()) for each in logits)
    assert weights == {(): (4, True, False, False), ("blocks.1.mlp",): (0, False, True, True)}


def test_black_listed_last_block_is_not_shortened(tmp_path):
    """Kernels are chosen after the lists. A shortened last block would not call the listed attention."""
    config = replaced(small_config(tmp_path, "AMP=true"), PRECISION={"CUSTOM_BLACK_LIST": ("blocks.1.attn",)})
    model = make_trainer(config).model
    seen = []
    model.blocks[1].attn.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=HALF):
        model(torch.randn(2, 1, 8, 8))
    assert seen == [FLOAT]


def test_black_listed_module_also_casts_tensors_given_in_a_list():
    class Sum(nn.Module):
        def forward(self, terms):
            return terms[0] + terms[1]

    OpOverrides(("Sum",), (), "cpu", HALF).apply(nn.Sequential(added := Sum()))
    assert added([torch.ones(2, dtype=HALF)] * 2).dtype is FLOAT


@pytest.mark.parametrize("lists", [(("Linear",), ()), ((), ("Linear",))])
def test_operator_lists_keep_float64_as_autocast_does(lists):
    model = nn.Sequential(nn.Linear(2, 3)).double()
    OpOverrides(*lists, "cpu", HALF).apply(model)
    with torch.autocast("cpu", dtype=HALF):
        assert model(torch.zeros(1, 2, dtype=torch.float64)).dtype is torch.float64


FIRST_LAYER = {
    "conv2d black": (("conv2d",), (), FLOAT),
    "patch_embed.proj white, patch_embed black": (("patch_embed",), ("patch_embed.proj",), HALF),
    "matmul_v2 black": (("matmul_v2",), (), HALF),
}


@pytest.mark.parametrize("is_listed_first", [True, False])
@pytest.mark.parametrize("lists", FIRST_LAYER)
def test_first_layer_with_gpu_kernels_follows_its_operator_list(tmp_path, lists, is_listed_first):
    """GpuKernels is applied after the lists, as in a run, or before them, as when the doctor tries black lists."""
    black, white, dtype = FIRST_LAYER[lists]
    model = build_model(small_config(tmp_path), 10)
    transforms = [OpOverrides(black, white, "cpu", HALF), GpuKernels()]
    ModelTransforms(tuple(transforms if is_listed_first else reversed(transforms))).apply(model)
    seen = []
    model.patch_embed.proj.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=HALF):
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    assert seen == [dtype]
    assert dict(model.named_parameters())["patch_embed.proj.weight"].grad.dtype is torch.float32
