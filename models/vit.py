"""Builds a ViT from our settings with timm's VisionTransformer, so that weights have timm's names and shapes."""

import contextlib
import inspect
from typing import Any

from torch import nn

from configs.schema import VIT_FIELDS, Config, Model, Shape
from utils.errors import ConfigError


def build_vit(config: Config, num_classes: int) -> nn.Module:
    """Return timm's VisionTransformer with these settings. LayerNorm eps (1e-6) and exact GELU are as in PaddleViT."""
    # timm is imported after these checks, because the import takes seconds and an error should be reported at once.
    data, model = config.DATA, config.MODEL
    check_patches(config, (model.PATCH_SIZE, model.PATCH_SIZE))
    refusing = contextlib.nullcontext()
    if model.KWARGS:
        from models.kwargs import check_kwargs, refuse_unknown, refusing_values

        check_kwargs(model)
        refusing = refusing_values(model)
    from timm.models.vision_transformer import VisionTransformer

    for name in model.KWARGS.keys() - inspect.signature(VisionTransformer).parameters.keys():
        refuse_unknown(model, name, VisionTransformer)
    with refusing:
        built = VisionTransformer(
            img_size=data.shape,
            in_chans=data.IMAGE_CHANNELS,
            num_classes=num_classes,
            **architecture_of(model),
            # drop_rate is not used: timm would add dropout before the classifier, which PaddleViT does not have.
            pos_drop_rate=model.DROPOUT or 0.0,
            proj_drop_rate=model.DROPOUT or 0.0,
            attn_drop_rate=model.ATTENTION_DROPOUT or 0.0,
            drop_path_rate=model.DROPPATH or 0.0,
            **dynamic_size(config),
            **model.KWARGS,
        )
    if model.POS_EMBED != "learn":
        from models.positions import fix_positions

        fix_positions(model, built)
    return built


def architecture_of(model: Model) -> dict[str, Any]:
    """Return timm's arguments for MODEL.EMBED_DIM, MODEL.NUM_HEADS, MODEL.QKV_BIAS and other names in VIT_FIELDS."""
    pos_embed = "learn" if model.POS_EMBED == "sincos2d" else model.POS_EMBED  # build_vit fixes them
    return {name.lower(): getattr(model, name) for name in VIT_FIELDS} | {"pos_embed": pos_embed}


def check_patches(config: Config, patch_size: tuple[int, int]) -> None:
    """Raise ConfigError if patches do not fill the image, because timm would silently cut off two of its edges."""
    shapes, patch = [("DATA.IMAGE_SIZE", config.DATA.shape)], Shape(*patch_size)
    for setting, shape in [*shapes, *(("TRAIN.SIZE_SCHEDULE", each) for each in config.train_shapes.values())]:
        near = Shape(*(max(1, round(side / step)) * step for side, step in zip(shape, patch, strict=True)))
        if near != shape:
            raise ConfigError(
                f"{setting}: {shape.size} is not a multiple of the patch size {patch.size}; the nearest is {near.size}"
            )


def dynamic_size(config: Config) -> dict[str, bool]:
    """Return the argument that lets a ViT accept images of any size by resizing its position embedding, else {}."""
    is_dynamic = config.MODEL.KWARGS.get("dynamic_img_size")
    if config.TRAIN.SIZE_SCHEDULE and is_dynamic is False:
        raise ConfigError(
            "MODEL.KWARGS.dynamic_img_size is False, but TRAIN.SIZE_SCHEDULE needs True; remove one of the two"
        )
    return {"dynamic_img_size": True} if config.TRAIN.SIZE_SCHEDULE and is_dynamic is None else {}
