"""halfstep export with several checkpoints: the averaged weights, and refused input."""

import json

import pytest
import safetensors
import torch
from PIL import Image

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
    """Return the folder of a run with three checkpoints of similar weights, which can be evaluated on the digits."""
    folder = tmp_path_factory.mktemp("run")
    for epoch in (1, 2, 10):
        path = folder / f"checkpoint-{epoch}.pth"
        checkpoint(path, MODEL, DATA, NUMBERS, seed=epoch, start=0, epoch=epoch - 1, preferred="state_dict")
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
    ema = {"state_dict_ema": mean, "preferred": "state_dict_ema"}
    one = checkpoint(tmp_path / "a.pth", MODEL, DATA, NUMBERS, seed=1, start=0, **ema)
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


def test_averaging_runs_from_different_random_weights_is_refused(run, tmp_path):
    one, other = run / "checkpoint-1.pth", checkpoint(tmp_path / "other.ckpt", MODEL, DATA, NUMBERS, seed=7, start=8)
    typed(EXPORT, one, other, "-output", tmp_path / "x.safetensors").refused("checkpoint-1.pth", "other.ckpt", "cosine")
    assert not (tmp_path / "x.safetensors").exists()


FOLDS = [{"rule": "hash", "folds": 3, "fold": fold, "seed": 0} for fold in range(3)]


def averaged(folder, places, splits, data=DATA):
    """Export the mean of runs with these splits of the data in these places. Return the file, and what is printed."""
    paths = []
    for number, (place, split) in enumerate(zip(places, splits, strict=True)):
        record = split | {"training": str(place), "validation": str(place)}
        more = {"split": record, "validation": {"num_images": 3, "digest": str(split.get("fold"))}}
        paths.append(checkpoint(folder / f"{number}.ckpt", MODEL, data, NUMBERS, seed=number, start=9, **more))
    mean = folder / "mean.safetensors"
    return mean, typed(EXPORT, *paths, "-output", mean).done().stdout


def make_photos(folder, shade):
    for number in NUMBERS:
        (folder / number).mkdir(parents=True)
        for name in range(3):
            Image.new("L", (8, 8), shade + 9 * int(number) + name).save(folder / number / f"{name}.png")
    return folder


def test_evaluation_of_mean_of_folds_calls_no_image_held_out(tmp_path):
    photos, others = (make_photos(tmp_path / name, shade) for name, shade in (("photos", 0), ("others", 100)))
    mean, printed = averaged(tmp_path, [photos] * 3, FOLDS, DATA | {"FOLD": "0/3"})
    assert "counts as held out" in printed and str(photos) in printed
    for place, is_learned in ((photos, True), (others, False)):
        words = ("-eval", "-pretrained", mean, "-data_path", place, "-output", tmp_path / "runs")
        printed = typed("main_single_gpu.py", *words).done().printed
        assert "held out of" not in printed and "30 validation images" in printed
        assert (f"no image of {photos} counts as held out" in printed) is is_learned


def test_evaluation_of_mean_of_folds_on_their_published_data_is_refused(tmp_path):
    folds = [split | {"rule": "position"} for split in FOLDS]
    mean, _ = averaged(tmp_path, ["digits"] * 3, folds, DATA | {"FOLD": "0/3"})
    typed("main_single_gpu.py", "-eval", "-pretrained", mean, "-output", tmp_path).refused("MODEL.PRETRAINED", "digits")


def test_mean_of_runs_that_held_out_the_same_images_keeps_their_split(tmp_path):
    mean, printed = averaged(tmp_path, ["photos", "/data/photos"], FOLDS[:1] * 2)
    assert "held out" not in printed
    with safetensors.safe_open(mean, "pt") as file:
        assert json.loads(file.metadata()["split"])["fold"] == 0 and "learned" not in file.metadata()
