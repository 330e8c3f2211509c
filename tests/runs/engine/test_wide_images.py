"""A run on images of 32 x 64: it trains, evaluates, predicts, exports, and its weights start a run on squares."""

import json

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.support.refusals import assert_names
from tests.support.runs import epochs_of, status_of, typed

pytestmark = pytest.mark.slow
WIDE = """
DATA: {DATASET: imagefolder, DATA_PATH: PHOTOS, IMAGE_SIZE: 32x64, BATCH_SIZE: 8, NUM_WORKERS: 0, CROP_SCALE: [0.8, 1],
       HFLIP: 0, VAL_FRACTION: 0.25}
MODEL: {TYPE: vit, PATCH_SIZE: 8, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 8, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, CUTMIX_ALPHA: 1, RANDOM_ERASE_PROB: 0.3, AUTO_AUGMENT: rand-m5}
TRACK: []
REPORT: false
CALIBRATE: false
"""
SIDES = [(40, 80), (30, 90), (64, 64), (120, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with photos, whose class says which end is light, and a trained run."""
    folder, rng = tmp_path_factory.mktemp("wide"), np.random.default_rng(0)
    for number in range(48):
        (height, width), end = SIDES[number % 4], ("left", "right")[number // 4 % 2]
        pixels = rng.integers(90, size=(height, width, 3))
        pixels[:, : width // 4] += 120 * (end == "left")
        pixels[:, -(width // 4) :] += 120 * (end == "right")
        (folder / "photos" / end).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / "photos" / end / f"{number}.png")
    (folder / "wide.yaml").write_text(WIDE.replace("PHOTOS", str(folder / "photos")))
    typed("main_single_gpu.py", "-cfg", folder / "wide.yaml", "-output", folder, "-name", "run").done()
    return folder


def predicted(source, folder, *words) -> dict[str, float]:
    """Return the probability of `left` by photo."""
    path = folder / "predicted.json"
    typed("scripts/predict.py", source, folder / "photos", "-top", "2", "-json", path, *words).done()
    images = json.loads(path.read_text())["images"]
    return {
        row["image_path"]: next(each["probability"] for each in row["predictions"] if each["class"] == "left")
        for row in images
    }


@pytest.mark.long
def test_run_keeps_its_shape_and_evaluates_to_its_own_scores(folder):
    settings = yaml.safe_load((folder / "run/config.yaml").read_text())
    assert settings["DATA"]["IMAGE_SIZE"] == "32x64"
    state = torch.load(folder / "run/best.pth", weights_only=True)
    assert state["data"]["input_size"] == [3, 32, 64] and state["state_dict"]["pos_embed"].shape[1] == 1 + 4 * 8
    best = epochs_of(folder / "run")[status_of(folder / "run")["best"]["epoch"] - 1]
    ended = typed("main_single_gpu.py", "-eval", "-pretrained", folder / "run", "-output", folder).done()
    assert_names(ended.printed, f"top-1 {best['eval_top1']:.3f}%", f"loss {best['eval_loss']:.4f}")


@pytest.mark.long
def test_photo_graph_of_wide_images_equals_predict(folder):
    pytest.importorskip("onnxruntime")
    typed("scripts/export.py", folder / "run", "-photo", "-output", folder / "photo.onnx").done()
    expected, found = predicted(folder / "run", folder), predicted(folder / "photo.onnx", folder)
    assert expected.keys() == found.keys() and len(expected) == 48
    assert max(abs(expected[path] - found[path]) for path in expected) < 1e-4


def test_exported_folder_of_wide_images_is_read_with_its_shape(folder):
    typed("scripts/export.py", folder / "run", "-to", "hf", "-output", folder / "hf").done()
    config = json.loads((folder / "hf/config.json").read_text())
    assert config["model_args"]["img_size"] == [32, 64] and config["pretrained_cfg"]["input_size"] == [3, 32, 64]
    assert predicted(folder / "hf", folder) == pytest.approx(predicted(folder / "run", folder), abs=1e-5)


def test_weights_of_wide_images_start_a_square_run_and_return(folder):
    words = ("-epochs", 1, "-output", folder)
    ended = typed("main_single_gpu.py", "-pretrained", folder / "run", "-image_size", 32, *words, "-name", "square")
    assert_names(ended.done().printed, "pos_embed resized from images of 32 x 64 to 32 x 32")
    ended = typed("main_single_gpu.py", "-pretrained", folder / "square", "-image_size", "16x64", *words)
    assert_names(ended.done().printed, "pos_embed resized from images of 32 x 32 to 16 x 64")


def test_prediction_with_a_shape_that_is_no_multiple_names_the_nearest(folder):
    words = ("scripts/predict.py", folder / "run", folder / "photos", "-image_size")
    typed(*words, "30x64").refused("DATA.IMAGE_SIZE", "32x64")
    typed(*words, "x64").refused("-image_size", "HEIGHTxWIDTH")
