"""Builds timm's models by name, and refuses settings that these models would ignore."""

import math
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from configs.schema import VIT_FIELDS, Config, Model
from models.kwargs import OF_A_MODEL, check_kwargs, refuse_unknown, refusing_values
from models.vit import check_patches, dynamic_size
from utils.errors import ConfigError, did_you_mean
from utils.torch_internals import import_timm

# With a larger product of weights and pixels, an image takes longer than the shapes alone, although torch imports its
# compiler for shapes. ConvNeXt-B at 512 pixels with one thread: 8.9 and 1.4 seconds.
LARGE = 4e12


def build_timm(config: Config, num_classes: int) -> nn.Module:
    """Return timm's model MODEL.NAME with random weights, without network access."""
    timm, name = import_timm(), config.MODEL.NAME
    # This also refuses hf-hub:... names: timm would access the network for them, even without pretrained weights.
    if not timm.is_model(name):
        raise ConfigError(
            f"MODEL.NAME: timm has no model called {name}{did_you_mean(name, timm.list_models())}; MODEL.TYPE timm "
            "needs the name of a timm model, for example -opts MODEL.NAME=resnet50"
        )
    _refuse_vit_fields(config.MODEL)
    try:
        timm_config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # the architecture exists, but not the tag after the dot
        raise ConfigError(f"MODEL.NAME: {name}: {error}{did_you_mean(name, timm.list_pretrained())}") from None
    check_kwargs(config.MODEL)
    takes_size = timm_config is not None and timm_config.fixed_input_size
    model = _create(config.MODEL, num_classes, _arguments(config, takes_size))
    patch_embed = getattr(model, "patch_embed", None)
    if isinstance(patch_embed, timm.layers.PatchEmbed):
        check_patches(config, patch_embed.patch_size)
    may_fail = config.TRAIN.SIZE_SCHEDULE or config.MODEL.KWARGS or not takes_size
    if may_fail and not next(model.parameters()).is_meta:
        _check_shapes(config, model)
    return model


@torch.no_grad()
def _check_shapes(config: Config, model: nn.Module) -> None:
    """Raise ConfigError for image sizes that the model cannot process, such as sizes that downsampling reduces to 0."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    num_weights = sum(each.numel() for each in tensors.values())
    shapes = {name: torch.empty_like(each, device="meta") for name, each in tensors.items()}
    settings = {shape: "TRAIN.SIZE_SCHEDULE" for shape in config.train_shapes.values()}
    model.eval()
    for shape, setting in (settings | {config.DATA.shape: "DATA.IMAGE_SIZE"}).items():
        image = next(model.parameters()).new_zeros(1, config.DATA.IMAGE_CHANNELS, *shape)
        try:
            if num_weights * math.prod(shape) > LARGE:
                torch.func.functional_call(model, shapes, image.to("meta"))
            else:
                model(image)
        except Exception:  # the model may need real values and not only shapes
            try:
                model(image)
            except Exception as error:
                arguments = ", ".join(f"{name} {value!r}" for name, value in config.MODEL.KWARGS.items())
                raise ConfigError(
                    f"{setting}: {config.MODEL.NAME}{arguments and f' with MODEL.KWARGS {arguments}'} cannot process "
                    f"images of {shape} ({type(error).__name__}: {error}); use larger images, or choose "
                    "another model"
                ) from None
    model.train()


def _create(settings: Model, num_classes: int, arguments: dict[str, Any]) -> nn.Module:
    """Return timm's model with these arguments and MODEL.KWARGS. An argument that it lacks is left out if it is 0."""
    timm, setting_of = import_timm(), OF_A_MODEL | {"dynamic_img_size": "TRAIN.SIZE_SCHEDULE"}
    name, kwargs = settings.NAME, settings.KWARGS
    with refusing_values(settings):
        try:
            return timm.create_model(name, pretrained=False, num_classes=num_classes, **arguments, **kwargs)
        except TypeError as error:
            refused = next((each for each in (*arguments, *kwargs) if f"'{each}'" in str(error)), None)
            if refused == "dynamic_img_size" and refused in arguments:
                raise ConfigError(
                    f"TRAIN.SIZE_SCHEDULE: {name} accepts images of one size only; remove the schedule, or choose a "
                    "ViT or a convolutional network"
                ) from None
            if refused in arguments and arguments[refused] == 0:  # a model without this argument has a rate of 0 anyway
                rest = {argument: value for argument, value in arguments.items() if argument != refused}
                return _create(settings, num_classes, rest)
            if refused in arguments:
                raise ConfigError(f"{setting_of[refused]}: {name} does not support this setting; set it to 0") from None
            if refused and "unexpected" in str(error):
                refuse_unknown(settings, refused, type(timm.create_model(name)))
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            if settings.KWARGS:
                raise
            values = ", ".join(f"{setting_of[argument]} {value}" for argument, value in arguments.items())
            values, why = values or "these settings", str(error)
            raise ConfigError(
                f"MODEL.NAME: timm cannot build {name} with {values} ({type(error).__name__}{why and f': {why}'}); use "
                "other values, or choose another model"
            ) from None


def _arguments(config: Config, takes_size: bool) -> dict[str, Any]:
    """Return timm's arguments for MODEL.DROPOUT, MODEL.DROPPATH and other settings that differ from its defaults."""
    data, model = config.DATA, config.MODEL
    # For these models drop_rate is timm's dropout before the classifier.
    rates = {"drop_rate": model.DROPOUT, "attn_drop_rate": model.ATTENTION_DROPOUT, "drop_path_rate": model.DROPPATH}
    arguments = {name: rate for name, rate in rates.items() if rate is not None}
    arguments |= {"in_chans": data.IMAGE_CHANNELS} if data.IMAGE_CHANNELS != 3 else {}
    # A convolutional network accepts images of any size. A ViT or Swin is built for one size.
    arguments |= {"img_size": data.shape} if takes_size else {}
    return arguments | ({"dynamic_img_size": True} if takes_size and dynamic_size(config) else {})


def _refuse_vit_fields(model: Model) -> None:
    for field in fields(model):
        value = getattr(model, field.name)
        if field.name in VIT_FIELDS and value != field.default:
            raise ConfigError(
                f"MODEL.{field.name}: {value} has no effect with MODEL.TYPE timm, where MODEL.NAME ({model.NAME}) "
                "defines the architecture; remove it"
            )
