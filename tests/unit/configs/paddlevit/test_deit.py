"""PaddleViT's DeiT files give timm's models; files of its other families are refused with timm's name for the model."""

import json
import re

import pytest

from configs.load import to_yaml
from tests.support.configs import load_text, write, yaml_of
from tests.support.modules import ROOT
from tests.support.refusals import refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")

# {file: the settings of model and images that it contains}
FILES: dict[str, dict[str, str]] = json.loads((ROOT / "tests/unit/configs/paddlevit/deit.json").read_text())
TINY = FILES["deit_tiny_patch16_224.yaml"]
PARAMETERS = {  # {timm's model with 1000 classes: its number of parameters}
    "deit_base_distilled_patch16_224": 87_338_192,
    "deit_base_distilled_patch16_384": 87_630_032,
    "deit_base_patch16_224": 86_567_656,
    "deit_base_patch16_384": 86_859_496,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_small_patch16_224": 22_050_664,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_tiny_patch16_224": 5_717_416,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_each_paddlevit_deit_file_selects_the_timm_model(name):
    loaded = load_text(yaml_of(FILES[f"{name}.yaml"]))
    assert (loaded.config.MODEL.TYPE, loaded.config.MODEL.NAME) == ("timm", name)
    assert f"{PARAMETERS[name]:,} parameters" in loaded.notes[0]
    assert load_text(to_yaml(loaded.config, loaded.origins)).config == loaded.config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("DEPTH", 6),
        ("NUM_HEADS", 6),
        ("EMBED_DIM", 384),
        ("MLP_RATIO", 3.0),
        ("PATCH_SIZE", "wide"),
        ("QKV_BIAS", "false"),
    ],
)
def test_deit_field_differing_from_timm_model_is_refused(key, value):
    with refused(ConfigError, "x.yaml", f"MODEL.{key}", TINY["MODEL.NAME"]):
        load_text(yaml_of(TINY | {f"MODEL.{key}": str(value)}))


def test_command_line_may_correct_deit_model_name_but_not_type():
    text = yaml_of(TINY | {"MODEL.NAME": "deit_base_patch16_224"})
    config = load_text(text, "-opts", "MODEL.NAME=deit_tiny_patch16_224").config
    assert (config.MODEL.TYPE, config.MODEL.NAME) == ("timm", "deit_tiny_patch16_224")
    for words in ("MODEL.NAME=deit_tini", "MODEL.TYPE=vit"):
        with refused(ConfigError, words.partition("=")[0], "x.yaml"):
            load_text(text, "-opts", words)


@pytest.mark.slow
def test_deit_settings_are_equal_with_and_without_2021_base_file():
    layers = {key: TINY[f"MODEL.{key}"] for key in ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO")}
    write(yaml_of({f"MODEL.TRANS.{key}": value for key, value in layers.items()}), "base.yaml")
    rest = {key: value for key, value in TINY.items() if key.removeprefix("MODEL.") not in layers}
    assert load_text(yaml_of({"BASE": "base.yaml"} | rest)).config == load_text(yaml_of(TINY)).config
    write(yaml_of({"MODEL.TYPE": "swin"}), "base.yaml")
    assert load_text(yaml_of({"BASE": "base.yaml"} | TINY)).config == load_text(yaml_of(TINY)).config


def test_missing_settings_in_deit_files_take_deit_defaults():
    loaded = load_text(yaml_of(TINY | {"TRAIN.WARMUP_EPOCHS": "7"}), "-opts", "TRAIN.MIXUP_ALPHA=0.1")
    train = loaded.config.TRAIN
    assert (train.BASE_LR, train.WARMUP_START_LR, train.END_LR, train.LINEAR_SCALED_LR) == (5e-4, 1e-6, 0, 512)
    assert (train.MODEL_EMA, train.MODEL_EMA_DECAY, train.COLOR_JITTER) == (True, 0.99996, 0.4)
    assert (train.SMOOTHING, train.WEIGHT_DECAY, train.AUTO_AUGMENT) == (0.1, 0.05, "rand-m9-n2-mstd0.5-inc1")
    assert (train.CUTMIX_ALPHA, train.RANDOM_ERASE_PROB, train.NUM_EPOCHS) == (1, 0.25, 300)
    assert (train.WARMUP_EPOCHS, train.MIXUP_ALPHA) == (7, 0.1)
    assert loaded.config.MODEL.ATTENTION_DROPOUT == 0.1  # from the file
    assert loaded.config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)
    assert "deit" in loaded.origins["TRAIN.COLOR_JITTER"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "suffix"), [("hard", "_distilled"), ("none", "")])
def test_distillation_selects_the_distilled_deit_model(kind, suffix):
    typed = f"TRAIN.DISTILLATION_TYPE={kind}"
    of_file, of_flags = load_text(yaml_of(TINY | dict([typed.split("=")]))), load_text(yaml_of(TINY), "-opts", typed)
    assert of_file.config.MODEL.NAME == of_flags.config.MODEL.NAME == f"deit_tiny{suffix}_patch16_224"


@pytest.mark.parametrize(("kind", "name"), [("swin", "swin_tiny_patch4_window7_224"), ("GatedMLP", "gMLP-s16-224")])
def test_error_for_another_model_family_names_timm_model(kind, name):
    with refused(ConfigError, "x.yaml", "MODEL.TYPE", name.replace("-", "_").lower(), "docs/from-paddlevit.md"):
        load_text(yaml_of({"MODEL.TYPE": kind, "MODEL.NAME": name, "MODEL.STAGE_DEPTHS": "[2, 2]"}))


def test_docs_example_for_another_model_family_loads():
    page = (ROOT / "docs/from-paddlevit.md").read_text("utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    loaded = load_text(example)
    assert loaded.notes == [] and loaded.config.MODEL.NAME == "swin_tiny_patch4_window7_224"
