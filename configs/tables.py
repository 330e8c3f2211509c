"""The tables of losses, optimizers, data sets, pixels and metrics.

Each row has a name and what other files need to know of it.

Settings, checks and documentation follow these rows: `python scripts/maintenance/make_settings_page.py` writes the
documentation, and tests/repository/test_registered.py names each file in which an entry is missing. The class or
function of a row is chosen by a `match` in the package of its subject, so that only runs that use it import it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from utils.commands import page


def sentences_of(table: Mapping[str, Any]) -> str:
    """Return all rows in one line: `name, description; name, description`."""
    return "; ".join(f"{name}, {row.sentence}" for name, row in table.items())


def names_with(table: Mapping[str, Any], field: str, value: bool = True) -> tuple[str, ...]:
    """Return the names of the rows that have this value in a field."""
    return tuple(name for name, row in table.items() if getattr(row, field) is value)


class LossRow(NamedTuple):
    """A row of LOSSES: one training loss."""

    sentence: str  # the description in settings and documentation, without a full stop


# {value of TRAIN.LOSS: its row}. A setting for only one loss has Only("TRAIN.LOSS", "name") in configs/schema.py.
LOSSES = {
    "cross_entropy": LossRow("softmax over all classes"),
    "bce": LossRow("binary cross entropy: a yes or no for each class (timm's `--bce-loss`)"),
    "smooth_l1": LossRow(
        "for numbers: quadratic for errors below one standard deviation of the targets, linear above",
    ),
    "l1": LossRow("for numbers: the absolute error"),
    "mse": LossRow("for numbers: the squared error"),
}


class OptimizerRow(NamedTuple):
    """A row of TORCH_OPTIMIZERS: one optimizer."""

    sentence: str  # the description in settings and documentation, without a full stop
    settings: tuple[str, ...]  # the settings in TRAIN.OPTIMIZER that this optimizer uses, besides KWARGS
    usual_rates: tuple[float, float]  # learning rates at 256 images per update: fine-tuning, training from scratch
    defaults: Mapping[str, float] = {}  # our defaults where they differ from torch's


# {value of TRAIN.OPTIMIZER.NAME: its row}: the classes of torch.optim with fused kernels. Other optimizers are timm's.
TORCH_OPTIMIZERS = {
    "AdamW": OptimizerRow("Adam with decoupled weight decay", ("EPS", "BETAS"), (1e-5, 1e-3)),
    "Adam": OptimizerRow("Adam, whose weight decay is part of the gradient", ("EPS", "BETAS"), (1e-5, 1e-3)),
    "SGD": OptimizerRow(
        "without Nesterov, unless `TRAIN.OPTIMIZER.KWARGS.nesterov=true`",
        ("MOMENTUM",),
        (1e-3, 1e-1),
        {"momentum": 0.9},
    ),
}


class SourceRow(NamedTuple):
    """A row of SOURCES: one data set or kind of data set."""

    sentence: str  # the description in settings and documentation, without a full stop
    split: str  # where the validation images come from
    section: str = ""  # anchor of the section in docs/data.md, if it differs from the data set's name
    has_files: bool = True  # False: DATA.DATA_PATH is not used
    in_order: bool = False  # whether images are read in file order


# {value of DATA.DATASET: its row}. A setting of some data sets has Only("DATA.DATASET", "name") in configs/schema.py.
SOURCES = {
    "imagenet2012": SourceRow("ImageNet as lists or class folders", "included"),
    "imagefolder": SourceRow("a folder of images per class", "included, or held out"),
    "csv": SourceRow("a table of paths and classes", "included, or held out"),
    "shards": SourceRow(
        "tar files with many images each, as WebDataset writes them",
        "included, or held out",
        in_order=True,
    ),
    "parquet": SourceRow(
        "parquet files, the usual format of data sets on Hugging Face",
        "included, or held out",
        in_order=True,
    ),
    "caltech101": SourceRow("its unpacked archive", "random", "caltech101-and-caltech256"),
    "caltech256": SourceRow("its unpacked archive", "random", "caltech101-and-caltech256"),
    "cifar10": SourceRow("downloaded if missing", "included", "cifar10-and-cifar100"),
    "cifar100": SourceRow("downloaded if missing", "included", "cifar10-and-cifar100"),
    "digits": SourceRow(
        "1,797 handwritten digits, part of halfstep",
        "fixed, 80/20, or in [folds](#cross-validation)",
        has_files=False,
    ),
    "torchvision/NAME": SourceRow(
        "Flowers102, Food101, SVHN and others; downloaded if missing",
        "included, or random",
        "torchvisionname",
    ),
    "synthetic": SourceRow("random images, to measure speed", "none needed", has_files=False),
}

# Data sets of users' own photos, where EXIF orientation is applied. Published scores on others ignore it.
OF_USERS = ("imagefolder", "csv", "shards", "parquet")


PIXEL_KINDS = ("8bit", "native", "window", "uint8", "uint16", "float32")  # the values of DATA.PIXELS


class MetricRow(NamedTuple):
    """A row of METRICS: one score of an evaluation."""

    title: str  # in lines for people
    unit: str = "%"
    digits: int = 2  # decimal places
    in_units: bool = False  # whether it is in the units of the data, so that lines have significant digits instead
    smaller_is_better: bool = False
    remedy: str = ""  # the end of the error message of tasks without this metric
    note: str = ""  # a sentence in the description of TRAIN.BEST_METRIC, on this row and similar ones


NEEDS_LABELS = "needs images with several labels; set DATA.LABEL_SEPARATOR or DATA.COLUMNS"
NEEDS_NUMBERS = f"measures numbers; set TRAIN.OBJECTIVE=numbers ({page('docs/numbers.md')}), or choose another metric"
LABEL_METRICS_HELP = "micro_f1 and map are for data with several labels per image; map is the default for such data."
NUMBER_METRICS_HELP = "mae (the default), rmse, r2 and spearman are for OBJECTIVE numbers."
# {value of TRAIN.BEST_METRIC in configs/schema.py: its row}
METRICS = {
    "top1": MetricRow("top-1"),
    "top5": MetricRow("top-5"),
    "loss": MetricRow("loss", unit="", digits=4, smaller_is_better=True),
    "macro_recall": MetricRow("macro recall"),
    "macro_f1": MetricRow("macro F1"),
    "micro_f1": MetricRow("micro F1", remedy=NEEDS_LABELS, note=LABEL_METRICS_HELP),
    "map": MetricRow("mAP", remedy=NEEDS_LABELS),
    "mae": MetricRow(
        "MAE", "", 4, in_units=True, smaller_is_better=True, remedy=NEEDS_NUMBERS, note=NUMBER_METRICS_HELP
    ),
    "rmse": MetricRow("RMSE", unit="", digits=4, in_units=True, smaller_is_better=True, remedy=NEEDS_NUMBERS),
    "r2": MetricRow("R2", unit="", digits=4, remedy=NEEDS_NUMBERS),
    "spearman": MetricRow("Spearman", unit="", digits=4, remedy=NEEDS_NUMBERS),
}


class TaskRow(NamedTuple):
    """A row of TASKS: what a model learns from the images."""

    reason: str  # the origin of the values of other settings that follow from the task
    losses: tuple[str, ...]  # values of TRAIN.LOSS, the default first
    metrics: tuple[str, ...]  # values of TRAIN.BEST_METRIC, the default first
    sentence: str = ""  # the description in settings; empty: no value of TRAIN.OBJECTIVE
    activation: str = ""  # the function that turns outputs into probabilities
    problem_type: str = ""  # the name of the task in transformers
    recipe: str = "finetune"  # file in configs/ that fine-tunes a model without BatchNorm
    has_exact_head: bool = False  # outputs are in float32 with -amp, which would lose digits
    metric_of_images: str = "top1"  # key of METRICS: the score that the tables of images give
    has_classes: bool = True  # whether the model predicts classes
    noun: str = "class"  # what an output of the model stands for
    has_several_classes: bool = False  # whether an image can have any number of classes
    # Flags of halfstep predict that need one class per image, and why the model has none.
    not_predicted: tuple[str, ...] = ()
    why_not_predicted: str = ""


# {task: its row}. TRAIN.OBJECTIVE names the task; `labels` are classes of which an image can have any number.
TASKS = {
    "classes": TaskRow(
        "TRAIN.OBJECTIVE",
        ("cross_entropy", "bce"),
        ("top1", "top5", "loss", "macro_recall", "macro_f1"),
        sentence="the labels of the images",
        activation="softmax",
        problem_type="single_label_classification",
    ),
    "labels": TaskRow(
        "several labels per image",
        ("bce",),
        ("map", "micro_f1", "top1", "top5", "loss", "macro_recall", "macro_f1"),
        activation="sigmoid",
        problem_type="multi_label_classification",
        has_several_classes=True,
        not_predicted=("into", "unsure", "unknown"),
        why_not_predicted="with this model an image can have several classes or none",
    ),
    "numbers": TaskRow(
        "TRAIN.OBJECTIVE",
        ("smooth_l1", "l1", "mse"),
        ("mae", "rmse", "r2", "spearman", "loss"),
        sentence="one or more for each image, such as an age (docs/numbers.md)",
        problem_type="regression",
        recipe="finetune_numbers",
        has_exact_head=True,
        metric_of_images="mae",
        noun="number",
        has_classes=False,
        not_predicted=("into", "unsure", "unknown", "top"),
        why_not_predicted="this model predicts numbers, not classes",
    ),
}
OBJECTIVES = {name: row for name, row in TASKS.items() if row.sentence}  # the values of TRAIN.OBJECTIVE
