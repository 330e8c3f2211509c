"""The shipped weights on real photos: predictions as timm's, a fine-tuning run, and the benchmark of accuracy.

The stamps come from a package. A test is skipped if the package or its client is not available.
"""

import hashlib
import json

import pytest
import skimage.data
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.models import EfficientNet_B0_Weights

from models.weights.metadata import SHIPPED_FILE
from scripts.benchmarks import accuracy
from scripts.benchmarks.accuracy import Key, Top1
from tests.support.real_sets import make
from tests.support.runs import epochs_of, run_folder, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow
MODEL = SHIPPED_FILE.stem
# A digest of the names of the photos of stamps20, seed 0, for which BENCHMARKS.md has figures.
DRAWN = "65d3800451568930"
PHOTOS = {"coffee": "espresso", "cat": "tiger cat", "camera": "tripod"}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Return a function that builds a part of the real sets, or skips the test."""
    root = tmp_path_factory.mktemp("real")

    def built(name: str):
        try:
            return make(root, name)
        except ConfigError as error:
            pytest.skip(f"the packages of {name} are not available here: {error}")

    return built


def test_predictions_on_photos_are_those_of_timm(tmp_path):
    model = timm.create_model(MODEL, num_classes=1000).eval()
    model.load_state_dict(load_file(SHIPPED_FILE))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    names = EfficientNet_B0_Weights.DEFAULT.meta["categories"]
    for photo, name in PHOTOS.items():
        image, path = Image.fromarray(getattr(skimage.data, photo)()).convert("RGB"), tmp_path / f"{photo}.png"
        image.save(path)
        with torch.no_grad():
            probability, number = model(transform(image)[None]).softmax(1)[0].max(0)
        found = typed("scripts/predict.py", MODEL, path).done().stdout.splitlines()[-1]
        _, label, confidence = found.split("\t")
        assert name in label and label.startswith(names[number].split(",")[0])
        assert float(confidence) == pytest.approx(float(probability), abs=0.01)


def test_three_epochs_on_160_stamps_classify_most_of_the_others(sets, tmp_path):
    """35% of the 220 validation images belong to the largest class."""
    photos = accuracy.draw(sets("stamps").parent, tmp_path, "stamps20", seed=0)
    names = sorted(path.name for path in (photos / "train").rglob("*.jpg"))
    assert len(names) == 160 and hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] == DRAWN
    words = ("-pretrained", MODEL, "-data_path", photos, "-epochs", "3", "-output", tmp_path / "runs")
    ended = typed("main_single_gpu.py", *words, "-image_size", 96, "-opts", "VALIDATE_FREQ=3").done()
    before, first, *_, last = epochs_of(run_folder(tmp_path / "runs"))
    assert "configs/finetune_batchnorm.yaml" in ended.stdout
    assert before["eval_top1"] > 70 and last["eval_top1"] > 68


def test_benchmark_pairs_runs_by_seed():
    peers = [{"peer": "other", "set": "stamps", "epochs": 3, "seed": seed, "top1": 70.0 + seed} for seed in range(3)]
    ours = {Key("stamps", 3, seed): Top1(60.0, 72.0 + 2 * seed) for seed in range(2)}
    lines = accuracy.table_of({"weights.pth": ours}, peers).splitlines()
    assert lines[2].split("|")[1:-1] == [" stamps ", " 3      ", " 60.0   ", " 73.0    ", " 71.0  ", " +2.5 +- 6.4 "]


def test_stored_figures_of_other_programs_have_all_their_facts():
    stored = json.loads(accuracy.STORED_PEERS.read_text())
    assert stored["about"] and len(stored["runs"]) == len({json.dumps(run) for run in stored["runs"]})
    for row in stored["runs"]:
        assert row.keys() == {"peer", "set", "epochs", "seed", "top1"} and 0 < row["top1"] <= 100
