"""A run takes settings from its weights, even if resumed without them; images match the pipelines of timm's weights."""

import json
from collections import defaultdict

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from configs.load import to_yaml
from configs.schema import Data, Shape
from configs.values import flatten
from datasets import Normalize
from datasets.pixels import Pixels
from datasets.pixels.decode import to_array
from datasets.transforms.crop import EvalTransform
from engine.settings import load_settings
from models import build_model
from models.weights.metadata import metadata_of
from tests.support.configs import replaced, small_config
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, typed
from tests.support.weight_files import saved, transformers_weights, vit
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("signal_handlers")


@pytest.fixture
def checkpoint(tmp_path):
    """Return a checkpoint of a run with its own mean and crop, whose pretrained weights were deleted."""
    config = small_config(tmp_path, "DATA.IMAGENET_MEAN=0.25", "DATA.CROP_PCT=0.75")
    config = replaced(config, MODEL={"PRETRAINED": str(tmp_path / "gone.pth")})
    state = {"state_dict": build_model(config, 10).state_dict(), "progress": {}, "config": flatten(config)}
    return saved(state, tmp_path / "last.pth")


@pytest.fixture
def bare(tmp_path):
    """Return a settings file that sets neither model nor preprocessing."""
    (tmp_path / "bare.yaml").write_text("DATA: {DATASET: digits}\nTRAIN: {NUM_EPOCHS: 1}\n")
    return str(tmp_path / "bare.yaml")


def test_unset_settings_are_taken_from_weights_and_their_origin_is_recorded(checkpoint, bare):
    loaded = load_settings(["-cfg", bare, "-pretrained", str(checkpoint), "-opts", "DATA.CROP_PCT=0.5"])
    assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.CROP_PCT) == ((0.25,), 0.5)
    assert (loaded.config.MODEL.EMBED_DIM, loaded.config.MODEL.NAME) == (16, "vit_small_test")
    (line,) = [line for line in to_yaml(loaded.config, loaded.origins).splitlines() if "IMAGENET_MEAN" in line]
    assert_names(line, "[0.25]", f"weights {checkpoint}")
    assert "default" in to_yaml(loaded.config, loaded.origins).partition("HFLIP")[2].splitlines()[0]


def test_explicit_model_setting_overrides_the_model_of_the_weights(checkpoint, bare):
    for word in ("MODEL.TYPE=vit", "MODEL.DEPTH=3"):
        loaded = load_settings(["-cfg", bare, "-pretrained", str(checkpoint), "-image_size", "16", "-opts", word])
        assert (loaded.config.MODEL.EMBED_DIM, loaded.config.DATA.IMAGENET_MEAN) == (768, (0.25,))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("DATA.COLUMNS=[path,kind]", ("bce", "macro_f1")),
        ("DATA.COLUMNS=[path,age] TRAIN.OBJECTIVE=numbers", ("smooth_l1", "mae")),
        ("DATA.LABEL_SEPARATOR=|", ("bce", "map")),
    ],
)
def test_loss_and_metric_of_the_weights_are_taken_only_by_their_own_task(words, expected, tmp_path):
    config = replaced(small_config(tmp_path), TRAIN={"LOSS": "bce", "BEST_METRIC": "macro_f1"})
    state = {"state_dict": build_model(config, 10).state_dict(), "progress": {}, "config": flatten(config)}
    weights = str(saved(state, tmp_path / "best.pth"))
    given = ["-pretrained", weights, "-dataset", "csv", "-data_path", "photos.csv", "-opts", *words.split()]
    train = load_settings(given).config.TRAIN
    assert (train.LOSS, train.BEST_METRIC) == expected


