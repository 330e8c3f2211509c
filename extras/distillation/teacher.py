"""The teacher of a distillation: a frozen model that sees the images of its student as its own weights expect them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Data


class Teacher(nn.Module):
    """Logits of a model in evaluation mode for images that are prepared for its student; never trained or saved."""

    def __init__(
        self, model: nn.Module, of_student: Data, own: Data, outputs: Sequence[int] = (), side: int | None = None
    ):
        """`of_student`, `own`: how images are normalized; `outputs`: those of the student's classes in its order, none:
        all; `side`: of the only image size that the model takes.
        """
        super().__init__()
        self.model, self.side = model.eval().requires_grad_(False), side
        # Every output is one of the student's: (image * its deviation + its mean - own mean) / own deviation.
        own_mean, own_std, mean, std = (
            torch.tensor(each, dtype=torch.float64)
            for each in (own.IMAGENET_MEAN, own.IMAGENET_STD, of_student.IMAGENET_MEAN, of_student.IMAGENET_STD)
        )
        self.renormalizes = not (torch.equal(mean, own_mean) and torch.equal(std, own_std))
        self.register_buffer("scale", (std / own_std).float()[:, None, None])
        self.register_buffer("shift", ((mean - own_mean) / own_std).float()[:, None, None])
        self.register_buffer("outputs", torch.tensor(outputs, dtype=torch.int64))

    def describe(self) -> str:
        """The number of parameters, and what is done to the images of the student."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        resized = f", images resized to {self.side} x {self.side}" if self.side else ""
        return f"{count:,} parameters{resized}{', images normalized as its weights expect' * self.renormalizes}"

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] as the student gets them -> logits [B, classes of the student]"""
        if self.side and images.shape[-1] != self.side:
            # In float32: not every device resizes half types.
            images = functional.interpolate(images.float(), (self.side, self.side), mode="bicubic", antialias=True)
        if self.renormalizes:
            images = images * self.scale + self.shift
        logits = self.model(images.to(next(self.model.parameters()).dtype))
        return logits[:, self.outputs] if len(self.outputs) else logits


def use_both_heads(model: nn.Module) -> None:
    """Make a model with a second head, such as DeiT's distilled ones, return the logits of both heads in training.

    In evaluation it always returns their mean; without a distillation, in training too.
    """
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
