"""The ImageNet weights that come with halfstep: their file, their metadata, and the names under which they are read."""

import hashlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

from configs.load import load
from engine.settings import load_settings
from models.weights import load as loading
from models.weights.files import read_record
from models.weights.load import load_pretrained
from models.weights.metadata import SHIPPED_FILE, SHIPPED_NAMES, classes_of_weights, metadata_of
from scripts.maintenance.shipped_weights import OF_IMAGES, SHA256
from tests.support.image_sets import draw_photos
from tests.support.refusals import refused
from tests.support.runs import typed
from tests.support.weight_files import timm_model, write_run_weights
from utils.errors import ConfigError

NAME = SHIPPED_FILE.stem
CLASSES = 1000
HALF = "[0.5,0.5,0.5]"


@pytest.fixture
def no_network(monkeypatch):
    """Fail if timm's weights of a name are fetched."""
    monkeypatch.setattr(loading, "fetch", lambda source: pytest.fail(f"the weights of {source} were fetched"))


def test_shipped_file_is_the_one_that_the_script_wrote():
    content = SHIPPED_FILE.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256 and len(content) < 1e7


def test_only_matrices_of_the_shipped_file_are_in_half_precision():
    kinds = {(tensor.ndim > 1, tensor.dtype) for tensor in load_file(SHIPPED_FILE).values()}
    assert kinds == {(True, torch.float16), (False, torch.float32), (False, torch.int64)}


@pytest.mark.long
@pytest.mark.parametrize("source", [*SHIPPED_NAMES, f"timm/{NAME}.in1k", f"hf-hub:timm/{NAME}.in1k", str(SHIPPED_FILE)])
def test_shipped_weights_are_read_in_float32_without_a_network(source, here, no_network):
    model = timm_model(NAME, CLASSES)
    first, *others = load_pretrained(model, source, classes=classes_of_weights(source))
    assert str(SHIPPED_FILE) in first and "comes with halfstep" in first
    assert others == ["  head: all 1000 classes by name"]
    state = load_file(SHIPPED_FILE)
    assert state.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype in (torch.float32, torch.int64) and torch.equal(tensor, state[name].to(tensor.dtype)), name


def test_shipped_classifier_is_kept_for_imagenet_with_numbers_as_names(no_network):
    model = timm_model(NAME, CLASSES)
    load_pretrained(model, str(SHIPPED_FILE), classes=[str(number) for number in range(CLASSES)])
    assert torch.equal(model.classifier.weight, load_file(SHIPPED_FILE)["classifier.weight"].float())


def test_metadata_of_the_shipped_file_is_that_of_timms_name():
    by_file, by_name = metadata_of(str(SHIPPED_FILE)), metadata_of(NAME)
    assert (by_file.images, by_file.model) == (by_name.images, by_name.model)
    classes = classes_of_weights(NAME)
    assert classes_of_weights(str(SHIPPED_FILE)) == classes and len(classes) == CLASSES
    facts = read_record(SHIPPED_FILE)["timm_config"]["pretrained_cfg"]
    assert facts["license"] == "apache-2.0" and facts["source"] and facts.keys() >= {*OF_IMAGES}


def test_file_in_the_working_folder_comes_before_the_shipped_one(here, no_network):
    shutil.copyfile(SHIPPED_FILE, f"{NAME}.safetensors")
    (first, *_) = load_pretrained(timm_model(NAME, CLASSES), NAME)
    assert f"weights of {NAME}.safetensors" in first and "comes with" not in first


@pytest.mark.long
def test_programs_read_the_shipped_weights_by_their_name(here, no_network):
    draw_photos(here / "photos", "cat", "dog", count=8)
    words = ("-data_path", "photos", "-image_size", 32, "-epochs", 1, "-batch_size", 8, "-output", "runs")
    options = ("-opts", "DATA.NUM_WORKERS=0", "TRACK=[]", "REPORT=false")
    said = typed("main_single_gpu.py", *words, *options, f"MODEL.PRETRAINED={NAME}", "NAME=first").done().stdout
    assert f"MODEL.PRETRAINED: weights of weights/{SHIPPED_FILE.name}, which comes with halfstep" in said
    typed("scripts/export.py", "runs/first", "-output", "first.safetensors").done()
    assert "photos/cat" in typed("scripts/predict.py", NAME, "photos").done().stdout
    typed("scripts/embed.py", NAME, "photos", "-output", "features.npz").done()
    said = typed("scripts/models.py", f"{NAME}@32", *words[:-2], "-output", "choice", *options).done().stdout
    assert f"chosen: {NAME}@32" in said and "apache-2.0" in said.lower()


@pytest.mark.long
def test_teacher_has_the_shipped_weights(here, no_network):
    words = ("-cfg", "vit_digits", "-dataset", "synthetic", "-epochs", 1, "-batch_size", 4, "-output", "runs")
    options = ("DATA.SYNTHETIC_SIZE=4", "DATA.IMAGE_SIZE=32", "DATA.IMAGE_CHANNELS=3", f"DATA.IMAGENET_MEAN={HALF}")
    teacher = (f"DATA.IMAGENET_STD={HALF}", "TRAIN.DISTILLATION_TYPE=hard", f"TRAIN.TEACHER_MODEL={NAME}", "TRACK=[]")
    said = typed("main_single_gpu.py", *words, "-opts", *options, *teacher, "REPORT=false").done().stdout
    assert f"TRAIN.TEACHER_MODEL: weights of weights/{SHIPPED_FILE.name}" in said


# --- weights of earlier versions, whose data set is gone


@pytest.mark.parametrize("words", [["-dataset", "fractals"], ["-opts", "DATA.DATASET=fractals"]])
def test_removed_data_set_is_refused_with_what_to_use(words):
    with refused(ConfigError, "DATA.DATASET", "fractals", "3.0.0", NAME):
        load(["-cfg", "vit_digits", *words])


@pytest.mark.parametrize("use", [[], ["-eval"]])
def test_weights_of_a_run_on_a_removed_data_set_are_read(tmp_path, use):
    source = ["-pretrained", str(write_run_weights(tmp_path / "vit.safetensors", dataset="fractals"))]
    loaded = load_settings([*use, *source, "-data_path", "photos"])
    assert loaded.config.DATA.DATASET == "imagefolder" and "-data_path" in loaded.origins["DATA.DATASET"]
    assert loaded.config.DATA.IMAGE_SIZE == 32 and loaded.config.MODEL.EMBED_DIM == 96
    assert load_settings([*use, *source, "-dataset", "digits"]).config.DATA.DATASET == "digits"