@pytest.mark.parametrize("flag", ["-eval", None])
@pytest.mark.parametrize(
    ("dataset", "file", "more", "expected"),
    [
        ("csv", "cats/1.jpg", {"COLUMNS": ("file", "label"), "GROUP_BY": "person"}, "imagefolder"),
        ("csv", "val.csv", {}, "csv"),
        ("csv", "cats/1.jpg", {"LABEL_SEPARATOR": "|"}, "csv"),
        ("parquet", "cats/1.jpg", {}, "imagefolder"),
        ("parquet", "data/val.parquet", {}, "parquet"),
        ("digits", "cats/1.jpg", {}, "imagefolder"),
        ("digits", "train-0.tar", {}, "shards"),
        ("imagefolder", "train-0.tar", {}, "shards"),
        ("imagefolder", "data/val.parquet", {}, "parquet"),
        ("imagefolder", "cats/1.jpg", {}, "imagefolder"),
        ("csv", "train-0.tar", {}, "shards"),
    ],
)
def test_typed_folder_without_the_files_of_the_run_is_recognised(tmp_path, flag, dataset, file, more, expected):
    config = replaced(small_config(tmp_path), DATA={"DATASET": dataset, "DATA_PATH": "photos", **more})
    if config.DATA.has_several_labels:
        config = replaced(config, TRAIN={"LOSS": "bce", "BEST_METRIC": "map"})
    state = {"state_dict": build_model(config, 10).state_dict(), "progress": {}, "config": flatten(config)}
    (tmp_path / "new" / file).parent.mkdir(parents=True)
    (tmp_path / "new" / file).touch()
    words = ["-pretrained", str(saved(state, tmp_path / "best.pth")), "-data_path", str(tmp_path / "new")]
    loaded = load_settings([*words, *([flag] if flag else [])])
    assert loaded.config.DATA.DATASET == expected
    assert not [note for note in loaded.notes if "no effect" in note and "DATA.DATASET" in note]


def test_resume_keeps_settings_of_weights_that_were_deleted(checkpoint, bare, tmp_path):
    for named in (["-pretrained", str(tmp_path / "gone.pth")], ["-pretrained", "resnet50"], []):
        loaded = load_settings(["-cfg", bare, *named, "-resume", str(checkpoint)])
        assert (loaded.config.DATA.IMAGENET_MEAN, loaded.config.DATA.CROP_PCT) == ((0.25,), 0.75)
        assert loaded.config.MODEL.EMBED_DIM == 16
    with refused(ConfigError, "MODEL.PRETRAINED", tmp_path / "gone.pth"):
        load_settings(
            ["-cfg", bare, "-pretrained", str(tmp_path / "gone.pth"), "-output", str(tmp_path), "-resume", "auto"]
        )
    older = load_settings(["-cfg", bare, "-pretrained", "resnet50"]).config.DATA
    assert older.IMAGENET_MEAN == (0.485, 0.456, 0.406), "a new run takes its settings from the weights"


@pytest.mark.parametrize(
    ("photos", "said"),
    [
        ({"ant": 3, "cat": 1}, "75.000%"),
        ({"ant": 3, "cat": 1, "dog": 4}, "37.500%"),
        ({"ant": 3, "cat": 1, "owl": 4}, "warning: the classes of the weights (cat, dog, ant) differ"),
    ],
)
def test_weights_with_class_names_are_evaluated_by_name(tmp_path, photos, said):
    state = {name: torch.zeros_like(tensor) for name, tensor in vit(num_classes=3).state_dict().items()}
    state["head.bias"][2] = 1  # every image is classified as class 2
    (tmp_path / "f").mkdir()
    safetensors.torch.save_file(transformers_weights(state), tmp_path / "f" / "model.safetensors")
    config = {"model_type": "vit", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config |= {"intermediate_size": 96, "image_size": 32, "patch_size": 8, "id2label": {0: "cat", 1: "dog", 2: "ant"}}
    (tmp_path / "f" / "config.json").write_text(json.dumps(config))
    for name, number in photos.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for each in range(number):
            Image.new("RGB", (40, 40), (each, 0, 0)).save(tmp_path / "photos" / name / f"{each}.png")
    flags = ["-eval", "-pretrained", tmp_path / "f", "-dataset", "imagefolder", "-data_path", tmp_path / "photos"]
    assert said in typed("main_single_gpu.py", *flags, "-output", tmp_path / "o").done().printed


def test_pretrained_weights_without_cfg_select_finetune_yaml_and_imagefolder(tmp_path):
    weights = saved(vit().state_dict(), tmp_path / "weights.pth")
    words = ["-pretrained", str(weights), "-data_path", "photos", "-opts", "MODEL.NAME=test_vit"]
    short = load_settings(words)
    assert short.config == load_settings(["-cfg", str(ROOT / "configs/finetune.yaml"), *words]).config
    assert (short.config.DATA.DATASET, short.config.TRAIN.LAYER_DECAY, short.arguments) == ("imagefolder", 0.75, words)
    assert_names(short.notes[0], "finetune.yaml", "imagefolder")


SIZES = [(160, 120), (97, 131), (61, 47), (33, 190), (211, 64), (90, 90), (128, 127), (25, 31), (150, 149), (17, 17)]
LARGEST = 512  # pixels per side; larger images differ only in size


def photograph(width: int, height: int) -> Image.Image:
    """Return blobs of colour with some noise."""
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)).resize((width, height), 3)
    return Image.fromarray(np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype("u1"))


