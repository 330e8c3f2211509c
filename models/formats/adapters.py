"""Plain weights of a model with low-rank adapters: their products are added to the weights that they lie beside."""

from torch import Tensor

from utils.errors import ConfigError

BASE = ".base_layer."  # where peft keeps the layer beside an adapter


def merged(state: dict[str, Tensor], settings: dict) -> dict[str, Tensor]:
    """The weights under timm's names, as they are if there are no adapters. `settings`: those of their run."""
    if not any(BASE in name for name in state):
        return state
    alpha = settings.get("MODEL.LORA.ALPHA")
    if alpha is None:
        raise ConfigError("its adapters (LoRA) are without the settings of their run; use the run's checkpoint")
    plain = {}
    for name, tensor in state.items():
        layer = name.partition(BASE)[0]
        down, up = (state.get(f"{layer}.lora_{letter}.default.weight") for letter in "AB")
        if name == f"{layer}{BASE}weight" and down is not None and up is not None:
            product = up.double() @ down.double()
            tensor = (tensor.double() + alpha / len(down) * product).to(tensor.dtype)
        if ".lora_" not in name:
            plain[name.replace(BASE, ".")] = tensor
    return plain
