"""All settings with their types, bounds, defaults and descriptions. docs/settings.md is generated from this file.

Settings that PaddleViT also has keep PaddleViT's names and defaults; the descriptions say where a default differs. This
file is long because it is the only table of all settings.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from configs.tables import LOSSES, METRICS, OBJECTIVES, OF_USERS, PIXEL_KINDS, TASKS, TaskRow, sentences_of
from utils.text import is_url

MAX_SIDE = 8_192  # of images, in pixels
AUTO = "auto"  # a value that lets the program choose at the start
MAX_INT = 2**63 - 1  # the largest integer that torch and numpy support

# Roles of settings. Each section has a role, and a setting may have another one. The role decides whether a resumed run
# may change the setting, whether an evaluation takes its value from the weights, and whether a comparison of runs
# ignores it.
DATA = "data"  # the images and labels
MODEL = "model"  # the architecture and the preprocessing of images, needed for every use of the weights
RECIPE = "recipe"  # how the weights are trained
MACHINE = "machine"  # where and how fast the run computes; does not affect the result
RECORD = "record"  # what the run saves and shows
START = "start"  # a command that applies to one start of the program and is never saved


class Form(NamedTuple):
    """A requirement on a string, a list or a number, in addition to its type and bounds."""

    fits: Callable[[Any], bool]
    requirement: str  # the end of a sentence that starts with `it must be`


def to_seconds(text: str) -> float | None:
    """Convert "3h30m", "90m", "1.5h", "5400" or Slurm's "03:30:00" and "1-12" to seconds, any other text to None."""
    text = text.strip().lower()
    number, units = r"(\d+(?:\.\d+)?)", {"d": 86400, "h": 3600, "m": 60, "s": 1}
    if re.fullmatch(number, text):
        return float(text)
    slurm = r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", r"(\d+)-(\d+)(?::(\d\d))?()"
    forms = "".join(f"(?:{number}{unit})?" for unit in units), *slurm
    match = next(filter(None, (re.fullmatch(form, text) for form in forms)), None)
    if not text or not match:
        return None
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), units.values(), strict=True))


def _is_range(numbers: tuple[float, ...]) -> bool:
    return len(numbers) == 2 and numbers[0] <= numbers[1]


def _is_range_or_empty(numbers: tuple[float, ...]) -> bool:
    return not numbers or _is_range(numbers)


def _is_pair_or_empty(numbers: tuple[float, ...]) -> bool:
    return len(numbers) in (0, 2)


def _is_even(number: int) -> bool:
    return number % 2 == 0


def _are_columns(names: tuple[str, ...]) -> bool:
    return len(names) != 1 and len({*names}) == len(names)


def _is_fold(text: str) -> bool:
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    return match is not None and 2 <= int(match[2]) <= 1000 and int(match[1]) < int(match[2])


def _is_size_schedule(entries: tuple[str, ...]) -> bool:
    if not all(re.fullmatch(r"\s*[0-9]{1,9}:[0-9]{1,4}\s*", each) for each in entries):
        return False
    starts, sides = ([int(each.split(":")[part]) for each in entries] for part in (0, 1))
    return not entries or (starts == sorted({0, *starts}) and 0 < min(sides) and max(sides) <= MAX_SIDE)


def _is_folder_name(text: str) -> bool:
    """Return whether a string can name a folder. The limit of 200 bytes is below the 255 that file systems allow."""
    return len(text.encode(errors="surrogateescape")) <= 200 and not re.search(r"^\.|[/\x00-\x1f\x7f]", text)


def _is_local(text: str) -> bool:
    return not is_url(text)


def _is_duration(text: str) -> bool:
    return 0 < (to_seconds(text) or 0) <= 1e9


def _is_time_to_spend(text: str) -> bool:
    return _is_duration(text) or re.fullmatch(r"([01]?[0-9]|2[0-3]):[0-5][0-9]", text) is not None


MIN_MAX = Form(_is_range, "two numbers, min and max, such as [0.08, 1.0]")
MIN_MAX_OR_NONE = Form(_is_range_or_empty, MIN_MAX.requirement)
TWO_BETAS = Form(_is_pair_or_empty, "two numbers, such as [0.9, 0.999]")
EVEN = Form(_is_even, "None or, because images are mixed in pairs, an even number")
COLUMN_NAMES = Form(
    _are_columns,
    "at least two different columns: one of paths (or images), then one or more of classes",
)
SIZE = Form(bool, "the side of a square such as 224, or HEIGHTxWIDTH such as 224x320, each a whole number")
SIZES = Form(_is_size_schedule, "a list such as 0:128, 60:160 that starts at epoch 0, with increasing epochs")
FOLD_OF = Form(_is_fold, "FOLD/FOLDS, such as 0/5 for the first of five folds, with at most 1000 folds")
FOLDER_NAME = Form(
    _is_folder_name,
    "the name of a folder in SAVE (-output): at most 200 bytes, no /, no control character and no . at its start",
)
LOCAL = Form(
    _is_local,
    "a folder on this machine, not a URL; copy finished runs to a bucket, or mount the bucket",
)
TIME_TO_SPEND = Form(
    _is_time_to_spend,
    "a duration above 0, such as 8h, 90m or 5400 (seconds), or a time of day, such as 07:00",
)
DURATION = Form(_is_duration, "a duration above 0, such as 3h30m, 90m or 5400 (seconds)")


class Shape(NamedTuple):
    """Height and width of the images that the model takes, in pixels."""

    height: int
    width: int

    @property
    def size(self) -> int | str:
        """The value of DATA.IMAGE_SIZE: 224 for a square, otherwise a text such as 224x320."""
        return self.height if self.height == self.width else f"{self.height}x{self.width}"

    def __str__(self) -> str:
        return f"{self.height} x {self.width}"


class Only:
    """The condition under which a setting has an effect: another setting has one of these values.

    `keys`: the full key of the other setting; | separates alternatives. Without values, the other setting must have any
    value except false, 0, None and empty ones.
    """

    def __init__(self, keys: str, *values: Any):
        self.keys, self.values = keys.split("|"), values

    def applies(self, values: Mapping[str, Any]) -> bool:
        """Return whether the condition holds. `values`: {full key: value} of all settings."""
        return any(values[key] in self.values if self.values else bool(values[key]) for key in self.keys)