def ours(data: Data, image: Image.Image) -> torch.Tensor:
    pixels = torch.empty(*data.shape, 3, dtype=torch.uint8).permute(2, 0, 1)
    EvalTransform(data)(to_array(image, Pixels(3)), pixels)
    return Normalize(data)(pixels[None])[0]


@pytest.mark.long
def test_preprocessing_of_every_pretrained_tag_matches_timm():
    pipelines, photographs = defaultdict(set), [photograph(*size) for size in SIZES]
    for tag in timm.list_pretrained():
        known = timm.get_pretrained_cfg(tag).to_dict()
        found = metadata_of(tag)
        assert found.model == {"MODEL.TYPE": "timm", "MODEL.NAME": tag}
        values = {key.removeprefix("DATA."): tuple(v) if isinstance(v, list) else v for key, v in found.images.items()}
        pipelines[tuple(resolve_data_config({}, pretrained_cfg=known).items())].add(tuple(values.items()))
    for number, (theirs, found) in enumerate(pipelines.items()):
        assert len(found) == 1
        theirs, settings = dict(theirs), dict(found.pop())
        shape = Data(**settings).shape
        assert theirs["input_size"] == (3, *shape)
        if max(shape) > LARGEST:
            smaller = Shape(*(side // 8 for side in shape))
            settings["IMAGE_SIZE"], theirs["input_size"] = smaller.size, (3, *smaller)
        transform, data = create_transform(**theirs), Data(**settings)
        image = photographs[number % 10]  # one per pipeline; the test also passes with all ten
        difference = (ours(data, image) - transform(image)) * 255 * torch.tensor(theirs["std"])[:, None, None]
        assert difference.abs().max() <= 2.01, (theirs, image.size)


def test_settings_follow_a_supported_pretrained_tag_or_tag_is_refused():
    tag = "convnext_tiny.fb_in22k_ft_in1k_384"
    loaded = load_settings(["-eval", "-pretrained", f"hf-hub:timm/{tag}"])
    assert (loaded.config.DATA.CROP_MODE, loaded.config.MODEL.NAME) == ("squash", tag)
    assert tag in loaded.origins["DATA.CROP_MODE"]
    sizes = {tag: timm.get_pretrained_cfg(tag).input_size[1:] for tag in timm.list_pretrained()}
    for tag in [tag for tag, (height, width) in sizes.items() if height != width][:1]:  # older versions have none
        assert load_settings(["-eval", "-pretrained", tag]).config.DATA.shape == sizes[tag]
        assert load_settings(["-eval", "-pretrained", tag, "-image_size", "512"]).config.DATA.CROP_PCT == 1.0
    with refused(ConfigError, "hf-hub:someone/something", "someone/something", "-pretrained"):
        load_settings(["-eval", "-pretrained", "hf-hub:someone/something"])
