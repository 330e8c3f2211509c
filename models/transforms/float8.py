"""Linear layers that compute in float8, with torchao (PRECISION.MODE float8)."""

from dataclasses import dataclass

import torch
from torch import nn

from models.parts import classifier_names
from models.transforms.base import ModelTransform
from utils.errors import ConfigError, needing

# Limits of torchao's automatic filter for tensorwise scaling (torchao.float8._auto_filter_for_recipe), from timings on
# H100s: converting the inputs of a smaller layer takes more time than the faster matrix products save. The hardware
# needs multiples of 16.
OUTPUTS, INPUTS, MULTIPLE = 1024, 4096, 16


def check_float8(device: torch.device) -> None:
    """Raise ConfigError if the device has no float8 arithmetic or torchao is not installed."""
    if not has_float8(device):
        raise ConfigError(
            "PRECISION.MODE is float8, which needs a CUDA device of compute capability 8.9 or higher; this one is "
            f"{device.type if device.type != 'cuda' else torch.cuda.get_device_name(device)}; use PRECISION.MODE "
            "autocast"
        )
    with needing("torchao", "PRECISION.MODE is float8, which"):
        import torchao.float8  # noqa: F401


def has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class Float8(ModelTransform):
    """Makes large Linear layers compute in float8. Weights stay float32 parameters with the same names."""

    device: torch.device

    def apply(self, model: nn.Module) -> list[str]:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        # Only this exact class: a layer on an operator list has another class, and computes as the list says.
        chosen = {
            module
            for module in linears
            if type(module) is nn.Linear
            and module.in_features % MULTIPLE == module.out_features % MULTIPLE == 0
            and (module.out_features > OUTPUTS or module.in_features > INPUTS)
        } - _with_few_rows(model)
        if not chosen:
            raise ConfigError(
                f"PRECISION.MODE is float8, but the model is too small: none of its {len(linears)} Linear layers has "
                f"more than {OUTPUTS} outputs or {INPUTS} inputs, both multiples of {MULTIPLE} (layers on operator "
                "lists, and layers that see only one token of an image, do not count); use PRECISION.MODE autocast"
            )
        # Devices without float8 emulate it; only tests use them. Padding is on, because a weight's gradient is
        # a sum over the rows of the batch, and the number of rows is rarely a multiple of 16.
        config = Float8LinearConfig(emulate=not has_float8(self.device), pad_inner_dim=True)
        convert_to_float8_training(model, module_filter_fn=lambda module, name: module in chosen, config=config)
        return [f"{len(chosen)} of {len(linears)} Linear layers compute in float8"]

    def revert(self, model: nn.Module) -> None:
        from torchao.float8.float8_linear import Float8Linear

        for module in model.modules():
            if type(module) is Float8Linear:
                module.__class__ = nn.Linear  # a Float8Linear differs from a Linear only in its forward


def _with_few_rows(model: nn.Module) -> set[nn.Module]:
    """Return the modules of the classifier, and of a last block that computes only the class token.

    Their inputs have one row per image, which is too little work for float8 to save time.
    """
    # Imported here, because importing timm takes seconds.
    from models.transforms.kernels import ClassTokenVisionTransformer

    few = [model.get_submodule(name) for name in classifier_names(model)]
    few += [model.blocks[-1]] if isinstance(model, ClassTokenVisionTransformer) else []
    return {module for each in few for module in each.modules()}
