"""Changes to how a model computes, never to what it computes: an ordered list, applied and reverted as one."""

from dataclasses import dataclass

import torch
from torch import nn

from configs.schema import Config
from models.transforms.activation_checkpointing import ActivationCheckpointing
from models.transforms.base import ModelTransform
from models.transforms.float8 import Float8
from models.transforms.half_residual import HalfResidual
from models.transforms.op_overrides import OpOverrides
from utils.errors import ConfigError


@dataclass(frozen=True)
class ModelTransforms:
    """In the order in which they are applied."""

    transforms: tuple[ModelTransform, ...]

    def apply(self, model: nn.Module) -> list[str]:
        """Returns lines for the log."""
        return [line for each in self.transforms for line in each.apply(model)]

    def revert(self, model: nn.Module) -> None:
        """Afterwards the model, or a copy of it, computes exactly as before."""
        for each in reversed(self.transforms):
            each.revert(model)

    def lowering_precision(self) -> "ModelTransforms":
        """Those without which the model computes in its own type outside of autocast."""
        return ModelTransforms(tuple(each for each in self.transforms if each.lowers_precision))

    def bypassing_modules(self) -> "ModelTransforms":
        """Those without which hooks see all that the modules of the model compute."""
        return ModelTransforms(tuple(each for each in self.transforms if each.bypasses_modules))


def choose_transforms(
    config: Config, device: torch.device, half: torch.dtype | None, training: bool, emulate: bool = False
) -> ModelTransforms:
    """What the settings ask for, and what computes fastest on this device. `half`: the type of autocast, None without;
    `emulate`: the numbers of float8 on a device without, slowly.
    """
    # Here and not above: importing timm takes seconds.
    from models.transforms.class_token_block import ClassTokenBlock
    from models.transforms.cpu_kernels import CpuKernels

    settings, is_autocast = config.PRECISION, half is not None and config.PRECISION.MODE != "naive"
    if half is not None and not is_autocast and (settings.CUSTOM_BLACK_LIST or settings.CUSTOM_WHITE_LIST):
        raise ConfigError(
            "PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST are about what autocast does, but PRECISION.MODE is "
            "naive, where everything is in half; use PRECISION.MODE autocast or remove the lists"
        )
    transforms: list[ModelTransform] = [
        # First: entries name modules by their own classes.
        OpOverrides(settings.CUSTOM_BLACK_LIST, settings.CUSTOM_WHITE_LIST, device.type, half),
        # Behind the overrides: it would not call the modules of the last block that they name, and so leaves them alone.
        ClassTokenBlock(),
    ]
    if device.type == "cpu":
        # Behind both: it replaces layers that are exactly torch's or timm's, and the class token needs timm's attention.
        transforms.append(CpuKernels(half is not None))
    if half is not None and settings.MODE == "float8":
        # Behind the overrides and the class token: neither named layers nor those of few rows are converted.
        transforms.append(Float8(emulate))
    if training and config.TRAIN.GRAD_CHECKPOINTING:
        # Around all that replaces forwards: what it computes again must be what was computed.
        transforms.append(ActivationCheckpointing(config.MODEL.NAME))
    if is_autocast and settings.RESIDUAL == "half":
        # Around checkpointing, so that blocks keep their input in half.
        transforms.append(HalfResidual(device.type, half))
    return ModelTransforms(tuple(transforms))
