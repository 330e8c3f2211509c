"""Models with weights from any source classify like their own library's evaluation, with the names of their classes."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.data import ImageNetInfo

from engine.predict.classifier import load_classifier
from engine.settings import load_settings
from tests.support.cases import cases_of, names_of
from tests.support.refusals import refused
from utils.errors import ConfigError

ARGUMENTS = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}


def hub_folder(folder, num_classes, **config):
    """Write a small ViT in the format of timm's push_to_hf_hub to a folder. Return the model."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **ARGUMENTS).eval()
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    known = {"input_size": [3, 32, 32], "mean": [0.4] * 3, "std": [0.2] * 3}
    known |= {"interpolation": "bilinear", "crop_pct": 0.8}
    content = {"architecture": "vit_tiny_patch16_224", "num_classes": num_classes, "model_args": ARGUMENTS}
    (folder / "config.json").write_text(json.dumps(content | {"pretrained_cfg": known} | config))
    return model


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_hub_folder_provides_model_preprocessing_and_class_names(tmp_path, prefix):
    theirs = hub_folder(tmp_path / "hub", 3, label_names=["cat", "dog", "owl"])
    found = load_classifier(f"{prefix}{tmp_path / 'hub'}")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(found.model(images), theirs(images)) and not found.model.training
    assert found.classes == ["cat", "dog", "owl"]
    facts = found.facts()["preprocessing"]
    assert facts["input_size"] == [3, 32, 32] and (facts["crop_pct"], facts["exif"]) == (0.8, "apply")
    assert (facts["mean"], facts["std"], facts["interpolation"]) == ([0.4] * 3, [0.2] * 3, "bilinear")


@pytest.mark.slow
def test_imagenet_sized_classifiers_get_imagenet_class_names(tmp_path):
    for number in (1000, 11821, 7):
        hub_folder(tmp_path / str(number), number)
    assert load_classifier(tmp_path / "1000").classes == ImageNetInfo().label_descriptions()
    assert load_classifier(tmp_path / "11821").classes == ImageNetInfo("imagenet-12k").label_descriptions()
    assert load_classifier(tmp_path / "7").classes == [f"class {number}" for number in range(7)]


def test_class_names_are_read_from_a_text_file(tmp_path):
    hub_folder(tmp_path / "hub", 3)
    for last, names in (("Käuzchen", ["Katze", "Hund", "Käuzchen"]), ("Hund", ["Katze", "Hund (1)", "Hund (2)"])):
        (tmp_path / "names.txt").write_text(f"Katze\nHund\n{last}\n\n", encoding="utf-8")
        assert load_classifier(tmp_path / "hub", names=tmp_path / "names.txt").classes == names
    for text, named in (("Katze\n", ["-classes", 1, 3]), ("Katze\n\nHund\n", ["line 2"]), ("Ka\0\n", ["zero byte"])):
        (tmp_path / "names.txt").write_text(text)
        with refused(ConfigError, "names.txt", *named):
            load_classifier(tmp_path / "hub", names=tmp_path / "names.txt")


@pytest.mark.long
def test_classifier_needs_model_name_for_bare_weights(tmp_path):
    model = timm.create_model("test_resnet", num_classes=4).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    with refused(ConfigError, "MODEL.NAME", "-opts"):
        load_classifier(tmp_path / "weights.pth")
    found = load_classifier(tmp_path / "weights.pth", ["-opts", "MODEL.NAME=test_resnet", "DATA.IMAGE_SIZE=64"])
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(found.model(images), model(images)) and found.config.DATA.IMAGE_SIZE == 64


def test_weights_without_a_run_are_used_in_batches_of_a_fine_tuning(tmp_path):
    hub_folder(tmp_path / "hub", 3)
    trained = load_settings(["-pretrained", str(tmp_path / "hub")]).config.DATA
    assert load_classifier(tmp_path / "hub").config.DATA.BATCH_SIZE == trained.BATCH_SIZE
    assert load_classifier(tmp_path / "hub", ["-batch_size", "100"]).config.DATA.BATCH_SIZE == 100


@pytest.mark.parametrize("words", cases_of("mistakes-of_classifiers"))
def test_weights_without_a_classifier_are_refused(here, words):
    hub_folder(here / "features", 0)
    with refused(ConfigError, *names_of("mistakes-of_classifiers", words)):
        load_classifier(words.split()[0], raw="-raw" in words)
