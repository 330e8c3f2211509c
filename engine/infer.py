"""Outputs of models without gradients, outside of a run: places models on the device, and refuses outputs that are not finite."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets import build_normalize
from engine.evaluation.evaluate import Inference
from engine.precision import Precision, are_finite, set_matmul, widen
from models.transforms import ModelTransforms, choose_transforms
from utils.distributed import Process
from utils.host import keep_freed_memory

Compute = Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, ...]]  # what a model computes from normalized images


@dataclass(frozen=True)
class PlacingInference(Inference):
    """An inference with models that it places on the device itself, as -eval, predict.py and embed.py do."""

    transforms: ModelTransforms

    @classmethod
    def of(cls, config: Config, process: Process) -> "PlacingInference":
        """Return how models are computed with the settings of an evaluation."""
        keep_freed_memory(process.device)
        set_matmul(config.PRECISION.MATMUL)
        precision = Precision(config, process.device)
        transforms = choose_transforms(config, process.device, precision.half)
        return cls(build_normalize(config.DATA).to(process.device), precision, process, transforms)

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model that computes: on the device, transformed, in its precision, in evaluation mode."""
        self.transforms.apply(model.to(self.process.device))
        return self.precision.computing(model).eval()

    def inputs(self, model: nn.Module, pixels: Tensor) -> Tensor:
        """Return the normalized input of a placed model."""
        return self.normalize(pixels.to(self.process.device), self.precision.input_dtype(model))

    @torch.no_grad()
    def outputs(self, model: nn.Module, inputs: Tensor, source: str, compute: Compute | None = None) -> Any:
        """Return what a placed model computes, in at least float32. Raise ConfigError if it is not finite.

        `source` names the weights. `compute` returns several values in place of the logits. Single logits may be -inf.
        """

        def forward() -> Tensor | tuple[Tensor, ...]:
            with self.precision.autocast():
                return compute(model, inputs) if compute else model(inputs)

        if compute:
            found = tuple(map(widen, forward()))
            is_finite = all(each.isfinite().all() for each in found)
        else:
            found = widen(forward())
            is_finite = are_finite(found).all()
        if not is_finite:
            self.refuse(model, source, forward)
        return found

    def refuse(self, model: nn.Module, source: str, forward: Callable[[], Any]) -> NoReturn:
        """Raise ConfigError, and name the place in the model whose output is not finite. `forward` computes it again."""
        from models.trace import refuse_not_finite

        refuse_not_finite(source, model, self.transforms, forward)
