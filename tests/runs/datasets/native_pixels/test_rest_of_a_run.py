"""Runs on images with the values of their files, and all programs that use their weights."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from configs.schema import Data
from engine.predict.classifier import load_classifier
from engine.settings import load_settings
from tests.support.graphs import share_graph
from tests.support.image_sets import draw_photos
from tests.support.native_files import tiff_of_pages
from tests.support.native_images import CHANNELS, draw, files, measured, settings_file
from tests.support.pages import block_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, epochs_of, rows_of, run_folder, typed
from utils.errors import ConfigError, DataError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("here")]

DEPTH = ("-opts", "MODEL.DEPTH=1", "DATA.RGB=[4,3,0]")
NAMES = ("RANGE", "IMAGENET_MEAN", "IMAGENET_STD")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("native") / "photos")


def train(photos, output, *words):
    """Return the folder of a run, and what it printed."""
    given = ["-cfg", settings_file(photos), "-output", output, *words]
    ended = typed("main_single_gpu.py", *given).done()
    return run_folder(output), ended.printed


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """Return the folder of a run with a report."""
    return train(photos, tmp_path_factory.mktemp("trained"), *DEPTH, "REPORT=true")[0]


def data_of(folder) -> dict:
    """Return the settings of the data in a run's config.yaml."""
    return yaml.safe_load((folder / "config.yaml").read_text())["DATA"]


def evaluated(*words) -> str:
    return typed("main_single_gpu.py", *words, "-eval").done().printed


def tiles_of(path) -> list[np.ndarray]:
    """Return the pictures in a sheet, float64 [H, W, 3] from 0 to 255."""
    with Image.open(path) as sheet:
        places = [place[:4] for place in json.loads(sheet.info["halfstep tiles"])]
        return [np.asarray(sheet.crop(place).convert("RGB"), float) for place in places]


# --- runs ---


def test_settings_of_a_run_have_the_found_type_and_statistics(trained, photos):
    data = data_of(trained)
    values = np.concatenate([np.load(path).reshape(-1, CHANNELS) for path in files(photos)]).astype(float)
    low, high = np.percentile(values, (0.1, 99.9), 0)
    assert data["PIXELS"] == "uint16"
    assert data["RANGE"] == pytest.approx(np.stack([low, high], 1).ravel().tolist())
    assert data["IMAGENET_MEAN"] == pytest.approx(((values - low) / (high - low)).mean(0).tolist(), abs=1e-4)
    assert epochs_of(trained)[-1]["eval_top1"] == 100, "the model learns the classes"


def test_pictures_of_a_report_show_the_named_colours(trained, photos):
    for name in ("train_batch", "mistakes"):
        assert (trained / f"{name}.png").stat().st_size > 1000
    tiles = tiles_of(trained / "train_batch.png")
    assert len(tiles) == 8
    # The class shifts each channel by two thirds of its limits.
    middles = sorted(tile.mean() for tile in tiles)
    assert middles[0] < 80 and middles[-1] > 180
    assert all(tile.std((0, 1)).min() > 5 for tile in tiles), "the pictures have detail in each colour"


@pytest.mark.long
@pytest.mark.parametrize("change", ["nothing", "brighter images"])
def test_resumed_run_keeps_its_values_and_measures_nothing(photos, tmp_path, change):
    shutil.copytree(photos, tmp_path / "photos")
    folder, said = train(tmp_path / "photos", tmp_path / "o", "-epochs", "1", *DEPTH)
    assert "channel 0: limits" in said
    before = data_of(folder)
    for path in files(tmp_path / "photos") if change == "brighter images" else []:
        np.save(path, 2 * np.load(path))
    said = typed("main_single_gpu.py", "-resume", folder, "-epochs", "2").done().printed
    assert data_of(folder) == before and "channel 0: limits" not in said
    assert len(epochs_of(folder)) == 2


def accuracy_in(said: str) -> str:
    return said.partition("----- Validation ")[2].partition(", time")[0]


def test_evaluation_uses_the_values_of_the_weights(photos, trained, tmp_path):
    weights = trained / "best.pth"
    whole = evaluated("-cfg", settings_file(photos), "-pretrained", weights, *DEPTH)
    assert "warning" not in whole
    alone = evaluated("-dataset", "imagefolder", "-data_path", photos, "-pretrained", weights)
    exported = tmp_path / "x.safetensors"
    typed("scripts/export.py", weights, "-output", exported).done()
    from_export = evaluated("-dataset", "imagefolder", "-data_path", photos, "-pretrained", exported)
    assert accuracy_in(whole) == accuracy_in(alone) == accuracy_in(from_export)
    assert_names(accuracy_in(whole), "Acc@1: 1.0000")


