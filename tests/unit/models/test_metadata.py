"""Metadata in files and folders of weights, about their images and model, and refused files."""

import argparse
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from timm.data import ImageNetInfo

import main_single_gpu
from engine.settings import load_settings
from models.weights.files import read_state_dict, read_weights
from models.weights.load import load_pretrained
from models.weights.metadata import classes_of_weights, is_imagenet_by_other_names, metadata_of, usual_images
from tests.support.cases import cases_of, names_of
from tests.support.pages import blocks_of, text_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT
from tests.support.weight_files import (
    DEIT_2021,
    DEPTH,
    HEADS,
    PADDLE_2022,
    WIDTH,
    assert_same,
    google_arrays,
    paddle_arrays,
    pickled,
    saved,
    timm_model,
    transformers_weights,
    vit,
)
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

HALF = [0.5, 0.5, 0.5]
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
FIELDS = {"PATCH_SIZE": 8, "EMBED_DIM": WIDTH, "DEPTH": DEPTH, "NUM_HEADS": HEADS, "MLP_RATIO": 4.0, "QKV_BIAS": True}
OUR_VIT = {"MODEL.TYPE": "vit", "MODEL.NAME": "vit"} | {f"MODEL.{name}": value for name, value in FIELDS.items()}


def folder(path, state, **files):
    """Write a folder as on the Hugging Face hub. `files`: {name: content of a JSON file}."""
    path.mkdir()
    safetensors.torch.save_file(state, path / "model.safetensors")
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def assert_images(metadata, **values) -> None:
    """Assert that the image settings in the metadata include these values."""
    images = {key.removeprefix("DATA."): value for key, value in metadata.images.items()}
    assert {key: list(images[key]) if isinstance(images[key], tuple) else images[key] for key in values} == values


def test_timm_folder_provides_model_arguments_and_preprocessing(tmp_path):
    images = {"input_size": [3, 32, 32], "mean": [0.1, 0.2, 0.3], "std": HALF, "crop_pct": 0.8, "crop_mode": "border"}
    config = {"architecture": "resnet10t", "model_args": {"act_layer": "gelu"}, "pretrained_cfg": images}
    config |= {"num_classes": 2, "label_names": ["cat", "dog"]}
    model, other = timm_model("resnet10t", 2), timm_model("resnet10t", 2)
    path = folder(tmp_path / "f", model.state_dict(), config=config)
    settings = load_settings(["-eval", "-pretrained", f"local-dir:{path}"]).config
    data, chosen = settings.DATA, settings.MODEL
    assert (chosen.TYPE, chosen.NAME, dict(chosen.KWARGS)) == ("timm", "resnet10t", {"act_layer": "gelu"})
    assert (data.IMAGENET_MEAN, data.CROP_PCT, data.CROP_MODE) == ((0.1, 0.2, 0.3), 0.8, "border")
    assert len(load_pretrained(other, str(path), classes=["dog", "cat"])) == 2
    assert torch.equal(other.fc.bias, model.fc.bias[[1, 0]])


def test_config_of_fine_tuning_page_names_model_and_preprocessing(tmp_path):
    (text,) = [code for language, code in blocks_of(text_of("docs/fine-tuning.md")) if language == "json"]
    path = folder(tmp_path / "f", timm_model("resnet18", 1000).state_dict(), config=text)
    settings = load_settings(["-eval", "-pretrained", str(path)]).config
    assert (settings.MODEL.TYPE, settings.MODEL.NAME) == ("timm", "resnet18")
    assert (settings.DATA.IMAGENET_MEAN, settings.DATA.IMAGENET_STD) == tuple(map(tuple, IMAGENET))
    assert (settings.DATA.IMAGE_SIZE, settings.DATA.CROP_PCT) == (224, 0.95)


def test_timm_folder_arguments_become_settings(tmp_path):
    images = {"input_size": [3, 32, 32], "mean": [0.5], "std": [0.5]}
    arguments = {"img_size": 48, "in_chans": 1, "num_classes": 2, "drop_path_rate": 0.1, "global_pool": "avg"}
    config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments, "pretrained_cfg": images}
    metadata = metadata_of(str(folder(tmp_path / "f", {"a": torch.ones(1)}, config=config)))
    assert_images(metadata, IMAGE_SIZE=48, IMAGE_CHANNELS=1)
    assert metadata.model["MODEL.KWARGS"] == {"global_pool": "avg"}


