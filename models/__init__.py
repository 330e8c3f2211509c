"""Builds the model that the settings describe, and says how large it is."""

from torch import nn

from configs.schema import Config, Model
from models.freeze import freeze
from utils.torch_internals import import_timm


def build_model(config: Config, num_classes: int) -> nn.Module:
    """The model with random weights, drawn from torch's seed on torch's default device; MODEL.FREEZE is in force."""
    import_timm()
    if config.MODEL.TYPE == "vit":
        from models.vit import build_vit

        model = build_vit(config, num_classes)
    else:
        from models.timm_models import build_timm

        model = build_timm(config, num_classes)
    freeze(model, config.MODEL.FREEZE)
    return model


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Return the model with the adapters of MODEL.LORA, or as it is if there are none.

    An evaluation adds none: the readers of weights merge saved adapters into the weights (models/weights/state.py).
    """
    if not config.MODEL.LORA.RANK or config.START.EVAL:
        return model
    from extras.lora import add_adapters as add_lora  # extra: lora

    return add_lora(model, config.MODEL.LORA)


def describe(model: nn.Module, trained: Model | None = None) -> str:
    """'86,567,656 parameters, all trainable'; `trained`: its settings, for the rates of a model that is trained."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    rates = ""
    if trained and trained.TYPE == "timm":
        from models.timm_models import describe_own_rates

        rates = describe_own_rates(model, trained)
    return f"{total:,} parameters, {'all' if trainable == total else f'{trainable:,}'} trainable{rates}"
