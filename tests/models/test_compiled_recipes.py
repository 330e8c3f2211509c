"""Every shipped recipe compiles as many graphs as it must in its first epoch, and none later."""

import dataclasses

import pytest
import torch

from configs.load import load
from configs.schema import Config, Train
from models.transforms import choose_transforms
from tests.support.compiling import graphs_of_two_epochs
from tests.support.runs import ROOT
from utils.errors import ConfigError

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# A small size of each kind of model; what decides about graphs stays: dropout, drop path, EMA, accumulation, mixing.
SMALLER = "AMP=true DATA.DATASET=digits DATA.IMAGE_CHANNELS=1 DATA.IMAGENET_MEAN=[0.5] DATA.IMAGENET_STD=[0.5]"
SMALLER += " DATA.BATCH_SIZE=512 DATA.BATCH_SIZE_EVAL=200 DATA.NUM_WORKERS=0 DATA.DROP_LAST=false MODEL.PRETRAINED=None"
OF_KIND = {
    "vit": "DATA.IMAGE_SIZE=8 MODEL.PATCH_SIZE=4 MODEL.EMBED_DIM=16 MODEL.NUM_HEADS=2 MODEL.DEPTH=4",
    "timm": "DATA.IMAGE_SIZE=16 MODEL.NAME=test_resnet",
}
# Two of training: a whole batch and the remainder. One of evaluation, which pads its last batch.
MODEL, MODEL_WITH_EMA = [2, 1, 0, 0], [2, 1, 0, 0, 0, 0]
# The first block drops no path: it is of another kind than the others. The last computes the class token only.
BLOCKS, BLOCKS_THAT_DROP_PATHS = [2, 1, 0, 0], [4, 2, 0, 0]
EXPECTED = {"vit_cifar10": (MODEL, BLOCKS_THAT_DROP_PATHS), "timm": (MODEL_WITH_EMA, None)}
EXPECTED["resnet50_caltech256"] = (MODEL, None)
EXPECTED["finetune"] = (MODEL_WITH_EMA, [*BLOCKS_THAT_DROP_PATHS, 0, 0])
EXPECTED["lora"] = (
    MODEL_WITH_EMA,
    [4, 1, 0, 0, 0, 0],
)  # its last block is like the others: adapters are in all of them


def small(stem: str, scope: str) -> Config:
    kind = load(["-cfg", str(ROOT / "configs" / f"{stem}.yaml")]).config.MODEL.TYPE
    options = [*SMALLER.split(), *OF_KIND[kind].split(), f"COMPILE={scope}"]
    return load(["-cfg", str(ROOT / "configs" / f"{stem}.yaml"), "-opts", *options]).config


def alike(config: Config) -> str:
    """The settings without those that no graph depends on."""
    other = {name: getattr(Train(), name) for name in "OPTIMIZER BASE_LR WARMUP_START_LR END_LR WEIGHT_DECAY".split()}
    other |= {name: getattr(Train(), name) for name in "NUM_EPOCHS WARMUP_EPOCHS LR_SCHEDULER LINEAR_SCALED_LR".split()}
    model = dataclasses.replace(config.MODEL, NAME="")
    return repr((config.COMPILE, model, dataclasses.replace(config.TRAIN, **other)))


@pytest.fixture(scope="module")
def known() -> dict[str, list[int]]:
    return {}


@pytest.mark.parametrize("scope", ["true", "blocks"])
@pytest.mark.parametrize("stem", [path.stem for path in CONFIGS])
def test_a_recipe_compiles_in_its_first_epoch_alone(stem, scope, known, monkeypatch):
    config = small(stem, scope)
    expected = EXPECTED.get(stem, (MODEL, BLOCKS))[scope == "blocks"]
    if expected is None:
        with pytest.raises(ConfigError, match="COMPILE"):
            graphs_of_two_epochs(config, monkeypatch)
        return
    key = alike(config)
    if key not in known:
        known[key] = graphs_of_two_epochs(config, monkeypatch)
    assert known[key] == expected


@pytest.mark.parametrize(
    ("stem", "scope"), [("vit_base_patch16_224", "true"), ("vit_cifar10", "blocks"), ("timm", "true")]
)
def test_with_what_gpus_compute_with_there_are_no_more(stem, scope, monkeypatch):
    def choose(config, device, *others, **options):
        return choose_transforms(config, torch.device("cuda"), *others, **options)

    monkeypatch.setattr("engine.build.choose_transforms", choose)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert (
        graphs_of_two_epochs(small(stem, scope), monkeypatch) == EXPECTED.get(stem, (MODEL, BLOCKS))[scope == "blocks"]
    )
