"""Pretrained weights: made to fit the model or refused with the reason, fetched from timm, exported and converted."""

import json
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import adapt_input_conv
from timm.models.vision_transformer import VisionTransformer

from models.weights import load
from models.weights.files import read_state_dict
from models.weights.load import load_pretrained
from scripts import export
from tests.support.refusals import assert_names, refused
from tests.support.weight_files import (
    CLASSES,
    DEPTH,
    HEADS,
    PADDLE_2022,
    PADDLE_OLDEST,
    WIDTH,
    Payload,
    assert_same,
    paddle_arrays,
    pickled,
    random_weights,
    saved,
    timm_model,
    training_file,
    vit,
)
from utils.errors import ConfigError
from utils.program import exit_code


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights()


# --- fitting a model


def test_a_file_that_fits_is_loaded_whole_and_named(tmp_path, weights):
    model = vit()
    path = saved(weights, tmp_path / "x.pth")
    assert load_pretrained(model, str(path)) == [f"MODEL.PRETRAINED: weights of {path}"]
    assert_same(model.state_dict(), weights)


def test_what_was_loaded_of_a_checkpoint_is_said(tmp_path, weights):
    path = saved({"state_dict": {"head.bias": torch.zeros(CLASSES)}, "state_dict_ema": weights}, tmp_path / "x.pth")
    assert load_pretrained(vit(), str(path)) == [f"MODEL.PRETRAINED: weights of {path} (state_dict_ema)"]


def test_another_class_count_drops_the_head_and_says_so(tmp_path, weights):
    model = vit(num_classes=3)
    head = model.head.weight.clone()
    lines = load_pretrained(model, str(saved(weights, tmp_path / "x.pth")))
    assert lines[1:] == ["  head starts from random weights: the one in the file has 10 classes, this model has 3"]
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.norm.weight, weights["norm.weight"])


def test_both_heads_of_a_distilled_deit_are_dropped(tmp_path):
    name = "deit_tiny_distilled_patch16_224"
    path = saved({"model": timm_model(name).state_dict()}, tmp_path / "x.pth")
    assert [line.split()[0] for line in load_pretrained(timm_model(name, 3), str(path))[1:]] == ["head", "head_dist"]
    assert len(load_pretrained(timm_model(name), str(path))) == 1


def test_a_file_without_a_head_is_taken(tmp_path, weights):
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("head")}
    lines = load_pretrained(vit(), str(saved(body, tmp_path / "x.pth")))
    assert lines[1:] == ["  head starts from random weights: the file has none"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_another_image_size_resizes_the_position_embedding_as_timm_does(tmp_path, weights, dtype):
    state = {name: tensor.to(dtype) for name, tensor in weights.items()}
    model = vit(image_size=48)
    lines = load_pretrained(model, str(saved(state, tmp_path / "x.pth")))
    old = state["pos_embed"].float()
    expected = resample_abs_pos_embed(old, new_size=[6, 6], interpolation="bicubic", antialias=True)
    assert lines[1:] == ["  pos_embed resized from [1, 17, 24] to [1, 37, 24]"]
    assert model.pos_embed.dtype == torch.float32
    torch.testing.assert_close(model.pos_embed.data, expected, rtol=0, atol=1e-6)
    assert torch.equal(model.pos_embed[:, 0], old[:, 0])


def test_a_grid_that_is_not_square_is_resized(tmp_path, weights):
    model = VisionTransformer((32, 64), 8, num_classes=CLASSES, embed_dim=WIDTH, depth=DEPTH, num_heads=HEADS)
    load_pretrained(model, str(saved(weights, tmp_path / "x.pth")))
    expected = resample_abs_pos_embed(weights["pos_embed"], new_size=[4, 8])
    assert torch.equal(model.pos_embed, expected)


def test_another_patch_size_resizes_the_patch_kernel(tmp_path, weights):
    model = vit(patch_size=16, image_size=64)
    lines = load_pretrained(model, str(saved(weights, tmp_path / "x.pth")))
    expected = resample_patch_embed(weights["patch_embed.proj.weight"], [16, 16])
    assert lines[1:] == ["  patch_embed.proj.weight resized from [24, 3, 8, 8] to [24, 3, 16, 16]"]
    assert torch.equal(model.patch_embed.proj.weight, expected)


@pytest.mark.filterwarnings("ignore:::timm.layers.interpolate")
def test_a_swin_is_resized_too(tmp_path):
    name = "swin_tiny_patch4_window7_224"
    path = saved(timm_model(name, image_size=224).state_dict(), tmp_path / "x.pth")
    lines = load_pretrained(timm_model(name, image_size=128), str(path))
    assert "relative_position_bias_table" in lines[1] and "more) resized" in lines[1]


def test_grey_images_get_the_sum_over_the_colours(tmp_path, weights):
    model = vit(channels=1)
    lines = load_pretrained(model, str(saved(weights, tmp_path / "x.pth")))
    assert lines[1:] == ["  patch_embed.proj made from 3 channels to 1"]
    assert torch.equal(model.patch_embed.proj.weight, adapt_input_conv(1, weights["patch_embed.proj.weight"]))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: vit(EMBED_DIM=48), r"of another shape: .*\[1, 1, 24\] in the file, \[1, 1, 48\] in the model.* more"),
        (lambda: vit(DEPTH=3), "only in the model: blocks.2.norm1.weight, .* and 9 more. Remedy"),
        (lambda: vit(DEPTH=1), "only in the file: blocks.1.norm1.weight, "),
        (
            lambda: timm_model("resnet18"),
            "only in the file: cls_token, .*only in the model: conv1.weight, bn1.weight, ",
        ),
        (lambda: timm_model("deit_tiny_distilled_patch16_224"), "only in the model: dist_token"),
    ],
)
def test_weights_of_another_architecture_are_refused_with_the_first_differences(tmp_path, weights, model, message):
    with pytest.raises(ConfigError, match=f"MODEL.PRETRAINED: the weights are of another architecture; .*{message}"):
        load_pretrained(model(), str(saved(weights, tmp_path / "x.pth")))