@pytest.fixture(scope="module")
def of_colours(tmp_path_factory):
    """Return the weights of a run with three channels of 16 bits, as a checkpoint and as an exported file."""
    root = tmp_path_factory.mktemp("colours")
    photos = draw(root / "photos", channels=3)
    words = ["-cfg", settings_file(photos, 3), "-output", root / "o", "-epochs", "1", "-opts", "MODEL.DEPTH=1"]
    typed("main_single_gpu.py", *words, "DATA.RGB=[2,1,0]").done()
    typed("scripts/export.py", run_folder(root / "o"), "-output", root / "x.safetensors").done()
    return run_folder(root / "o") / "best.pth", root / "x.safetensors"


def test_fine_tuning_begins_with_own_weights_of_three_named_colours(of_colours, tmp_path):
    folder = of_colours[0].parent
    photos = folder.parents[1] / "photos"
    given = ["-cfg", settings_file(photos, 3), "-epochs", "1", "-opts", "MODEL.DEPTH=1", "DATA.RGB=[2,1,0]"]
    (epoch,) = epochs_of(folder)
    for number, weights in enumerate(of_colours):
        words = [*given, f"MODEL.PRETRAINED={weights}", "-output", tmp_path / f"{number}"]
        said = typed("main_single_gpu.py", *words).done().printed
        assert_names(said, f"before training: top-1 {epoch['eval_top1']:.2f}%, loss {epoch['eval_loss']:.4f}")


def test_evaluation_of_weights_without_limits_is_refused(photos, trained, tmp_path):
    bare = tmp_path / "bare.pth"
    torch.save(torch.load(trained / "best.pth", weights_only=True)["state_dict"], bare)
    words = ["-cfg", settings_file(photos), "-pretrained", bare, "-eval", *DEPTH]
    typed("main_single_gpu.py", *words).refused("DATA.RANGE", "DATA.PIXELS", "native")
    assert accuracy_in(evaluated(*words[:-3], *DEPTH, "DATA.RANGE=[0,9000]"))


def test_evaluation_of_images_of_another_type_is_refused(trained, tmp_path):
    folder = draw(tmp_path / "photos")
    for path in files(folder, "val"):
        np.save(path, np.load(path).astype(np.float32))
    words = ["-dataset", "imagefolder", "-data_path", folder, "-pretrained", trained / "best.pth", "-eval"]
    typed("main_single_gpu.py", *words).refused("uint16", "float32")


def measured_after(weights, photos, *options) -> Data:
    """Return the settings of images of a run that starts from weights of another run."""
    words = ["-pretrained", str(weights), "-data_path", str(photos), "-opts", *options]
    return measured(load_settings(words))[0].DATA


def assert_measured(data: Data, photos) -> None:
    values = np.concatenate([np.load(path).reshape(-1, data.IMAGE_CHANNELS) for path in files(photos)])
    expected = np.stack(np.percentile(values, (0.1, 99.9), 0), 1).ravel()
    assert data.RANGE == pytest.approx(expected.tolist()) and len(data.IMAGENET_MEAN) == data.IMAGE_CHANNELS


@pytest.mark.parametrize("options", [["DATA.PIXELS=native"], []], ids=["native", "as the weights"])
def test_fine_tuning_with_other_channels_measures_their_limits(of_colours, tmp_path, options):
    photos = draw(tmp_path / "two", channels=2)
    data = measured_after(of_colours[0], photos, "DATA.IMAGE_CHANNELS=2", *options)
    assert_measured(data, photos)
    assert (data.PIXELS, data.RGB) == ("uint16", ())


