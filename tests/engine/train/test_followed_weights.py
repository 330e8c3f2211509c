"""A run follows its weights: from the first start to a resumed run whose weights are gone, and in the numbers of classes."""

import json

import pytest
import safetensors.torch
import torch
from PIL import Image

from configs.load import to_yaml
from configs.values import flatten
from engine.settings import load_settings
from models import build_model
from tests.support.configs import replaced, small_config
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, typed
from tests.support.weight_files import saved, transformers_weights, vit
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("signal_handlers")


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a run with its own mean and crop, that started from weights which are gone."""
    config = small_config(tmp_path, "DATA.IMAGENET_MEAN=0.25", "DATA.CROP_PCT=0.75")
    config = replaced(config, MODEL={"PRETRAINED": str(tmp_path / "gone.pth")})
    state = {"state_dict": build_model(config, 10).state_dict(), "progress": {}, "config": flatten(config)}
    return saved(state, tmp_path / "last.pth")


@pytest.fixture
def bare(tmp_path):
    """A settings file that leaves model and preprocessing open."""
    (tmp_path / "bare.yaml").write_text("DATA: {DATASET: digits}\nTRAIN: {NUM_EPOCHS: 1}\n")
    return str(tmp_path / "bare.yaml")


def test_what_a_file_leaves_open_follows_the_weights_and_config_yaml_says_so(checkpoint, bare):
    loaded = load_settings(["-cfg", bare, "-pretrained", str(checkpoint), "-opts", "DATA.CROP_PCT=0.5"])
    assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.CROP_PCT) == ((0.25,), 0.5)
    assert (loaded.config.MODEL.EMBED_DIM, loaded.config.MODEL.NAME) == (16, "vit_small_test")
    (line,) = [line for line in to_yaml(loaded.config, loaded.origins).splitlines() if "IMAGENET_MEAN" in line]
    assert_names(line, "[0.25]", f"weights {checkpoint}")
    assert "default" in to_yaml(loaded.config, loaded.origins).partition("HFLIP")[2].splitlines()[0]


def test_a_model_that_is_set_is_not_replaced_by_that_of_the_weights(checkpoint, bare):
    for word in ("MODEL.TYPE=vit", "MODEL.DEPTH=3", "MODEL.TRANS.DEPTH=3"):
        loaded = load_settings(["-cfg", bare, "-pretrained", str(checkpoint), "-image_size", "16", "-opts", word])
        assert (loaded.config.MODEL.EMBED_DIM, loaded.config.DATA.IMAGENET_MEAN) == (768, (0.25,))


def test_a_resumed_run_keeps_what_it_began_with_although_its_weights_are_gone(checkpoint, bare, tmp_path):
    for named in (["-pretrained", str(tmp_path / "gone.pth")], ["-pretrained", "resnet50"], []):
        loaded = load_settings(["-cfg", bare, *named, "-resume", str(checkpoint)])
        assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.CROP_PCT) == ((0.25,), 0.75)
        assert loaded.config.MODEL.EMBED_DIM == 16
    with refused(ConfigError, "MODEL.PRETRAINED", tmp_path / "gone.pth"):
        load_settings(
            ["-cfg", bare, "-pretrained", str(tmp_path / "gone.pth"), "-output", str(tmp_path), "-resume", "auto"]
        )
    older = load_settings(["-cfg", bare, "-pretrained", "resnet50"]).config.DATA
    assert older.IMAGENET_MEAN == (0.485, 0.456, 0.406), "a new run follows the weights"


def test_a_run_says_what_it_follows_and_starts(checkpoint, bare, tmp_path):
    flags = ["-cfg", bare, "-pretrained", checkpoint, "-output", tmp_path / "o", "-batch_size", "1000"]
    before = typed("main_single_gpu.py", *flags, "-opts", "DATA.CROP_PCT=0.5").done().printed.partition("Epoch[")[0]
    assert_names(before, checkpoint, "DATA.IMAGENET_MEAN [0.25]", "MODEL.EMBED_DIM 16", "-opts DATA.CROP_PCT=0.75")
    assert "contradict" not in before and "DATA.IMAGE_SIZE 8" in before


@pytest.mark.parametrize("count", [2, 3])
def test_weights_with_class_names_are_evaluated_by_name(tmp_path, count):
    state = {name: torch.zeros_like(tensor) for name, tensor in vit(num_classes=3).state_dict().items()}
    state["head.bias"][2] = 1  # every image is taken for class 2
    (tmp_path / "f").mkdir()
    safetensors.torch.save_file(transformers_weights(state), tmp_path / "f" / "model.safetensors")
    config = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config |= {"intermediate_size": 96, "image_size": 32, "patch_size": 8, "id2label": {0: "cat", 1: "dog", 2: "ant"}}
    (tmp_path / "f" / "config.json").write_text(json.dumps(config))
    for name, number in list({"ant": 3, "cat": 1, "dog": 4}.items())[:count]:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for each in range(number):
            Image.new("RGB", (40, 40), (each, 0, 0)).save(tmp_path / "photos" / name / f"{each}.png")
    flags = ["-eval", "-pretrained", tmp_path / "f", "-dataset", "imagefolder", "-data_path", tmp_path / "photos"]
    ended = typed("main_single_gpu.py", *flags, "-output", tmp_path / "o").done()
    assert_names(ended.printed, {2: "75.000%", 3: "37.500%"}[count])


def test_weights_without_a_settings_file_are_fine_tuned_on_folders(tmp_path):
    weights = saved(vit().state_dict(), tmp_path / "weights.pth")
    words = ["-pretrained", str(weights), "-data_path", "photos", "-opts", "MODEL.NAME=test_vit"]
    short = load_settings(words)
    assert short.config == load_settings(["-cfg", str(ROOT / "configs/finetune.yaml"), *words]).config
    assert (short.config.DATA.DATASET, short.config.TRAIN.LAYER_DECAY, short.arguments) == ("imagefolder", 0.75, words)
    assert_names(short.notes[0], "finetune.yaml", "imagefolder")
