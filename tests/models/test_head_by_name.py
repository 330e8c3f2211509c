"""The classifier of a file that names its classes is taken over class by class."""

import json

import pytest
import torch

from models.weights.load import load_pretrained
from models.weights.torch_files import to_safetensors
from tests.support.weight_files import random_weights, saved, vit
from utils.errors import ConfigError

THEIRS = ["bird", "cat", "dog"]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights() | {"head.weight": torch.randn(3, 24), "head.bias": torch.randn(3)}


def fitted(path, classes: list[str], num_outputs: int | None = None):
    model = vit(num_classes=num_outputs or len(classes))
    return model, load_pretrained(model, str(path), classes=classes)[1:]


def checkpoint(weights, tmp_path):
    return saved({"state_dict": weights, "class_names": THEIRS}, tmp_path / "best.pth")


def exported(weights, tmp_path):
    path = tmp_path / "best.safetensors"
    path.write_bytes(to_safetensors(weights, {"format": "pt", "class_names": json.dumps(THEIRS), "config": "no JSON"}))
    return path


@pytest.mark.parametrize("write", [checkpoint, exported])
def test_rows_follow_the_names_and_a_new_class_gets_the_mean_of_those_taken_over(tmp_path, weights, write):
    model, lines = fitted(write(weights, tmp_path), ["dog", "zebra", "bird"])
    for own, theirs in ((model.head.weight, weights["head.weight"]), (model.head.bias, weights["head.bias"])):
        assert torch.equal(own[[0, 2]], theirs[[2, 0]])
        torch.testing.assert_close(own[1], theirs[[0, 2]].mean(0))
    assert len(lines) == 1
    assert [name in lines[0] for name in ("2 of 3", "new: zebra", "not used: cat")] == [True] * 3


def test_the_same_classes_keep_every_row_also_those_without_a_name(tmp_path, weights):
    four = weights | {"head.weight": torch.randn(4, 24), "head.bias": torch.randn(4)}
    model, lines = fitted(checkpoint(four, tmp_path), THEIRS, num_outputs=4)
    assert torch.equal(model.head.weight, four["head.weight"]) and torch.equal(model.head.bias, four["head.bias"])
    assert len(lines) == 1


@pytest.mark.parametrize("num_theirs", [3, 5])
def test_the_same_classes_are_taken_over_into_a_head_of_another_size(tmp_path, weights, num_theirs):
    theirs = weights | {"head.weight": torch.randn(num_theirs, 24), "head.bias": torch.randn(num_theirs)}
    model, lines = fitted(checkpoint(theirs, tmp_path), THEIRS, num_outputs=8 - num_theirs)
    assert torch.equal(model.head.weight[:3], theirs["head.weight"][:3])
    assert torch.equal(model.head.bias[:3], theirs["head.bias"][:3])
    assert len(lines) == 1 and "all 3" in lines[0]


def test_without_a_common_class_the_head_begins_anew(tmp_path, weights):
    model = vit(num_classes=3)
    before = model.head.weight.clone()
    lines = load_pretrained(model, str(checkpoint(weights, tmp_path)), classes=["x", "y", "z"])[1:]
    assert torch.equal(model.head.weight, before)
    assert len(lines) == 1 and "random weights" in lines[0] and "cat" in lines[0]


def test_a_name_is_the_same_in_either_spelling_of_an_umlaut(tmp_path, weights):
    path = saved({"state_dict": weights, "class_names": ["a", "Ba\u0308r", "c"]}, tmp_path / "best.pth")
    model, lines = fitted(path, ["B\u00e4r", "a", "c"])
    assert torch.equal(model.head.weight, weights["head.weight"][[1, 0, 2]]) and "new" not in lines[0]


def test_a_new_class_never_has_the_largest_logit(tmp_path, weights):
    old, _ = fitted(checkpoint(weights, tmp_path), THEIRS)
    new, _ = fitted(checkpoint(weights, tmp_path), ["alpaca", *THEIRS])
    images = torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(new.eval()(images).argmax(1) - 1, old.eval()(images).argmax(1))


def test_for_evaluation_a_head_of_another_size_stays_refused(tmp_path, weights):
    with pytest.raises(ConfigError, match="num_classes"):
        load_pretrained(vit(num_classes=4), str(checkpoint(weights, tmp_path)), needs_head=True, classes=list("abcd"))
