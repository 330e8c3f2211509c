"""Makes the exports of a release, which tests/commands/test_exports_of_releases.py lets later versions read:

    python -m tests.support.make_exports [KIND ...]

Trains a small run of each kind, and writes its best weights to tests/data/strangers/VERSION/KIND.safetensors and, where
the format exists, as a folder for Hugging Face. KIND.json has the run's validation score and predictions of some
images.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import native_images, number_rows, several_labels
from tests.support.configs import ema
from tests.support.forks import ROOT, end_server
from tests.support.runs import run, status_of, typed
from utils import VERSION

EXPORTS = ROOT / "tests/data/strangers"
BASE = """
DATA: {DATASET: digits, IMAGE_SIZE: 8, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.8, 1], BATCH_SIZE: 16,
       NUM_WORKERS: 0}
MODEL: {TYPE: vit, PATCH_SIZE: 4, EMBED_DIM: 8, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 8, WARMUP_EPOCHS: 1, BASE_LR: 1e-2, BEST_EPOCH: highest}
TRACK: []
REPORT: false
"""
CONVOLUTIONS = "MODEL.TYPE=timm MODEL.NAME=test_resnet MODEL.KWARGS.channels=[4,4,8,8] TRAIN.MODEL_EMA=true"
START = "MODEL.PRETRAINED=strangers/classes.safetensors"
# {kind: settings}. A later kind may start from the file of an earlier one.
KINDS = {
    "classes": " ".join(ema(0.9)),
    "convolutions": f"{CONVOLUTIONS} MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12",
    "labels": "DATA.DATASET=csv DATA.DATA_PATH=labels/digits.csv DATA.LABEL_SEPARATOR=| TRAIN.NUM_EPOCHS=12",
    "numbers": "DATA.DATASET=csv DATA.DATA_PATH=numbers/digits.csv DATA.COLUMNS=[path,digit,ink] TRAIN.NUM_EPOCHS=12"
    " TRAIN.OBJECTIVE=numbers",
    "native": "DATA.DATASET=imagefolder DATA.DATA_PATH=native DATA.PIXELS=native DATA.IMAGE_CHANNELS=5"
    " DATA.IMAGE_SIZE=16 TRAIN.BASE_LR=3e-3 TRAIN.NUM_EPOCHS=4",
    "lora": f"{START} MODEL.LORA.RANK=2 TRAIN.NUM_EPOCHS=2",
}
WITHOUT_ANSWERS = ("features",)  # models without a classifier, which halfstep 2.3.0 exported
NUM_PREDICTED = 12


def write_data(folder: Path) -> None:
    """Write the images of the runs that read files, and those that are predicted, into a folder."""
    for name in ("numbers", "labels"):
        (folder / name).mkdir()
    number_rows.write_digits(folder / "numbers", 300, missing=range(0, 300, 5))
    several_labels.write_digits(folder / "labels", 300)
    native_images.draw(folder / "native", 64, 32, size=(16, 16))


def copy_images(kind: str, data: Path, copies: Path) -> Path:
    """Copy the images that are predicted to a new folder, and return it."""
    source = data / ("native/val" if kind == "native" else "numbers")
    images = sorted(path for path in source.rglob("*") if path.suffix in (".npy", ".png"))
    images = images[:: len(images) // NUM_PREDICTED][:NUM_PREDICTED]
    copies.mkdir()
    for number, path in enumerate(images):
        shutil.copy(path, copies / f"{number:02}{path.suffix}")
    return copies


def predictions_of(kind: str, model: Path, images: Path) -> list[Any]:
    """Return the predictions of each image, in the order of their names, or its features."""
    if kind in WITHOUT_ANSWERS:
        file = images.with_suffix(".npz")
        typed("scripts/embed.py", model, images, "-output", file).done()
        with np.load(file) as content:
            return content["features"].tolist()
    file = images.with_suffix(".json")
    all_classes = [] if kind == "numbers" else ["-top", len(native_images.CLASSES) if kind == "native" else 4]
    typed("scripts/predict.py", model, images, *all_classes, "-json", file).done()
    keys = ("predictions", "numbers", "known")
    return [{key: row[key] for key in keys if key in row} for row in json.loads(file.read_text())["images"]]


def make(kind: str, work: Path) -> None:
    """Train a run of this kind, write its files, and what they must answer."""
    words = ["-cfg", "base.yaml", "-output", "runs", "-name", kind, "-opts", *KINDS[kind].split()]
    run("main_single_gpu.py", *words, cwd=work, faults={"read_all_digits": []}).done()
    folder, target = work / "runs" / kind, work / "strangers" / kind
    typed("scripts/export.py", folder, "-output", f"{target}.safetensors").done()
    typed("scripts/export.py", folder, "-to", "hf", "-output", target).done()
    status = status_of(folder)
    metric = status["best_metric"]
    expected = {"metric": metric, "value": status["best"][metric]}
    expected["images"] = predictions_of(kind, folder, copy_images(kind, work, work / f"predicted-{kind}"))
    target.with_suffix(".json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        os.chdir(work)  # relative paths, so that no file names a folder of this machine
        write_data(work)
        (work / "base.yaml").write_text(BASE)
        (work / "strangers").mkdir()
        for kind in sys.argv[1:] or KINDS:
            make(kind, work)
        shutil.copytree(work / "strangers", EXPORTS / VERSION, dirs_exist_ok=True)
        os.chdir(ROOT)
    end_server()