def test_a_distilled_deit_for_a_plain_vit_is_refused_with_the_remedy(tmp_path, weights):
    state = weights | {"dist_token": torch.ones(1, 1, WIDTH), "pos_embed": torch.ones(1, 18, WIDTH)}
    with pytest.raises(ConfigError, match="only in the file: dist_token.* MODEL.TYPE timm .*distilled"):
        load_pretrained(vit(), str(saved(state, tmp_path / "x.pth")))


def test_a_refused_file_leaves_the_model_as_it_was(tmp_path, weights):
    model = vit(DEPTH=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError):
        load_pretrained(model, str(saved(weights, tmp_path / "x.pth")))
    assert_same(model.state_dict(), before)


# --- timm's hub


@pytest.fixture
def network(monkeypatch):
    """A server that answers, whatever it is asked; `errors`: what it raises first."""
    server = SimpleNamespace(errors=[])

    def head(url, timeout):
        assert timeout < 10
        for error in server.errors:
            raise error

    monkeypatch.setattr(load, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    return server


def test_a_hub_name_is_fetched_by_timm_and_fitted(monkeypatch, network, weights):
    def create_model(name, pretrained):
        assert (name, pretrained) == ("vit_tiny_patch16_224", True)
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        torch.rand(7)
        source = vit()
        source.load_state_dict(weights)
        return source

    monkeypatch.setattr(timm, "create_model", create_model)
    model = vit(num_classes=3, image_size=48)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lines = load_pretrained(model, "vit_tiny_patch16_224")
    assert torch.rand(1) == expected, "random numbers moved on"
    assert lines[0] == "MODEL.PRETRAINED: weights of vit_tiny_patch16_224"
    assert len(lines) == 3
    assert torch.equal(model.blocks[0].attn.qkv.weight, weights["blocks.0.attn.qkv.weight"])


def test_a_fetch_that_fails_is_told_and_the_remedy_is_a_file(monkeypatch, network):
    def create_model(name, pretrained):
        raise OSError("name resolution failed\nand much more")

    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(
        ConfigError,
        match=r"vit_tiny_patch16_224 could not be fetched \(OSError: name resolution failed\).*/timm/vit_tiny_.*-pretrained path",
    ):
        load_pretrained(vit(), "vit_tiny_patch16_224")


@pytest.mark.parametrize("cached", [False, True])
def test_a_server_out_of_reach_is_asked_once_and_only_for_weights_that_are_not_cached(monkeypatch, network, cached):
    def snapshot(repository, local_files_only):
        assert local_files_only
        if not cached:
            raise FileNotFoundError(repository)

    asked = []
    monkeypatch.setattr(load, "snapshot_download", snapshot)
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: asked.append(name) or vit())
    network.errors = [ConnectionError("Name or service not known")]
    if cached:
        load_pretrained(vit(), "vit_tiny_patch16_224")
    else:
        with refused(ConfigError, "vit_tiny_patch16_224", "Name or service not known", "-pretrained"):
            load_pretrained(vit(), "vit_tiny_patch16_224")
    assert asked == ["vit_tiny_patch16_224"] * cached


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "vit_tiny_patch16_22",
            "no file at vit_tiny_patch16_22, nor .* no model of this name; did you mean .*vit_tiny_patch16_224",
        ),
        ("resnet50.b1_in1k", "no pretrained weights of resnet50.b1_in1k; did you mean resnet50.b1k_in1k"),
        ("missing/x.pdparams", "no file at missing/x.pdparams"),
    ],
)
def test_a_source_that_is_neither_file_nor_model_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        load_pretrained(vit(), source)


