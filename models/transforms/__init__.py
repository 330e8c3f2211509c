"""Model transforms change how a model computes but not its results. An ordered list of them is applied and reverted."""

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
        """Apply all transforms. Return log lines."""
        return [line for each in self.transforms for line in each.apply(model)]

    def revert(self, model: nn.Module) -> None:
        """Revert all transforms, so that the model or a copy of it computes exactly as before."""
        for transform in reversed(self.transforms):
            transform.revert(model)

    def that_bypass_modules(self) -> "ModelTransforms":
        """Return the transforms that bypass some modules, so that hooks on these modules do not run."""
        return ModelTransforms(tuple(each for each in self.transforms if each.bypasses_modules))


def choose_transforms(
    config: Config, device: torch.device, half: torch.dtype | None, training: bool = False
) -> ModelTransforms:
    """Return the transforms for these settings and this device, in order. `half` is the type of -amp, or None."""
    # Imported here because importing timm takes seconds.
    from models.transforms.kernels import ClassTokenBlock, CpuKernels

    settings = config.PRECISION
    is_autocast = half is not None and settings.MODE != "naive"
    transforms: list[ModelTransform] = []
    has_exact_head = is_autocast and config.task.has_exact_head
    if settings.CUSTOM_BLACK_LIST or settings.CUSTOM_WHITE_LIST or has_exact_head:
        from models.transforms.operator_lists import OpOverrides

        if half is not None and not is_autocast:
            raise ConfigError(
                "PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST change autocast, but PRECISION.MODE is naive, where "
                "everything is computed in half precision; use PRECISION.MODE autocast or remove the lists"
            )
        # The overrides are first, because the entries of the lists name modules by their original classes.
        lists = settings.CUSTOM_BLACK_LIST, settings.CUSTOM_WHITE_LIST
        transforms.append(OpOverrides(*lists, device.type, half, has_exact_head=has_exact_head))
    # ClassTokenBlock comes after the overrides and leaves a block with overrides alone. Otherwise it would bypass them.
    transforms.append(ClassTokenBlock())
    # Kernels come next: they replace only layers of timm's own classes, and ClassTokenBlock needs timm's attention.
    if device.type == "cpu":
        transforms.append(CpuKernels(half is not None, is_compiled=training and bool(config.COMPILE)))
    else:
        from models.transforms.gpu_kernels import GpuKernels

        transforms.append(GpuKernels())
    if half is not None and settings.MODE == "float8":
        from models.transforms.float8 import Float8

        # Float8 is after the overrides and ClassTokenBlock, because it converts neither overridden layers nor layers
        # that ClassTokenBlock gives few rows.
        transforms.append(Float8(device))
    if training and config.COMPILE == "blocks":
        from models.transforms.blocks import SharedDropPath

        transforms.append(SharedDropPath())
    if training and config.TRAIN.GRAD_CHECKPOINTING:
        from models.transforms.blocks import ActivationCheckpointing

        # Checkpointing is after all transforms that replace a forward, because it must recompute the replaced forward.
        transforms.append(ActivationCheckpointing(config.MODEL.NAME))
    # A half-precision residual stream pays off only with -compile. Without -compile, memory traffic does not shrink,
    # because autocast's layer norms compute in float32, and the gradient error of a deep model doubles. CPUs never use
    # this stream, so that results stay equal to earlier runs. Accuracy: BENCHMARKS.md, "half precision".
    is_fused = settings.RESIDUAL == "bfloat16" or settings.RESIDUAL == AUTO and bool(config.COMPILE)
    pays = is_fused and half is torch.bfloat16 and device.type != "cpu"
    if is_autocast and (pays or settings.RESIDUAL == "half"):
        from models.transforms.blocks import HalfResidual

        # HalfResidual is after checkpointing, so that blocks save their input in half precision.
        transforms.append(HalfResidual(device.type, half, is_required=not pays))
    # The last two wrap the whole model. They follow ClassTokenBlock, because it checks the model's class.
    if training and config.DETERMINISTIC and config.TRAIN.SIZE_SCHEDULE and device.type != "cpu":
        from models.transforms.blocks import ResizeByMatrices

        transforms.append(ResizeByMatrices())
    if device.type == "cuda":
        from models.transforms.gpu_kernels import ChannelsLast

        transforms.append(ChannelsLast())
    return ModelTransforms(tuple(transforms))
