"""Models: building them from settings, adapters, and a description of their size."""

from torch import nn

from configs.schema import Config
from models.parts import freeze, freeze_statistics
from utils.torch_internals import import_timm


def build_model(config: Config, num_classes: int) -> nn.Module:
    """Return the model with random weights from torch's seed, on torch's default device, with MODEL.FREEZE applied."""
    import_timm()
    if config.MODEL.TYPE == "vit":
        from models.vit import build_vit

        model = build_vit(config, num_classes)
    else:
        from models.timm_models import build_timm

        model = build_timm(config, num_classes)
    freeze(model, config.MODEL.FREEZE)
    if config.MODEL.PRETRAINED and config.MODEL.FROZEN_STATISTICS:
        freeze_statistics(model)
    return model


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Return the model with the adapters of MODEL.LORA, or unchanged if there are none.

    An evaluation adds none, because the readers of weights merge saved adapters (models/weights/state.py).
    """
    if not config.MODEL.LORA.RANK or config.EVAL:
        return model
    from models.lora import add_adapters as add_lora

    return add_lora(model, config.MODEL.LORA)


def describe_size(model: nn.Module) -> str:
    """Return the model's size as text, such as '86,567,656 parameters, all trainable'."""
    total = sum(parameter.numel() for parameter in model.parameters())
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return f"{total:,} parameters, {'all' if trainable == total else f'{trainable:,}'} trainable"