# --- scripts


def run_script(script, *arguments) -> int:
    """Returns the exit code."""
    return exit_code(script.main, [str(each) for each in arguments])


def test_export_writes_what_is_needed_to_use_the_weights(tmp_path, weights, capsys):
    mean = {name: tensor / 2 for name, tensor in weights.items()}
    data = {"mean": [0.5, 0.5, 0.5], "input_size": [3, 32, 32], "crop_pct": 0.875}
    names = {"epoch": 3, "arch": "vit", "class_names": ["ä", "b"], "data": data, "metric": 0.5}
    path = saved({"state_dict": weights, "state_dict_ema": mean, "optimizer": {}, **names}, tmp_path / "best.pth")
    for flags, expected in ((["-raw"], weights), (["-ema"], mean), ([], mean)):
        assert run_script(export, path, "-output", tmp_path / "out.safetensors", *flags) == 0
        assert_same(read_state_dict(tmp_path / "out.safetensors"), expected)
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert {key: json.loads(metadata[key]) for key in names} == names | {
        "epoch": 4
    }  # finished ones, as everywhere else
    assert json.loads(metadata["weights"]) == "state_dict_ema"
    assert "tensors of vit, after epoch 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ({"head.bias": torch.ones(1)}, [], "state_dict"),
        ({"state_dict": {"head.bias": torch.ones(1)}, "state_dict_ema": None}, ["-ema"], "TRAIN.MODEL_EMA"),
        ({"state_dict": Payload(os.system, "true")}, [], "could run code"),
    ],
)
def test_export_of_anything_else_exits_with_2(tmp_path, capsys, content, flags, message):
    assert run_script(export, saved(content, tmp_path / "x.pth"), "-o", tmp_path / "out.safetensors", *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("target", ["m.pt", "m.bin", "m"])
def test_export_refuses_a_name_of_a_format_that_it_does_not_write(tmp_path, weights, capsys, target):
    path = saved({"state_dict": weights}, tmp_path / "best.pth")
    assert run_script(export, path, "-output", f"{tmp_path}/{target}") == 2
    assert_names(capsys.readouterr().err, target.rstrip("/"), ".safetensors", ".pth")
    assert [each.name for each in tmp_path.iterdir()] == ["best.pth"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pdparams"])
def test_paddlevits_weights_convert_and_come_back(tmp_path, weights, suffix):
    source = pickled(training_file(paddle_arrays(weights, PADDLE_OLDEST)), tmp_path / "x.pdparams", 2)
    assert run_script(export, source, "-o", tmp_path / f"y{suffix}") == 0
    assert_same(read_state_dict(tmp_path / f"y{suffix}"), weights)


def test_pdparams_are_written_under_the_names_of_2022(tmp_path, weights):
    assert run_script(export, saved(weights, tmp_path / "x.pth"), "-o", tmp_path / "y.pdparams") == 0
    written = pickle.loads((tmp_path / "y.pdparams").read_bytes())
    assert set(written.pop("StructuredToParameterName@@")) == set(written)
    expected = paddle_arrays(weights, PADDLE_2022)
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name], array) for name, array in expected.items())


def test_what_paddlevit_has_no_name_for_is_not_converted(tmp_path, capsys):
    path = saved(timm_model("resnet18").state_dict(), tmp_path / "x.pth")
    assert run_script(export, path, "-o", tmp_path / "y.pdparams") == 2
    assert "conv1.weight has no place in PaddleViT's ViT" in capsys.readouterr().err
    assert not (tmp_path / "y.pdparams").exists()
