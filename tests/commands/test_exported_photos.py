"""Exported graphs that take photos: halfstep export -photo, -int8 and -to web, and halfstep predict with them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.pixels.rules import ImageReadError
from datasets.sources.arrays import ArrayStorage
from engine.confidence.known import to_plain
from engine.confidence.stored import from_plain
from engine.export.formats import FORMATS
from engine.export.runtime import load_exported
from engine.export.web import RUNTIME
from engine.settings import load_settings
from tests.support.configs import beginning_with_weights
from tests.support.graphs import share_graph
from tests.support.pages import block_of
from tests.support.refusals import assert_names
from tests.support.runs import ROOT, rows_of, run_folder, typed

pytestmark = pytest.mark.slow
NUM_VAL = 90  # validation images of the digits of tests
onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml):
    output = tmp_path_factory.mktemp("trained")
    settings = beginning_with_weights(small_yaml)
    # Another background than black, white or grey, and answers that 8 bits do not change.
    options = ["DATA.IMAGENET_MEAN=[0.7]", "DATA.IMAGENET_STD=[0.3]", "TRAIN.BASE_LR=1e-2"]
    words = ["-cfg", settings, "-output", output, "-epochs", 8, "-opts", *options]
    typed("main_single_gpu.py", *words, faults={"judge_no_labels": []}).done()
    return run_folder(output)


@pytest.fixture(scope="module")
def photo_graph(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "digits.onnx"
    ended = typed("scripts/export.py", trained, "-output", path, "-photo").done()
    assert_names(ended.stdout, path, "onnxruntime", f"{NUM_VAL} validation images, 0 with another answer")
    assert str(ROOT).encode() not in path.read_bytes(), "the file names no file of this machine"
    return path


@pytest.fixture(scope="module")
def image_graph(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "digits.onnx"
    typed("scripts/export.py", trained, "-output", path).done()
    return path


@pytest.fixture
def export_changed(trained, tmp_path, monkeypatch):
    """Return a function that exports a model whose loaded graph returns change(photo, probabilities, known)."""

    def export_changed(change, checkpoint=trained):
        def load(subject, path):
            return lambda photo: change(photo, *subject.graph(photo))

        replaced = FORMATS["torch"]._replace(write=lambda subject, path: path.touch(), load=load)
        monkeypatch.setitem(FORMATS, "torch", replaced)
        with torch.compiler.set_stance("force_eager"):  # torch.cond would be compiled for each size of a photo
            return typed("scripts/export.py", checkpoint, "-output", tmp_path / "x.pt2", "-photo")

    return export_changed


@pytest.mark.long
@pytest.mark.parametrize("wrong", ["probabilities", "known"])
def test_graph_with_other_answers_on_validation_images_is_deleted(export_changed, tmp_path, wrong):
    def change(photo, probabilities, known):
        is_digit = photo.shape[0] == 8  # pixels high
        if wrong == "known":
            return probabilities, -known if is_digit else known
        return probabilities.roll(int(is_digit), 0), known

    ended = export_changed(change)
    assert ended.returncode == 1 and not any(tmp_path.iterdir())
    assert_names(ended.stderr, "-to torch", f"{NUM_VAL} validation images")
    same = {"probabilities": "sign of known", "known": "answer"}[wrong]
    assert re.search(rf"\b0 with another {same}", ended.stderr), "the message says which of the two agrees"


@pytest.mark.long
def test_other_sign_of_known_decided_by_rounding_refuses_no_export(trained, export_changed, tmp_path):
    state = torch.load(trained / "best.pth", weights_only=True)
    statistics = state["calibration"]["known"]["statistics"]
    known = from_plain(statistics, state["calibration"]["temperature"])
    # The limit and the median of the scores are nearly the same.
    known.scales[:, 1] = known.scales[:, 0] + known.scales[:, 0].abs() * 1e-7
    statistics |= to_plain(known)
    torch.save(state, tmp_path / "best.pth")
    ended = export_changed(lambda photo, probabilities, known: (probabilities, -known), tmp_path / "best.pth").done()
    assert_names(ended.stdout, "0 with another answer", "0 with another sign of known")


def test_comparison_of_validation_images_sees_how_the_documented_code_reads_them(export_changed, tmp_path, monkeypatch):
    def read_photo(image, is_turned):
        return np.zeros((*image.size, 4), np.uint8)  # a reader that loses the pixels

    monkeypatch.setattr("engine.export.photo.read_photo", read_photo)
    ended = export_changed(lambda photo, *results: results)
    assert ended.returncode == 1 and not any(tmp_path.iterdir())
    assert_names(ended.stderr, f"{NUM_VAL} validation images")


@pytest.fixture(scope="module")
def modes(digits, tmp_path_factory):
    """Make photos with transparent or 16-bit pixels in every mode of Pillow that has them."""
    folder = tmp_path_factory.mktemp("modes")
    for number, path in enumerate(sorted(digits.glob("[0-9]/*.png"))[::18]):
        grey = np.asarray(Image.open(path).convert("L"))
        hidden = np.stack([255 - grey, grey, grey // 2, 255 - grey], 2)  # the colours behind transparent pixels differ
        soft = Image.fromarray(hidden)
        soft.save(folder / f"{number}-rgba.png")
        soft.convert("LA").save(folder / f"{number}-la.png")
        soft.quantize(64, method=Image.Quantize.FASTOCTREE).save(folder / f"{number}-palette.png")
        soft.save(folder / f"{number}.webp", lossless=True, exact=True)
        soft.convert("RGB").save(folder / f"{number}-key.png", transparency=tuple(hidden[0, 0, :3].tolist()))
        Image.fromarray(grey.astype(np.uint16) * 257).save(folder / f"{number}-deep.png")
        exif = Image.Exif()
        exif[0x112] = 6
        soft.save(folder / f"{number}-turned.png", exif=exif)
    return folder


@pytest.fixture(scope="module")
def upright(trained, photo_graph, tmp_path_factory):
    """Return a checkpoint with DATA.EXIF=apply, and its page, whose graph is the same but for its facts."""
    folder = tmp_path_factory.mktemp("stored")
    state = torch.load(trained / "best.pth", weights_only=True)
    state["config"]["DATA.EXIF"] = "apply"  # digits have no EXIF, so their run ignores it
    torch.save(state, folder / "best.pth")
    with pytest.MonkeyPatch.context() as patch:
        share_graph(patch, photo_graph)
        typed("scripts/export.py", folder / "best.pth", "-to", "web", "-output", folder / "page").done()
    return folder / "best.pth", folder / "page"


@pytest.mark.long
@pytest.mark.parametrize("exif", ["apply", "ignore"])
def test_documented_code_answers_as_predict_for_images_of_every_mode(
    trained, photo_graph, upright, modes, tmp_path, monkeypatch, exif
):
    model, graph = (trained, photo_graph) if exif == "ignore" else (upright[0], upright[1] / "model.onnx")
    shutil.copy(graph, tmp_path / "pets.onnx")
    monkeypatch.chdir(tmp_path)
    code = block_of(ROOT / "docs/exporting.md", "exif_transpose")
    for row in predicted(model, modes, tmp_path / "a.csv"):
        names: dict = {}
        exec(code.replace("photo.jpg", row["image_path"]), names)
        found = dict(zip(names["facts"]["class_names"], names["probabilities"], strict=True))
        assert found[row["class"]] == pytest.approx(float(row["probability"]), abs=1e-4), row["image_path"]


@pytest.mark.long
def test_code_of_the_model_card_answers_as_predict_for_images_of_every_mode(trained, modes, tmp_path):
    typed("scripts/export.py", trained, "-to", "hf", "-output", tmp_path / "hf").done()
    state = torch.load(trained / "best.pth", weights_only=True)
    code = block_of(tmp_path / "hf/README.md", "create_transform").replace("FOLDER", str(tmp_path / "hf"))
    for row in predicted(trained, modes, tmp_path / "a.csv"):
        names = {"image": Image.open(row["image_path"])}
        with torch.no_grad():
            exec(code, names)
        probabilities = (names["logits"][0] / state["calibration"]["temperature"]).softmax(0)
        found = float(probabilities[int(row["class"])])
        # timm's resize rounds a few pixels differently.
        assert found == pytest.approx(float(row["probability"]), abs=2e-3), row["image_path"]


def predicted(model, images, table, *words) -> list[dict[str, str]]:
    typed("scripts/predict.py", model, images, "-csv", table, *words).done()
    return rows_of(table)


def assert_same_answers(one: list, other: list) -> None:
    assert [each["image_path"] for each in one] == [each["image_path"] for each in other]
    for row, again in zip(one, other, strict=True):
        assert float(again["probability"]) == pytest.approx(float(row["probability"]), abs=5e-3)
        assert again["class"] == row["class"] or float(row["probability"]) - float(row["probability_2"]) < 5e-3


@pytest.fixture
def photos(tmp_path, digits):
    """Make photos of unusual sizes and modes."""
    folder, rng = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    for number, path in enumerate(sorted(digits.glob("[0-9]/*.png"))[::4]):
        shutil.copy(path, folder / f"{number}.png")
    sizes = {"pixel": (1, 1), "wide": (20, 200), "tall": (200, 20), "large": (300, 400)}
    for name, size in sizes.items():
        Image.fromarray(rng.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"{name}.png")
    Image.fromarray(rng.integers(0, 256, (9, 9, 4), np.uint8)).save(folder / "alpha.png")
    Image.fromarray(rng.integers(0, 2**16, (9, 9), np.uint16)).save(folder / "deep.png")
    Image.fromarray(rng.integers(0, 256, (9, 9), np.uint8)).save(folder / "grey.png")
    return folder


def test_graph_with_photo_answers_as_its_run(trained, photo_graph, photos, tmp_path):
    expected = predicted(trained, photos, tmp_path / "a.csv", "-top", 2)
    assert_same_answers(expected, predicted(photo_graph, photos, tmp_path / "b.csv", "-top", 2))


def known_of(model, images, table) -> list[float]:
    typed("scripts/predict.py", model, images, "-json", table).done()
    return [each["known"] for each in json.loads(table.read_text())["images"]]


@pytest.mark.long
def test_graph_with_photo_knows_how_well_photos_fit(trained, photo_graph, image_graph, photos, tmp_path):
    expected = known_of(trained, photos, tmp_path / "a.json")
    assert known_of(photo_graph, photos, tmp_path / "b.json") == pytest.approx(expected, rel=1e-2, abs=1e-2)
    words = (image_graph, photos, "-unknown", 0.5, "-json", tmp_path / "x.json")
    ended = typed("scripts/predict.py", *words).done()
    assert_names(ended.stderr, "no statistics of the validation images", "-photo")
    assert "known" not in json.loads((tmp_path / "x.json").read_text())["images"][0]


@pytest.mark.long
def test_graph_without_photo_answers_as_its_run(trained, image_graph, photos, tmp_path):
    typed("scripts/export.py", trained, "-output", tmp_path / "x.onnx", "-calibrated").done()
    expected = predicted(trained, photos, tmp_path / "a.csv", "-top", 2, "-flip")
    for graph in (image_graph, tmp_path / "x.onnx"):
        assert_same_answers(expected, predicted(graph, photos, tmp_path / "b.csv", "-top", 2, "-flip"))


def test_graph_computes_batches_of_a_fine_tuning_by_default(image_graph):
    fine_tuned = load_settings(["-cfg", "configs/finetune.yaml"]).config.DATA
    assert load_exported(image_graph, [], raw=False).config.DATA.BATCH_SIZE == fine_tuned.BATCH_SIZE


def test_predict_names_runtime_and_draws_photos_of_a_graph(photo_graph, photos, tmp_path):
    files = ("-sheet", tmp_path / "x.png", "-json", tmp_path / "x.json", "-unknown", 0.5)
    ended = typed("scripts/predict.py", photo_graph, photos, *files).done()
    assert_names(ended.stderr, "onnxruntime", "CPUExecutionProvider", "calibrated", "-unknown 0.5")
    assert len(json.loads((tmp_path / "x.json").read_text())["images"]) == len(list(photos.iterdir()))
    with Image.open(tmp_path / "x.png") as sheet:
        assert np.asarray(sheet).std() > 10


def test_unreadable_photo_is_named_and_the_others_are_classified(photo_graph, photos):
    (photos / "broken.png").write_bytes(b"no picture")
    Image.new("RGB", (1, 20_000)).save(photos / "thread.png")
    ended = typed("scripts/predict.py", photo_graph, photos)
    assert ended.returncode == 2 and len(ended.stdout.splitlines()) == len(list(photos.iterdir())) - 1
    assert_names(ended.stderr, photos / "broken.png", "1 of 32 images")


def test_wrong_graph_or_flag_is_refused_by_predict(photo_graph, photos, tmp_path):
    typed("scripts/predict.py", photo_graph, photos, "-amp").refused("-amp", photo_graph)
    typed("scripts/predict.py", photo_graph, photos, "-raw").refused("-raw", photo_graph)
    typed("scripts/predict.py", photo_graph, photos, "-flip").refused("-flip", photo_graph)
    typed("scripts/predict.py", photo_graph, photos, "-attention", tmp_path / "maps").refused("-attention")
    (tmp_path / "damaged.onnx").write_bytes(b"no graph")
    typed("scripts/predict.py", tmp_path / "damaged.onnx", photos).refused(tmp_path / "damaged.onnx", "onnxruntime")
    model = onnx.load(photo_graph)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "theirs.onnx")
    typed("scripts/predict.py", tmp_path / "theirs.onnx", photos).refused("class_names", "data", "probabilities")


def test_wrong_use_of_photo_flags_is_refused_by_export(trained, tmp_path):
    typed("scripts/export.py", trained, "-output", tmp_path / "x.safetensors", "-photo").refused("-photo", "-to onnx")
    typed("scripts/export.py", trained, "-output", tmp_path / "x.pt2", "-int8").refused("-int8", "-to onnx")
    typed("scripts/export.py", trained, "-to", "web", "-output", tmp_path / "x", "-runtime", tmp_path).refused(
        "-runtime", tmp_path
    )
    assert not any(tmp_path.iterdir())


def test_export_without_a_readable_validation_image_is_refused(export_changed, tmp_path, monkeypatch):
    def fail(*given) -> None:
        raise ImageReadError("no picture")

    monkeypatch.setattr(ArrayStorage, "read", fail)
    export_changed(lambda photo, *results: results).refused("-photo", NUM_VAL, "-data_path")
    assert not any(tmp_path.iterdir())


def test_page_in_8_bits_has_the_graph_and_asks_no_other_place(trained, photo_graph, photos, tmp_path, monkeypatch):
    share_graph(monkeypatch, photo_graph)
    package = tmp_path / "onnxruntime-web"
    (package / "dist").mkdir(parents=True)
    for name in RUNTIME:
        (package / "dist" / name).write_text(name)
    words = ("-to", "web", "-output", tmp_path / "page", "-int8", "-accept", "-runtime", package)
    ended = typed("scripts/export.py", trained, *words).done()
    assert_names(ended.stdout, "float32", "int8", f"{NUM_VAL} right", "95% interval", "python -m http.server")
    assert ended.stdout.count("% fit the validation images") == 2
    facts = json.loads((tmp_path / "page/model.json").read_text())
    assert facts["classes"] == list("0123456789") and 0 < facts["threshold"] <= 1
    for each, name in zip(facts["runtime"], RUNTIME, strict=True):
        assert each["url"] == f"runtime/{name}" and each["integrity"].startswith("sha384-")
        assert (tmp_path / "page" / each["url"]).read_text() == name
    texts = {name: (tmp_path / "page" / name).read_text() for name in ("index.html", "page.css", "page.js")}
    assert not any("http" in text.replace("http-equiv", "") for text in texts.values())
    assert {*re.findall(r'byId\("(\w+)"\)', texts["page.js"])} <= {*re.findall(r'id="(\w+)"', texts["index.html"])}
    model = onnx.load(tmp_path / "page/model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("DequantizeLinear") > 10 and "If" in kinds
    answers = predicted(tmp_path / "page/model.onnx", photos, tmp_path / "a.csv")
    assert len(answers) == len(list(photos.iterdir()))


def test_page_without_a_runtime_names_one_version_and_its_checksums(upright):
    facts = json.loads((upright[1] / "model.json").read_text())
    assert "<title>digits</title>" in (upright[1] / "index.html").read_text()
    assert all(re.search(r"/onnxruntime-web@\d+\.\d+\.\d+/dist/", each["url"]) for each in facts["runtime"])
    assert [each["integrity"] for each in facts["runtime"]] == [f"sha384-{digest}" for digest in RUNTIME.values()]


@pytest.mark.long
def test_int8_that_loses_accuracy_is_refused_and_names_the_layer(trained, photo_graph, tmp_path, monkeypatch):
    state = torch.load(trained / "best.pth", weights_only=True)
    bias, weight = (state[state["preferred"]][f"blocks.0.mlp.{name}"] for name in ("fc1.bias", "fc2.weight"))
    before = [bias.numpy().copy(), weight.T.numpy().copy()]
    # A hidden unit that is always large, and that the next layer ignores: float32 loses nothing, 8 bits lose the rest.
    bias[0], weight[:, 0] = 1e4, 0.0
    torch.save(state, tmp_path / "best.pth")
    model, num_changed = onnx.load(photo_graph), 0
    for tensor in model.graph.initializer:  # change the graph, because tracing another takes ten seconds
        for old, new in zip(before, (bias.numpy(), weight.T.numpy()), strict=True):
            if np.array_equal(onnx.numpy_helper.to_array(tensor), old):
                tensor.CopyFrom(onnx.numpy_helper.from_array(new, tensor.name))
                num_changed += 1
    assert num_changed == 2
    onnx.save(model, tmp_path / "float32.onnx")
    share_graph(monkeypatch, tmp_path / "float32.onnx")
    words = (tmp_path / "best.pth", "-output", tmp_path / "x.onnx", "-int8")
    ended = typed("scripts/export.py", *words, "-keep_float", "blocks.1.*")  # the ranking of layers takes most time
    assert ended.returncode == 1 and not (tmp_path / "x.onnx").exists()
    assert_names(ended.stderr, "float32", "int8", "change the answers most: blocks.0.mlp.fc2", "-keep_float", "-accept")
    typed("scripts/export.py", *words, "-keep_float", "blocks.0.mlp.*").done()
    assert (tmp_path / "x.onnx").exists()
    typed("scripts/export.py", *words, "-keep_float", "blocks.99").refused("-keep_float", "blocks.99")