ONLY_FOR_DISTILLATION = Only("TRAIN.DISTILLATION_TYPE", "soft", "hard")
ONLY_FOR_NUMBERS = Only("TRAIN.OBJECTIVE", *(name for name, row in TASKS.items() if not row.has_classes))
SCALE = ("DATA.TARGET_MEAN", "DATA.TARGET_STD")  # of numbers; measured unless given
ONLY_FOR_MIXING = Only("TRAIN.MIXUP_ALPHA|TRAIN.CUTMIX_ALPHA|TRAIN.CUTMIX_MINMAX")
ONLY_FOR_VIT = Only("MODEL.TYPE", "vit")
ONLY_FOR_NATIVE_PIXELS = Only("DATA.PIXELS", *(name for name in PIXEL_KINDS if name != "8bit"))
ONLY_FOR_END_LR = Only("TRAIN.LR_SCHEDULER.NAME", "cosine", "paddlevit", "wsd")


# One keyword for each property that a setting can have.
def setting(  # noqa: PLR0913
    default: Any,
    *,
    help: str,
    bounds: tuple[float, float] | None = None,
    form: Form | None = None,
    role: str = "",
    may_change: bool = False,
    alike: tuple = (),
    only: Only | None = None,
) -> Any:
    """Declare a setting. Its type is the field's annotation, where Literal lists the allowed values.

    bounds      the smallest and the largest allowed number; absurdly large ones would exhaust the memory
    form        a further requirement on the value
    role        if it is not the section's role
    may_change  whether a resumed run may change the setting, although it affects the result
    alike       values that give the same result, so that a resumed run may switch between them
    only        the condition under which the setting has an effect
    """
    declared = {"help": help, "bounds": bounds, "form": form, "may_change": may_change, "alike": alike, "only": only}
    return field(default=default, metadata=declared | {"role": role})


class Fold(NamedTuple):
    """A fold of a data set for cross-validation."""

    number: int  # counted from 0
    total: int  # number of folds


class Arguments(Mapping):
    """Keyword arguments for another library's constructor: the value of an open section such as MODEL.KWARGS.

    Immutable, hashable and picklable. Its values are None, booleans, numbers, strings and tuples of these.
    """

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({})):
        self._pairs = tuple(sorted(values.items()))

    def __getitem__(self, name: str) -> Any:
        return dict(self._pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._pairs))

    def __len__(self) -> int:
        return len(self._pairs)

    def __hash__(self) -> int:
        return hash(self._pairs)


# fmt: off
# A setting has two lines: its declaration, and its description.


