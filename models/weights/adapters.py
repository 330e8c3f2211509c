"""Merges the adapters of MODEL.LORA into the weights of the layers that they extend."""

from torch import Tensor

from utils.errors import ConfigError

BASE_LAYER = ".base_layer."  # peft's name for the layer that an adapter extends


def merge_adapters(state: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    """Return the weights with the adapters merged into them. `settings`: the settings of the run that trained them."""
    alpha = settings.get("MODEL.LORA.ALPHA")
    if alpha is None:
        raise ConfigError(
            "the file contains LoRA adapters, but not their settings (MODEL.LORA.ALPHA); use the run's checkpoint"
        )
    plain = {}
    for name, tensor in state.items():
        layer = name.partition(BASE_LAYER)[0]
        down, up = (state.get(f"{layer}.lora_{letter}.default.weight") for letter in "AB")
        if name == f"{layer}{BASE_LAYER}weight" and down is not None and up is not None:
            if (*up.shape[:-1], *down.shape[1:]) != tensor.shape:
                raise ConfigError(f"{layer}: its adapter (LoRA) does not fit the shape of the layer")
            product = up.double() @ down.double()
            tensor = (tensor.double() + alpha / len(down) * product).to(tensor.dtype)
        if ".lora_" not in name:
            plain[name.replace(BASE_LAYER, ".")] = tensor
    return plain
