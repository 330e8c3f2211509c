"""Weight files: every format gives the same tensors, damage is reported, and untrusted files are never executed."""

import argparse
import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision

from configs.schema import Config
from configs.values import flatten
from models.weights.files import read_record, read_state_dict
from models.weights.load import load_pretrained
from models.weights.state import check_record
from tests.support.cases import cases_of, names_of
from tests.support.refusals import refused
from tests.support.weight_files import (
    CLASSES,
    DEPTH,
    HEADS,
    PADDLE_2022,
    PAYLOADS,
    WIDTH,
    assert_same,
    google_arrays,
    paddle_arrays,
    payloads,
    pickled,
    saved,
    vit,
)
from utils.errors import ConfigError

# --- torch and safetensors


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + name: tensor for name, tensor in state.items()}


OTHER = {"head.bias": torch.zeros(CLASSES)}
TORCH_LAYOUTS = {
    "ours": lambda state: {"epoch": 3, "arch": "vit", "state_dict": state, "state_dict_ema": None, "metric": 0.9},
    "ours_with_mean": lambda state: {"state_dict": OTHER, "state_dict_ema": state, "optimizer": {"state": {}}},
    "ours_with_an_empty_mean": lambda state: {"state_dict": state, "state_dict_ema": {}},
    "timm": lambda state: {"state_dict": state, "args": argparse.Namespace(lr=0.1, opt="sgd"), "version": 2},
    "deit": lambda state: {"model": state},
    "torchvision_with_mean": lambda state: {
        "model": OTHER,
        "model_ema": {"n_averaged": torch.tensor(5), **prefixed("module.", state)},
    },
}


@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_files_of_every_layout_are_read(tmp_path, weights, layout):
    for as_zip in (True, False):
        path = saved(TORCH_LAYOUTS[layout](weights), tmp_path / "x.pth", _use_new_zipfile_serialization=as_zip)
        assert_same(read_state_dict(path), weights)


def test_weights_file_format_is_detected_by_content_not_suffix(tmp_path, weights):
    for suffix in (".pdparams", ".pth", ".npz"):
        saved(weights, tmp_path / f"Epoch{suffix}-2.345{suffix}")
        assert_same(read_state_dict(tmp_path / f"Epoch{suffix}-2.345"), weights)
    safetensors.torch.save_file(weights, tmp_path / "x.pdparams")
    saved({"another": torch.ones(1)}, tmp_path / "x.pdparams.pth")
    assert_same(read_state_dict(tmp_path / "x.pdparams"), weights)


def test_torchvision_vit_weights_give_torchvision_logits(tmp_path):
    theirs = torchvision.models.VisionTransformer(32, 8, DEPTH, HEADS, WIDTH, WIDTH * 4, num_classes=CLASSES).eval()
    torch.nn.init.normal_(theirs.heads.head.weight)  # it starts at zero, which would prove nothing
    old_names = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in theirs.state_dict().items()
    }
    images = torch.randn(2, 3, 32, 32)
    for state in (theirs.state_dict(), old_names):
        ours = vit().eval()
        load_pretrained(ours, str(saved({"model": state}, tmp_path / "tv.pth")))
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=1e-5)


# --- Google's npz


@pytest.mark.parametrize("prefix", ["", "opt/target/"])
def test_google_npz_weights_are_read_as_in_timm(tmp_path, weights, prefix):
    path = tmp_path / "google.npz"
    np.savez(path, **google_arrays(weights, prefix))
    theirs = vit()
    theirs.load_pretrained(str(path))
    assert_same(theirs.state_dict(), weights)
    assert_same(read_state_dict(path), weights)


# --- files that must never be executed


def in_pickles(content: dict, folder: Path) -> Iterator[Path]:
    for suffix in (".pdparams", ".pth", ".npz"):
        for protocol in (0, 2, 4):
            yield pickled(content, folder / f"{protocol}{suffix}", protocol)


def in_arrays(content: dict, folder: Path) -> Iterator[Path]:
    objects = np.empty(1, dtype=object)
    objects[0] = content["head.weight"]
    np.savez(folder / "x.npz", cls=objects)
    yield folder / "x.npz"


def in_torch_files(content: dict, folder: Path) -> Iterator[Path]:
    for as_zip in (True, False):
        yield saved(content, folder / f"{as_zip}.pth", _use_new_zipfile_serialization=as_zip)


@pytest.mark.parametrize("write", [in_pickles, in_torch_files, in_arrays])
@pytest.mark.parametrize("kind", PAYLOADS)
def test_weights_file_that_would_run_code_is_refused(tmp_path, kind, write):
    marker = tmp_path / "marker"
    if kind in ("system", "eval", "exec", "object_array"):  # these do run if a reader allows it
        pickle.loads(pickle.dumps(payloads(marker)[kind]))
        marker.unlink()
    for path in write({"head.weight": payloads(marker)[kind]}, tmp_path):
        names = ("allow_pickle=False",) if write is in_arrays else ("refused", "code", ".safetensors")
        with refused(ConfigError, path, *names):
            read_state_dict(path)
        assert not marker.exists()


# --- damaged files, and files without weights


@pytest.mark.parametrize("kind", ["torch", "legacy", "safetensors", "npz", "pdparams"])
def test_truncated_weights_file_is_refused_by_name(tmp_path, weights, kind):
    path = tmp_path / "whole"
    if kind in ("torch", "legacy"):
        saved(weights, path, _use_new_zipfile_serialization=kind == "torch")
    elif kind == "safetensors":
        safetensors.torch.save_file(weights, path)
    elif kind == "npz":
        with open(path, "wb") as file:
            np.savez(file, **google_arrays(weights, ""))
    else:
        pickled(paddle_arrays(weights, PADDLE_2022), path)
    whole = path.read_bytes()
    for part in range(5):
        (tmp_path / "cut").write_bytes(whole[: len(whole) * part // 5])
        with refused(ConfigError, tmp_path / "cut"):
            read_state_dict(tmp_path / "cut")
    if kind == "safetensors":
        with refused(ConfigError, tmp_path / "cut"):
            read_record(tmp_path / "cut")


@pytest.mark.parametrize("content", cases_of("mistakes-in_weights"))
def test_file_without_usable_weights_is_refused(tmp_path, content):
    """Lists of numbers are converted to tensors."""

    def with_tensors(found: dict) -> dict:
        return {name: torch.tensor(each) if isinstance(each, list) else each for name, each in found.items()}

    with refused(ConfigError, *names_of("mistakes-in_weights", content)):
        read_state_dict(saved(json.loads(content, object_hook=with_tensors), tmp_path / "x.pth"))


def test_model_larger_than_its_checkpoint_is_refused(tmp_path):
    shard, path = tmp_path / "shards/step-1/1-of-1.pth", tmp_path / "last.pth"
    shard.parent.mkdir(parents=True)
    path.touch()
    huge = flatten(Config()) | {"MODEL.EMBED_DIM": 1280, "MODEL.DEPTH": 32}  # 630 million weights
    for size, config, is_accepted in ((0, flatten(Config()), True), (0, huge, False), (10**8, huge, True)):
        with open(shard, "wb") as file:
            file.truncate(size)
        with contextlib.nullcontext() if is_accepted else refused(ConfigError, path, "6.29e+08"):
            check_record({"config": config}, path)
