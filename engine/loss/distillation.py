"""The loss of a distillation: the labels' loss, and how far the student is from its teacher."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema import Train
from datasets import Batch, Mixed, Preparation
from engine.loss.classification import Taught, widen
from engine.precision.policy import Precision
from models.teacher import Teacher


class TaughtPreparation:
    """A preparation that also asks the teacher: of the images as the student gets them, mixed and erased, as in DeiT."""

    def __init__(self, prepare: Preparation, teacher: Teacher, precision: Precision):
        self.prepare, self.normalize, self.precision = prepare, prepare.normalize, precision
        self.device, self.teacher = prepare.device, teacher.to(prepare.device)
        self.teacher.model.to(precision.half or self.normalize.dtype)

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, Taught]:
        images, targets = self.prepare(batch, dtype)
        with torch.no_grad(), self.precision.autocast():
            return images, Taught(targets, self.teacher(images))


class DistillationLoss:
    """(1 - ALPHA) x the loss of the labels + ALPHA x that of the teacher, as timm's and DeiT's.

    A student with two heads learns the labels with the first and the teacher with the second. `soft` is the divergence of
    the classes' probabilities at temperature TAU, times TAU^2, averaged over the images (DeiT also divides by the number of
    classes); `hard` is the cross entropy with the class that the teacher chooses.
    """

    def __init__(self, base: Callable[[Tensor, Tensor | Mixed], Tensor], settings: Train):
        self._base, self._type = base, settings.DISTILLATION_TYPE
        self._alpha, self._tau = settings.DISTILLATION_ALPHA, settings.DISTILLATION_TAU

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: Taught) -> Tensor:
        first, second = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        student, teacher = widen(second), widen(targets.logits)
        if self._type == "hard":
            taught = functional.cross_entropy(student, teacher.argmax(1))
        else:
            student, teacher = (functional.log_softmax(each / self._tau, 1) for each in (student, teacher))
            divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
            taught = divergence * self._tau**2
        return (1 - self._alpha) * self._base(first, targets.labels) + self._alpha * taught
