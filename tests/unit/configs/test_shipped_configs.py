"""Every YAML file in configs/ passes through the real command line and gives the model in its name."""

import itertools
import re
import shlex
from unittest import mock

import pytest
import timm
import torch
from timm.models import VisionTransformer

from configs.load import load, to_yaml
from configs.values import flatten
from models import build_model
from tests.support.configs import load_text, meta_device
from tests.support.runs import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RECIPES = sorted((ROOT / "configs").glob("*/*.yaml"))
MODELS = [pytest.param(path, id=path.stem) for path in CONFIGS]


@pytest.mark.parametrize("path", [*MODELS, *RECIPES], ids=lambda path: path.stem)
def test_shipped_file_documents_results_and_command_and_reloads_unchanged_after_saving(path, here):
    """test_recipes.py compares recipes with their sources."""
    opening = "".join(itertools.takewhile(lambda line: line.startswith("#"), path.open(encoding="utf-8")))
    assert "Expected accuracy: " in opening and "Time: " in opening
    assert path in CONFIGS or "# Source: https://" in opening
    words = shlex.split(re.search(r"halfstep train (.*)", opening.replace("\\\n#", " ")).group(1))
    name = words.index("-cfg") + 1
    assert words[name] == str(path.relative_to(ROOT))
    loaded = load(["-cfg", str(path), *words[name + 1 :]])
    assert load_text(to_yaml(loaded.config, loaded.origins)).config == loaded.config
    assert loaded.notes == []


@pytest.mark.long
@pytest.mark.parametrize("path", MODELS)
def test_shipped_file_builds_the_timm_model_of_its_name(path):
    """The step runs on the meta device, where it computes nothing, so the weights need no values."""
    config = load(["-cfg", str(path)]).config
    with mock.patch.object(VisionTransformer, "init_weights"), meta_device():
        model = build_model(config, 1000)
        images = torch.empty(2, config.DATA.IMAGE_CHANNELS, config.DATA.IMAGE_SIZE, config.DATA.IMAGE_SIZE)
        logits = model(images)
        theirs = timm.create_model(path.stem, num_classes=1000) if timm.is_model(path.stem) else None
    assert logits.shape == (2, config.MODEL.NUM_CLASSES or 1000)
    if theirs:
        found, expected = ({name: each.shape for name, each in m.state_dict().items()} for m in (model, theirs))
        assert type(model) is type(theirs) and found == expected


def test_all_15_paddlevit_configs_keep_their_values():
    widths = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
    names = {f"vit_{size}_patch{patch}_{image}" for size in widths for patch in (16, 32) for image in (224, 384)}
    names = names - {"vit_tiny_patch32_224", "vit_tiny_patch32_384"} | {"vit_huge_patch14_224"}
    widths["huge"] = (1280, 32, 16)
    ours = {"vit_digits", "vit_cifar10", "vit_caltech101", "resnet50_caltech256", "timm", "linear_probe", "lora"}
    ours |= {
        "finetune",
        "finetune_batchnorm",
        "finetune_numbers",
        "finetune_numbers_batchnorm",
    }
    assert len(names) == 15 and {path.stem for path in CONFIGS} == names | ours
    model = {"TYPE": "vit", "MLP_RATIO": 4.0, "QKV_BIAS": True, "DROPOUT": 0.1, "ATTENTION_DROPOUT": 0.1}
    train = {"NUM_EPOCHS": 300, "WARMUP_EPOCHS": 32, "WEIGHT_DECAY": 0.3, "BASE_LR": 3e-3, "WARMUP_START_LR": 1e-6}
    train |= {"END_LR": 0.0, "GRAD_CLIP": 1.0, "ACCUM_ITER": 1}
    train |= {"OPTIMIZER.NAME": "AdamW", "OPTIMIZER.BETAS": [0.9, 0.999]}
    for name in names:
        size, patch, image = re.fullmatch(r"vit_(\w+)_patch(\d+)_(\d+)", name).groups()
        own = dict(zip(("EMBED_DIM", "DEPTH", "NUM_HEADS"), widths[size], strict=True))
        sections = {
            "DATA": {"IMAGE_SIZE": int(image), "CROP_PCT": {"224": 0.875, "384": 1.0}[image]},
            "MODEL": model | own | {"NAME": name, "PATCH_SIZE": int(patch)},
            "TRAIN": train,
        }
        expected = {f"{section}.{key}": value for section, each in sections.items() for key, value in each.items()}
        values = flatten(load(["-cfg", str(ROOT / "configs" / f"{name}.yaml")]).config)
        assert {key: values[key] for key in expected} == expected
