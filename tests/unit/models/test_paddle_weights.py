"""PaddleViT's .pdparams files give timm's tensors, and nothing in them is ever executed."""

import codecs

import numpy as np
import pytest
import timm
import torch

from models.weights.files import read_state_dict
from models.weights.load import load_pretrained
from models.weights.metadata import metadata_of
from models.weights.paddle import read_pdparams
from tests.support.refusals import assert_names, refused
from tests.support.runs import typed
from tests.support.weight_files import (
    PADDLE_2021,
    PADDLE_2022,
    PADDLE_LAYOUTS,
    PADDLE_OLDEST,
    WIDTH,
    YEARS,
    Payload,
    assert_same,
    paddle_arrays,
    pickled,
    training_file,
    vit,
)
from utils.errors import ConfigError


@pytest.mark.parametrize("layout", PADDLE_LAYOUTS)
@pytest.mark.parametrize("year", YEARS)
def test_pdparams_files_of_every_year_and_layout_are_read(tmp_path, weights, year, layout):
    content = PADDLE_LAYOUTS[layout](paddle_arrays(weights, YEARS[year]))
    for protocol, numpy in ((4, None), (2, b"numpy.core.")):
        path = pickled(content, tmp_path / "x.pdparams", protocol)
        if numpy:
            path.write_bytes(path.read_bytes().replace(b"numpy._core.", numpy).replace(b"numpy.core.", numpy))
            assert numpy in path.read_bytes()
        assert_same(read_state_dict(path), weights)


def test_split_paddle_arrays_are_joined(tmp_path, weights):
    content = paddle_arrays(weights, PADDLE_2022)
    name = "encoder.layers.0.mlp.fc1.weight"
    whole = content.pop(name)
    parts = {f"{name}@@.{number}": part for number, part in enumerate(np.array_split(whole.ravel(), 3))}
    content |= parts | {"UnpackBigParamInfor@@": {name: {"OriginShape": whole.shape, "slices": list(parts)}}}
    assert_same(read_state_dict(pickled(content, tmp_path / "x.pdparams", 2)), weights)


def test_paddlevit_distilled_deit_is_recognized_by_shapes(tmp_path):
    theirs = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, num_classes=5).state_dict()
    names = PADDLE_2022 | {"dist_token": "dist_token", "head_dist": "classifier_dist"}
    arrays = paddle_arrays({name: tensor for name, tensor in theirs.items() if "head_dist.weight" not in name}, names)
    arrays["classifier_dist.weight"] = theirs["head_dist.weight"].T.numpy()
    path = pickled(arrays, tmp_path / "x.pdparams")
    assert_same(read_state_dict(path), theirs)
    metadata = metadata_of(str(path))
    assert metadata.model == {"MODEL.TYPE": "timm", "MODEL.NAME": "deit_tiny_distilled_patch16_224"}
    assert metadata.images["DATA.IMAGENET_MEAN"] == [0.485, 0.456, 0.406]


def test_two_layer_paddlevit_head_of_2021_is_dropped(tmp_path, weights):
    arrays = {
        name.replace("classifier.", "classifier.3."): array
        for name, array in paddle_arrays(weights, PADDLE_2021).items()
    }
    arrays |= {"classifier.0.weight": np.ones((WIDTH, WIDTH), "f4"), "classifier.0.bias": np.ones(WIDTH, "f4")}
    model = vit()
    head = model.head.weight.clone()
    _, line = load_pretrained(model, str(pickled(arrays, tmp_path / "x.pdparams")))
    assert_names(line, "head")
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.blocks[1].mlp.fc2.weight, weights["blocks.1.mlp.fc2.weight"])


def test_weights_of_unsupported_paddlevit_model_are_refused(tmp_path):
    for name, kind in (("stages.0.conv.weight", "f4"), ("cls_token", "i8")):
        with refused(ConfigError, name):
            read_state_dict(pickled({name: np.ones(2, kind)}, tmp_path / "x.pdparams"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_paddlevit_weights_convert_to_timm_names(tmp_path, weights, suffix):
    source = pickled(training_file(paddle_arrays(weights, PADDLE_OLDEST)), tmp_path / "x.pdparams", 2)
    typed("scripts/export.py", source, "-o", tmp_path / f"y{suffix}").done()
    assert_same(read_state_dict(tmp_path / f"y{suffix}"), weights)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (Payload(codecs.encode, b"x", "zip"), "zip"),  # only the codec that Paddle needs is allowed
        (Payload(np.float32(1).__reduce__()[0], np.dtype("f4"), "text"), "objects"),
        (np.zeros(2, dtype=[("a", "f4"), ("b", "O")]), "V12"),  # numpy would trust this layout
    ],
)
def test_pickled_objects_other_than_paddle_arrays_are_refused(tmp_path, content, name):
    with refused(ConfigError, "refused", name):
        read_state_dict(pickled({"head.bias": content}, tmp_path / "x.pdparams"))


def test_big_endian_paddle_arrays_keep_their_values(tmp_path):
    numbers = np.array([1.5, -2.0, 3e-5], ">f4")
    found = read_pdparams(pickled({"x": numbers}, tmp_path / "x.pdparams"))["x"]
    assert found.tolist() == numbers.tolist()