def test_fine_tuning_keeps_the_values_of_native_weights(of_colours, tmp_path):
    photos = draw(tmp_path / "dark", channels=3)
    for path in files(photos):
        np.save(path, np.load(path) // 2)
    data, then = measured_after(of_colours[0], photos, "SEED=1"), data_of(of_colours[0].parent)
    assert all([*getattr(data, name)] == then[name] for name in NAMES)


def test_fine_tuning_with_named_limits_measures_the_mean(of_colours, tmp_path):
    photos = draw(tmp_path / "three", channels=3)
    data = measured_after(of_colours[0], photos, "DATA.RANGE=[0,16000]")
    values = np.concatenate([np.load(path).reshape(-1, 3) for path in files(photos)]) / 16000
    assert data.RANGE == (0, 16000) and data.IMAGENET_MEAN == pytest.approx(values.mean(0).tolist(), rel=1e-4)


@pytest.mark.parametrize("option", ["DATA.PIXELS=native", "DATA.PIXELS=uint8"])
def test_fine_tuning_on_images_of_another_type_measures_them(of_colours, tmp_path, option):
    photos = draw(tmp_path / "bytes", channels=3)
    for path in (*files(photos), *files(photos, "val")):
        np.save(path, (np.load(path) >> 5).astype(np.uint8))
    data = measured_after(of_colours[0], photos, option)
    assert_measured(data, photos)
    assert data.PIXELS == "uint8"


def test_limits_of_weights_are_refused_for_another_type(of_colours):
    for weights in of_colours:
        classifier = load_classifier(weights, ["-opts", "DATA.PIXELS=uint16"])
        assert classifier.config.DATA.RANGE
        with refused(ConfigError, "DATA.PIXELS", "uint8", "uint16", "DATA.RANGE"):
            load_classifier(weights, ["-opts", "DATA.PIXELS=uint8"])
        limited = load_classifier(weights, ["-opts", "DATA.PIXELS=uint8", "DATA.RANGE=[0,255]"])
        assert limited.config.DATA.RANGE == (0, 255)
        words = ["-eval", "-pretrained", str(weights), "-data_path", str(of_colours[0].parents[2] / "photos")]
        assert measured(load_settings([*words, "-dataset", "imagefolder", "-opts", "DATA.PIXELS=native"]))
        with refused(DataError, "DATA.PIXELS", "uint8", "uint16", "DATA.RANGE"):
            measured(load_settings([*words, "-dataset", "imagefolder", "-opts", "DATA.PIXELS=uint8"]))


# --- programs that use the weights ---


def predictions(model, photos, tmp_path) -> list[dict[str, str]]:
    table = tmp_path / f"{model.name}.csv"
    sheet = tmp_path / f"{model.name}.png"
    typed("scripts/predict.py", model, photos / "val", "-csv", table, "-sheet", sheet).done()
    found = rows_of(table)
    assert len(tiles_of(sheet)) == len(found)
    return found


def assert_same_predictions(found: list[dict], expected: list[dict]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one["image_path"], one["class"]) == (other["image_path"], other["class"])
        assert float(one["probability"]) == pytest.approx(float(other["probability"]), abs=2e-4)


def test_predict_leaves_out_arrays_for_a_model_of_8_bits(photos, tmp_path):
    shutil.copytree(photos / "val", tmp_path / "mixed")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "mixed/x.png")
    words = ["DATA.PIXELS=8bit", "DATA.IMAGE_CHANNELS=3", "DATA.IMAGE_SIZE=8", "MODEL.DEPTH=1"]
    data = ["-data_path", draw_photos(tmp_path / "photos", "cat", "dog", count=10)]
    given = ["-cfg", settings_file(photos), "-output", tmp_path / "o", "-epochs", "1", *data, "-opts", *words]
    typed("main_single_gpu.py", *given).done()
    ended = typed("scripts/predict.py", run_folder(tmp_path / "o"), tmp_path / "mixed").done()
    assert len(ended.stdout.splitlines()) == 1 and "x.png" in ended.stdout
    assert_names(ended.stderr, "8 files", "DATA.PIXELS")


def test_embedding_places_images_of_a_class_close_together(trained, photos, tmp_path):
    typed("scripts/embed.py", trained, photos / "val", "-output", tmp_path / "f.npz").done()
    with np.load(tmp_path / "f.npz") as content:
        assert content["features"].shape == (8, 16) and content["sizes"].tolist() == [[36, 32]] * 8
    query = photos / "val/bee/00.npy"
    words = [trained, photos / "val", "-near", query, "-sheet", tmp_path / "near.png"]
    found = typed("scripts/embed.py", *words).done().stdout.splitlines()
    assert len(found) == 7 and all("/bee/" in line for line in found[:3])
    assert (tmp_path / "near.png").stat().st_size > 1000


# --- exported models ---


