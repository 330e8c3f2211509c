"""MODEL.LORA: low-rank adapters (peft). Each adapter adds a trained product of two small matrices to a frozen layer."""

from torch import nn

from configs.schema import Lora
from models.parts import classifier_names, covers, freeze
from utils.errors import ConfigError, needing
from utils.text import first_of

ALL_LINEAR = "all-linear"


def add_adapters(model: nn.Module, settings: Lora) -> nn.Module:
    """Add adapters of rank MODEL.LORA.RANK, scaled by MODEL.LORA.ALPHA / RANK, and return the model.

    They output zero at first. Only adapters and the classifier are trained.
    """
    layers = _layers(model, settings)
    for name, layer in layers.items():
        narrow = min(layer.weight.shape)
        if settings.RANK > narrow:
            raise ConfigError(
                f"MODEL.LORA.RANK: {settings.RANK} is more than {narrow}, the smaller side of {name} "
                f"({layer.in_features} x {layer.out_features}); choose a much lower rank, because otherwise an "
                "adapter saves no weights"
            )
    with needing("peft", f"MODEL.LORA.RANK is {settings.RANK}, which"):
        from peft import LoraConfig, inject_adapter_in_model  # local: importing peft takes seconds

    freeze(model, ("*", "!classifier"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters = LoraConfig(r=settings.RANK, lora_alpha=settings.ALPHA, target_modules=list(layers))
    inject_adapter_in_model(adapters, model)
    for parameter in trained:  # peft freezes everything except its adapters
        parameter.requires_grad_(True)
    for module in model.modules():  # peft would cast half inputs to float32, and autocast would cast them back
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return model


def _layers(model: nn.Module, settings: Lora) -> dict[str, nn.Linear]:
    """Return {name: layer} for the layers in MODEL.LORA.TARGETS, without the classifier, which is trained in full."""
    heads = tuple(classifier_names(model))
    linear = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not any(covers(head, name) for head in heads)
    }
    names = {
        pattern: [name for name in linear if pattern == ALL_LINEAR or covers(pattern, name)]
        for pattern in settings.TARGETS
    }
    unmatched = [pattern for pattern, found in names.items() if not found]
    # The default patterns name the layers of several architectures.
    if len(unmatched) == len(names) or (unmatched and settings.TARGETS != Lora.TARGETS):
        remedy = f"choose from {first_of(list(linear), limit=3)}, or use {ALL_LINEAR}" if linear else "it has no others"
        raise ConfigError(
            f"MODEL.LORA.TARGETS: {', '.join(unmatched)} matches no linear layer of this model except its classifier; "
            f"{remedy}"
        )
    return {name: linear[name] for found in names.values() for name in found}
