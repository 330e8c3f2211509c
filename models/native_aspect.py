"""Models that take images at their own aspect ratio (DATA.TOKENS): timm's NaFlexVit."""

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import nn

from configs.schema import Config, Data, Model
from models.kwargs import check_kwargs, refuse_unknown
from models.timm_models import build_timm
from models.vit import architecture_of, check_patches, sincos2d
from utils.commands import page
from utils.errors import ConfigError
from utils.torch_internals import import_timm

# The modules of timm whose models can be built as a NaFlexVit (`use_naflex`), and NaFlexVit's own module.
PLAIN, OWN = ("timm.models.vision_transformer", "timm.models.eva"), "timm.models.naflexvit"


def build_native(config: Config, num_classes: int) -> nn.Module:
    """Return timm's NaFlexVit with these settings and random weights."""
    from timm.models.naflexvit import NaFlexVit

    settings, (native, added) = config.MODEL, _of_vit(config) if config.MODEL.TYPE == "vit" else _of_timm(config)
    try:
        model = build_timm(dataclasses.replace(config, MODEL=native), num_classes, added)
    except (ConfigError, TypeError) as error:
        # A few models have parts that NaFlexVit lacks.
        if "NaFlexVit.__init__() got unexpected" in str(error):
            raise _refusal(config) from None
        raise
    if not isinstance(model, NaFlexVit):
        raise _refusal(config)
    embeds = model.embeds
    _check_patches(config, embeds)
    if settings.TYPE == "vit":
        # Draw as in a plain ViT. For small patches, timm's weights are several times smaller, which costs accuracy.
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
        "linear embedding and channels last; change this setting, or set DATA.TOKENS=null"
    )


def arguments_of(config: Config) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments with which timm builds this model."""
    native, added = _of_vit(config) if config.MODEL.TYPE == "vit" else _of_timm(config)
    size = {"img_size": config.DATA.IMAGE_SIZE} if "use_naflex" in added else {}
    return native.NAME, {**native.KWARGS, **added, **size}


def _of_timm(config: Config) -> tuple[Model, dict[str, Any]]:
    """Return the settings and further arguments for building this timm model as a NaFlexVit."""
    from timm.models.naflexvit import NaFlexVitCfg

    timm, settings = import_timm(), config.MODEL
    where = timm.models.model_entrypoint(settings.NAME).__module__ if timm.is_model(settings.NAME) else OWN
    if where not in (*PLAIN, OWN):
        raise _refusal(config)
    check_kwargs(settings)
    if where in PLAIN:
        return settings, {"use_naflex": True}
    fields = {each.name for each in dataclasses.fields(NaFlexVitCfg)}
    for name in settings.KWARGS:
        if name not in fields:
            refuse_unknown(settings, name, NaFlexVitCfg)
    # build_timm tests the model with a square of DATA.IMAGE_SIZE. Padding lets this test pass for any patch size.
    return settings, {"dynamic_img_pad": True}


def _of_vit(config: Config) -> tuple[Model, dict[str, Any]]:
    """Return the settings and further arguments for building a NaFlexVit with the architecture of this plain ViT."""
    settings = config.MODEL
    check_patches(config, settings.PATCH_SIZE)
    check_kwargs(settings)
    arguments = {
        "use_naflex": True,
        **architecture_of(settings),
        "pos_embed": "none" if settings.POS_EMBED == "none" else "learned",
        "pos_drop_rate": settings.DROPOUT or 0.0,
        "proj_drop_rate": settings.DROPOUT or 0.0,
        "fix_init": False,  # as in a plain ViT: no smaller weights in later blocks
    }
    model = Model(
        TYPE="timm",
        NAME="vit_base_patch16_224",  # `arguments` override its sizes
        ATTENTION_DROPOUT=settings.ATTENTION_DROPOUT or 0.0,
        DROPPATH=settings.DROPPATH or 0.0,
        KWARGS=settings.KWARGS,
    )
    return model, {name: value for name, value in arguments.items() if name not in settings.KWARGS}


def _refusal(config: Config) -> ConfigError:
    return ConfigError(
        f"MODEL.NAME: {config.MODEL.NAME} cannot take images at their own aspect ratio (DATA.TOKENS is "
        f"{config.DATA.TOKENS}); choose another model, for example naflexvit_base_patch16_gap or vit_small_patch16_224 "
        f"({page('docs/native-aspect.md')} lists the models), or set DATA.TOKENS=null"
    )


@functools.lru_cache(8)
def _patch_size(model: Model, data: Data) -> int:
    with torch.device("meta"):
        return build_native(Config(DATA=data, MODEL=model), 1).get_patch_size()[0]


def patch_size_of(config: Config) -> int:
    """Return the side of the model's patches in pixels."""
    data = Data(IMAGE_SIZE=config.DATA.IMAGE_SIZE, IMAGE_CHANNELS=config.DATA.IMAGE_CHANNELS, TOKENS=config.DATA.TOKENS)
    return _patch_size(config.MODEL, data)


def largest_square(config: Config) -> int:
    """Return the side of the largest square image within the number of patches, in pixels."""
    return math.isqrt(config.DATA.TOKENS) * patch_size_of(config)


def with_patches_of(data: Data, other: Data) -> Data:
    """Return the settings with the number of patches of other images."""
    return dataclasses.replace(data, TOKENS=other.TOKENS)


# --- descriptions ---


def describe_sequences(config: Config) -> str:
    """Return the log line about the number of patches."""
    patch, data = patch_size_of(config), config.DATA
    text = f"images: own aspect ratio, at most {data.TOKENS:,} patches of {patch} x {patch}"
    if data.TRAIN_TOKENS:
        lengths = ", ".join(f"{each:,}" for each in data.TRAIN_TOKENS)
        text += f" in evaluation; in training, the maximum is drawn for each update from {lengths}"
    return text


CODE_FOR_TIMM = """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:OWNER/NAME
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(
    **data, is_training=False, naflex=True, patch_size={patch}, max_seq_len={tokens}, patchify=True
)
logits = model({{name: each[None] for name, each in transform(prepare(image)).items()}})
"""


def code_for_timm(config: Config) -> str:
    """Return Python code that classifies an image with timm, for the model card of an export."""
    return CODE_FOR_TIMM.format(patch=patch_size_of(config), tokens=config.DATA.TOKENS)