def test_transformers_vit_is_built_and_loaded(tmp_path, weights):
    config = {"model_type": "vit", "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
    config |= {"intermediate_size": 4 * WIDTH, "image_size": 32, "patch_size": 8, "id2label": {"0": "a", "1": "b"}}
    prepared = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": HALF, "image_std": HALF}
    prepared["crop_size"] = 24  # counts only together with do_center_crop
    path = folder(tmp_path / "f", transformers_weights(weights), config=config, preprocessor_config=prepared)
    metadata = metadata_of(str(path))
    assert metadata.model == OUR_VIT
    expected = {"CROP_MODE": "squash", "CROP_PCT": 1.0, "INTERPOLATION": "bilinear", "IMAGENET_MEAN": HALF}
    assert_images(metadata, IMAGE_SIZE=32, IMAGE_CHANNELS=3, **expected)
    model = vit()
    assert len(load_pretrained(model, str(path))) == 1
    assert_same(model.state_dict(), weights)
    for side, size, share in ((32, 36, 32 / 36), (9, 14, math.nextafter(9 / 14, 0))):  # 9 / (9 / 14) is below 14
        cropped = prepared | {"size": size, "crop_size": {"height": side, "width": side}, "do_center_crop": True}
        (path / "preprocessor_config.json").write_text(json.dumps(cropped))
        assert_images(metadata_of(str(path)), IMAGE_SIZE=side, CROP_MODE="squash", CROP_PCT=share)
    (path / "preprocessor_config.json").write_text(json.dumps(prepared | {"size": {"height": 32, "width": 48}}))
    assert_images(metadata_of(str(path)), IMAGE_SIZE="32x48", CROP_MODE="squash", CROP_PCT=1.0)
    for size in ({"shortest_edge": 32, "longest_edge": 48}, {"height": 32, "width": 48}):
        cropped = prepared | {"size": size, "crop_size": 24, "do_center_crop": True}
        (path / "preprocessor_config.json").write_text(json.dumps(cropped))
        with refused(ConfigError, path, "32"):
            metadata_of(str(path))


@pytest.mark.parametrize(("word", "is_name"), [("kind", True), ("LABEL", False)])
def test_class_names_are_sorted_by_number_and_placeholder_names_are_ignored(tmp_path, word, is_name):
    names = [f"{word}_{number}" for number in range(11)]
    labels = {str(number): names[number] for number in reversed(range(11))}
    path = folder(tmp_path / "f", {"a": torch.ones(1)}, config={"id2label": labels})
    assert classes_of_weights(str(path)) == (names if is_name else [])


def test_transformers_vit_with_missing_tensor_is_refused(tmp_path, weights):
    state = transformers_weights(weights)
    del state["vit.encoder.layer.1.attention.attention.key.weight"]
    with refused(ConfigError, "MODEL.PRETRAINED", "blocks.1.attn.qkv.weight"):
        load_pretrained(vit(), str(folder(tmp_path / "f", state) / "model.safetensors"))


def test_transformers_distilled_deit_gets_timm_names(tmp_path):
    names = {"distillation_token": "dist_token", "cls_token": "cls_token"}
    names |= {f"patch_embeddings.projection.{each}": f"patch_embed.proj.{each}" for each in ("weight", "bias")}
    state = {f"deit.embeddings.{name}": torch.ones(1) for name in names} | {"deit.pooler.dense.weight": torch.ones(1)}
    state |= {"cls_classifier.bias": torch.ones(1), "distillation_classifier.bias": torch.ones(1)}
    config = {"model_type": "deit", "hidden_size": 192, "image_size": 224, "patch_size": 16}
    path = folder(tmp_path / "f", state, config=config)
    assert set(read_state_dict(path)) == {*names.values(), "head.bias", "head_dist.bias"}
    metadata = metadata_of(str(path))
    assert metadata.model == {"MODEL.TYPE": "timm", "MODEL.NAME": "deit_tiny_distilled_patch16_224"}
    assert_images(metadata, IMAGE_SIZE=224)


def test_timm_training_checkpoints_describe_model_and_preprocessing(tmp_path):
    def of_checkpoint(**content):
        content = {"state_dict": {"fc.weight": torch.ones(2, 2)}} | content
        return metadata_of(str(saved(content, tmp_path / "x.pth")))

    arguments = argparse.Namespace(model="resnet50", img_size=160, mean=[0.2] * 3, crop_pct=0.8, std=None, lr=0.1)
    metadata = of_checkpoint(arch="resnet50", args=arguments)
    assert metadata.model == {"MODEL.TYPE": "timm", "MODEL.NAME": "resnet50"}
    assert_images(metadata, IMAGE_SIZE=160, IMAGENET_MEAN=[0.2] * 3, IMAGENET_STD=IMAGENET[1], CROP_PCT=0.8)
    assert_images(of_checkpoint(arch="resnet50"), IMAGENET_MEAN=IMAGENET[0], CROP_PCT=0.95)  # like timm's defaults
    kwargs = {"stem_type": "deep", "drop_rate": 0.2, "img_size": 96}
    trained = argparse.Namespace(gp="max", img_size=None, bn_eps=1e-3, bn_momentum=None, model_kwargs=kwargs)
    metadata = of_checkpoint(arch="resnet50", args=trained)
    assert metadata.model["MODEL.KWARGS"] == {"global_pool": "max", "bn_eps": 1e-3, "stem_type": "deep"}
    assert_images(metadata, IMAGE_SIZE=96)
    for words in ([], ["MODEL.TYPE=timm", "MODEL.NAME=resnet50.a1_in1k"]):
        loaded = load_settings(["-eval", "-pretrained", str(tmp_path / "x.pth"), "-opts", "SEED=1", *words])
        assert loaded.config.MODEL.KWARGS["global_pool"] == "max"
    with refused(ConfigError, tmp_path / "x.pth", "layers"):
        of_checkpoint(arch="resnet50", args=argparse.Namespace(model_kwargs={"layers": {"a": 1}}))
    with refused(ConfigError, tmp_path / "x.pth"):
        of_checkpoint(arch="resnet50", args=argparse.Namespace(model="resnet50", img_size="160"))


TINY_VIT = {"EMBED_DIM": 192, "DEPTH": 1, "MLP_RATIO": 0.5}


def test_vit_of_google_weights_is_recognized_by_shapes(tmp_path):
    np.savez(tmp_path / "g.npz", **google_arrays(vit(**TINY_VIT).state_dict(), ""))
    metadata = metadata_of(str(tmp_path / "g.npz"))
    assert metadata.model == OUR_VIT | {f"MODEL.{key}": value for key, value in TINY_VIT.items()}
    assert_images(metadata, IMAGE_SIZE=32, IMAGE_CHANNELS=3, IMAGENET_MEAN=HALF, IMAGENET_STD=HALF)
    np.savez(tmp_path / "g.npz", **google_arrays(vit().state_dict(), ""))  # no published ViT has this width
    assert not metadata_of(str(tmp_path / "g.npz")).model


def test_vit_of_paddlevit_weights_is_recognized_by_shapes(tmp_path):
    tiny = vit(**TINY_VIT).state_dict()
    for name, names, mean in (("v", PADDLE_2022, HALF), ("deit_x", DEIT_2021, IMAGENET[0])):
        metadata = metadata_of(str(pickled(paddle_arrays(tiny, names), tmp_path / f"{name}.pdparams")))
        assert metadata.model == OUR_VIT | {f"MODEL.{key}": value for key, value in TINY_VIT.items()}
        assert_images(metadata, IMAGE_SIZE=32, IMAGENET_MEAN=mean, CROP_PCT=0.875, CROP_MODE="center")
    large = vit(image_size=384, patch_size=96, **TINY_VIT).state_dict()
    path = pickled(paddle_arrays(large, PADDLE_2022), tmp_path / "large.pdparams")
    assert_images(metadata_of(str(path)), IMAGE_SIZE=384, CROP_PCT=1.0)


def test_grey_images_get_normalization_averaged_over_color_channels():
    settings = load_settings(["-eval", "-pretrained", "resnet50", "-opts", "DATA.IMAGE_CHANNELS=1"]).config
    assert settings.DATA.IMAGENET_MEAN == (0.449,) and settings.DATA.IMAGENET_STD == (0.226,)


def test_error_for_bare_weights_asks_for_model_name(tmp_path):
    path = str(saved({"a": torch.ones(1)}, tmp_path / "x.pth"))
    with refused(ConfigError, "MODEL.NAME", path):
        load_settings(["-eval", "-pretrained", path])
    named = load_settings(["-eval", "-pretrained", path, "-opts", "MODEL.NAME=vit_tiny_patch16_224"]).config
    assert (named.MODEL.TYPE, named.MODEL.NAME) == ("timm", "vit_tiny_patch16_224")
    for words in (["MODEL.NAME=resnet18.a1_in1k"], ["MODEL.TYPE=timm", "MODEL.NAME=resnet18.a1_in1k"]):
        found = load_settings(["-eval", "-pretrained", path, "-opts", "DATA.CROP_MODE=squash", *words])
        images, origin = found.config.DATA, found.origins["DATA.CROP_PCT"]
        assert path in origin and "resnet18.a1_in1k" in origin
        assert (images.IMAGENET_MEAN, images.CROP_PCT, images.CROP_MODE) == (tuple(IMAGENET[0]), 0.95, "squash")


@pytest.mark.long
@pytest.mark.usefixtures("here")
def test_untrained_timm_model_reports_differing_preprocessing(capfd):
    words = "-dataset digits -check -check_images 10 -batch_size 4 -opts MODEL.TYPE=timm MODEL.NAME=resnet18".split()
    words += ["MODEL.KWARGS.channels=[4,4,8,8]", "DATA.IMAGE_SIZE=32"]
    flags = ["-cfg", str(ROOT / "configs/finetune.yaml"), *words]
    for words, is_told in (([], True), (["DATA.IMAGENET_MEAN=[0.5,0.5,0.5]"], False)):
        main_single_gpu.main([*flags, *words])
        said = capfd.readouterr().out
        assert_names(said, "DATA.CROP_PCT=0.95")
        assert ("DATA.IMAGENET_MEAN=[0.485,0.456,0.406]" in said) is is_told


def test_settings_file_decides_the_mean_of_a_timm_model_even_against_weights(tmp_path):
    images = {"input_size": [3, 32, 32], "mean": HALF, "std": HALF}
    about = {"architecture": "resnet10t", "pretrained_cfg": images}
    weights = str(folder(tmp_path / "weights", {"a": torch.ones(1)}, config=about))
    (tmp_path / "own.yaml").write_text("MODEL: {TYPE: timm, NAME: resnet18}")
    timms, own = (["-cfg", str(path)] for path in (ROOT / "configs/timm.yaml", tmp_path / "own.yaml"))
    for words, expected in ((timms, IMAGENET), (own, (HALF, HALF)), ([*timms, "-pretrained", weights], IMAGENET)):
        data = load_settings(words).config.DATA
        assert ([*data.IMAGENET_MEAN], [*data.IMAGENET_STD]) == tuple(expected), words


def test_imagenet_classes_are_recognized_by_number_or_description():
    numbers, descriptions = [str(number) for number in range(1000)], ImageNetInfo().label_descriptions()
    for classes in (
        numbers,
        descriptions,
        descriptions[::-1],
        descriptions[1:],
        numbers[1:] + ["cat"],
        numbers[1:] + ["1000"],
    ):
        assert is_imagenet_by_other_names(classes) == (classes in (numbers, descriptions))
    assert usual_images("resnet18.of_no_such_tag") == {} != usual_images("resnet18.a1_in1k")


@pytest.mark.parametrize("config", cases_of("mistakes-in_config_json"))
def test_invalid_config_json_is_refused(tmp_path, config):
    text = config.replace("(deep)", '{"a":' * 100_000)
    path = folder(tmp_path / "f", {"a": torch.ones(1)}, config=text)
    with refused(ConfigError, *names_of("mistakes-in_config_json", config)):
        load_settings(["-eval", "-pretrained", str(path)])


def test_non_float_weights_are_refused(tmp_path, weights):
    path = saved(weights | {"norm.weight": torch.ones(WIDTH).char()}, tmp_path / "x.pth")
    with refused(ConfigError, "MODEL.PRETRAINED", "norm.weight"):
        load_pretrained(vit(), str(path))


def test_invalid_metadata_in_safetensors_is_ignored(tmp_path, weights):
    path = tmp_path / "x.safetensors"
    metadata = {"class_names": "[1, 2]", "arch": '"x"', "config": '{"a":' * 100_000}
    safetensors.torch.save_file(weights, path, metadata=metadata)
    assert read_weights(path).record == {"arch": "x"}
