"""Computes outputs without gradients outside of a run: for halfstep evaluate, predict and embed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from configs.schema import Config
from datasets import Normalize
from engine.evaluation.evaluate import Inference
from engine.precision import Precision, are_finite, set_matmul, widen
from models.transforms import ModelTransforms, choose_transforms
from utils.distributed import Process
from utils.host import keep_freed_memory

# Returns what is asked for, from a model and its normalized input: logits, or several values.
Compute = Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class PlacingInference(Inference):
    """An inference with models that it places on the device itself, as evaluate, predict and embed do."""

    transforms: ModelTransforms

    @classmethod
    def of(cls, config: Config, process: Process) -> "PlacingInference":
        """Return how models are computed with the settings of an evaluation."""
        keep_freed_memory(process.device)
        set_matmul(config.PRECISION.MATMUL)
        precision = Precision(config, process.device)
        transforms = choose_transforms(config, process.device, precision.half)
        return cls(Normalize(config.DATA).to(process.device), precision, process, transforms)

    def place(self, model: nn.Module) -> nn.Module:
        """Return the model that computes: on the device, transformed, in its precision, in evaluation mode."""
        self.transforms.apply(model.to(self.process.device))
        return self.precision.computing(model).eval()

    def inputs(self, model: nn.Module, pixels: Tensor) -> Tensor:
        """Return the normalized input of a placed model."""
        return self.normalize(pixels.to(self.process.device), self.precision.input_dtype(model))

    @torch.no_grad()
    def outputs(self, model: nn.Module, inputs: Tensor, source: str, compute: Compute = nn.Module.__call__) -> Any:
        """Return what a placed model computes, in at least float32. Raise ConfigError if it is not finite.

        `source` names the weights. Single logits may be -inf, but none of several values.
        """
        outputs = self._computed(model, inputs, compute)
        if isinstance(outputs, tuple):
            outputs = tuple(map(widen, outputs))
            is_finite = all(each.isfinite().all() for each in outputs)
        else:
            outputs = widen(outputs)
            is_finite = are_finite(outputs).all()
        if not is_finite:
            self.refuse(model, inputs, source, compute)
        return outputs

    def refuse(self, model: nn.Module, inputs: Tensor, source: str, compute: Compute = nn.Module.__call__) -> NoReturn:
        """Raise ConfigError for outputs that are not finite. They are computed again to find the place in the model."""
        from models.trace import refuse_not_finite

        refuse_not_finite(source, model, self.transforms, lambda: self._computed(model, inputs, compute))

    def _computed(self, model: nn.Module, inputs: Tensor, compute: Compute) -> Tensor | tuple[Tensor, ...]:
        with self.precision.autocast():
            return compute(model, inputs)
