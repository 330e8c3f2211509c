"""Where any other model looks: which places of a late feature map speak for the class, by Grad-CAM.

Each channel counts as much as the class gains by it, its gradient's mean over all places: https://arxiv.org/abs/1610.02391.
Without the mean (HiResCAM) the maps of earlier stages, which small images need, hit the object less often.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

FINE_ENOUGH = 7  # places a side: what most models have of an image of 224


class GradientMaps:
    """Maps of a model by the output of one of its modules."""

    title = "Grad-CAM"

    def __init__(self, model: nn.Module, module: nn.Module, channels: int):
        self.model, self.module, self.channels = model, module, channels

    @classmethod
    def of(cls, model: nn.Module, image: Tensor) -> "GradientMaps | None":
        """By the last of timm's stages that is fine enough, else the finest; None if no stage has places.

        Images of 32 leave most models a last stage of a single place.
        """
        stages = {
            stage["module"]: stage["num_chs"] for stage in getattr(model, "feature_info", ()) if "module" in stage
        }
        modules = dict(model.named_modules())
        found: list[tuple[int, GradientMaps]] = []
        for name, channels in stages.items():
            if name not in modules:
                continue
            maps = cls(model, modules[name], channels)
            with torch.no_grad(), maps._watching(kept := []):
                model(image)
            grid = maps._as_grid(kept[0]) if kept else None
            if grid is not None and (side := min(grid.shape[1:3])) > 1:
                found.append((side, maps))
        return max(reversed(found), key=lambda each: min(each[0], FINE_ENOUGH), default=(0, None))[1]

    def __call__(self, images: Tensor, classes: Tensor) -> Tensor:
        """[B, rows, columns]: how much each place speaks for the class of its image, at least 0."""
        with torch.enable_grad(), self._watching(kept := []):
            logits = self.model(images.detach().clone().requires_grad_())
            (features,) = kept
            (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), features)
        weights = self._as_grid(gradient).mean((1, 2), keepdim=True)
        return (self._as_grid(features) * weights).sum(-1).relu().detach()

    @contextlib.contextmanager
    def _watching(self, kept: list[Tensor]) -> Iterator[None]:
        hook = self.module.register_forward_hook(_keep_in(kept))
        try:
            yield
        finally:
            hook.remove()

    def _as_grid(self, features: Tensor) -> Tensor | None:
        """[B, rows, columns, channels] of [B, channels, rows, columns], or of tokens in a square; None for others."""
        if not isinstance(features, Tensor) or self.channels not in (shape := features.shape):
            return None
        if features.ndim == 4:
            is_last = shape[-1] == self.channels and shape[1] != self.channels
            is_last |= shape[1] == shape[-1] and getattr(self.model, "output_fmt", "NCHW") == "NHWC"
            return features if is_last else features.permute(0, 2, 3, 1)
        side = math.isqrt(shape[1]) if features.ndim == 3 else 0
        return features[:, -side * side :].unflatten(1, (side, side)) if side else None


def _keep_in(kept: list[Tensor]) -> Callable:
    return lambda module, given, output: kept.append(output)