@pytest.fixture(scope="module")
def onnx_graph(trained, tmp_path_factory):
    pytest.importorskip("onnxscript")
    path = tmp_path_factory.mktemp("graph") / "bands.onnx"
    said = typed("scripts/export.py", trained, "-output", path, "-photo").done().stdout
    assert_names(said, path, "8 validation images, 0 with another answer")
    return path


@pytest.mark.long
def test_predict_with_a_graph_of_onnx_answers_as_the_checkpoint(trained, onnx_graph, photos, tmp_path):
    found = predictions(onnx_graph, photos, tmp_path)
    assert_same_predictions(found, predictions(trained / "best.pth", photos, tmp_path))
    found, expected = (
        [tile.mean((0, 1)) for tile in tiles_of(tmp_path / f"{name}.png")] for name in (onnx_graph.name, "best.pth")
    )
    np.testing.assert_allclose(found, expected, atol=12, err_msg="the pictures have other colours")
    assert np.ptp(expected) > 100


@pytest.mark.long
def test_graphs_take_images_of_any_size_with_their_values(trained, onnx_graph, tmp_path):
    session = pytest.importorskip("onnxruntime").InferenceSession(onnx_graph)
    (given,) = session.get_inputs()
    assert given.type == "tensor(uint16)" and given.shape[2] == CHANNELS
    typed("scripts/export.py", trained, "-output", tmp_path / "bands.pt2", "-photo").done()
    program = torch.export.load(tmp_path / "bands.pt2").module()
    for number, size in enumerate([(7, 50), (90, 33)]):
        folder = draw(tmp_path / f"{number}", train=2, val=2, size=size)
        for row in predictions(trained / "best.pth", folder, tmp_path):
            image = np.load(row["image_path"])
            for probabilities in (session.run(None, {given.name: image})[0], program(torch.from_numpy(image))):
                assert probabilities.max().item() == pytest.approx(float(row["probability"]), abs=2e-4)


def test_documented_code_answers_as_the_checkpoint(trained, onnx_graph, photos, tmp_path, monkeypatch, capsys):
    row = predictions(trained / "best.pth", photos, tmp_path)[0]
    (tmp_path / "cell.tif").write_bytes(tiff_of_pages(*np.moveaxis(np.load(row["image_path"]), 2, 0)))
    shutil.copy(onnx_graph, tmp_path / "cells.onnx")
    monkeypatch.chdir(tmp_path)
    exec(block_of(ROOT / "docs/pixels.md", "def read(path)"), {})
    assert capsys.readouterr().out.strip() == row["class"]


def test_graph_of_8_bit_weights_keeps_the_answers(trained, onnx_graph, photos, tmp_path, monkeypatch):
    share_graph(monkeypatch, onnx_graph)
    path = tmp_path / "bands8.onnx"
    said = typed("scripts/export.py", trained, "-output", path, "-int8", "-accept").done().stdout
    assert_names(said, "0 of 8")
    answers = [row["class"] for row in predictions(trained / "best.pth", photos, tmp_path)]
    assert [row["class"] for row in predictions(path, photos, tmp_path)] == answers


def test_folder_for_the_hub_documents_and_keeps_the_preparation(trained, photos, tmp_path):
    folder = tmp_path / "hub"
    typed("scripts/export.py", trained, "-to", "hf", "-output", folder).done()
    assert_same_predictions(predictions(folder, photos, tmp_path), predictions(trained / "best.pth", photos, tmp_path))
    card, data = (folder / "README.md").read_text(), data_of(trained)
    names: dict = {}
    code = next(block for block in card.split("```python\n")[1:] if "def prepare" in block).partition("```")[0]
    exec(code[: code.index("\nimport timm")] if "\nimport timm" in code else code, names)
    image = np.load(files(photos, "val")[0])
    low, high = np.reshape(data["RANGE"], (-1, 2)).T
    expected = np.clip((image - low) / (high - low), 0, 1)
    np.testing.assert_allclose(names["prepare"](image).permute(1, 2, 0).numpy(), expected, atol=1e-5)
    assert_names(card, "uint16", CHANNELS)


def test_page_for_browsers_is_refused_in_one_line(trained, tmp_path):
    ended = typed("scripts/export.py", trained, "-to", "web", "-output", tmp_path / "page")
    ended.refused("-to web", "DATA.PIXELS", "uint16", "-photo")
    assert len(ended.stderr.splitlines()) == 1 and not (tmp_path / "page").exists()
