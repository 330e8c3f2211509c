"""PaddleViT's other families: their files give timm's models, and are refused where they describe another one."""

import json
import re

import pytest

from configs.load import to_yaml
from tests.support.configs import load_text, write, yaml_of
from tests.support.modules import ROOT
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")

# What each file sets of model and images, by family and name.
FILES: dict[str, dict[str, str | list]] = json.loads((ROOT / "tests/data/paddlevit_families.json").read_text())
REFUSED = dict(
    re.findall(r"^\| (\w+/\S+\.yaml) \| (.*) \|$", (ROOT / "docs/from-paddlevit.md").read_text("utf-8"), re.M)
)
# {small files that together have almost every field: millions of parameters of timm's model}
SMALL = {
    "CaiT/cait_xxs24_224": 11.96,
    "CoaT/coat_lite_tiny": 5.72,
    "ConvMixer/convmixer_768_32": 21.11,
    "DeiT/deit_tiny_patch16_224": 5.72,
    "MobileOne/mobileone_s1": 4.83,
    "MobileViT/mobilevit_xxs": 1.27,
    "PoolFormer/poolformer_s12": 11.92,
    "ResMLP/resmlp_12_224": 15.35,
    "SwinTransformer/swin_tiny_patch4_window7_224": 28.29,
    "VOLO/volo_d1_224": 26.63,
}
SWIN = FILES["SwinTransformer/swin_tiny_patch4_window7_224.yaml"]


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.partition("/")[2])
def test_file_of_each_family_gives_timms_model(file):
    facts = FILES[f"{file}.yaml"]
    loaded = load_text(yaml_of(facts))
    assert (loaded.config.MODEL.TYPE, loaded.config.MODEL.NAME) == ("timm", facts["MODEL.NAME"])
    (parameters,) = re.findall(r"([\d,]+) parameters", loaded.notes[0])
    assert int(parameters.replace(",", "")) == pytest.approx(SMALL[file] * 1e6, abs=1e4)
    assert_names(loaded.notes[0], *(["INIT_VALUES"] if "CaiT" in file else []))  # which the model does not show
    assert load_text(to_yaml(loaded.config, loaded.origins)).config == loaded.config


def test_files_that_contradict_themselves_are_refused_with_the_reason_in_the_docs():
    assert len(REFUSED) == 8 and REFUSED.keys() <= FILES.keys() and len(FILES) == 106
    for file, reason in REFUSED.items():
        with refused(ConfigError, reason):
            load_text(yaml_of(FILES[file]))


OTHER_VALUES = [
    ("SwinTransformer/swin_tiny_patch4_window7_224", "MODEL.STAGE_DEPTHS", [2, 2, 18, 2]),
    ("CoaT/coat_lite_tiny", "MODEL.PARALLEL_DEPTH", 6),
    ("CoaT/coat_lite_tiny", "MODEL.PARALLEL_DEPTH", "deep"),
    ("ConvMixer/convmixer_768_32", "MODEL.CNN.ACTIVATION", "GELU"),
    ("MobileViT/mobilevit_xxs", "MODEL.HIDDEN_DIMS", [64, 80]),
]


@pytest.mark.parametrize(("file", "key", "value"), OTHER_VALUES)
def test_field_that_differs_from_timms_model_is_refused_with_its_key(file, key, value):
    facts = FILES[f"{file}.yaml"]
    assert facts[key] != value
    with refused(ConfigError, "x.yaml", key, facts["MODEL.NAME"]):
        load_text(yaml_of(facts | {key: str(value)}))


def test_command_line_can_correct_the_model_of_a_familys_file_and_not_make_another_kind_of_it():
    text = yaml_of(FILES["ConvNeXt/convnext_large.yaml"])
    config = load_text(text, "-opts", "MODEL.NAME=convnext_large").config
    assert (config.MODEL.TYPE, config.MODEL.NAME) == ("timm", "convnext_large")
    for words in ("MODEL.NAME=convnext_larg", "MODEL.TYPE=vit"):
        with refused(ConfigError, words.partition("=")[0], "x.yaml"):
            load_text(text, "-opts", words)


def test_dialect_of_2021_and_a_base_file_describe_the_same_model():
    layers = {key: value for key, value in SWIN.items() if key.split(".")[1] not in ("TYPE", "NAME", "DROPPATH")}
    write(yaml_of({key.replace("MODEL.", "MODEL.TRANS."): value for key, value in layers.items()}), "base.yaml")
    rest = {key: value for key, value in SWIN.items() if key not in layers}
    assert load_text(yaml_of({"BASE": "base.yaml"} | rest)).config == load_text(yaml_of(SWIN)).config
    write(yaml_of({"MODEL.TYPE": "deit"}), "base.yaml")
    assert load_text(yaml_of({"BASE": "base.yaml"} | SWIN)).config == load_text(yaml_of(SWIN)).config


def test_what_the_file_leaves_out_is_the_familys_default_and_not_ours():
    loaded = load_text(yaml_of(SWIN | {"TRAIN.WARMUP_EPOCHS": "7"}), "-opts", "TRAIN.MIXUP_ALPHA=0.1")
    train = loaded.config.TRAIN
    assert (train.BASE_LR, train.WARMUP_START_LR, train.END_LR, train.LINEAR_SCALED_LR) == (5e-4, 5e-7, 5e-6, 512)
    assert (train.GRAD_CLIP, train.AUTO_AUGMENT) == (5, "rand-m9-n2-mstd0.5-inc1")
    assert (train.CUTMIX_ALPHA, train.RANDOM_ERASE_PROB) == (1, 0.25)
    assert (train.WARMUP_EPOCHS, train.MIXUP_ALPHA) == (7, 0.1)
    assert loaded.config.MODEL.DROPPATH == 0.2  # the file's
    assert loaded.config.DATA.IMAGENET_MEAN == (0.485, 0.456, 0.406)
    assert "swin" in loaded.origins["TRAIN.GRAD_CLIP"]


@pytest.mark.parametrize(("kind", "suffix"), [("hard", "_distilled"), ("none", "")])
def test_distillation_means_deits_model_with_two_tokens(kind, suffix):
    facts, typed = FILES["DeiT/deit_tiny_patch16_224.yaml"], f"TRAIN.DISTILLATION_TYPE={kind}"
    of_file, of_flags = load_text(yaml_of(facts | dict([typed.split("=")]))), load_text(yaml_of(facts), "-opts", typed)
    assert of_file.config.MODEL.NAME == of_flags.config.MODEL.NAME == f"deit_tiny{suffix}_patch16_224"