@dataclass(frozen=True)
class Data:
    """The data set and its loading."""

    role: ClassVar[str] = DATA

    DATASET: str = setting("imagenet2012", help=
        "Name of the data set; docs/data.md lists them with their folder layouts.")
    DATA_PATH: str = setting("/dataset/imagenet/", may_change=True, help=
        "Folder of the data set; csv and parquet also take one file, shards a URL (docs/data.md, \"Shards on a "
        "server\").")
    IMAGE_ROOT: str | None = setting(None, form=LOCAL, may_change=True, only=Only("DATA.DATASET", "csv"), help=
        "For csv: the folder of the listed paths, which they must not leave. Not set: the folder of the list.")
    BATCH_SIZE: int | Literal["auto"] = setting(256, bounds=(1, 1_000_000), role=RECIPE, may_change=True, help=
        "Images per process and micro-batch; one update uses BATCH_SIZE x processes x TRAIN.ACCUM_ITER images. auto: "
        "the largest batch that fits the device.")
    BATCH_SIZE_EVAL: int | None = setting(None, bounds=(1, 1_000_000), role=MACHINE, help=
        "Images per process in evaluation; not set: BATCH_SIZE.")
    IMAGE_SIZE: int | str = setting(224, bounds=(1, MAX_SIDE), form=SIZE, role=MODEL, help=
        "Size of the input image, in pixels: the side of a square, or height x width, such as 224x320 (docs/data.md, "
        "\"Images that are not square\").")
    IMAGE_CHANNELS: int = setting(3, bounds=(1, 1_000), role=MODEL, help=
        "3 for colour, 1 for grey; with PIXELS native, the number of channels of each image.")
    PIXELS: Literal[*PIXEL_KINDS] = setting("8bit", role=MODEL, help=
        "8bit: deeper files are scaled to 8 bits. native: images keep the channels and the type of their files, which "
        "is that of the first image (uint8, uint16 or float32). window: native, after the window that each DICOM file "
        "names (docs/pixels.md).")
    RANGE: tuple[float, ...] = setting((), bounds=(-3e38, 3e38), role=MODEL, only=ONLY_FOR_NATIVE_PIXELS, help=
        "Lowest and highest pixel value, for all channels or for each one; values outside become the limits. Empty: "
        "the 0.1 and 99.9 percentiles of the training images, saved with the weights.")
    RGB: tuple[int, ...] = setting((), bounds=(0, 999), role=MODEL, only=ONLY_FOR_NATIVE_PIXELS, help=
        "The channels, from 0, that are red, green and blue: they start from the RGB weights of a pretrained model, "
        "and pictures show them. Empty: pictures show the first three, or the only one.")
    CROP_PCT: float = setting(0.875, bounds=(0.01, 2.0), role=MODEL, help=
        "Evaluation resizes images to IMAGE_SIZE / CROP_PCT and crops the centre; above 1, the image gets a black "
        "border.")
    CROP_MODE: Literal["center", "squash", "border"] = setting("center", role=MODEL, help=
        "The side that evaluation resizes to IMAGE_SIZE / CROP_PCT: center, the short side; squash, both; border, the "
        "long side, with a border in the mean colour.")
    CROP_SCALE: tuple[float, ...] = setting((0.08, 1.0), bounds=(0.0001, 1.0), form=MIN_MAX, role=RECIPE, help=
        "Area of a random training crop as a fraction of the image: min, max.")
    CROP_RATIO: tuple[float, ...] = setting((3 / 4, 4 / 3), bounds=(0.01, 100.0), form=MIN_MAX, role=RECIPE, help=
        "Aspect ratio (width / height) of a random training crop: min, max. Not set: the default x that of IMAGE_SIZE.")
    HFLIP: float = setting(0.5, bounds=(0.0, 1.0), role=RECIPE, help=
        "Probability of a horizontal flip of a training image.")
    VFLIP: float = setting(0.0, bounds=(0.0, 1.0), role=RECIPE, help=
        "Probability of a vertical flip of a training image.")
    TRAIN_CROP: Literal["rrc", "simple"] = setting("rrc", role=RECIPE, help=
        "Crop of training images: rrc, a random part resized to IMAGE_SIZE; simple, DeiT III's random part of the "
        "resized image.")
    INTERPOLATION: Literal["nearest", "bilinear", "bicubic", "lanczos"] = setting("bicubic", role=MODEL, help=
        "Interpolation for resizing images.")
    TRAIN_INTERPOLATION: Literal["random", "nearest", "bilinear", "bicubic", "lanczos"] | None = setting(
        None, role=RECIPE, help=
        "Interpolation of training images, also in AUTO_AUGMENT's rotations and shifts; random: bilinear or bicubic; "
        "not set: INTERPOLATION.")
    IMAGENET_MEAN: tuple[float, ...] = setting((0.5, 0.5, 0.5), bounds=(-1_000.0, 1_000.0), role=MODEL, help=
        "Mean of each channel, for pixel values in [0, 1]; subtracted from every image.")
    IMAGENET_STD: tuple[float, ...] = setting((0.5, 0.5, 0.5), bounds=(1e-6, 1_000.0), role=MODEL, help=
        "Standard deviation of each channel, for pixel values in [0, 1]; divides every image.")
    NUM_WORKERS: int | None = setting(None, bounds=(0, 1_000), role=MACHINE, help=
        "Loader threads or processes per training process; not set: on GPUs the process's share of the cores, minus "
        "one if the share is 4 or more; on CPUs at most 8, and 0 for data sets in memory. (PaddleViT: 1.)")
    WORKERS: Literal["auto", "threads", "processes"] = setting("auto", role=MACHINE, help=
        "Threads share memory and cost less; processes are not limited by Python's interpreter lock. auto: on GPUs, "
        "processes for 5 or more workers (3 or more with TRAIN.AUTO_AUGMENT or COLOR_JITTER, any number for data sets "
        "in memory) if the shared memory suffices; else threads.")
    DROP_LAST: bool = setting(True, role=RECIPE, help=
        "Drop an epoch's last images if they do not fill a whole update (unless no update would be left).")
    SAMPLER: Literal["shuffle", "balanced"] = setting("shuffle", role=RECIPE, help=
        "Images of an epoch: shuffle, each image once; balanced, as many images in total, but equally many of each "
        "class.")
    VAL_FRACTION: float = setting(0.1, bounds=(0.0, 0.9), only=Only("DATA.FOLD", None), help=
        "Fraction of the images held out for validation, if the data has no split. 0: train on all images and measure "
        "nothing.")
    FOLD: str | None = setting(None, form=FOLD_OF, help=
        "Cross-validation, if the data has no split: 0/5 divides the images into five folds with equal shares of each "
        "class and holds out the first (4/5: the last); VAL_FRACTION then has no effect.")
    FOLDS: int | None = setting(None, bounds=(2, 1_000), help=
        "Train on all images of data without a split, and measure this by further runs: 5 trains five more, each "
        "without a fifth of the images, which it then predicts. VAL_FRACTION then has no effect.")
    GROUP_BY: str | None = setting(None, only=Only("DATA.DATASET", "csv"), help=
        "For csv: a column that groups the images, for example by person or scene. A group stays in one part, and "
        "intervals count groups.")
    CLASSES: str | None = setting(None, may_change=True, help=
        "Text file with one class name per line, which numbers the classes from 0. Not set: the order of their names.")
    LABEL_SEPARATOR: str | None = setting(None, help=
        "For csv with several labels per image: their separator, such as | in `cat|dog`; an empty cell means no "
        "labels. TRAIN.LOSS then defaults to bce, and TRAIN.BEST_METRIC to map.")
    COLUMNS: tuple[str, ...] = setting(
        (), form=COLUMN_NAMES, only=Only("DATA.DATASET", "csv", "parquet", "shards"), help=
        "For csv and parquet: the columns of paths (parquet: of images) and of classes; empty: image_path and target "
        "(parquet: image and label). For csv with several labels per image: the column of paths and one column of 1 "
        "and 0 (or true and false) per class; * means all other columns. With TRAIN.OBJECTIVE numbers, the other "
        "columns (shards: keys of the .json files) have the numbers.")
    TARGET_MEAN: tuple[float, ...] = setting((), bounds=(-1e30, 1e30), only=ONLY_FOR_NUMBERS, help=
        "With TRAIN.OBJECTIVE numbers: the mean that training subtracts from each number. Empty: that of the training "
        "images, saved with the weights.")
    TARGET_STD: tuple[float, ...] = setting((), bounds=(1e-30, 1e30), only=ONLY_FOR_NUMBERS, help=
        "With TRAIN.OBJECTIVE numbers: the standard deviation by which training divides each number. Empty: that of "
        "the training images, saved with the weights.")
    EXIF: Literal["apply", "ignore"] | None = setting(None, help=
        "apply: rotate photos as their EXIF orientation says; ignore: leave them as stored. Not set: apply for "
        f"{', '.join(OF_USERS)}; ignore for the data sets with published results.")
    MAX_PIXELS: int = setting(200_000_000, bounds=(1, 2**40), may_change=True, help=
        "Maximum number of pixels of an image. Larger images count as unreadable.")
    MAX_BAD_FRACTION: float = setting(0.01, bounds=(0.0, 1.0), may_change=True, help=
        "Maximum fraction of unreadable images, which are replaced and reported; with more, the run stops. Up to three "
        "are always tolerated, unless MAX_BAD_FRACTION is 0.")
    CACHE: int | Literal["none", "disk"] = setting(
        "none", bounds=(1, 100_000), role=RECIPE, alike=("none", "disk"), help=
        "Cache decoded images on disk, also for later runs. disk: in full size; a number: larger images are reduced to "
        "this short side in pixels.")
    CACHE_PATH: str | None = setting(None, form=LOCAL, role=MACHINE, help=
        "Folder for the disk cache, for shards from a server, and for indexes of read-only data; not set: `cache` in "
        "SAVE.")
    SHUFFLE_BUFFER: int = setting(
        8192, bounds=(1, 2**31), role=RECIPE, only=Only("DATA.DATASET", "shards", "parquet"), help=
        "Size of the shuffle buffer, in samples. Shards (and row groups of parquet) are read in random order, and each "
        "sample then moves by fewer places than SHUFFLE_BUFFER.")
    REMOTE_CACHE_GB: float | None = setting(None, bounds=(0.001, 1e9), role=MACHINE, help=
        "For shards on a server: maximum size of their cache in CACHE_PATH, in 10^9 bytes; the least recently used "
        "tars are deleted. Not set: all shards, but at most 80% of the disk's free space.")
    SYNTHETIC_SIZE: int = setting(
        1280, bounds=(1, 100_000_000), only=Only("DATA.DATASET", "synthetic"), help=
        "Images per epoch of the data set synthetic.")

    @property
    def fold(self) -> Fold | None:
        """The fold that cross-validation holds out, if any."""
        return Fold(*map(int, self.FOLD.split("/"))) if self.FOLD else None

    @property
    def shape(self) -> Shape:
        """Height and width of the images that the model takes."""
        height, _, width = str(self.IMAGE_SIZE).partition("x")
        return Shape(int(height), int(width or height))

    @property
    def is_native(self) -> bool:
        """Return whether images keep the values of their files."""
        return self.PIXELS != "8bit"

    @property
    def cache_side(self) -> int | None:
        """The short side to which the cache reduces larger images, or None to keep their size."""
        return None if isinstance(self.CACHE, str) else self.CACHE

    @property
    def has_label_columns(self) -> bool:
        """Return whether the csv file has one column of 0 and 1 for each class."""
        return len(self.COLUMNS) > 2 or self.COLUMNS[1:] == ("*",)

    @property
    def image_root(self) -> str:
        """Return IMAGE_ROOT, or "" if it is not set or has no effect."""
        return self.IMAGE_ROOT or "" if self.DATASET == "csv" else ""

    @property
    def has_several_labels(self) -> bool:
        """Return whether an image can have any number of labels."""
        return bool(self.LABEL_SEPARATOR) or self.has_label_columns

    @property
    def train_interpolation(self) -> str:
        """The name of the interpolation of training images, or random."""
        return self.TRAIN_INTERPOLATION or self.INTERPOLATION


