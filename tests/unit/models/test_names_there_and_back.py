"""Weights of drawn models, written under the names of each program, give the same logits when they are loaded."""

import tempfile
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.weights.load import load_pretrained
from models.weights.torch_files import to_safetensors
from tests.support.properties import examples
from tests.support.weight_files import YEARS, paddle_arrays, pickled, saved, transformers_weights, vit


def prefixed(prefix):
    return lambda state, path: saved({prefix + name: tensor for name, tensor in state.items()}, path)


def in_safetensors(convert):
    def write(state, path):
        path.write_bytes(to_safetensors(convert(state)))
        return path

    return write


def in_paddle(names):
    return lambda state, path: pickled(paddle_arrays(state, names), path)


WRITERS = {
    "timm": prefixed(""),
    "DDP": prefixed("module."),
    "compiled": prefixed("_orig_mod."),
    "compiled DDP": prefixed("_orig_mod.module."),
    "EMA": lambda state, path: saved({"state_dict": {"x.weight": torch.ones(1, 1)}, "state_dict_ema": state}, path),
    "safetensors": in_safetensors(dict),
    "transformers": in_safetensors(transformers_weights),
} | {f"PaddleViT {year}": in_paddle(names) for year, names in YEARS.items()}


@st.composite
def models(draw) -> dict:
    """Return the arguments of a small ViT with a class token."""
    heads = draw(st.integers(1, 4))
    sizes = {
        "NUM_HEADS": heads,
        "EMBED_DIM": heads * draw(st.sampled_from([4, 8])),
        "DEPTH": draw(st.sampled_from([1, 2, 11])),
    }
    side = {"patch_size": draw(st.sampled_from([4, 8])), "channels": draw(st.sampled_from([1, 3]))}
    return {"num_classes": draw(st.integers(1, 30)), "image_size": draw(st.sampled_from([16, 24])), **side, **sizes}


def drawn_model(arguments: dict) -> torch.nn.Module:
    """Return the model in evaluation mode with random weights."""
    model = vit(**arguments).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.3)
    return model


@pytest.mark.long
@examples(30)
@given(arguments=models(), program=st.sampled_from([*WRITERS]))
def test_weights_of_every_program_give_the_same_logits(arguments, program):
    theirs, ours = drawn_model(arguments), vit(**arguments).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = WRITERS[program](theirs.state_dict(), Path(folder) / "x")
        assert len(load_pretrained(ours, str(path))) == 1, "nothing is resized, dropped or random"
        images = torch.randn(2, arguments["channels"], *[arguments["image_size"]] * 2)
        torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=0)


NAMES = st.lists(st.sampled_from([*"abcdefgh", "ä", "a\u0308", "ö", "o\u0308"]), min_size=1, max_size=8)


@pytest.mark.long
@examples(25)
@given(theirs=NAMES, mine=NAMES)
def test_logits_of_known_classes_stay_and_new_classes_never_win(theirs, mine):
    plain = [[*dict.fromkeys(normalize("NFC", name) for name in names)] for names in (theirs, mine)]
    theirs = [normalize("NFD", name) for name in plain[0]]  # the form that macOS writes
    known = [name for name in plain[1] if name in plain[0]]
    old = drawn_model({"num_classes": len(theirs)})
    new = vit(num_classes=len(plain[1])).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = saved({"state_dict": old.state_dict(), "class_names": theirs}, Path(folder) / "x.pth")
        load_pretrained(new, str(path), classes=plain[1])
        images = torch.randn(3, 3, 32, 32)
        expected, found = old(images), new(images)
    for name in known:
        logits = expected[:, plain[0].index(name)]
        np.testing.assert_allclose(found[:, plain[1].index(name)], logits, rtol=1e-4, atol=1e-4)
    if known:
        assert all(plain[1][int(number)] in known for number in found.argmax(1)) or len(known) < 2
