"""The shipped weights on real photos give timm's predictions, and the benchmark of accuracy has its figures.

tests/release/test_real.py trains on real photos.
"""

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
from tests.support.runs import typed

pytestmark = pytest.mark.slow
MODEL = SHIPPED_FILE.stem
PHOTOS = {"coffee": "espresso", "cat": "tiger cat", "camera": "tripod"}


@pytest.mark.long
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
