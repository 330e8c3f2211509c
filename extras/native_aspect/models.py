"""Builds models that take images at their own aspect ratio: timm's NaFlexVit, also from the settings of a plain ViT."""

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

from configs.schema import Arguments, Config, Data, Model
from models.kwargs import check_kwargs
from models.timm_models import build_timm
from models.vit import check_patches, sincos2d
from utils.errors import ConfigError
from utils.torch_internals import import_timm

# The modules of timm whose models can be built as a NaFlexVit (`use_naflex`), and NaFlexVit's own module.
PLAIN, OWN = ("timm.models.vision_transformer", "timm.models.eva"), "timm.models.naflexvit"


def build_native(config: Config, num_classes: int) -> nn.Module:
    """Return the NaFlexVit with these settings and random weights, as timm builds it."""
    from timm.models.naflexvit import NaFlexVit

    settings = config.MODEL
    native = dataclasses.replace(config, MODEL=_of_vit(config) if settings.TYPE == "vit" else _of_timm(config))
    model = build_timm(native, num_classes)
    if not isinstance(model, NaFlexVit):
        raise _refusal(config)
    embeds = model.embeds
    _check_patches(config, embeds)
    if settings.TYPE == "vit":
        # As in a plain ViT. For small patches, timm's own values are several times smaller, which costs accuracy.
        embeds.proj.reset_parameters()
    if settings.TYPE == "vit" and settings.POS_EMBED == "sincos2d":
        rows = sincos2d(embeds.pos_embed_grid_size, settings.EMBED_DIM).to(embeds.pos_embed)
        embeds.pos_embed.data.copy_(rows.view(embeds.pos_embed.shape))
        embeds.pos_embed.requires_grad_(False)
    return model


def _check_patches(config: Config, embeds: nn.Module) -> None:
    """Raise ConfigError if patches do not have the form that the readers write."""
    height, width = embeds.patch_size
    if embeds.is_linear and embeds.channels_last and 1 < height == width:
        return
    settings = config.MODEL
    key = "MODEL.PATCH_SIZE" if settings.TYPE == "vit" else "MODEL.KWARGS" if settings.KWARGS else "MODEL.NAME"
    raise ConfigError(
        f"{key}: the patches of {settings.NAME} have {height} x {width} pixels and a "
        f"{'linear' if embeds.is_linear else 'convolutional'} embedding with channels "
        f"{'last' if embeds.channels_last else 'first'}; DATA.TOKENS needs square patches of at least 2 x 2 pixels, a "
        "linear embedding and channels last; change this, or set DATA.TOKENS=null"
    )


def arguments_of(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments with which timm builds this model."""
    settings = config.MODEL
    native = _of_vit(config) if settings.TYPE == "vit" else _of_timm(config)
    size = {"img_size": config.DATA.IMAGE_SIZE} if "use_naflex" in native.KWARGS else {}
    return native.NAME, {**native.KWARGS, **size}


def _of_timm(config: Config) -> Model:
    """Return the settings that build this timm model as a NaFlexVit."""
    timm, settings = import_timm(), config.MODEL
    where = timm.models.model_entrypoint(settings.NAME).__module__ if timm.is_model(settings.NAME) else OWN
    if where not in (*PLAIN, OWN):
        raise _refusal(config)
    # build_timm tries the image size, which sequences do not use. Padding makes this work with any patch size.
    added = {"use_naflex": True} if where in PLAIN else {"dynamic_img_pad": True}
    check_kwargs(settings)
    return dataclasses.replace(settings, KWARGS=Arguments({**settings.KWARGS, **added}))


def _of_vit(config: Config) -> Model:
    """Return the settings of the timm model that equals this plain ViT."""
    settings = config.MODEL
    check_patches(config, settings.PATCH_SIZE)
    check_kwargs(settings)
    arguments = {
        "use_naflex": True,
        "patch_size": settings.PATCH_SIZE,
        "embed_dim": settings.EMBED_DIM,
        "depth": settings.DEPTH,
        "num_heads": settings.NUM_HEADS,
        "mlp_ratio": settings.MLP_RATIO,
        "qkv_bias": settings.QKV_BIAS,
        "pos_embed": "none" if settings.POS_EMBED == "none" else "learned",
        "pos_drop_rate": settings.DROPOUT or 0.0,
        "proj_drop_rate": settings.DROPOUT or 0.0,
        "fix_init": False,  # as in a plain ViT: no smaller weights in later blocks
    }
    return Model(
        TYPE="timm",
        NAME="vit_base_patch16_224",  # each of its sizes is replaced
        ATTENTION_DROPOUT=settings.ATTENTION_DROPOUT or 0.0,
        DROPPATH=settings.DROPPATH or 0.0,
        KWARGS=Arguments({**arguments, **settings.KWARGS}),
    )


def _refusal(config: Config) -> ConfigError:
    return ConfigError(
        f"MODEL.NAME: {config.MODEL.NAME} cannot take images at their own aspect ratio (DATA.TOKENS is "
        f"{config.DATA.TOKENS}); choose one of timm's naflexvit_*, vit_* or eva02_*, or "
        "set DATA.TOKENS=null"
    )


@functools.lru_cache(8)
def _patch_size(model: Model, data: Data) -> int:
    with torch.device("meta"):
        return build_native(Config(DATA=data, MODEL=model), 1).get_patch_size()[0]


def patch_size_of(config: Config) -> int:
    """Return the side of the model's patches in pixels."""
    data = Data(IMAGE_SIZE=config.DATA.IMAGE_SIZE, IMAGE_CHANNELS=config.DATA.IMAGE_CHANNELS, TOKENS=config.DATA.TOKENS)
    return _patch_size(config.MODEL, data)