# Settings that define a model of TYPE vit. The name of a timm model implies their values.
VIT_FIELDS = ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS", "POS_EMBED")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which are trained instead of the weights of the adapted layers. They need the package peft."""

    role: ClassVar[str] = RECIPE

    RANK: int = setting(0, bounds=(0, 100_000), help=
        "Rank of the adapters; 0: no adapters, all weights are trained.")
    ALPHA: float = setting(16.0, bounds=(1e-6, 1e6), only=Only("MODEL.LORA.RANK"), help=
        "The output of an adapter is multiplied by ALPHA / RANK.")
    TARGETS: tuple[str, ...] = setting(
        ("*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2"), only=Only("MODEL.LORA.RANK"), help=
        "Patterns of the linear layers that get an adapter; all-linear: all but the classifier, which is trained in "
        "full.")


@dataclass(frozen=True)
class Model:
    """The model, and the weights that it starts from."""

    role: ClassVar[str] = MODEL

    TYPE: Literal["vit", "timm"] = setting("vit", help=
        "vit: a Vision Transformer from the settings below; timm: the timm model NAME.")
    NAME: str = setting("vit", help=
        "With TYPE timm, any timm model; with TYPE vit, a label that is saved with the weights.")
    NUM_CLASSES: int | None = setting(None, bounds=(1, 1_000_000), role=DATA, help=
        "Outputs of the classifier; not set: the number of classes of the data. (PaddleViT: 1000.)")
    PATCH_SIZE: int = setting(16, bounds=(1, 8_192), only=ONLY_FOR_VIT, help=
        "Side of a patch in pixels.")
    EMBED_DIM: int = setting(768, bounds=(1, 100_000), only=ONLY_FOR_VIT, help=
        "Width of the model: the number of features of a token.")
    DEPTH: int = setting(12, bounds=(1, 1_000), only=ONLY_FOR_VIT, help=
        "Number of transformer blocks.")
    NUM_HEADS: int = setting(12, bounds=(1, 1_000), only=ONLY_FOR_VIT, help=
        "Attention heads in each block.")
    MLP_RATIO: float = setting(4.0, bounds=(0.01, 100.0), only=ONLY_FOR_VIT, help=
        "Hidden width of the MLP divided by EMBED_DIM.")
    QKV_BIAS: bool = setting(True, only=ONLY_FOR_VIT, help=
        "Use biases for queries, keys and values.")
    POS_EMBED: Literal["learn", "sincos2d", "none"] = setting("learn", only=ONLY_FOR_VIT, help=
        "Position embedding: learn, trained; sincos2d, fixed sines and cosines of row and column, as in big_vision's "
        "plain ViT; none.")
    DROPOUT: float | None = setting(None, bounds=(0.0, 0.99), role=RECIPE, help=
        "Dropout rate after position embedding, attention projection and MLP; for a timm model, before the classifier. "
        "Not set (also for ATTENTION_DROPOUT and DROPPATH): the timm model's default, or 0 with TYPE vit.")
    ATTENTION_DROPOUT: float | None = setting(None, bounds=(0.0, 0.99), role=RECIPE, help=
        "Dropout rate of attention weights.")
    DROPPATH: float | None = setting(None, bounds=(0.0, 0.99), role=RECIPE, help=
        "Drop path rate of the last block; the rate rises linearly from 0 at the first block.")
    RESUME: str | None = setting(None, role=START, help=
        "Checkpoint or run (its folder, or latest for the newest) to resume; auto: the newest valid checkpoint of run "
        "NAME or, without NAME, of the newest run in SAVE that has no name.")
    PRETRAINED: str | None = setting(None, role=RECIPE, may_change=True, help=
        "Weights to start from: a file (.pth, .safetensors, .npz, .pdparams), a run (its folder, or latest), a folder "
        "of the Hugging Face hub, or the name of a timm model, which is downloaded (except tf_efficientnet_lite0); "
        "choose, or choose:WORD,WORD: the images choose one (a comma in a name is written twice).")
    NEW_CLASSIFIER: Literal["random", "zeros", "linear"] = setting(
        "random", role=RECIPE, only=Only("MODEL.PRETRAINED"), help=
        "How the last layer starts if PRETRAINED has none for these classes or numbers: random; zeros, so that all "
        "classes are equally probable and each number is its mean; linear, from a logistic (numbers: ridge) regression "
        "on the features of at most 20,000 training images. With zeros, this regression is only measured, and is "
        "best.pth if no epoch is better.")
    FROZEN_STATISTICS: bool = setting(False, role=RECIPE, only=Only("MODEL.PRETRAINED"), help=
        "BatchNorm keeps the statistics of PRETRAINED and uses them in training too.")
    FREEZE: tuple[str, ...] = setting((), role=RECIPE, help=
        "Patterns of parameters or modules that are not trained (blocks.0.*); a leading ! excludes matches from "
        "freezing; `classifier` matches the classifier of any model.")
    KWARGS: Arguments = setting(Arguments(), help=
        "Further arguments of timm's constructor, such as global_pool: avg; arguments that have their own setting are "
        "refused.")
    LORA: Lora = Lora()


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its arguments."""

    role: ClassVar[str] = RECIPE

    NAME: str = setting("AdamW", help=
        "AdamW, Adam and SGD (without Nesterov) are torch's, with fused kernels; all names in "
        "timm.optim.list_optimizers() work too, such as lamb or lion. Case does not matter.")
    EPS: float | None = setting(None, bounds=(0.0, 1_000.0), help=
        "Adam's epsilon; not set: the optimizer's default (AdamW and Adam 1e-8).")
    BETAS: tuple[float, ...] = setting((), bounds=(0.0, 0.999999), form=TWO_BETAS, help=
        "Adam's betas; not set: the optimizer's default (AdamW and Adam [0.9, 0.999]).")
    MOMENTUM: float | None = setting(None, bounds=(0.0, 0.999999), help=
        "SGD's momentum; not set: the optimizer's default (SGD 0.9).")
    KWARGS: Arguments = setting(Arguments(), help=
        "Further arguments of the constructor, such as nesterov: true for SGD; arguments that have their own setting "
        "are refused.")


@dataclass(frozen=True)
class LRScheduler:
    """The schedule of the learning rate after the warm-up."""

    role: ClassVar[str] = RECIPE

    NAME: Literal["cosine", "paddlevit", "constant", "step", "wsd"] = setting("cosine", help=
        "paddlevit: PaddleViT's cosine, updated once per epoch; wsd: constant, then decays in the last DECAY_FRACTION "
        "of the run.")
    PER_EPOCH: bool = setting(False, only=Only("TRAIN.LR_SCHEDULER.NAME", "cosine", "constant", "step", "wsd"), help=
        "Change the rate once per epoch, as timm does by default, instead of at every update.")
    AFTER_WARMUP: bool = setting(True, only=Only("TRAIN.LR_SCHEDULER.NAME", "cosine", "paddlevit", "step"), help=
        "For cosine and step: start the schedule after the warm-up; false (the default for step): at epoch 0, so that "
        "the warm-up replaces its first epochs, as timm does by default.")
    COOLDOWN_EPOCHS: int = setting(0, bounds=(0, 1_000_000), only=ONLY_FOR_END_LR, help=
        "For cosine and wsd: number of epochs at END_LR at the end of the run; NUM_EPOCHS includes them.")
    DECAY_FRACTION: float = setting(0.2, bounds=(0.0, 1.0), only=Only("TRAIN.LR_SCHEDULER.NAME", "wsd"), help=
        "For wsd: fraction of NUM_EPOCHS over which the rate falls to END_LR.")
    MILESTONES: tuple[int, ...] = setting((), bounds=(0, 1_000_000), only=Only("TRAIN.LR_SCHEDULER.NAME", "step"), help=
        "For step: epochs after which the rate is multiplied by DECAY_RATE; not set: after every DECAY_EPOCHS epochs.")
    DECAY_EPOCHS: float = setting(30.0, bounds=(0.001, 1_000_000), only=Only("TRAIN.LR_SCHEDULER.NAME", "step"), help=
        "For step: epochs between two decays.")
    DECAY_RATE: float = setting(0.1, bounds=(0.0, 1.0), only=Only("TRAIN.LR_SCHEDULER.NAME", "step"), help=
        "For step: factor by which each decay multiplies the rate.")


@dataclass(frozen=True)
class Train:
    """The training recipe."""

    role: ClassVar[str] = RECIPE

    NUM_EPOCHS: int = setting(300, bounds=(1, 1_000_000), may_change=True, help=
        "Number of passes over the training images.")
    LAST_EPOCH: int = setting(0, bounds=(0, 1_000_000), role=START, help=
        "For weights from another system: the last finished epoch (1-based).")
    BUDGET: str | None = setting(None, form=TIME_TO_SPEND, may_change=True, help=
        "Total time of the run over all its starts (8h, 90m), or the time of day at which it ends (07:00). After its "
        "first epoch or 200 updates, the run chooses its number of updates (at most NUM_EPOCHS) so that it ends on "
        "time at END_LR.")
    SIZE_SCHEDULE: tuple[str, ...] = setting((), form=SIZES, help=
        "Sizes of training images as EPOCHS:PIXELS, such as 0:128, 60:160, 80:224; each applies once that many epochs "
        "are finished. Evaluation always uses DATA.IMAGE_SIZE; with an empty list, training does too.")
    WARMUP_EPOCHS: float = setting(32, bounds=(0.0, 1e6), help=
        "Epochs over which the learning rate rises from WARMUP_START_LR to BASE_LR.")
    BASE_LR: float = setting(3e-3, bounds=(0.0, 1_000.0), help=
        "Peak learning rate.")
    WARMUP_START_LR: float = setting(1e-6, bounds=(0.0, 1_000.0), help=
        "Learning rate of the first update of the warm-up.")
    END_LR: float = setting(0.0, bounds=(0.0, 1_000.0), only=ONLY_FOR_END_LR, help=
        "Learning rate at the end of the schedule.")
    LINEAR_SCALED_LR: int | None = setting(None, bounds=(1, 1_000_000_000), help=
        "Images per update that BASE_LR, WARMUP_START_LR and END_LR were tuned for; they are multiplied by global "
        "batch / LINEAR_SCALED_LR (see LR_SCALING). Not set: no scaling.")
    LR_SCALING: Literal["linear", "sqrt"] = setting("linear", only=Only("TRAIN.LINEAR_SCALED_LR"), help=
        "Scaling with LINEAR_SCALED_LR: linear, by global batch / LINEAR_SCALED_LR; sqrt, by its square root, as timm "
        "does for Adam.")
    LAYER_DECAY: float | None = setting(None, bounds=(0.0001, 1.0), help=
        "From the classifier down, each layer's rate is this factor times the rate of the layer above it, like timm's "
        "--layer-decay; not set: one rate for all layers.")
    WEIGHT_DECAY: float = setting(0.3, bounds=(0.0, 1_000.0), help=
        "Weight decay of matrices; biases, norms, class token and position embedding are not decayed. (PaddleViT "
        "decays all.)")
    GRAD_CLIP: float | None = setting(None, bounds=(0.0, 1e9), help=
        "Limit for the gradients (see CLIP_MODE); not set: no clipping.")
    CLIP_MODE: Literal["norm", "value", "agc"] = setting("norm", only=Only("TRAIN.GRAD_CLIP"), help=
        "What GRAD_CLIP limits: norm, the norm of all gradients; value, each element; agc, the norm of a unit's "
        "gradient relative to that of its weights (adaptive gradient clipping, except for the classifier).")
    EARLY_STOP: int | None = setting(None, bounds=(1, 1_000_000), may_change=True, help=
        "End the run after this many consecutive evaluations without a higher BEST_METRIC; not set: never.")
    ACCUM_ITER: int = setting(1, bounds=(1, 1_000_000), may_change=True, help=
        "Micro-batches per update.")
    GRAD_CHECKPOINTING: bool = setting(False, role=MACHINE, help=
        "Activation checkpointing: a transformer block saves only its input and recomputes the rest in the backward "
        "pass, which costs one more forward pass. (Other timm models: timm's `--grad-checkpointing`.)")
    SMOOTHING: float = setting(0.0, bounds=(0.0, 0.99), help=
        "Label smoothing.")
    LOSS: Literal[*LOSSES] = setting("cross_entropy", help=
        f"Training loss: {sentences_of(LOSSES)}.")
    BCE_TARGET_THRESH: float | None = setting(None, bounds=(0.0, 1.0), only=Only("TRAIN.LOSS", "bce"), help=
        "For bce: targets above this value, after smoothing and mixing, become 1, the others 0; not set: they do not "
        "change.")
    CLASS_WEIGHTS: str | None = setting(None, help=
        "Weights of the classes in the training loss: auto, images / (classes x images of the class); or a CSV file "
        "with a class and its weight in each line; not set: 1.")
    OBJECTIVE: Literal[*sorted(OBJECTIVES)] = setting("classes", help=
        f"What the model learns: {sentences_of(OBJECTIVES)}.")
    DISTILLATION_TYPE: Literal["none", "soft", "hard"] = setting("none", help=
        "Also learn from a teacher: soft, from its class probabilities; hard, from the class that it predicts.")
    DISTILLATION_ALPHA: float = setting(
        0.5, bounds=(0.0, 1.0), only=ONLY_FOR_DISTILLATION, help=
        "Weight of the teacher in the loss; the weight of the labels is 1 - DISTILLATION_ALPHA.")
    DISTILLATION_TAU: float = setting(1.0, bounds=(0.01, 1_000.0), only=Only("TRAIN.DISTILLATION_TYPE", "soft"), help=
        "For soft: temperature by which the logits of teacher and student are divided.")
    TEACHER_MODEL: str | None = setting("regnety_160.deit_in1k", only=ONLY_FOR_DISTILLATION, help=
        "The teacher: a timm model, or the checkpoint of a run, with the classes of the data. (PaddleViT: a weights "
        "file of RegNetY-16GF.)")
    TEACHER_PRETRAINED: str | None = setting(None, only=ONLY_FOR_DISTILLATION, help=
        "Weights of a timm teacher: a file or a timm model name; not set: timm's for TEACHER_MODEL.")
    COLOR_JITTER: float = setting(0.0, bounds=(0.0, 100.0), help=
        "Brightness, contrast and saturation (with PIXELS native only the first two) are each multiplied by a random "
        "factor in 1 +- COLOR_JITTER; no effect with AUTO_AUGMENT, except 3a. (PaddleViT's DeiT: 0.4.)")
    AUTO_AUGMENT: str | None = setting(None, help=
        "Augmentation policy: original (PaddleViT: true), v0, rand-m9-mstd0.5-inc1, augmix-m3-w3, ta_wide or 3a "
        "(docs/augmentation.md).")
    MIXUP_ALPHA: float = setting(0.0, bounds=(0.0, 1_000.0), help=
        "Mixup: blend pairs of images, with a weight from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 0.8.)")
    CUTMIX_ALPHA: float = setting(0.0, bounds=(0.0, 1_000.0), help=
        "Cutmix: paste a box from the paired image, with an area from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: "
        "1.0.)")
    CUTMIX_MINMAX: tuple[float, ...] = setting((), bounds=(0.0, 1.0), form=MIN_MAX_OR_NONE, help=
        "Cutmix with boxes whose sides are random fractions (min, max) of the image's; CUTMIX_ALPHA then has no "
        "effect.")
    MIXUP_PROB: float = setting(1.0, bounds=(0.0, 1.0), only=ONLY_FOR_MIXING, help=
        "Probability that a batch, pair or image (see MIXUP_MODE) is mixed.")
    MIXUP_SWITCH_PROB: float = setting(0.5, bounds=(0.0, 1.0), only=ONLY_FOR_MIXING, help=
        "Probability of cutmix instead of mixup if both are on.")
    MIXUP_MODE: Literal["batch", "pair", "elem"] = setting("batch", only=ONLY_FOR_MIXING, help=
        "Images that share a random draw of kind, weight and box: batch, MIXUP_GROUP images; pair, two; elem, one.")
    MIXUP_GROUP: int | None = setting(
        128, bounds=(2, 1_000_000), form=EVEN, only=Only("TRAIN.MIXUP_MODE", "batch"), help=
        "For MIXUP_MODE batch: even number of consecutive images of an update that share a draw, on whichever process. "
        "Not set: all images of an update.")
    MIXUP_OFF_EPOCH: int = setting(0, bounds=(0, 1_000_000), only=ONLY_FOR_MIXING, help=
        "Number of epochs after which mixing stops; 0: never.")
    RANDOM_ERASE_PROB: float = setting(0.0, bounds=(0.0, 1.0), help=
        "Probability of random erasing of a training image. (PaddleViT's DeiT: 0.25.)")
    RANDOM_ERASE_MODE: Literal["pixel", "rand", "const"] = setting("pixel", only=Only("TRAIN.RANDOM_ERASE_PROB"), help=
        "Fill of erased boxes: pixel, noise; rand, one random colour; const, the mean colour.")
    RANDOM_ERASE_COUNT: int = setting(1, bounds=(1, 100), only=Only("TRAIN.RANDOM_ERASE_PROB"), help=
        "Maximum number of boxes per image, which share the erased area.")
    REPEATED_AUG: int = setting(1, bounds=(1, 1_000), help=
        "Differently augmented copies of each image in an update; an epoch then uses 1 / REPEATED_AUG of the images. "
        "(DeiT: 3.)")
    MODEL_EMA: bool = setting(False, help=
        "Keep an exponential moving average (EMA) of the weights, and evaluate both.")
    MODEL_EMA_DECAY: float = setting(0.99996, bounds=(0.0, 1.0), only=Only("TRAIN.MODEL_EMA"), help=
        "Decay of the EMA per update.")
    MODEL_EMA_WARMUP: bool | Literal["timm"] = setting(True, only=Only("TRAIN.MODEL_EMA"), help=
        "Start with a smaller decay, so that the EMA also follows the weights in short runs. true: update u (from 1) "
        "has the decay (u - 1) / (u + 8); timm: 1 - u ** (-2/3), as timm's train.py; false: MODEL_EMA_DECAY from the "
        "second update on.")
    BEST_METRIC: Literal[*METRICS] = setting(
        "top1", may_change=True, help=
        "The validation metric that decides which epoch is the highest, and best.pth during the run; for equal "
        f"values, the smaller loss wins. {' '.join(filter(None, (row.note for row in METRICS.values())))}")
    BEST_EPOCH: Literal["last", "highest"] = setting("last", may_change=True, help=
        "The weights in best.pth at the end of the run. last: those after the last epoch (with MODEL_EMA, their "
        "average), unless another epoch is better by more than the noise of the validation images; highest: those with "
        "the best BEST_METRIC.")
    OPTIMIZER: Optimizer = Optimizer()
    LR_SCHEDULER: LRScheduler = LRScheduler()

    @property
    def augments(self) -> bool:
        """Return whether a policy or colour jitter changes training images."""
        return bool(self.AUTO_AUGMENT or self.COLOR_JITTER)

    @property
    def mixes(self) -> bool:
        """Return whether mixup or cutmix is on."""
        return bool(self.MIXUP_ALPHA or self.cuts)

    @property
    def cuts(self) -> bool:
        """Return whether cutmix is on."""
        return bool(self.CUTMIX_ALPHA or self.CUTMIX_MINMAX)


@dataclass(frozen=True)
class Precision:
    """Mixed precision and loss scaling; AMP switches mixed precision on."""

    role: ClassVar[str] = RECIPE

    DTYPE: Literal["float16", "bfloat16", "auto"] | None = setting(None, only=Only("AMP"), help=
        "Type of AMP; auto: bfloat16 if the device supports it, else float16; not set: float16 on CUDA, bfloat16 "
        "elsewhere.")
    MODE: Literal["autocast", "naive", "float8"] = setting("autocast", only=Only("AMP"), help=
        "autocast: half precision where that is safe, float32 weights; naive: all in half precision, with float32 "
        "master weights; float8: autocast in bfloat16, with the large Linear layers in float8 (torchao, on CUDA "
        "devices that support it).")
    RESIDUAL: Literal["auto", "bfloat16", "float32", "half"] = setting(AUTO, only=Only("AMP"), help=
        "Type of the residual stream between transformer blocks under autocast. float32: the most precise; half: the "
        "type of AMP, faster with COMPILE; bfloat16: like half, but float32 if AMP uses float16 or the device is a "
        "CPU; auto: bfloat16 with COMPILE, otherwise float32.")
    REDUCE: Literal["float32", "half"] = setting("float32", only=Only("AMP"), help=
        "Type of the gradient all-reduce; half, the type of autocast, halves the traffic.")
    MATMUL: Literal["ieee", "tf32"] = setting("ieee", help=
        "float32 matrix multiplication on CUDA: ieee, or tf32, which is faster and less precise.")
    INIT_LOSS_SCALING: float = setting(65536.0, bounds=(1.0, 1e38), help=
        "Initial loss scale, for float16.")
    INCR_EVERY_N_STEPS: int = setting(2000, bounds=(1, 1_000_000_000), help=
        "Consecutive updates without overflow after which the loss scale grows.")
    INCR_RATIO: float = setting(2.0, bounds=(1.0001, 1e6), help=
        "Factor by which the loss scale grows.")
    DECR_EVERY_N_NAN_OR_INF: int = setting(1, bounds=(1, 1_000_000_000), help=
        "Consecutive updates with an overflow after which the loss scale shrinks. (Paddle Fleet: 2.)")
    DECR_RATIO: float = setting(0.5, bounds=(0.0001, 0.9999), help=
        "Factor by which the loss scale shrinks.")
    USE_DYNAMIC_LOSS_SCALING: bool = setting(True, help=
        "Adapt the loss scale during training; false: it stays at INIT_LOSS_SCALING.")
    MIN_LOSS_SCALING: float = setting(1.0, bounds=(1e-6, 1e38), help=
        "Minimum loss scale.")
    MAX_LOSS_SCALING: float | None = setting(None, bounds=(1e-6, 1e38), help=
        "Maximum loss scale; not set: no limit.")
    MAX_CONSECUTIVE_SKIPS: int = setting(50, bounds=(1, 1_000_000_000), help=
        "After this many consecutive updates with non-finite gradients, the run rolls back, or stops with exit code 3.")
    CUSTOM_BLACK_LIST: tuple[str, ...] = setting((), only=Only("AMP"), help=
        "Module paths (blocks.7.*), classes (LayerNorm) and operators (softmax) that AMP keeps in float32.")
    CUSTOM_WHITE_LIST: tuple[str, ...] = setting((), only=Only("AMP"), help=
        "Module paths, classes and operators that AMP computes in half precision although autocast would not.")


@dataclass(frozen=True)
class Dist:
    """Distributed training."""

    role: ClassVar[str] = MACHINE

    URL: str | None = setting(None, role=START, help=
        "Address of process 0, as tcp://HOST:PORT; not set: from the launcher.")
    WORLD_SIZE: int | None = setting(None, bounds=(1, 100_000), role=START, help=
        "Number of processes on all machines; not set: from the launcher.")
    RANK: int | None = setting(None, bounds=(0, 99_999), role=START, help=
        "Rank of this process, from 0; not set: from the launcher.")
    TIMEOUT: float = setting(1800.0, bounds=(1.0, 1e7), help=
        "Seconds to wait for a process that does not respond; then the run ends and names it.")
    STRATEGY: Literal["ddp", "fsdp2"] = setting("ddp", help=
        "ddp: each process has the whole model; fsdp2: weights, gradients, optimizer and EMA are sharded, and a "
        "checkpoint has one file per process.")


@dataclass(frozen=True)
class Run:
    """Limits of the run."""

    role: ClassVar[str] = START

    MAX_TIME: str | None = setting(None, form=DURATION, help=
        "Time limit since the program's start, such as 3h30m, 90m, 5400 (seconds) or Slurm's 1-12:00:00, before which "
        "the run saves and ends; not set: none.")


@dataclass(frozen=True)
class Resume:
    """Permissions of a resumed run."""

    role: ClassVar[str] = START

    ALLOW_CHANGED: tuple[str, ...] = setting((), help=
        "Settings whose values may differ from the checkpoint's; also GLOBAL_BATCH, NUM_IMAGES, IMAGES, CLASS_NAMES, "
        "SPLIT and AUGMENTATION.")

    def allows(self, name: str) -> bool:
        """Return whether a resumed run may change this setting, or this property of the run such as GLOBAL_BATCH."""
        return name in self.ALLOW_CHANGED


@dataclass(frozen=True)
class Config:
    """All settings of a run, such as `config.TRAIN.BASE_LR`. They cannot be changed."""

    role: ClassVar[str] = RECIPE

    # The tables of docs/settings.md have this order. All settings with the role START are in the last one.
    DATA: Data = Data()
    EVAL: bool = setting(False, role=START, help=
        "Evaluate the weights without training.")
    MODEL: Model = Model()
    NAME: str = setting("", form=FOLDER_NAME, role=START, help=
        "Name of the run's folder in SAVE, without a date. The folder must not exist yet, except with -resume auto, "
        "which continues its run.")
    CHECK: bool = setting(False, role=START, help=
        "Check data, weights, memory and disk, print the findings and exit.")
    CHECK_IMAGES: int | None = setting(None, bounds=(1, 1_000_000_000), role=START, help=
        "With CHECK, read at most this many images of each set, spread evenly; not set: all.")
    PROFILE: int | None = setting(None, bounds=(1, 10_000), role=START, help=
        "Updates to trace shortly after the start, into trace.json.gz for ui.perfetto.dev; not set: none.")
    RUN: Run = Run()
    RESUME: Resume = Resume()
    TRAIN: Train = Train()
    PRECISION: Precision = Precision()
    NGPUS: int | None = setting(None, bounds=(1, 1_000), role=START, help=
        "Processes to start without a launcher; not set: one, or with main_multi_gpu one per visible device.")
    DIST: Dist = Dist()
    AMP: bool | Literal["auto"] = setting(False, help=
        "Mixed precision: autocast and a GradScaler, in training and evaluation. auto: on if it makes this model's "
        "updates faster, which a run measures for a few seconds at its start.")
    SEED: int = setting(0, bounds=(0, MAX_INT), help=
        "Seed of the initial weights, the order of the images, augmentation and dropout.")
    SAVE: str = setting("./output", form=LOCAL, role=RECORD, help=
        "Folder in which every run creates its own folder.")
    SAVE_FREQ: int = setting(10, bounds=(1, 1_000_000), role=RECORD, help=
        "Epochs between two numbered checkpoints; last.pth is written after every epoch.")
    SAVE_STEPS: int | None = setting(None, bounds=(1, 1_000_000_000), role=RECORD, help=
        "Updates between two saves within an epoch; not set: no saves within an epoch.")
    KEEP_CHECKPOINTS: int = setting(3, bounds=(0, 1_000_000), role=RECORD, help=
        "Numbered checkpoints to keep besides last.pth, previous.pth and best.pth; 0: none are written.")
    REPORT_FREQ: int = setting(20, bounds=(1, 1_000_000_000), role=RECORD, help=
        "Updates between two log lines.")
    VALIDATE_FREQ: int = setting(1, bounds=(1, 1_000_000), may_change=True, help=
        "Epochs between two evaluations; the last epoch is always evaluated.")
    DEVICE: Literal["auto", "cuda", "xpu", "mps", "cpu"] = setting("auto", role=MACHINE, help=
        "Device; auto: CUDA, else XPU, else MPS, else the CPU.")
    COMPILE: bool | Literal["blocks", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = setting(
        False, help=
        "Compile with torch.compile: faster on GPUs, but compiling takes a minute or more; blocks: one block for all, "
        "which takes less time.")
    DETERMINISTIC: bool = setting(False, help=
        "Use only deterministic kernels: slower on GPUs, where bit-identical resume needs it.")
    REPORT: bool = setting(True, role=RECORD, help=
        "Write report.html and pictures (confusion.png, mistakes.png, correct.png, train_batch.png); tables with the "
        "same data are always written.")
    CALIBRATE: bool = setting(True, role=RECORD, help=
        "Fit a temperature to the validation images and store it in best.pth, so that probabilities of halfstep "
        "predict are calibrated; for numbers, the widths of their intervals. With PRETRAINED, also statistics that "
        "recognise photos unlike these images.")
    TRACK: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = setting(("tensorboard",), role=RECORD, help=
        "Trackers that show the run: tensorboard (files in the run folder), wandb (Weights & Biases), mlflow; empty: "
        "none (docs/tracking.md).")

    def changed(self, section: str, **values: object) -> "Config":
        """Return a copy with other values of some settings in a section, such as DATA."""
        return replace(self, **{section: replace(getattr(self, section), **values)})

    @property
    def task(self) -> TaskRow:
        """What the model learns. The settings of the data say whether an image can have several labels."""
        return TASKS[self.task_name]

    @property
    def task_name(self) -> str:
        """The key of the task in TASKS."""
        name = self.TRAIN.OBJECTIVE
        return "labels" if name == "classes" and self.DATA.has_several_labels else name

    @property
    def fits_unknown_statistics(self) -> bool:
        """Whether the evaluations of a new best epoch measure statistics for halfstep predict -unknown."""
        return self.CALIBRATE and self.MODEL.PRETRAINED is not None and not self.task.has_several_classes

    @property
    def compares_weights(self) -> bool:
        """Whether the validation images choose the best weights among several, so that their scores are too high."""
        if self.DATA.FOLDS:
            return False
        has_one = self.TRAIN.NUM_EPOCHS <= self.VALIDATE_FREQ and not self.TRAIN.MODEL_EMA
        return not (has_one and self.MODEL.NEW_CLASSIFIER == "random")

    @property
    def train_shapes(self) -> dict[int, Shape]:
        """The shape of training images by epoch: {number of finished epochs: shape from then on}."""
        pairs = (each.split(":") for each in self.TRAIN.SIZE_SCHEDULE)
        return {int(epochs): Shape(int(side), int(side)) for epochs, side in pairs} or {0: self.DATA.shape}
