"""halfstep export: its files, loaded by the programs they are for, and refused input."""

import errno
import importlib.util
import json
import os
import sys
from unittest.mock import Mock

import pytest
import timm
import torch
from PIL import Image

from engine.export.files import staged
from engine.export.formats import FORMATS
from engine.predict.classifier import load_classifier
from models.weights.files import find_and_read, read_record, read_state_dict
from models.weights.metadata import metadata_of
from tests.support.cases import cases_of, names_of
from tests.support.checkpoints import CLASSES, PLAIN, checkpoint
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, Ended, run, run_fresh, typed
from tests.support.weight_files import assert_same, saved
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("plain") / "best.pth")


def exported(source, to, target) -> Ended:
    return typed("scripts/export.py", source, "-to", to, "-output", target)


def weights_in(path) -> dict:
    return torch.load(path, weights_only=True)["state_dict"]


TARGETS = {"safetensors": "x.safetensors", "hf": "x"}


@pytest.mark.parametrize("to", TARGETS)
def test_exported_weights_and_metadata_are_read_back_exactly(plain, tmp_path, to):
    target = tmp_path / "new" / TARGETS[to]
    exported(plain, to, target).done()
    assert_same(read_state_dict(target), weights_in(plain))
    known = metadata_of(str(target))
    assert known.model["MODEL.EMBED_DIM"] == PLAIN["EMBED_DIM"] and known.model["MODEL.NUM_HEADS"] == PLAIN["NUM_HEADS"]
    assert known.images["DATA.IMAGE_SIZE"] == 32 and known.images["DATA.CROP_PCT"] == 0.9
    assert list(known.images["DATA.IMAGENET_MEAN"]) == [0.1, 0.2, 0.3]
    file = target / "model.safetensors" if to == "hf" else target
    assert read_record(file)["class_names"] == CLASSES
    (target.parent / "x.npz").write_text("a file beside a folder of that name")
    assert_same(find_and_read(target, {"config", "class_names", "data"})[1]["state_dict"], weights_in(plain))
    assert {each.name for each in target.parent.iterdir()} == {target.name, "x.npz"}


def test_timm_loads_export_with_preprocessing_and_class_names(plain, tmp_path):
    (tmp_path / "x").mkdir()  # an empty folder may exist
    exported(plain, "hf", tmp_path / "x").done()
    model = timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True)
    assert_same(model.state_dict(), weights_in(plain))
    assert model.pretrained_cfg["label_names"] == CLASSES
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (3, 32, 32) and data["crop_pct"] == 0.9 and list(data["mean"]) == [0.1, 0.2, 0.3]
    assert "<" not in (tmp_path / "x" / "README.md").read_text()


# Block two libraries that transformers would import for other models, which takes a second.
IN_TRANSFORMERS = """
import sys, torch
sys.modules |= {"scipy": None, "torchao": None}
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
for folder in sys.argv[1:]:
    model, info = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == "TimmWrapperForImageClassification" and not any(info.values()), info
    saved = torch.load(f"{folder}.pth")
    with torch.no_grad():
        found = model.eval()(saved["images"]).logits
        inputs = AutoImageProcessor.from_pretrained(folder)(Image.open(f"{folder}.png"), return_tensors="pt")
        logits = model(**inputs).logits
    torch.testing.assert_close(found, saved["logits"], rtol=1e-5, atol=1e-5)
    assert list(model.config.id2label.values()) == saved["classes"]
    several = model.config.problem_type == "multi_label_classification"  # decides what transformers' pipeline prints
    probabilities = logits.sigmoid() if several else logits.softmax(1)
    torch.testing.assert_close(probabilities[0], saved["probabilities"], rtol=0, atol=1e-4)
"""
FOR_TRANSFORMERS = {  # {name: settings of the model, settings of the data}
    "plain": (PLAIN, {}),
    "distilled": ({"TYPE": "timm", "NAME": "deit_tiny_distilled_patch16_224"}, {}),
    "convolutions": ({"TYPE": "timm", "NAME": "test_resnet"}, {}),
    "grey": (PLAIN, {"IMAGE_CHANNELS": 1, "IMAGENET_MEAN": (0.1,), "IMAGENET_STD": (0.2,)}),
    "several": (PLAIN, {"DATASET": "csv", "LABEL_SEPARATOR": "|"}),
}


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_transformers_reads_exports_with_the_logits_of_predict(tmp_path):
    """In a separate process, because transformers looks for the package `datasets` and would find ours."""
    noise = torch.randint(256, (6, 8, 3), generator=torch.manual_seed(0), dtype=torch.uint8).numpy()
    for name, (model, data) in FOR_TRANSFORMERS.items():
        source, photo = checkpoint(tmp_path / f"{name}.ckpt", model, data), tmp_path / f"{name}.png"
        Image.fromarray(noise).resize((64, 48)).convert("L" if name == "grey" else "RGB").save(photo)
        exported(source, "hf", tmp_path / name).done()
        typed("scripts/predict.py", source, photo, "-top", 3, "-json", tmp_path / "x.json").done()
        (found,) = json.loads((tmp_path / "x.json").read_text())["images"]
        probabilities = {each["number"]: each["probability"] for each in found["predictions"]}
        classifier = load_classifier(str(source))
        images = torch.rand(8, classifier.config.DATA.IMAGE_CHANNELS, 32, 32)
        with torch.no_grad():
            content = {"images": images, "logits": classifier.model(images), "classes": CLASSES}
        content["probabilities"] = torch.tensor([probabilities[number] for number in range(3)])
        saved(content, tmp_path / f"{name}.pth")
    (tmp_path / "theirs.py").write_text(IN_TRANSFORMERS)
    run(str(tmp_path / "theirs.py"), *FOR_TRANSFORMERS, cwd=tmp_path, faults={"forget_our_modules": []}).done()


