"""Each recipe against its published script: rates, parameter groups, augmentation and loss.

The numbers here come from the sources that the recipes cite, not from the recipes.
"""

import math
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.scheduler import CosineLRScheduler
from torch.testing import assert_close

from configs.load import load
from datasets import Mixed
from engine.train.loss import build_loss
from engine.train.optimizers import build_optimizer, parameter_groups
from engine.train.schedule import Schedule
from models import build_model
from tests.support.configs import meta_device
from tests.support.runs import ROOT

# From README_deit.md, README_revenge.md and main.py of DeiT: the number of GPUs, and the script's arguments and
# defaults.
DEFAULTS = {"batch": 256, "size": 224, "epochs": 300, "decay": 0.05, "drop_path": 0.1, "repeats": 3, "reprob": 0.25}
DEFAULTS |= {"smoothing": 0.1, "aa": "rand-m9-mstd0.5-inc1", "color_jitter": 0.3, "crop_pct": 0.875}
DEIT3 = {"gpus": 8, "epochs": 800, "reprob": 0.0, "smoothing": 0.0, "aa": "3a", "crop_pct": 1.0}
FINETUNE = {"gpus": 8, "batch": 64, "epochs": 20, "decay": 0.1, "drop_path": 0.2, "repeats": 1, "reprob": 0.0}
# lr: for the whole batch, so 5e-4 x batch / 512 without --unscale-lr.
SCRIPTS = {
    "deit_tiny_patch16_224": {"gpus": 4, "lr": 5e-4 * 1024 / 512},
    "deit_small_patch16_224": {"gpus": 4, "lr": 5e-4 * 1024 / 512},
    "deit_base_patch16_224": {"gpus": 16, "batch": 64, "lr": 5e-4 * 1024 / 512},
    "deit3_small_patch16_224": DEIT3 | {"lr": 4e-3, "drop_path": 0.05},
    "deit3_base_patch16_192": DEIT3 | {"lr": 3e-3, "drop_path": 0.2, "size": 192},
    "deit3_base_patch16_224_finetune": FINETUNE | {"lr": 1e-5, "crop_pct": 1.0},
}
DEIT = {name: SimpleNamespace(**(DEFAULTS | given)) for name, given in SCRIPTS.items()}
IMAGENET, CIFAR = 1_281_167, 50_000
# Updates, warm-up updates, rate, images and global batch of configs/vit_s16_i1k.py, vit.py, augreg.py and common.py.
# The updates are for whole epochs of all images. The comment at the top of each recipe explains the difference.
COSINES = {
    "vit_small_patch16_224_90ep": (112_590, 10_000, 1e-3, IMAGENET, 1024),
    "vit_base_patch16_384_cifar10": (9_991, 500, 0.01, CIFAR, 512),
    "vit_base_patch16_384_cifar100": (9_991, 500, 0.03, CIFAR, 512),
    "vit_base_patch16_384_flowers102": (500, 100, 0.03, 1_020, 512),
    "vit_base_patch16_384_caltech101": (495, 100, 0.03, 7_809, 512),
}


def recipe(name):
    return load(["-cfg", str(ROOT / "configs" / "recipes" / f"{name}.yaml")]).config


