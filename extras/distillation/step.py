"""Adds distillation to a training step: the targets get the teacher's logits, and the loss gets a term for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Config, Train
from datasets import Batch, Preparation
from engine.evaluation.tally import widen
from engine.precision.policy import Precision
from engine.train.loss import ExtendedTargets, Loss
from extras.distillation.sources import load_teacher, random_teacher
from extras.distillation.teacher import Teacher, use_both_heads
from models.compilation import compile_model
from models.parts import has_running_statistics
from models.transforms import choose_transforms
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log


def make_distillation(
    config: Config, process: Process, log: Log, num_classes: int, classes: Sequence[str] | None
) -> "Distillation":
    """Return the distillation that the settings ask for. Each process loads the whole teacher. Collective.

    `classes`: names of the data's classes; None: use a teacher with random weights.
    """
    if classes is None:
        return Distillation(random_teacher(config, num_classes), config)
    teacher, lines = process.after_first(lambda: load_teacher(config, classes, num_classes))
    log.say(*lines, f"teacher: {config.TRAIN.TEACHER_MODEL}, {teacher.describe()}")
    return Distillation(teacher, config)


class Distillation:
    """A StepWrapper that makes the model learn from a teacher as well."""

    def __init__(self, teacher: Teacher, config: Config):
        self._teacher, self._config = teacher, config

    def change_model(self, model: nn.Module) -> None:
        if self._config.DATA.TOKENS:
            sides = model.get_patch_size()[0], self._teacher.model.get_patch_size()[0]
            if sides[0] != sides[1]:
                raise ConfigError(
                    f"TRAIN.TEACHER_MODEL: {self._config.TRAIN.TEACHER_MODEL} has patches of {sides[1]} x {sides[1]} pixels, "
                    f"but the model has {sides[0]} x {sides[0]} (DATA.TOKENS); name a teacher with the same patches"
                )
        use_both_heads(model)

    def wrap(self, prepare: Preparation, loss: Loss, precision: Precision) -> tuple[Preparation, Loss]:
        with_logits = TeacherPreparation(prepare, self._teacher, precision, self._config)
        return with_logits, DistillationLoss(loss, self._config.TRAIN)


@dataclass(frozen=True)
class DistillationTargets(ExtendedTargets):
    """The labels of the images and the teacher's logits for them."""

    logits: Tensor  # [B, classes]


class DistillationLoss:
    """The loss (1 - ALPHA) x label loss + ALPHA x teacher loss, as in timm and DeiT.

    A student with two heads learns the labels with the first, and from the teacher with the second. `soft` is the KL
    divergence of the class probabilities at temperature TAU, times TAU^2, averaged over the images (DeiT also divides
    by the number of classes). `hard` is the cross entropy with the class that the teacher predicts.
    """

    def __init__(self, base: Loss, settings: Train):
        self._base, self._type = base, settings.DISTILLATION_TYPE
        self._alpha, self._tau = settings.DISTILLATION_ALPHA, settings.DISTILLATION_TAU

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: DistillationTargets) -> Tensor:
        first, second = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        student, teacher = widen(second), widen(targets.logits)
        if self._type == "hard":
            teacher_loss = functional.cross_entropy(student, teacher.argmax(1))
        else:
            student, teacher = (functional.log_softmax(each / self._tau, 1) for each in (student, teacher))
            divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
            teacher_loss = divergence * self._tau**2
        return (1 - self._alpha) * self._base(first, targets.labels) + self._alpha * teacher_loss


class TeacherPreparation:
    """A preparation that adds the teacher's logits for the student's mixed and erased images, as in DeiT."""

    def __init__(self, prepare: Preparation, teacher: Teacher, precision: Precision, config: Config):
        self.prepare, self.normalize, self.precision = prepare, prepare.normalize, precision
        model, self.device = teacher.model, prepare.device
        cast(model, precision.half or self.normalize.dtype)
        self.teacher = teacher.to(self.device)
        if self.device.type != "cpu":  # on a CPU, transforms would change the results
            # PRECISION is left at its defaults, because its operator lists name modules of the student.
            choose_transforms(replace(config, PRECISION=Config().PRECISION), self.device, precision.half).apply(model)
            if config.COMPILE:  # without a compile mode: CUDA graphs would overwrite logits that the loss still needs
                compile_model(model, replace(config, COMPILE=True))

    def __call__(self, batch: Batch, dtype: torch.dtype | None = None) -> tuple[Tensor, DistillationTargets]:
        images, targets = self.prepare(batch, dtype)
        with torch.no_grad(), self.precision.autocast():
            return images, DistillationTargets(targets, self.teacher(images))


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point parameters and buffers to this type. BatchNorm is never converted to a half type."""
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        for tensor in own if dtype.itemsize > 2 or not has_running_statistics(module) else ():
            tensor.data = tensor.data.to(dtype if tensor.is_floating_point() else tensor.dtype)
