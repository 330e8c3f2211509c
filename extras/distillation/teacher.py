"""The teacher of a distillation: a frozen model that gets the student's images, normalized as its weights expect."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Data


class Teacher(nn.Module):
    """A model in evaluation mode that computes logits for the images of its student. It is never trained or saved."""

    def __init__(
        self, model: nn.Module, student: Data, own: Data, outputs: Sequence[int] = (), side: int | None = None
    ):
        """Wrap `model`.

        `student`, `own`: normalization settings of the student and of this model; `outputs`: the index of the model's
        output for each class of the student (empty: all outputs in order); `side`: the model's only image size.
        """
        super().__init__()
        self.model, self.side = model.eval().requires_grad_(False), side
        # Undo the student's normalization, then apply the teacher's: (image * std + mean - own mean) / own std.
        own_mean, own_std, mean, std = (
            torch.tensor(each, dtype=torch.float64)
            for each in (own.IMAGENET_MEAN, own.IMAGENET_STD, student.IMAGENET_MEAN, student.IMAGENET_STD)
        )
        self.renormalizes = not (torch.equal(mean, own_mean) and torch.equal(std, own_std))
        self.register_buffer("scale", (std / own_std).float()[:, None, None])
        self.register_buffer("shift", ((mean - own_mean) / own_std).float()[:, None, None])
        self.register_buffer("outputs", torch.tensor(outputs, dtype=torch.int64))

    def describe(self) -> str:
        """Return the number of parameters and the changes to the student's images, for the log."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        resized = f", images resized to {self.side} x {self.side}" if self.side else ""
        return f"{count:,} parameters{resized}{', images normalized as its weights expect' * self.renormalizes}"

    def forward(self, images: Tensor | dict[str, Tensor]) -> Tensor:
        """Return logits [B, classes of the student] for images [B, C, H, W] as the student gets them.

        With DATA.TOKENS, the images are a dict with sequences of patches.
        """
        dtype = next(self.model.parameters()).dtype
        if isinstance(images, dict):
            patches = images["patches"]
            if self.renormalizes:
                scale, shift = self.scale.flatten(), self.shift.flatten()
                patches = (patches.unflatten(2, (-1, len(scale))) * scale + shift).flatten(2)
            return self._chosen(self.model({**images, "patches": patches.to(dtype)}))
        if self.side and images.shape[-1] != self.side:
            # Resize in float32, because not every device can resize half types.
            images = functional.interpolate(images.float(), (self.side, self.side), mode="bicubic", antialias=True)
        if self.renormalizes:
            images = images * self.scale + self.shift
        return self._chosen(self.model(images.to(dtype)))

    def _chosen(self, logits: Tensor) -> Tensor:
        return logits[:, self.outputs] if len(self.outputs) else logits


def use_both_heads(model: nn.Module) -> None:
    """Make a model with two heads (such as a distilled DeiT) return the logits of both heads in training.

    In evaluation, the model always returns the mean of both. Without distillation, it returns the mean in training too.
    """
    if hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)
