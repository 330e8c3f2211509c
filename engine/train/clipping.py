"""Clips gradients by TRAIN.CLIP_MODE and TRAIN.GRAD_CLIP."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from configs.schema import Train


class Clipping:
    """Clips all gradients of an update. It does nothing if GRAD_CLIP is not set."""

    def __init__(self, settings: Train, parameters: Iterable[nn.Parameter]):
        """Set the limit, and the parameters that AGC clips. `parameters`: all, or this process's shards of all."""
        limit = settings.GRAD_CLIP
        self.max_norm = limit if settings.CLIP_MODE == "norm" else None
        self.max_value = limit if settings.CLIP_MODE == "value" else None
        self._factor = limit if settings.CLIP_MODE == "agc" else None
        # As in timm's --clip-mode agc, the last two parameters are left out: weight and bias of the classifier.
        self._units = list(parameters)[:-2] if self._factor else []

    @property
    def is_by_norm(self) -> bool:
        """Return whether clipping needs only the norm of all gradients, so that a fused optimizer can clip."""
        return not (self.max_value or self._factor)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], norm: Tensor) -> None:
        """Clip the gradients of `parameters`. `norm` is the norm of all gradients together."""
        if self.max_norm:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        if self.max_value:
            clip_grad_value_(parameters, self.max_value)
        if self._factor:
            from engine.train.adaptive_clipping import clip_adaptively

            clip_adaptively(self._units, self._factor)
