"""The student: a model without classifier, with linear maps from its features to the teacher's widths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from configs.schema import Data
from models.features import Widths, features_of
from models.transforms.base import ModelTransform, wrap
from models.weights.state import FEATURE_MAPS
from utils.text import first_of

MAPS = FEATURE_MAPS.rstrip(".")
PARTS = {"both": ("pooled", "patches"), "pooled": ("pooled",), "patches": ("patches",)}  # by TRAIN.FEATURES


@dataclass(frozen=True)
class FeatureOutput(ModelTransform):
    """Makes a model return features instead of logits: a tuple with each of the `parts`, mapped if the model has maps.

    In evaluation, a model with maps also returns its own pooled features [B, D] as the last element.
    """

    parts: tuple[str, ...]

    def apply(self, model: nn.Module) -> list[str]:
        wrap(model, self)
        return []

    def subclass(self, cls: type) -> type:
        parts = self.parts

        class FeatureModel(cls):
            def forward(self, images: Tensor) -> tuple[Tensor, ...]:
                found = features_of(self, images)
                chosen = tuple(getattr(found, part) for part in parts)
                if not hasattr(self, MAPS):
                    return chosen
                maps = getattr(self, MAPS)
                mapped = tuple(maps[part](each) for part, each in zip(parts, chosen, strict=True))
                return mapped if self.training else (*mapped, found.pooled)

        return FeatureModel


def make_student(
    model: nn.Module, parts: Sequence[str], own: Widths, teacher: Widths, data: Data, seed: int
) -> list[str]:
    """Remove the classifier, add the maps, and make the model return features. Return lines for the log.

    `own`, `teacher`: the sizes of both models' features. The weights of the maps depend only on `seed`, so they are
    equal in all processes.
    """
    parameter = next(model.parameters())
    model.reset_classifier(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        maps = nn.ModuleDict({part: nn.Linear(getattr(own, part), getattr(teacher, part)) for part in parts})
    model.add_module(MAPS, maps.to(parameter.device, parameter.dtype))
    FeatureOutput(tuple(parts)).apply(model)
    return _freeze_unused(model, parameter.new_zeros(1, data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE))


def _freeze_unused(model: nn.Module, images: Tensor) -> list[str]:
    """Freeze the weights that no chosen feature depends on, because DDP would wait for their gradients."""
    was_training = model.training
    with torch.enable_grad():
        *mapped, _ = model.eval()(images)
        sum(each.sum() for each in mapped).backward()
    model.train(was_training)
    unused = [name for name, each in model.named_parameters() if each.requires_grad and each.grad is None]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in unused)
        parameter.grad = None
    return [f"not trained, because no feature depends on them: {first_of(unused)}"] if unused else []