def test_missing_library_is_refused_before_writing(plain, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    exported(plain, "onnx", tmp_path / "x.onnx").refused("-to", "pip install onnx onnxscript onnxruntime")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("words", cases_of("mistakes-of_export"))
def test_wrong_export_name_or_flag_is_refused(plain, words):
    for name in ("status.json", "theirs.npz"):
        (plain.parent / name).write_text("{}")
    given = words.format(run=plain.parent).split()
    typed("scripts/export.py", *given).refused(*names_of("mistakes-of_export", words))


def wrong_for(is_chosen):
    """Return a function that changes the logits of some images. `is_chosen`: pixels [B, C, H, W] -> bool [B]."""
    return lambda logits, pixels: torch.where(is_chosen(pixels)[:, None], logits + 1e-3, logits)


def is_striped(pixels):
    return ((pixels[..., ::2] < 0.01) & (pixels[..., 1::2] > 0.99)).flatten(1).all(1)


# {images for which the export is wrong: its logits, computed from the model's logits and the pixels from 0 to 1}
MISTAKES = {
    "all": lambda logits, pixels: logits + 1e-3,
    "all, NaN": lambda logits, pixels: logits * float("nan"),
    "all, another shape": lambda logits, pixels: logits[None],
    "black": wrong_for(lambda pixels: pixels.flatten(1).amax(1) < 0.01),
    "white": wrong_for(lambda pixels: pixels.flatten(1).amin(1) > 0.99),
    "striped": wrong_for(is_striped),
    "with grey pixels": wrong_for(lambda pixels: ((pixels > 0.3) & (pixels < 0.7)).flatten(1).any(1)),
    "one alone": wrong_for(lambda pixels: torch.full([len(pixels)], len(pixels) == 1)),
    "several together": wrong_for(lambda pixels: torch.full([len(pixels)], len(pixels) > 1)),
}


@pytest.mark.parametrize("images", MISTAKES)
def test_export_wrong_for_one_kind_of_image_is_deleted(plain, tmp_path, monkeypatch, images):
    def load(subject, path):
        mean, std = (torch.tensor(subject.data[key])[:, None, None] for key in ("mean", "std"))
        return lambda given: MISTAKES[images](subject.model(given), given * std + mean)

    wrong = FORMATS["torch"]._replace(write=lambda subject, path: torch.save({}, path), load=load)
    monkeypatch.setitem(FORMATS, "torch", wrong)
    ended = exported(plain, "torch", tmp_path / "x.pt2")
    assert ended.returncode == 1
    assert_names(ended.stderr, "-to", "torch", tmp_path / "x.pt2")
    assert not any(tmp_path.iterdir())


class Branching(torch.nn.Module):
    """A model whose calculation depends on the values of its input."""

    def forward(self, images):
        return images.mean((2, 3)) if images.sum() > 0 else images.amax((2, 3))


@pytest.mark.long
@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_model_that_torch_cannot_trace_is_refused_with_a_way_out(plain, tmp_path, monkeypatch, to):
    monkeypatch.setattr("engine.export.subject.Subject.graph", Branching())
    exported(plain, to, tmp_path / f"x{FORMATS[to].suffix}").refused(f"-to {to}", "tiny_test", "-to hf", ".safetensors")
    assert not any(tmp_path.iterdir())


# Exports weights that differ from the model's, in both formats, and prints the exit codes.
WRONG_WEIGHTS = """
import sys
from engine.export import files, hugging_face
from scripts.export import main
from utils.program import exit_code

def shifted(write):
    return lambda weights, *more: write({name: each + 1 for name, each in weights.items()}, *more)

for module in (files, hugging_face):
    module.to_safetensors = shifted(module.to_safetensors)
source, *targets = sys.argv[1:]
print([exit_code(main, [source, "-to", to, "-output", target]) for to, target in zip(targets[::2], targets[1::2])])
"""


@pytest.mark.long
def test_export_of_wrong_weights_is_refused_even_without_asserts(plain, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG_WEIGHTS)
    words = [word for to, name in TARGETS.items() for word in (to, str(tmp_path / "new" / name))]
    environment = {"PYTHONOPTIMIZE": "1", "PYTHONPATH": str(ROOT)}
    ended = run_fresh(str(tmp_path / "wrong.py"), str(plain), *words, environment=environment)
    assert ended.stdout.splitlines()[-1:] == ["[1, 1]"], ended
    for (to, name), what in zip(TARGETS.items(), ("weights", "logits"), strict=True):
        assert_names(ended.stderr, f"-to {to}", f"its {what}", tmp_path / "new" / name)
    assert "Traceback" not in ended.stderr and not any((tmp_path / "new").iterdir())


@pytest.mark.parametrize("to", TARGETS)
def test_full_disk_keeps_the_previous_export_intact(plain, tmp_path, monkeypatch, to):
    target = tmp_path / TARGETS[to]
    if to != "hf":
        exported(plain, to, target).done()
    former = {each: each.read_bytes() for each in tmp_path.iterdir()}
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    exported(plain, to, target).refused(target, "disk", "full")
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == former


def test_graph_export_over_the_file_size_limit_is_refused(plain, tmp_path):
    ended = run("scripts/export.py", str(plain), "-output", str(tmp_path / "x.pt2"), faults={"limit_files": [4000]})
    ended.refused()
    assert "x.pt2" in ended.stderr
    assert not any(tmp_path.iterdir())


def test_timm_loads_exports_with_grey_images_and_fixed_position_embeddings(tmp_path):
    grey = {"IMAGE_CHANNELS": 1, "IMAGENET_MEAN": (0.1,), "IMAGENET_STD": (0.2,)}
    source = checkpoint(tmp_path / "best.pth", PLAIN | {"POS_EMBED": "sincos2d"}, grey)
    exported(source, "hf", tmp_path / "x").done()
    assert timm.create_model(f"local-dir:{tmp_path / 'x'}", pretrained=True).patch_embed.proj.in_channels == 1
    assert metadata_of(str(tmp_path / "x")).images["DATA.IMAGE_CHANNELS"] == 1


def test_outputs_without_a_class_name_are_exported_by_number(tmp_path):
    source = checkpoint(tmp_path / "a.ckpt", PLAIN | {"NUM_CLASSES": 5}, classes=[*"abcde"], class_names=CLASSES)
    exported(source, "hf", tmp_path / "x").done()
    names = json.loads((tmp_path / "x" / "config.json").read_text(encoding="utf-8"))["label_names"]
    assert names == [*CLASSES, "class 3", "class 4"]


def test_second_file_of_an_export_never_replaces_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "weights.data")
    with refused(ConfigError, "-output", tmp_path / "graph.onnx"), staged(tmp_path / "graph.onnx") as path:
        path.write_bytes(b"graph")
        path.with_name("weights.data").write_bytes(b"weights")
    assert [each.name for each in tmp_path.iterdir()] == ["weights.data"] and (tmp_path / "weights.data").is_fifo()
