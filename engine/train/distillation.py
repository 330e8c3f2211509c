"""TRAIN.DISTILLATION_TYPE: the model learns from the labels and from a trained model, its teacher."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from configs.schema import Config, Data, Model, Shape, Train
from configs.tables import TASKS
from configs.values import unflatten
from datasets import Batch, Preparation
from engine.open_model import outputs_in
from engine.precision import Precision, widen
from engine.train.loss import DistillationTargets, Loss
from models import build_model
from models.compilation import compile_model
from models.parts import has_running_statistics
from models.sized import sized
from models.transforms import choose_transforms
from models.units import Scale
from models.weights.files import find_file, read_record, read_state_dict
from models.weights.load import load_pretrained
from utils.distributed import Process
from utils.errors import ConfigError, did_you_mean
from utils.log import Log
from utils.text import counted, first_of
from utils.torch_internals import import_timm

# --- the teacher ---


class Teacher(nn.Module):
    """A model in evaluation mode that computes logits for the images of its student. It is never trained or saved."""

    def __init__(
        self, model: nn.Module, student: Data, own: Data, outputs: Sequence[int] = (), shape: Shape | None = None
    ):
        """Wrap `model`.

        `student`, `own`: normalization settings of the student and of this model; `outputs`: the index of the model's
        output for each class of the student (empty: all outputs in order); `shape`: the model's only image size.
        """
        super().__init__()
        self.model, self.shape = model.eval().requires_grad_(False), shape
        # Undo the student's normalization, then apply the teacher's: (image * std + mean - own mean) / own std.
        own_mean, own_std, mean, std = (
            torch.tensor(numbers, dtype=torch.float64)
            for numbers in (own.IMAGENET_MEAN, own.IMAGENET_STD, student.IMAGENET_MEAN, student.IMAGENET_STD)
        )
        self.renormalizes = not (torch.equal(mean, own_mean) and torch.equal(std, own_std))
        self.register_buffer("scale", (std / own_std).float()[:, None, None])
        self.register_buffer("shift", ((mean - own_mean) / own_std).float()[:, None, None])
        self.register_buffer("outputs", torch.tensor(outputs, dtype=torch.int64))
        self.register_buffer("units", None)

    def describe(self) -> str:
        """Return the number of parameters and the changes to the student's images, for the log."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        resized = f", images resized to {self.shape}" if self.shape else ""
        normalized = ", images normalized as its weights expect" if self.renormalizes else ""
        return f"{count:,} parameters{resized}{normalized}"

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, classes of the student] for images [B, C, H, W] as the student gets them."""
        if self.shape and images.shape[2:] != self.shape:
            # Resize in float32, because not every device can resize half types.
            images = functional.interpolate(images.float(), self.shape, mode="bicubic", antialias=True)
        if self.renormalizes:
            images = images * self.scale + self.shift
        logits = self.model(images.to(next(self.model.parameters()).dtype))
        logits = logits[:, self.outputs] if len(self.outputs) else logits
        return logits if self.units is None else logits.float() * self.units[0] + self.units[1]

    def set_units(self, own: Scale, student: Scale) -> None:
        """Standardize the numbers as those of the student are."""
        teachers, students = (torch.tensor(each, dtype=torch.float64) for each in (own, student))
        if len(self.outputs):
            teachers = teachers[:, self.outputs]
        slope, offset = teachers[1] / students[1], (teachers[0] - students[0]) / students[1]
        self.units = torch.stack([slope, offset]).float()


# --- finding the teacher that the settings name ---


KEY, WEIGHTS_KEY = "TRAIN.TEACHER_MODEL", "TRAIN.TEACHER_PRETRAINED"
REMEDY = f"train the teacher on this data first, and name its checkpoint: -opts {KEY}=output/train-.../best.pth"


class TeacherSource(NamedTuple):
    """The model, weights and classes of a teacher that has not been built yet."""

    config: Config  # settings for the teacher's model and for the normalization of its images
    weights: str  # a file, or the name of a timm model
    classes: list[str] | None  # names of its outputs, if known
    num_classes: int | None
    shape: Shape | None  # the only image size that the model takes; None: any size
    key: str = KEY  # the setting that names the weights

    def build(self, num_classes: int, is_trial: bool) -> tuple[nn.Module, list[str]]:
        """Return the model on the CPU, with lines for the log. In a trial its weights are random."""
        with torch.random.fork_rng(devices=[]):
            try:
                model = build_model(self.config, num_classes)
            except ConfigError as error:
                raise ConfigError(f"{KEY}: {str(error).removeprefix('MODEL.NAME: ')}") from None
            if is_trial:
                return model, []
            if self.num_classes is None:
                self._check_number(model, num_classes)
            return model, load_pretrained(
                model, self.weights, self.key, needs_head=True, sized=sized(self.config, num_classes)
            )

    def _check_number(self, model: nn.Module, num_classes: int) -> None:
        """Raise ConfigError if the classifier in the file has another number of classes than the data."""
        num_outputs = outputs_in(read_state_dict(self.weights), model)
        if num_outputs not in (0, num_classes):
            raise ConfigError(
                f"{WEIGHTS_KEY}: {self.weights} has {num_outputs} classes, but the data has {num_classes}; {REMEDY}"
            )


def load_teacher(config: Config, classes: Sequence[str] | None, num_classes: int) -> tuple[Teacher, list[str]]:
    """Load the teacher on the CPU. Return it with lines for the log.

    `classes`: names of the data's classes; None: use random weights, for a trial.
    """
    source = find_teacher(config)
    outputs = _outputs(source, list(classes), num_classes) if classes is not None else []
    number = len(source.classes) if outputs else num_classes
    model, lines = source.build(number, is_trial=classes is None)
    teacher = Teacher(model, config.DATA, source.config.DATA, outputs, source.shape)
    scales = Scale.of(source.config), Scale.of(config)
    if all(scales):
        teacher.set_units(*scales)
    return teacher, lines


def find_teacher(config: Config) -> TeacherSource:
    """Find the teacher: a timm model by its name, or a checkpoint, which also holds the settings of its run."""
    timm = import_timm()
    name, weights = config.TRAIN.TEACHER_MODEL, config.TRAIN.TEACHER_PRETRAINED
    path = find_file(name)
    if path:
        return _of_run(config, str(path), read_record(path))
    if not timm.is_model(name):
        raise ConfigError(
            f"{KEY}: there is no file {name}, and timm has no model of this name"
            f"{did_you_mean(name, timm.list_models())}"
        )
    cfg = timm.get_pretrained_cfg(weights if weights and timm.is_model(weights) else name)
    file = find_file(weights) if weights else None
    has_means = cfg is not None and len(cfg.mean) == config.DATA.IMAGE_CHANNELS
    images = {"IMAGENET_MEAN": tuple(cfg.mean), "IMAGENET_STD": tuple(cfg.std)} if has_means else {}
    shape = Shape(*cfg.input_size[1:]) if cfg is not None and cfg.fixed_input_size else None
    data = replace(config.DATA, **images, **({"IMAGE_SIZE": shape.size} if shape else {}))
    # The teacher needs no schedule of sizes: its model takes images of one size, or of any size.
    train = replace(config.TRAIN, SIZE_SCHEDULE=())
    built = replace(config, DATA=data, MODEL=Model(TYPE="timm", NAME=name), TRAIN=train)
    names = read_record(file).get("class_names") if file else None
    number = len(names) if names else None
    if not file and cfg is not None:
        number = cfg.num_classes
    return TeacherSource(built, weights or name, names, number, shape, WEIGHTS_KEY if weights else KEY)


def _of_run(config: Config, path: str, record: dict) -> TeacherSource:
    settings, names = record.get("config", {}), record.get("class_names")
    if "MODEL.TYPE" not in settings or not names:
        raise ConfigError(
            f"{KEY}: {path} does not say which model its weights are for; set {KEY} to a timm model, "
            f"and {WEIGHTS_KEY} to this file"
        )
    if config.TRAIN.TEACHER_PRETRAINED:
        raise ConfigError(f"{WEIGHTS_KEY} is set, but {KEY}, {path}, contains weights; remove one of these settings")
    then = unflatten(settings)
    if then.task.has_classes != config.task.has_classes:
        raise ConfigError(f"{KEY}: {path} was trained for another task (TRAIN.OBJECTIVE); {REMEDY}")
    if then.DATA.IMAGE_CHANNELS != config.DATA.IMAGE_CHANNELS:
        raise ConfigError(
            f"{KEY}: {path} takes images of {counted(then.DATA.IMAGE_CHANNELS, 'channel')}; set DATA.IMAGE_CHANNELS to "
            f"{then.DATA.IMAGE_CHANNELS}, or name another teacher"
        )
    then = then.changed("MODEL", FREEZE=())
    return TeacherSource(then, path, list(names), then.MODEL.NUM_CLASSES or len(names), then.DATA.shape)


def _outputs(source: TeacherSource, classes: list[str], num_classes: int) -> list[int]:
    """Return the index of the teacher's output for each class of the data.

    An empty list means that the outputs already have the order of the classes.
    """
    if source.classes and len(source.classes) == source.num_classes and num_classes == len(classes):
        unknown = [name for name in classes if name not in source.classes]
        if unknown:
            raise ConfigError(f"{KEY}: {source.weights} does not know these classes: {first_of(unknown)}; {REMEDY}")
        return [] if classes == source.classes else [source.classes.index(name) for name in classes]
    if source.num_classes not in (None, num_classes):
        raise ConfigError(
            f"{KEY}: {source.weights} has {source.num_classes} classes, but the data has {num_classes}; {REMEDY}"
        )
    return []


# --- the training step with a teacher ---


def make_distillation(
    config: Config, process: Process, log: Log, num_classes: int, classes: Sequence[str] | None
) -> "Distillation":
    """Return the distillation that the settings ask for. Each process loads the whole teacher. Collective.

    `classes`: names of the data's classes; None: use a teacher with random weights.
    """
    if classes is None:
        return Distillation(load_teacher(config, None, num_classes)[0], config)
    teacher, lines = process.after_first(lambda: load_teacher(config, classes, num_classes))
    log.say(*lines, f"teacher: {config.TRAIN.TEACHER_MODEL}, {teacher.describe()}")
    return Distillation(teacher, config)


class Distillation:
    """Makes the model of a training step learn from a teacher as well."""

    def __init__(self, teacher: Teacher, config: Config):
        self._teacher, self._config = teacher, config

    def change_model(self, model: nn.Module) -> None:
        """Let the model return the logits of both heads in training. It is not yet copied or compiled."""
        # A model with two heads, such as a distilled DeiT, returns the logits of both in training, and always their
        # mean in evaluation. Without distillation, it returns the mean in training too.
        if hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)

    def wrap(self, prepare: Preparation, loss: Loss, precision: Precision) -> tuple[Preparation, Loss]:
        """Return replacements for `prepare` and `loss` in the training step."""
        with_logits = TeacherPreparation(prepare, self._teacher, precision, self._config)
        return with_logits, DistillationLoss(loss, self._config.TRAIN)


class DistillationLoss:
    """The loss (1 - a) x label loss + a x teacher loss, as in timm and DeiT, where a is TRAIN.DISTILLATION_ALPHA.

    A student with two heads learns the labels with the first, and from the teacher with the second. `soft` is the KL
    divergence of the class probabilities at temperature TRAIN.DISTILLATION_TAU, times its square, averaged over the
    images (DeiT also divides by the number of classes), or for numbers the mean squared difference. `hard` is the cross
    entropy with the class that the teacher predicts.
    """

    def __init__(self, base: Loss, settings: Train):
        self._base, self._type = base, settings.DISTILLATION_TYPE
        self._has_classes = TASKS[settings.OBJECTIVE].has_classes
        self._alpha, self._tau = settings.DISTILLATION_ALPHA, settings.DISTILLATION_TAU

    def __call__(self, outputs: Tensor | tuple[Tensor, Tensor], targets: DistillationTargets) -> Tensor:
        first, second = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        student, teacher = widen(second), widen(targets.logits)
        if not self._has_classes:
            teacher_loss = functional.mse_loss(student, teacher)
        elif self._type == "hard":
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
