"""PaddleViT's other families: their files give timm's models, and are refused where they describe another one."""

import json
import re

import pytest
import timm

from configs.load import load, to_yaml
from models import build_model
from tests.support.configs import load_text, meta_device, write
from tests.support.modules import ROOT
from tests.support.refusals import assert_names, refused
from utils.errors import ConfigError

pytestmark = pytest.mark.usefixtures("here")

# What each file sets of model and images, by family and name.
FILES: dict[str, dict[str, str | list]] = json.loads((ROOT / "tests/data/paddlevit_families.json").read_text())
REFUSED = dict(
    re.findall(r"^\| (\w+/\S+\.yaml) \| (.*) \|$", (ROOT / "docs/from-paddlevit.md").read_text("utf-8"), re.M)
)
# Small ones that together have almost every field.
SMALL = """CoaT/coat_lite_tiny ConvMixer/convmixer_768_32 DeiT/deit_tiny_patch16_224 MobileOne/mobileone_s1
MobileViT/mobilevit_xxs PoolFormer/poolformer_s12 ResMLP/resmlp_12_224 SwinTransformer/swin_tiny_patch4_window7_224
VOLO/volo_d1_224""".split()
SWIN = FILES["SwinTransformer/swin_tiny_patch4_window7_224.yaml"]


def as_yaml(settings: dict[str, str | list]) -> list[str]:
    """The lines of a settings file with these values by full key."""
    lines: list[str] = []
    opened: list[str] = []
    for key, value in sorted(settings.items(), key=lambda item: (item[0].rpartition(".")[0], item[0])):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != opened[: depth + 1]:
                lines.append(f"{'    ' * depth}{section}:")
        opened = sections
        lines.append(f"{'    ' * len(sections)}{name}: {json.dumps(value) if isinstance(value, list) else value}")
    return lines


def text_of(facts):
    return "\n".join(as_yaml(facts))


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.partition("/")[2])
def test_file_of_each_family_gives_timms_model(file):
    config = load_text(text_of(FILES[f"{file}.yaml"])).config
    with meta_device():
        ours, theirs = build_model(config, 1000), timm.create_model(FILES[f"{file}.yaml"]["MODEL.NAME"])
    assert [each.shape for each in ours.parameters()] == [each.shape for each in theirs.parameters()]


def test_files_that_contradict_themselves_are_refused_with_the_reason_in_the_docs():
    assert len(REFUSED) == 8 and REFUSED.keys() <= FILES.keys() and len(FILES) == 106
    for file, reason in REFUSED.items():
        with refused(ConfigError, reason):
            load_text(text_of(FILES[file]))


OTHER_VALUES = [
    ("SwinTransformer/swin_tiny_patch4_window7_224", "MODEL.STAGE_DEPTHS", [2, 2, 18, 2]),
    ("CoaT/coat_lite_tiny", "MODEL.PARALLEL_DEPTH", 6),
    ("ConvMixer/convmixer_768_32", "MODEL.CNN.ACTIVATION", "GELU"),
    ("MobileViT/mobilevit_xxs", "MODEL.HIDDEN_DIMS", [64, 80]),
]


@pytest.mark.parametrize(("file", "key", "value"), OTHER_VALUES)
def test_field_that_differs_from_timms_model_is_refused_with_its_key(file, key, value):
    facts = FILES[f"{file}.yaml"]
    assert facts[key] != value
    with refused(ConfigError, "x.yaml", key, facts["MODEL.NAME"]):
        load_text(text_of(facts | {key: str(value)}))


def test_wrong_name_in_a_file_is_refused_with_the_model_of_the_files_own_name(tmp_path):
    path = tmp_path / "convnext_large.yaml"
    path.write_text(text_of(FILES["ConvNeXt/convnext_large.yaml"]))
    with refused(ConfigError, "MODEL.DEPTHS", "convnext_tiny", "MODEL.NAME: convnext_large"):
        load(["-cfg", str(path)])
    config = load(["-cfg", str(path), "-opts", "MODEL.NAME=convnext_large"]).config
    assert (config.MODEL.TYPE, config.MODEL.NAME) == ("timm", "convnext_large")


@pytest.mark.parametrize("words", ["MODEL.NAME=swin_tiny_patch4_window7", "MODEL.TYPE=vit"])
def test_command_line_cannot_make_another_kind_of_model_of_a_familys_file(words):
    with refused(ConfigError, words.partition("=")[0], "x.yaml"):
        load_text(text_of(SWIN), "-opts", words)


def test_field_that_the_model_does_not_show_is_named():
    loaded = load_text(text_of(FILES["CaiT/cait_xxs24_224.yaml"]))
    assert_names(loaded.notes[0], "cait_xxs24_224", "11,956,264", "INIT_VALUES")


def test_dialect_of_2021_and_a_base_file_describe_the_same_model():
    layers = {key: value for key, value in SWIN.items() if key.split(".")[1] not in ("TYPE", "NAME", "DROPPATH")}
    old = {key.replace("MODEL.", "MODEL.TRANS."): value for key, value in layers.items()}
    write(text_of(old), "base.yaml")
    rest = {key: value for key, value in SWIN.items() if key not in layers}
    assert load_text(f"BASE: base.yaml\n{text_of(rest)}").config == load_text(text_of(SWIN)).config


def test_what_the_file_leaves_out_is_the_familys_default_and_not_ours():
    loaded = load_text(text_of(SWIN) + "\nTRAIN: {WARMUP_EPOCHS: 7}", "-opts", "TRAIN.MIXUP_ALPHA=0.1")
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
    facts = FILES["DeiT/deit_tiny_patch16_224.yaml"] | {"TRAIN.DISTILLATION_TYPE": kind}
    config = load_text(text_of(facts)).config
    assert config.MODEL.NAME == f"deit_tiny{suffix}_patch16_224"


def test_saved_settings_of_a_family_give_the_same_run():
    loaded = load_text(text_of(SWIN))
    assert load_text(to_yaml(loaded.config, loaded.origins)).config == loaded.config