def test_every_recipe_is_compared_with_its_source():
    assert {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")} == {*DEIT, *COSINES}


@pytest.mark.parametrize("name", DEIT)
def test_deit_learning_rates_match_timm_scheduler(name):
    script = DEIT[name]
    batch = script.gpus * script.batch
    assert recipe(name).DATA.BATCH_SIZE == script.batch
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=script.lr)
    published = CosineLRScheduler(optimizer, t_initial=script.epochs, lr_min=1e-5, warmup_lr_init=1e-6, warmup_t=5)
    steps = IMAGENET // batch
    ours = Schedule(recipe(name).TRAIN, steps, batch)
    for epoch in (0, 1, 4, 5, 6, script.epochs // 2, script.epochs - 1):
        published.step(epoch)
        for step in (epoch * steps, (epoch + 1) * steps - 1):
            assert ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
    assert recipe(name).TRAIN.NUM_EPOCHS == script.epochs


@pytest.mark.parametrize("name", COSINES)
def test_google_recipe_learning_rates_match_their_formula(name):
    updates, warmup, rate, images, batch = COSINES[name]
    config = recipe(name)
    in_epoch = images / batch if not config.DATA.DROP_LAST else images // batch
    steps = math.ceil(in_epoch)
    assert config.TRAIN.NUM_EPOCHS * steps == updates
    ours = Schedule(config.TRAIN, steps, batch)
    for step in (0, 1, warmup // 2, warmup - 1, warmup, warmup + 1, (warmup + updates) // 2, updates - 1):
        progress = min(max((step - warmup) / (updates - warmup), 0.0), 1.0)
        published = rate * 0.5 * (1 + math.cos(math.pi * progress)) * min(1.0, step / warmup)
        assert ours(step) == pytest.approx(published, rel=1e-4, abs=1e-5 * rate)


def test_deit_3_recipe_configures_lamb_as_in_apex():
    config = recipe("deit3_base_patch16_192")
    optimizer = build_optimizer(config.TRAIN, torch.nn.Linear(2, 2))
    assert config.TRAIN.OPTIMIZER.NAME == "lamb"
    for group in optimizer.param_groups:  # like apex's FusedLAMB with main.py's --opt-eps
        assert (group["eps"], group["betas"], group["max_grad_norm"]) == (1e-8, (0.9, 0.999), 1.0)
    assert recipe("deit3_base_patch16_224_finetune").TRAIN.OPTIMIZER.NAME == "AdamW"


def test_plain_vit_recipe_decays_only_the_kernels_decayed_by_big_vision():
    """Its wd_mults name only kernels: those of the patch embedding, of attention and MLP, and of the classifier."""
    config = recipe("vit_small_patch16_224_90ep")
    with meta_device():
        model = build_model(config, 1000)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, kept = parameter_groups(config.TRAIN, model, dict(model.named_parameters()))
    kernels = {name for name, parameter in model.named_parameters() if name.endswith("weight") and parameter.ndim > 1}
    assert {names[id(each)] for each in decayed["params"]} == kernels
    assert "pos_embed" not in {names[id(each)] for each in kept["params"]}  # not trained
    assert not model.num_prefix_tokens and model.global_pool == "avg"  # no class token


@pytest.mark.parametrize("name", DEIT)
def test_deit_augmentation_matches_timm_transform(name):
    config, script = recipe(name), DEIT[name]
    given = {"color_jitter": script.color_jitter, "auto_augment": script.aa, "re_prob": 0.25, "re_mode": "pixel"}
    train = create_transform(script.size, is_training=True, interpolation="bicubic", **given).transforms
    crop, erasing = train[0], train[-1]
    data, settings = config.DATA, config.TRAIN
    assert (data.CROP_SCALE, data.CROP_RATIO) == (tuple(crop.scale), tuple(crop.ratio))
    assert (data.IMAGE_SIZE, data.train_interpolation, data.TRAIN_CROP) == (script.size, "bicubic", "rrc")
    assert data.HFLIP == train[1].p
    assert settings.AUTO_AUGMENT == script.aa
    jitters = [each for each in train if type(each).__name__ == "ColorJitter"]  # none if RandAugment is used
    assert settings.COLOR_JITTER == (script.color_jitter if jitters else 0)
    assert (settings.RANDOM_ERASE_PROB, settings.RANDOM_ERASE_MODE) == (script.reprob, "pixel")
    assert settings.RANDOM_ERASE_COUNT == erasing.max_count
    mixing = (settings.MIXUP_ALPHA, settings.CUTMIX_ALPHA, settings.MIXUP_PROB, settings.MIXUP_SWITCH_PROB)
    assert mixing == (0.8, 1, 1, 0.5) and (settings.MIXUP_MODE, settings.MIXUP_GROUP) == ("batch", script.batch)
    assert (settings.REPEATED_AUG, config.MODEL.DROPPATH) == (script.repeats, script.drop_path)
    assert settings.GRAD_CLIP is None
    assert (settings.MODEL_EMA, settings.MODEL_EMA_DECAY, settings.MODEL_EMA_WARMUP) == (True, 0.99996, False)
    model_config = timm.get_pretrained_cfg(config.MODEL.NAME)
    assert (data.IMAGENET_MEAN, data.IMAGENET_STD) == (tuple(model_config.mean), tuple(model_config.std))
    assert (data.CROP_PCT, settings.WEIGHT_DECAY) == (script.crop_pct, script.decay)
    assert settings.SMOOTHING == script.smoothing


def test_plain_vit_augmentation_matches_big_vision():
    config = recipe("vit_small_patch16_224_90ep")
    data, train = config.DATA, config.TRAIN
    assert (data.CROP_SCALE, data.train_interpolation, data.CROP_PCT) == ((0.05, 1.0), "bilinear", 224 / 256)
    assert (train.AUTO_AUGMENT, train.MIXUP_ALPHA, train.CUTMIX_ALPHA) == ("rand-m10-n2-p1", 0.2, 0)
    assert train.MIXUP_GROUP is None
    assert (train.GRAD_CLIP, train.SMOOTHING, train.RANDOM_ERASE_PROB, train.MODEL_EMA) == (1.0, 0, 0, False)
    assert train.WEIGHT_DECAY == pytest.approx(1e-4 / 1e-3)  # torch's AdamW multiplies the decay by the rate


@pytest.mark.parametrize("name", [name for name in COSINES if "384" in name])
def test_fine_tuning_recipes_match_the_jax_code(name):
    config = recipe(name)
    data, train = config.DATA, config.TRAIN
    assert data.BATCH_SIZE * train.ACCUM_ITER == 512
    assert (train.OPTIMIZER.NAME, train.OPTIMIZER.MOMENTUM, train.WEIGHT_DECAY, train.GRAD_CLIP) == ("SGD", 0.9, 0, 1)
    assert (data.IMAGE_SIZE, data.CROP_SCALE, data.CROP_MODE, data.CROP_PCT) == (384, (0.05, 1.0), "squash", 1.0)
    assert not (train.augments or train.mixes or train.SMOOTHING or config.MODEL.DROPOUT)


def published_deit3(logits, soft):
    """From DeiT's engine.py: with --bce-loss, each class with a share counts fully."""
    return torch.nn.BCEWithLogitsLoss()(logits, soft.gt(0.0).type(soft.dtype))


LOSSES = {
    "deit_tiny_patch16_224": (0.1, SoftTargetCrossEntropy()),
    "deit3_small_patch16_224": (0.0, published_deit3),
    "vit_small_patch16_224_90ep": (0.0, SoftTargetCrossEntropy()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_recipe_loss_matches_publication_for_mixed_targets(name):
    smoothing, published = LOSSES[name]
    config = recipe(name)
    logits, targets = torch.linspace(-2, 3, 80, dtype=torch.float64).view(8, 10), torch.arange(8)
    mixup = Mixup(config.TRAIN.MIXUP_ALPHA, label_smoothing=smoothing, num_classes=10)
    _, soft = mixup(torch.zeros(8, 3, 2, 2), targets)
    low = soft.min()  # the share that smoothing gives to every class
    share = (soft[0, targets[0]] - low) / (1 - 10 * low)
    ours = build_loss(config)(logits, Mixed(targets, targets.flip(0), share.repeat(8)))
    assert_close(ours, published(logits, soft.double()), atol=1e-6, rtol=1e-6)
