"""scripts/export.py with several checkpoints: the averaged weights, and refused input."""

import json

import pytest
import safetensors
import torch

from models.weights.average import average
from models.weights.files import read_state_dict
from tests.support.checkpoints import PLAIN, checkpoint
from tests.support.runs import typed
from tests.support.weight_files import assert_same

pytestmark = pytest.mark.slow

MODEL = PLAIN | {"PATCH_SIZE": 4}
DATA = {"DATASET": "digits", "IMAGE_SIZE": 8, "IMAGE_CHANNELS": 1, "NUM_WORKERS": 0}
DATA |= {"IMAGENET_MEAN": (0.5,), "IMAGENET_STD": (0.5,)}
EXPORT = "scripts/export.py"
NUMBERS = [str(number) for number in range(10)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of a run with three checkpoints of random weights, which can be evaluated on the digits."""
    folder = tmp_path_factory.mktemp("run")
    for epoch in (1, 2, 10):
        path = folder / f"checkpoint-{epoch}.pth"
        checkpoint(path, MODEL, DATA, NUMBERS, seed=epoch, epoch=epoch - 1, preferred="state_dict")
    return folder


def weights_of(path) -> dict:
    return torch.load(path, weights_only=True)["state_dict"]


def formula(*states: dict) -> dict:
    """Average as timm's avg_checkpoints.py: the sum in float64, divided by the number of files, as float32."""
    return {name: (sum(state[name].double() for state in states) / len(states)).float() for name in states[0]}


@pytest.mark.parametrize("order", [(2, 10), (10, 2), (10, 1, 10, 10)])
def test_checkpoint_mean_matches_timm_and_keeps_latest_metadata(run, tmp_path, order):
    paths = [run / f"checkpoint-{epoch}.pth" for epoch in order]
    typed(EXPORT, *paths, "-output", tmp_path / "mean.safetensors").done()
    found = read_state_dict(tmp_path / "mean.safetensors")
    assert_same(found, formula(*map(weights_of, paths)))
    with safetensors.safe_open(tmp_path / "mean.safetensors", "pt") as file:
        metadata = {name: json.loads(value) for name, value in file.metadata().items() if name != "format"}
    assert metadata["epoch"] == 10 and metadata["class_names"] == NUMBERS and "metric" not in metadata
    assert [each["file"] for each in metadata["averaged"]] == [str(path) for path in paths]


def test_averaged_batch_norm_has_mean_statistics_and_largest_counter():
    states = [
        {"bn.running_var": torch.tensor([1.0]), "bn.num_batches_tracked": torch.tensor(7)},
        {"bn.running_var": torch.tensor([2.0]), "bn.num_batches_tracked": torch.tensor(5)},
    ]
    assert average(states) == {
        "bn.running_var": torch.tensor([1.5]),
        "bn.num_batches_tracked": torch.tensor(7),
    }


def test_averaging_uses_each_checkpoints_better_weights_by_default(run, tmp_path):
    mean = {name: tensor / 2 for name, tensor in weights_of(run / "checkpoint-1.pth").items()}
    one = checkpoint(tmp_path / "a.pth", MODEL, DATA, NUMBERS, seed=1, state_dict_ema=mean, preferred="state_dict_ema")
    other = run / "checkpoint-2.pth"
    for flags, first in (([], mean), (["-raw"], weights_of(one))):
        typed(EXPORT, one, other, *flags, "-output", tmp_path / "x.safetensors").done()
        assert_same(read_state_dict(tmp_path / "x.safetensors"), formula(first, weights_of(other)))
    typed(EXPORT, one, other, "-ema", "-output", tmp_path / "y.safetensors").refused()
    assert not (tmp_path / "y.safetensors").exists()


def test_averaging_unlike_models_is_refused_and_writes_nothing(run, tmp_path):
    def other(name, model=None, data=None, classes=NUMBERS):
        return checkpoint(tmp_path / f"{name}.ckpt", MODEL | (model or {}), DATA | (data or {}), classes)

    one = run / "checkpoint-1.pth"
    for words, names in [
        ([one, other("heads", model={"NUM_HEADS": 2})], [one, "heads.ckpt", "architecture"]),
        ([one, other("classes", classes=NUMBERS[::-1])], [one, "classes.ckpt", "classes"]),
        ([one, other("crop", data={"CROP_PCT": 1.0})], [one, "crop.ckpt", "preparation"]),
    ]:
        typed(EXPORT, *words, "-output", tmp_path / "x.safetensors").refused(*names)
    typed(EXPORT, one, one, "-output", tmp_path / "x.pth").refused()
    assert {each.suffix for each in tmp_path.iterdir()} == {".ckpt"}
