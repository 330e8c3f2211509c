"""Changes to how a model computes, never to what it computes: an ordered list, applied and reverted as one."""

from dataclasses import dataclass

import torch
from torch import nn

from configs.schema import AUTO, Config
from models.transforms.base import ModelTransform
from utils.errors import ConfigError


@dataclass(frozen=True)
class ModelTransforms:
    """A list of transforms in the order in which they are applied."""

    transforms: tuple[ModelTransform, ...]

    def apply(self, model: nn.Module) -> list[str]:
        """Apply all. Returns lines for the log."""
        return [line for each in self.transforms for line in each.apply(model)]

    def revert(self, model: nn.Module) -> None:
        """Revert all, also on a copy of the model, which then computes exactly as before."""
        for each in reversed(self.transforms):
            each.revert(model)

    def bypassing_modules(self) -> "ModelTransforms":
        """The transforms that compute without calling modules, so that hooks miss it."""
        return ModelTransforms(tuple(each for each in self.transforms if each.bypasses_modules))


def choose_transforms(
    config: Config, device: torch.device, half: torch.dtype | None, training: bool = False
) -> ModelTransforms:
    """The transforms for these settings and this device, in order. `half`: the type of -amp, None without."""
    # Local: importing timm takes seconds.
    from models.transforms.class_token_block import ClassTokenBlock

    settings, is_autocast = config.PRECISION, half is not None and config.PRECISION.MODE != "naive"
    transforms: list[ModelTransform] = []
    if settings.CUSTOM_BLACK_LIST or settings.CUSTOM_WHITE_LIST:
        from extras.operator_lists import OpOverrides

        if half is not None and not is_autocast:
            raise ConfigError(
                "PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST are about what autocast does, but PRECISION.MODE is "
                "naive, where everything is in half; use PRECISION.MODE autocast or remove the lists"
            )
        # First: entries name modules by their own classes.
        transforms.append(OpOverrides(settings.CUSTOM_BLACK_LIST, settings.CUSTOM_WHITE_LIST, device.type, half))
    # After the overrides: it does not call the modules of the last block, so it skips a block with overrides.
    transforms.append(ClassTokenBlock())
    # After both: they replace layers of exactly timm's classes, and the class token needs timm's attention.
    if device.type == "cpu":
        from models.transforms.kernels import CpuKernels

        transforms.append(CpuKernels(half is not None, is_compiled=training and bool(config.COMPILE)))
    else:
        from models.transforms.gpu_kernels import GpuKernels

        transforms.append(GpuKernels())
    if half is not None and settings.MODE == "float8":
        from extras.float8 import Float8

        # After the overrides and the class token: it converts neither named layers nor those with few rows.
        transforms.append(Float8(device))
    if training and config.COMPILE == "blocks":
        from models.transforms.blocks import SharedDropPath

        transforms.append(SharedDropPath())
    if training and config.TRAIN.GRAD_CHECKPOINTING:
        from models.transforms.blocks import ActivationCheckpointing

        # After everything that replaces forwards: it must recompute what was computed.
        transforms.append(ActivationCheckpointing(config.MODEL.NAME))
    # Without -compile it moves no fewer bytes, as autocast's layer norms work in float32, and it doubles the error of the
    # gradients of a deep model. CPUs keep the numbers of all runs so far. Accuracy: BENCHMARKS.md, "half precision".
    is_fused = settings.RESIDUAL == "bfloat16" or settings.RESIDUAL == AUTO and bool(config.COMPILE)
    pays = is_fused and half is torch.bfloat16 and device.type != "cpu"
    if is_autocast and (pays or settings.RESIDUAL == "half"):
        from models.transforms.blocks import HalfResidual

        # After checkpointing, so that blocks save their input in half precision.
        transforms.append(HalfResidual(device.type, half, is_required=not pays))
    # Last: these wrap the whole model, whose class ClassTokenBlock looks at.
    if training and config.DETERMINISTIC and config.TRAIN.SIZE_SCHEDULE and device.type != "cpu":
        from models.transforms.blocks import ResizeByMatrices

        transforms.append(ResizeByMatrices())
    if device.type == "cuda":
        from models.transforms.gpu_kernels import ChannelsLast

        transforms.append(ChannelsLast())
    return ModelTransforms(tuple(transforms))
