"""All settings with their types, bounds, defaults and descriptions. docs/settings.md is generated from this file.

Settings that PaddleViT also has keep PaddleViT's names and defaults; the descriptions say where a default differs. This
file is long because it is the only table of all settings.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from configs.tables import LOSSES
from utils.text import is_url

AUTO = "auto"  # a value that lets the program choose at the start
MAX_INT = 2**63 - 1  # the largest integer that torch and numpy support

# Roles of settings. Each section has a role; a field with a different role has that role in its annotation. The role
# decides whether a resumed run may change the setting, whether an evaluation takes its value from the weights, and
# whether a comparison of runs ignores it.
DATA = "data"  # the images and labels
MODEL = "model"  # the architecture and the preprocessing of images, needed for every use of the weights
RECIPE = "recipe"  # how the weights are trained
MACHINE = "machine"  # where and how fast the run computes; does not affect the result
RECORD = "record"  # what the run saves and shows
START = "start"  # a command that applies to one start of the program and is never saved
MAY_CHANGE = "may change"  # not a role: marks a setting that a resumed run may change, although it affects the result


class Bounds(NamedTuple):
    """The smallest and the largest allowed value of a number, or of each number in a list.

    Absurdly large values would make the program loop forever or exhaust the memory.
    """

    low: float
    high: float


class Form(NamedTuple):
    """A requirement on a string, a list or a number, in addition to its type and bounds."""

    fits: Callable[[Any], bool]
    words: str  # the end of a sentence that starts with `it must be`


def to_seconds(text: str) -> float | None:
    """Convert "3h30m", "90m", "1.5h", "5400" or Slurm's "03:30:00" and "1-12" to seconds; return None for any other text."""
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


def _is_fold(text: str) -> bool:
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    return match is not None and 2 <= int(match[2]) <= 1000 and int(match[1]) < int(match[2])


def _is_size_schedule(entries: tuple[str, ...]) -> bool:
    if not all(re.fullmatch(r"\s*[0-9]{1,9}:[0-9]{1,4}\s*", each) for each in entries):
        return False
    starts, sides = ([int(each.split(":")[part]) for each in entries] for part in (0, 1))
    return not entries or (starts == sorted({0, *starts}) and 0 < min(sides) and max(sides) <= 8_192)


def _is_folder_name(text: str) -> bool:
    """Return whether a string can name a folder. The limit of 200 bytes is below the 255 that file systems allow."""
    return len(text.encode(errors="surrogateescape")) <= 200 and not re.search(r"^\.|[/\x00-\x1f\x7f]", text)


RANGE = Form(_is_range, "two numbers, min and max, such as [0.08, 1.0]")
COLUMN_NAMES = Form(
    lambda names: len(names) != 1 and len({*names}) == len(names),
    "at least two different columns: one of paths (or images), then one or more of classes",
)
SIZES = Form(_is_size_schedule, "a list such as 0:128, 60:160 that starts at epoch 0, with increasing epochs")
FOLD_OF = Form(_is_fold, "FOLD/FOLDS, such as 0/5 for the first of five folds, with at most 1000 folds")
FOLDER_NAME = Form(
    _is_folder_name,
    "the name of a folder in SAVE (-output): at most 200 bytes, no /, no control character and no . at its start",
)
LOCAL = Form(
    lambda text: not is_url(text),
    "a folder on this machine, not a URL; copy finished runs to a bucket, or mount the bucket",
)
TIME_TO_SPEND = Form(
    lambda text: DURATION.fits(text) or re.fullmatch(r"([01]?[0-9]|2[0-3]):[0-5][0-9]", text) is not None,
    "a duration above 0, such as 8h, 90m or 5400 (seconds), or a time of day, such as 07:00",
)
DURATION = Form(
    lambda text: 0 < (to_seconds(text) or 0) <= 1e9, "a duration above 0, such as 3h30m, 90m or 5400 (seconds)"
)


class Only(NamedTuple):
    """The condition under which a setting has an effect: another setting must have one of `values`."""

    key: str  # name of the other setting in the same section, or its full key; | separates alternatives
    values: tuple = ()  # empty: any value of the other setting except false, 0, None and empty ones

    def keys(self, values: Mapping[str, Any], section: str) -> list[str]:
        """Return the full keys of the settings in the condition. `values`: {full key: value} of all settings."""
        in_section = {name: f"{section}.{name}" for name in self.key.split("|")}
        return [key if key in values else name for name, key in in_section.items()]

    def applies(self, values: Mapping[str, Any], section: str) -> bool:
        """Return whether the condition holds. `values`: {full key: value} of all settings."""
        found = [values[key] for key in self.keys(values, section)]
        return any(value in self.values if self.values else bool(value) for value in found)


OF_A_TEACHER = Only("DISTILLATION_TYPE|OBJECTIVE", ("soft", "hard", "features"))


class Alike(NamedTuple):
    """Values of a setting that give the same result: a resumed run may switch between them."""

    values: tuple


class Described(NamedTuple):
    """The table of a setting's values (configs/tables.py); its sentences complete the setting's description."""

    table: Mapping[str, Any]


class In(NamedTuple):
    """The section under which users write a setting of Start."""

    section: str


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


@dataclass(frozen=True)
class Data:
    """The data set and its loading."""

    role: ClassVar[str] = DATA

    DATASET: str = "imagenet2012"
    """Name of the data set; docs/data.md lists them with their folder layouts."""
    DATA_PATH: Annotated[str, MAY_CHANGE] = "/dataset/imagenet/"
    """Folder of the data set (for csv: folder or file; for shards also a URL: docs/data.md, "Shards on a server")."""
    IMAGE_ROOT: Annotated[str | None, LOCAL, MAY_CHANGE, Only("DATASET", ("csv",))] = None
    """For csv: the folder to which the listed paths are relative, and which they must not leave. Not set: the folder of the list."""
    BATCH_SIZE: Annotated[int | Literal["auto"], Bounds(1, 1_000_000), RECIPE, MAY_CHANGE] = 256
    """Images per process and micro-batch; one update uses BATCH_SIZE x processes x TRAIN.ACCUM_ITER images. auto: the largest batch that fits the device, found by trial at the start."""
    BATCH_SIZE_EVAL: Annotated[int | None, Bounds(1, 1_000_000), MACHINE] = None
    """Images per process in evaluation; not set: BATCH_SIZE."""
    IMAGE_SIZE: Annotated[int, Bounds(1, 8_192), MODEL] = 224
    """Side of the square input image, in pixels."""
    IMAGE_CHANNELS: Annotated[Literal[1, 3], MODEL] = 3
    """3 for colour, 1 for grey."""
    CROP_PCT: Annotated[float, Bounds(0.01, 2.0), MODEL, Only("TOKENS", (None,))] = 0.875
    """Evaluation resizes images to IMAGE_SIZE / CROP_PCT and crops the centre; with values above 1, the image gets a black border."""
    CROP_MODE: Annotated[Literal["center", "squash", "border"], MODEL, Only("TOKENS", (None,))] = "center"
    """The side that evaluation resizes to IMAGE_SIZE / CROP_PCT: the short side (center), both sides (squash), or the long side, with a border in the mean colour (border). These are timm's crop modes."""
    CROP_SCALE: Annotated[tuple[float, ...], Bounds(0.0001, 1.0), RANGE, RECIPE] = (0.08, 1.0)
    """Area of a random training crop as a fraction of the image: min, max."""
    CROP_RATIO: Annotated[tuple[float, ...], Bounds(0.01, 100.0), RANGE, RECIPE] = (3 / 4, 4 / 3)
    """Aspect ratio (width / height) of a random training crop: min, max."""
    HFLIP: Annotated[float, Bounds(0.0, 1.0), RECIPE] = 0.5
    """Probability of a horizontal flip of a training image."""
    VFLIP: Annotated[float, Bounds(0.0, 1.0), RECIPE] = 0.0
    """Probability of a vertical flip of a training image."""
    TRAIN_CROP: Annotated[Literal["rrc", "simple"], RECIPE] = "rrc"
    """Crop of training images: rrc, a random part resized to the square; simple, DeiT III's random square of the resized image."""
    INTERPOLATION: Annotated[Literal["nearest", "bilinear", "bicubic", "lanczos"], MODEL] = "bicubic"
    """Interpolation for resizing images."""
    TOKENS: Annotated[int | None, Bounds(1, 65_535), MODEL] = None
    """Maximum number of patches per image: images keep their aspect ratio and are resized to fit, for timm's naflexvit_* and plain ViTs (docs/native-aspect.md). Not set: images are square."""
    TRAIN_TOKENS: Annotated[tuple[int, ...], Bounds(1, 65_535), RECIPE, Only("TOKENS")] = ()
    """With TOKENS, numbers of patches such as [128, 256, 576]; each training update draws one of them. Empty: TOKENS."""
    TRAIN_INTERPOLATION: Annotated[Literal["random", "nearest", "bilinear", "bicubic", "lanczos"] | None, RECIPE] = None
    """Interpolation of training images, also in the rotations and shifts of AUTO_AUGMENT; random: bilinear or bicubic, drawn each time; not set: INTERPOLATION."""
    IMAGENET_MEAN: Annotated[tuple[float, ...], Bounds(-1_000.0, 1_000.0), MODEL] = (0.5, 0.5, 0.5)
    """Mean of each channel, for pixel values in [0, 1]; it is subtracted from every image."""
    IMAGENET_STD: Annotated[tuple[float, ...], Bounds(1e-6, 1_000.0), MODEL] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, for pixel values in [0, 1]; every image is divided by it."""
    NUM_WORKERS: Annotated[int | None, Bounds(0, 1_000), MACHINE] = None
    """Loader threads or processes per training process; not set: on GPUs the process's share of the cores, minus one if the share is 4 or more; on CPUs at most 8, and 0 for data sets in memory. (PaddleViT: 1, which starves a GPU.)"""
    WORKERS: Annotated[Literal["auto", "threads", "processes"], MACHINE] = "auto"
    """Kind of loader worker: threads share memory and cost less; processes are not limited by Python's interpreter lock. auto: on GPUs, processes for 5 or more workers (3 or more with TRAIN.AUTO_AUGMENT or COLOR_JITTER, any number for data sets in memory) if the shared memory suffices; else threads."""
    DROP_LAST: Annotated[bool, RECIPE] = True
    """Drop an epoch's last images if they do not fill a whole update (unless no update would be left)."""
    SAMPLER: Annotated[Literal["shuffle", "balanced"], RECIPE] = "shuffle"
    """Images of an epoch: shuffle, each image once; balanced, the same total number of images, but equally many of each class: images of rare classes are repeated, common classes are subsampled."""
    VAL_FRACTION: Annotated[float, Bounds(0.0, 0.9), Only("FOLD", (None,))] = 0.1
    """Fraction of the images held out for validation, for data sets without a split."""
    FOLD: Annotated[str | None, FOLD_OF] = None
    """Cross-validation, for data sets without a split: 0/5 divides the images into five folds and holds out the first (4/5: the last); VAL_FRACTION then has no effect."""
    LABELLED_PATH: Annotated[str | None, LOCAL, MAY_CHANGE, Only("TRAIN.OBJECTIVE", ("features",))] = None
    """With TRAIN.OBJECTIVE features: a folder that has a folder of images for each class. Each evaluation measures how often the nearest of these images predict the class of an image (k-NN accuracy). Training never uses the labels."""
    GROUP_BY: Annotated[str | None, Only("DATASET", ("csv",))] = None
    """For csv: a column that groups the images, for example by person or scene; the images of a group are either all held out or all used for training."""
    CLASSES: Annotated[str | None, MAY_CHANGE] = None
    """Text file with one class name per line; the classes are numbered from 0 in this order. Not set: they are numbered in the order of their names."""
    LABEL_SEPARATOR: str | None = None
    """For csv with several labels per image: the separator of labels in the column of classes, such as | in `cat|dog`; an empty cell means no labels. TRAIN.LOSS then defaults to bce, and TRAIN.BEST_METRIC to map."""
    COLUMNS: Annotated[tuple[str, ...], COLUMN_NAMES, Only("DATASET", ("csv", "parquet"))] = ()
    """For csv and parquet: the column of paths (parquet: of images) and the column of classes; empty: image_path and target (parquet: image and label). For csv with several labels per image: the column of paths and one column per class, with 1 (or true) for images that have the label and 0 (or false) for others; * means all other columns."""
    EXIF: Literal["apply", "ignore"] | None = None
    """apply: rotate photos as their EXIF orientation says; ignore: leave them as stored. Not set: apply for imagefolder, images, csv, shards and parquet, ignore for the data sets with published results."""
    MAX_PIXELS: Annotated[int, Bounds(1, 2**40), MAY_CHANGE] = 200_000_000
    """Maximum number of pixels of an image. Larger images count as unreadable, because a small file can decompress to gigabytes."""
    MAX_BAD_FRACTION: Annotated[float, Bounds(0.0, 1.0), MAY_CHANGE] = 0.01
    """Maximum tolerated fraction of unreadable images. Tolerated images are replaced and reported; if there are more, the run stops. Up to three unreadable images are always tolerated, unless MAX_BAD_FRACTION is 0."""
    CACHE: Annotated[int | Literal["none", "disk"], Bounds(1, 100_000), RECIPE, Alike(("none", "disk"))] = "none"
    """Cache decoded images on disk, also for later runs. disk: in full size; a number: with the short side of larger images reduced to this many pixels."""
    CACHE_PATH: Annotated[str | None, LOCAL, MACHINE] = None
    """Folder for the disk cache, for shards from a server, and for indexes of data in read-only folders; not set: `cache` in SAVE."""
    SHUFFLE_BUFFER: Annotated[int, Bounds(1, 2**31), RECIPE, Only("DATASET", ("shards", "parquet"))] = 8192
    """Size of the shuffle buffer, in samples. Shards (and row groups of parquet) are read in random order, and each sample then moves by fewer places than SHUFFLE_BUFFER; a buffer for all images makes any order possible."""
    REMOTE_CACHE_GB: Annotated[float | None, Bounds(0.001, 1e9), MACHINE] = None
    """For shards on a server: maximum size of their cache in CACHE_PATH, in 10^9 bytes; the least recently used tars are deleted. Not set: the size of all shards, but at most 80% of the disk's free space."""
    SYNTHETIC_SIZE: Annotated[int, Bounds(1, 100_000_000), Only("DATASET", ("synthetic", "fractals"))] = 1280
    """Images per epoch of the computed data sets, synthetic and fractals."""

    @property
    def fold(self) -> Fold | None:
        """The fold that cross-validation holds out, if any."""
        return Fold(*map(int, self.FOLD.split("/"))) if self.FOLD else None

    @property
    def cache_side(self) -> int | None:
        """The short side to which the cache reduces larger images, or None to keep their size."""
        return None if isinstance(self.CACHE, str) else self.CACHE

    @property
    def has_label_columns(self) -> bool:
        """Return whether the csv file has one column of 0 and 1 for each class."""
        return len(self.COLUMNS) > 2 or self.COLUMNS[1:] == ("*",)

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

    RANK: Annotated[int, Bounds(0, 100_000)] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    ALPHA: Annotated[float, Bounds(1e-6, 1e6), Only("RANK")] = 16.0
    """The output of an adapter is multiplied by ALPHA / RANK."""
    TARGETS: Annotated[tuple[str, ...], Only("RANK")] = ("*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2")
    """Patterns of the linear layers that get an adapter; all-linear: all linear layers except the classifier, which is trained in full."""


@dataclass(frozen=True)
class Model:
    """The model, and the weights that it starts from."""

    role: ClassVar[str] = MODEL

    TYPE: Literal["vit", "timm"] = "vit"
    """vit: a Vision Transformer built from the settings below; timm: the timm model NAME."""
    NAME: str = "vit"
    """With TYPE timm, the name of any timm model; with TYPE vit, a label that is saved with the weights."""
    NUM_CLASSES: Annotated[int | None, Bounds(1, 1_000_000), DATA] = None
    """Number of outputs of the classifier; not set: the number of classes of the data. (PaddleViT: 1000.)"""
    PATCH_SIZE: Annotated[int, Bounds(1, 8_192)] = 16
    """Side of a patch in pixels."""
    EMBED_DIM: Annotated[int, Bounds(1, 100_000)] = 768
    """Width of the model: the number of features of a token."""
    DEPTH: Annotated[int, Bounds(1, 1_000)] = 12
    """Number of transformer blocks."""
    NUM_HEADS: Annotated[int, Bounds(1, 1_000)] = 12
    """Attention heads in each block."""
    MLP_RATIO: Annotated[float, Bounds(0.01, 100.0)] = 4.0
    """Hidden width of the MLP divided by EMBED_DIM."""
    QKV_BIAS: bool = True
    """Use biases for queries, keys and values."""
    POS_EMBED: Literal["learn", "sincos2d", "none"] = "learn"
    """Position embedding: learn, a trained embedding; sincos2d, fixed sines and cosines of row and column, as in big_vision's plain ViT; none, no embedding."""
    DROPOUT: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Dropout rate after position embedding, attention projection and MLP; for a timm model, before the classifier. Not set (also for ATTENTION_DROPOUT and DROPPATH): the timm model's default, or 0 with TYPE vit."""
    ATTENTION_DROPOUT: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Dropout rate of attention weights."""
    DROPPATH: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Drop path rate of the last block; the rate rises linearly from 0 at the first block."""
    PRETRAINED: Annotated[str | None, RECIPE, MAY_CHANGE] = None
    """Weights to start from: a file (.pth, .safetensors, .npz, .pdparams), a run (its folder, or latest), or a timm model name to download."""
    FREEZE: Annotated[tuple[str, ...], RECIPE] = ()
    """Patterns of parameters or modules that are not trained (blocks.0.*); a pattern with a leading ! excludes its matches from freezing; `classifier` matches the classifier of any model."""
    KWARGS: Arguments = Arguments()
    """Further arguments of timm's constructor, such as global_pool: avg or init_values: 1e-5; arguments that have their own setting are refused."""
    LORA: Lora = Lora()


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its arguments."""

    role: ClassVar[str] = RECIPE

    NAME: str = "AdamW"
    """AdamW, Adam and SGD (without Nesterov) are torch's, with fused kernels; all names in timm.optim.list_optimizers() work too, such as lamb, lion, muon, nadamw or adafactor. Case does not matter."""
    EPS: Annotated[float | None, Bounds(0.0, 1_000.0)] = None
    """Adam's epsilon; not set: the optimizer's default (AdamW and Adam 1e-8)."""
    BETAS: Annotated[
        tuple[float, ...],
        Bounds(0.0, 0.999999),
        Form(lambda betas: len(betas) in (0, 2), "two numbers, such as [0.9, 0.999]"),
    ] = ()
    """Adam's betas; not set: the optimizer's default (AdamW and Adam [0.9, 0.999])."""
    MOMENTUM: Annotated[float | None, Bounds(0.0, 0.999999)] = None
    """SGD's momentum; not set: the optimizer's default (SGD 0.9)."""
    KWARGS: Arguments = Arguments()
    """Further arguments of the optimizer's constructor, such as nesterov: true for SGD; arguments that have their own setting are refused."""


@dataclass(frozen=True)
class LRScheduler:
    """The schedule of the learning rate after the warm-up."""

    role: ClassVar[str] = RECIPE

    NAME: Literal["cosine", "paddlevit", "constant", "step", "wsd"] = "cosine"
    """One of: cosine; paddlevit (PaddleViT's cosine, updated once per epoch); constant; step; wsd (constant, then decays in the last DECAY_FRACTION of the run)."""
    PER_EPOCH: Annotated[bool, Only("NAME", ("cosine", "constant", "step", "wsd"))] = False
    """Change the rate once per epoch, as timm does by default, instead of at every update."""
    AFTER_WARMUP: Annotated[bool, Only("NAME", ("cosine", "paddlevit", "step"))] = True
    """For cosine and step: start the schedule at the end of the warm-up; false (the default for step): start it at epoch 0, so that the warm-up replaces its first epochs, as timm does by default."""
    COOLDOWN_EPOCHS: Annotated[int, Bounds(0, 1_000_000), Only("NAME", ("cosine", "paddlevit", "wsd"))] = 0
    """For cosine and wsd: number of epochs at END_LR at the end of the run; NUM_EPOCHS includes them."""
    DECAY_FRACTION: Annotated[float, Bounds(0.0, 1.0), Only("NAME", ("wsd",))] = 0.2
    """For wsd: fraction of NUM_EPOCHS over which the rate falls to END_LR."""
    MILESTONES: Annotated[tuple[int, ...], Bounds(0, 1_000_000), Only("NAME", ("step",))] = ()
    """For step: epochs after which the rate is multiplied by DECAY_RATE; not set: after every DECAY_EPOCHS epochs."""
    DECAY_EPOCHS: Annotated[float, Bounds(0.001, 1_000_000), Only("NAME", ("step",))] = 30.0
    """For step: epochs between two decays."""
    DECAY_RATE: Annotated[float, Bounds(0.0, 1.0), Only("NAME", ("step",))] = 0.1
    """For step: factor by which each decay multiplies the rate."""


@dataclass(frozen=True)
class Train:
    """The training recipe."""

    role: ClassVar[str] = RECIPE

    NUM_EPOCHS: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 300
    """Number of passes over the training images."""
    BUDGET: Annotated[str | None, TIME_TO_SPEND, MAY_CHANGE] = None
    """Total time of the run over all its starts (8h, 90m), or the time of day at which it ends (07:00). After its first epoch or 200 updates, the run chooses its number of updates (at most NUM_EPOCHS) and shortens the schedule in proportion, so that it ends on time at END_LR. Not set: NUM_EPOCHS."""
    SIZE_SCHEDULE: Annotated[tuple[str, ...], SIZES] = ()
    """Sizes of training images as EPOCHS:PIXELS, such as 0:128, 60:160, 80:224; each size applies once that many epochs are finished. Evaluation always uses DATA.IMAGE_SIZE; with an empty list, training does too."""
    WARMUP_EPOCHS: Annotated[float, Bounds(0.0, 1e6)] = 32
    """Epochs over which the learning rate rises from WARMUP_START_LR to BASE_LR."""
    BASE_LR: Annotated[float, Bounds(0.0, 1_000.0)] = 3e-3
    """Peak learning rate."""
    WARMUP_START_LR: Annotated[float, Bounds(0.0, 1_000.0)] = 1e-6
    """Learning rate of the first update of the warm-up."""
    END_LR: Annotated[float, Bounds(0.0, 1_000.0), Only("TRAIN.LR_SCHEDULER.NAME", ("cosine", "paddlevit", "wsd"))] = (
        0.0
    )
    """Learning rate at the end of the schedule."""
    LINEAR_SCALED_LR: Annotated[int | None, Bounds(1, 1_000_000_000)] = None
    """Global batch size that BASE_LR, WARMUP_START_LR and END_LR were tuned for; they are multiplied by global batch / LINEAR_SCALED_LR (see LR_SCALING). Not set: no scaling."""
    LR_SCALING: Annotated[Literal["linear", "sqrt"], Only("LINEAR_SCALED_LR")] = "linear"
    """Scaling with LINEAR_SCALED_LR: linear, by global batch / LINEAR_SCALED_LR; sqrt, by the square root of this factor, as timm does for Adam and similar optimizers."""
    LAYER_DECAY: Annotated[float | None, Bounds(0.0001, 1.0)] = None
    """Layer-wise learning rates: from the classifier down, each layer's rate is this factor times the rate of the layer above it, like timm's --layer-decay; not set: one rate for all layers."""
    WEIGHT_DECAY: Annotated[float, Bounds(0.0, 1_000.0)] = 0.3
    """Weight decay of matrices; biases, norms, class token and position embedding are not decayed. (PaddleViT decays all.)"""
    GRAD_CLIP: Annotated[float | None, Bounds(0.0, 1e9)] = None
    """Limit for the gradients (see CLIP_MODE); not set: no clipping."""
    CLIP_MODE: Annotated[Literal["norm", "value", "agc"], Only("GRAD_CLIP")] = "norm"
    """The quantity that GRAD_CLIP limits: norm, the norm of all gradients together; value, each element of the gradients; agc, the norm of a unit's gradient relative to the norm of its weights (adaptive gradient clipping, except for the classifier)."""
    EARLY_STOP: Annotated[int | None, Bounds(1, 1_000_000), MAY_CHANGE] = None
    """End the run after this many consecutive evaluations without a new best.pth; not set: train for all NUM_EPOCHS."""
    ACCUM_ITER: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 1
    """Micro-batches per update."""
    GRAD_CHECKPOINTING: Annotated[bool, MACHINE] = False
    """Activation checkpointing: a transformer block saves only its input and recomputes the rest in the backward pass. This saves much memory and costs the time of one more forward pass. (For timm models without such blocks, this is timm's `--grad-checkpointing`.)"""
    SMOOTHING: Annotated[float, Bounds(0.0, 0.99)] = 0.0
    """Label smoothing."""
    LOSS: Annotated[Literal[*LOSSES], Described(LOSSES)] = "cross_entropy"
    """Training loss"""
    BCE_TARGET_THRESH: Annotated[float | None, Bounds(0.0, 1.0), Only("LOSS", ("bce",))] = None
    """For bce: targets above this value, after smoothing and mixing, become 1, the others 0; not set: targets do not change."""
    CLASS_WEIGHTS: str | None = None
    """Weights of the classes in the training loss: auto, images / (classes x images of the class), so that the mean over the images is 1; or a CSV file with a class and its weight in each line; not set: all weights are 1."""
    OBJECTIVE: Literal["classes", "features"] = "classes"
    """What the model learns: classes, the labels of the images; features, the features of TEACHER_MODEL, without labels. Fine-tuning with few labels can start from learned features: docs/unlabelled.md."""
    FEATURES: Annotated[Literal["both", "pooled", "patches"], Only("OBJECTIVE", ("features",))] = "both"
    """The teacher's features to learn: pooled, one vector for the whole image (the input of the teacher's classifier); patches, a vector for each patch, which needs the same grid of patches in both models; or both."""
    FEATURE_LOSS: Annotated[Literal["cosine", "smooth_l1"], Only("OBJECTIVE", ("features",))] = "cosine"
    """Loss between the features of model and teacher: cosine, 1 minus their cosine; smooth_l1, quadratic for differences below 1 and linear above. Both are means over the images; with FEATURES both, the two losses are added."""
    DISTILLATION_TYPE: Literal["none", "soft", "hard"] = "none"
    """Also learn from a teacher: soft, from its class probabilities; hard, from the class that it predicts."""
    DISTILLATION_ALPHA: Annotated[float, Bounds(0.0, 1.0), Only("DISTILLATION_TYPE", ("soft", "hard"))] = 0.5
    """Weight of the teacher in the loss; the weight of the labels is 1 - DISTILLATION_ALPHA."""
    DISTILLATION_TAU: Annotated[float, Bounds(0.01, 1_000.0), Only("DISTILLATION_TYPE", ("soft",))] = 1.0
    """For soft: temperature by which the logits of teacher and student are divided."""
    TEACHER_MODEL: Annotated[str | None, OF_A_TEACHER] = "regnety_160.deit_in1k"
    """The teacher: a timm model, or the checkpoint of a run. For DISTILLATION_TYPE, it must have the same classes as the data; for OBJECTIVE features, its classes do not matter. (PaddleViT: a weights file of RegNetY-16GF.)"""
    TEACHER_PRETRAINED: Annotated[str | None, OF_A_TEACHER] = None
    """Weights of a timm teacher: a file or a timm model name; not set: timm's weights for TEACHER_MODEL."""
    COLOR_JITTER: Annotated[float, Bounds(0.0, 100.0)] = 0.0
    """Brightness, contrast and saturation are each multiplied by a random factor in 1 +- COLOR_JITTER; no effect with an AUTO_AUGMENT policy other than 3a. (PaddleViT's DeiT: 0.4.)"""
    AUTO_AUGMENT: str | None = None
    """Augmentation policy: original, v0, rand-m9-mstd0.5-inc1, augmix-m3-w3, ta_wide or 3a; docs/augmentation.md explains them. (PaddleViT's value true means original.)"""
    MIXUP_ALPHA: Annotated[float, Bounds(0.0, 1_000.0)] = 0.0
    """Mixup: blend pairs of images, with a weight from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 0.8.)"""
    CUTMIX_ALPHA: Annotated[float, Bounds(0.0, 1_000.0)] = 0.0
    """Cutmix: paste a box from the paired image, with an area from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 1.0.)"""
    CUTMIX_MINMAX: Annotated[
        tuple[float, ...], Bounds(0.0, 1.0), Form(lambda sides: not sides or _is_range(sides), RANGE.words)
    ] = ()
    """Cutmix with boxes whose sides are random fractions (min, max) of the image's sides; CUTMIX_ALPHA then has no effect."""
    MIXUP_PROB: Annotated[float, Bounds(0.0, 1.0), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 1.0
    """Probability that a batch, pair or image (see MIXUP_MODE) is mixed."""
    MIXUP_SWITCH_PROB: Annotated[float, Bounds(0.0, 1.0), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 0.5
    """Probability of cutmix instead of mixup if both are on."""
    MIXUP_MODE: Annotated[Literal["batch", "pair", "elem"], Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = "batch"
    """The images that share one random draw of kind, weight and box: batch, MIXUP_GROUP images; pair, two images; elem, a single image."""
    MIXUP_GROUP: Annotated[
        int | None,
        Bounds(2, 1_000_000),
        Form(lambda number: number % 2 == 0, "None or, because images are mixed in pairs, an even number"),
        Only("MIXUP_MODE", ("batch",)),
    ] = 128
    """For MIXUP_MODE batch: even number of consecutive images of an update that share a draw. The split over processes and micro-batches does not change the groups. Not set: all images of an update."""
    MIXUP_OFF_EPOCH: Annotated[int, Bounds(0, 1_000_000), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 0
    """Number of epochs after which mixing stops; 0: never."""
    RANDOM_ERASE_PROB: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of random erasing of a training image. (PaddleViT's DeiT: 0.25.)"""
    RANDOM_ERASE_MODE: Annotated[Literal["pixel", "rand", "const"], Only("RANDOM_ERASE_PROB")] = "pixel"
    """Fill of erased boxes: pixel, noise; rand, one random colour; const, the mean colour."""
    RANDOM_ERASE_COUNT: Annotated[int, Bounds(1, 100), Only("RANDOM_ERASE_PROB")] = 1
    """Maximum number of boxes per image; the erased area is divided among the boxes (not with DATA.TOKENS: as in timm, each box may then cover up to a third of the image)."""
    REPEATED_AUG: Annotated[int, Bounds(1, 1_000)] = 1
    """Number of differently augmented copies of each image in an update; an epoch then uses 1 / REPEATED_AUG of the images. (DeiT: 3.)"""
    MODEL_EMA: bool = False
    """Keep an exponential moving average (EMA) of the weights, and evaluate the weights and the average."""
    MODEL_EMA_DECAY: Annotated[float, Bounds(0.0, 1.0), Only("MODEL_EMA")] = 0.99996
    """Decay of the EMA per update."""
    MODEL_EMA_WARMUP: Annotated[bool | Literal["timm"], Only("MODEL_EMA")] = True
    """Start with a smaller decay, so that the EMA also follows the weights in short runs. true: update u (counted from 1) has the decay (u - 1) / (u + 8); timm: 1 - u ** (-2/3), the warm-up of timm's train.py; false: MODEL_EMA_DECAY from the second update on. The EMA starts with the weights after the first update."""
    BEST_METRIC: Annotated[
        Literal["top1", "top5", "loss", "macro_recall", "macro_f1", "micro_f1", "map", "similarity", "knn"],
        MAY_CHANGE,
    ] = "top1"
    """The validation metric that decides which epoch is saved as best.pth; for equal values, the smaller loss wins. micro_f1 and map are for data with several labels per image; map is the default for such data. similarity and knn are for OBJECTIVE features, where knn is the default if DATA.LABELLED_PATH is set, else similarity."""
    OPTIMIZER: Optimizer = Optimizer()
    LR_SCHEDULER: LRScheduler = LRScheduler()

    @property
    def augments(self) -> bool:
        """Return whether a policy or colour jitter changes training images."""
        return bool(self.AUTO_AUGMENT or self.COLOR_JITTER)

    @property
    def mixes(self) -> bool:
        """Return whether mixup or cutmix is on."""
        return bool(self.MIXUP_ALPHA or self.CUTMIX_ALPHA or self.CUTMIX_MINMAX)


@dataclass(frozen=True)
class Precision:
    """Mixed precision and loss scaling; AMP switches mixed precision on."""

    role: ClassVar[str] = RECIPE

    DTYPE: Annotated[Literal["float16", "bfloat16", "auto"] | None, Only("AMP")] = None
    """Half-precision type of AMP; auto: bfloat16 if the device supports it, else float16; not set: float16 on CUDA, bfloat16 elsewhere."""
    MODE: Annotated[Literal["autocast", "naive", "float8"], Only("AMP")] = "autocast"
    """autocast: half-precision operations where that is safe, float32 weights; naive: half-precision weights and operations, with float32 master weights for the optimizer; float8: autocast in bfloat16, with the large Linear layers in float8 (torchao, on CUDA devices that support it)."""
    RESIDUAL: Annotated[Literal["auto", "bfloat16", "float32", "half"], Only("AMP")] = AUTO
    """Type of the residual stream between transformer blocks under autocast. float32: the most precise; half: the half-precision type of AMP, less precise but faster with COMPILE; bfloat16: like half, but float32 if AMP uses float16 or the device is a CPU; auto: bfloat16 with COMPILE, otherwise float32."""
    REDUCE: Annotated[Literal["float32", "half"], Only("AMP")] = "float32"
    """Type of the gradient all-reduce: float32; half, the half-precision type of autocast, which halves the traffic."""
    MATMUL: Literal["ieee", "tf32"] = "ieee"
    """float32 matrix multiplication on CUDA: ieee, or tf32, which is faster and less precise."""
    INIT_LOSS_SCALING: Annotated[float, Bounds(1.0, 1e38)] = 65536.0
    """Initial loss scale, for float16."""
    INCR_EVERY_N_STEPS: Annotated[int, Bounds(1, 1_000_000_000)] = 2000
    """Consecutive updates without overflow after which the loss scale grows."""
    INCR_RATIO: Annotated[float, Bounds(1.0001, 1e6)] = 2.0
    """Factor by which the loss scale grows."""
    DECR_EVERY_N_NAN_OR_INF: Annotated[int, Bounds(1, 1_000_000_000)] = 1
    """Consecutive updates with an overflow after which the loss scale shrinks. (Paddle Fleet: 2.)"""
    DECR_RATIO: Annotated[float, Bounds(0.0001, 0.9999)] = 0.5
    """Factor by which the loss scale shrinks."""
    USE_DYNAMIC_LOSS_SCALING: bool = True
    """Adapt the loss scale during training; false: it stays at INIT_LOSS_SCALING."""
    MIN_LOSS_SCALING: Annotated[float, Bounds(1e-6, 1e38)] = 1.0
    """Minimum loss scale."""
    MAX_LOSS_SCALING: Annotated[float | None, Bounds(1e-6, 1e38)] = None
    """Maximum loss scale; not set: no limit."""
    MAX_CONSECUTIVE_SKIPS: Annotated[int, Bounds(1, 1_000_000_000)] = 50
    """After this many consecutive updates skipped because of non-finite gradients, the run rolls back, or stops with exit code 3."""
    CUSTOM_BLACK_LIST: Annotated[tuple[str, ...], Only("AMP")] = ()
    """Module paths (blocks.7.*), classes (LayerNorm) and operators (softmax) that AMP keeps in float32."""
    CUSTOM_WHITE_LIST: Annotated[tuple[str, ...], Only("AMP")] = ()
    """Module paths, classes and operators that AMP computes in half precision although autocast would not."""


@dataclass(frozen=True)
class Dist:
    """Distributed training."""

    role: ClassVar[str] = MACHINE

    TIMEOUT: Annotated[float, Bounds(1.0, 1e7)] = 1800.0
    """Seconds to wait for a process that does not join or respond; then the run ends and names the process."""
    STRATEGY: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process has the whole model; fsdp2: weights, gradients, optimizer and EMA are sharded, and a checkpoint has one file per process and an index. With one process, both strategies are the same. Any number of processes can load both kinds of checkpoints."""


@dataclass(frozen=True)
class Start:
    """Commands for one start of the program, in the form of settings. They are not saved with the run.

    The code reads all of them from `config.START`. In files, after -opts and in messages, some have the section in `In`:
    `config.START.MAX_TIME` is the setting RUN.MAX_TIME, and `config.START.RESUME` is MODEL.RESUME.
    """

    role: ClassVar[str] = START
    EVAL: bool = False
    """Evaluate the weights without training."""
    RESUME: Annotated[str | None, In("MODEL")] = None
    """Checkpoint or run (its folder, or latest for the newest run) to resume; auto: the newest valid checkpoint of run NAME or, without NAME, of the newest run in SAVE that has no name."""
    NAME: Annotated[str, FOLDER_NAME] = ""
    """Name of the run's folder in SAVE; no date is added to it. The folder must not exist yet, except with -resume auto, which continues the run in it."""
    CHECK: bool = False
    """Check data, weights, memory and disk, print the findings and exit: no training, no run folder."""
    CHECK_IMAGES: Annotated[int | None, Bounds(1, 1_000_000_000)] = None
    """With CHECK, read at most this many images of each set, spread evenly over the set; not set: all images."""
    PROFILE: Annotated[int | None, Bounds(1, 10_000)] = None
    """Number of updates to trace shortly after the start, into trace.json.gz for ui.perfetto.dev; not set: none."""
    MAX_TIME: Annotated[str | None, DURATION, In("RUN")] = None
    """Time limit since the program's start, such as 3h30m, 90m, 5400 (seconds) or Slurm's 1-12:00:00: the run saves and ends before the limit; not set: none."""
    ALLOW_CHANGED: Annotated[tuple[str, ...], In("RESUME")] = ()
    """Names of settings whose values may differ from the checkpoint's. The properties GLOBAL_BATCH, NUM_IMAGES, IMAGES, CLASS_NAMES, SPLIT and AUGMENTATION may be named too."""
    LAST_EPOCH: Annotated[int, Bounds(0, 1_000_000), In("TRAIN")] = 0
    """For weights from another system: the last finished epoch (1-based), after which training continues."""
    NGPUS: Annotated[int | None, Bounds(1, 1_000)] = None
    """Number of processes that main_multi_gpu.py starts without a launcher; not set: one per visible device."""
    URL: Annotated[str | None, In("DIST")] = None
    """Address of process 0, as tcp://HOST:PORT; not set: from the launcher."""
    WORLD_SIZE: Annotated[int | None, Bounds(1, 100_000), In("DIST")] = None
    """Number of processes on all machines; not set: from the launcher."""
    RANK: Annotated[int | None, Bounds(0, 99_999), In("DIST")] = None
    """Rank of this process, from 0; not set: from the launcher."""

    def allows(self, name: str) -> bool:
        """Return whether a resumed run may change this setting, or this property of the run such as GLOBAL_BATCH."""
        return name in self.ALLOW_CHANGED


@dataclass(frozen=True)
class Config:
    """All settings of a run, such as `config.TRAIN.BASE_LR`. They cannot be changed. START is not saved."""

    role: ClassVar[str] = RECIPE

    DATA: Data = Data()
    MODEL: Model = Model()
    TRAIN: Train = Train()
    PRECISION: Precision = Precision()
    DIST: Dist = Dist()
    START: Start = Start()
    AMP: bool = False
    """Mixed precision: autocast and a GradScaler, in training and evaluation."""
    SEED: Annotated[int, Bounds(0, MAX_INT)] = 0
    """Seed of the initial weights, the order of the images, augmentation and dropout."""
    SAVE: Annotated[str, LOCAL, RECORD] = "./output"
    """Folder in which every run creates its own folder."""
    SAVE_FREQ: Annotated[int, Bounds(1, 1_000_000), RECORD] = 10
    """Epochs between two numbered checkpoints; last.pth is written after every epoch."""
    SAVE_STEPS: Annotated[int | None, Bounds(1, 1_000_000_000), RECORD] = None
    """Updates between two saves within an epoch; not set: no saves within an epoch."""
    KEEP_CHECKPOINTS: Annotated[int, Bounds(0, 1_000_000), RECORD] = 3
    """Number of numbered checkpoints to keep besides last.pth, previous.pth and best.pth; 0: none are written."""
    REPORT_FREQ: Annotated[int, Bounds(1, 1_000_000_000), RECORD] = 20
    """Updates between two log lines."""
    VALIDATE_FREQ: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    DEVICE: Annotated[Literal["auto", "cuda", "xpu", "mps", "cpu"], MACHINE] = "auto"
    """Device; auto: CUDA, else XPU, else MPS, else the CPU."""
    COMPILE: bool | Literal["blocks", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = False
    """Compile with torch.compile: faster on GPUs, but compiling takes a minute or more; blocks: compile each block by itself, which takes less time."""
    DETERMINISTIC: bool = False
    """Use only deterministic kernels: slower on GPUs, where bit-identical resume needs it."""
    REPORT: Annotated[bool, RECORD] = True
    """Draw the wrong predictions (confusion.png, mistakes.png) and a training batch (train_batch.png), and write report.html; tables with the same data are always written."""
    CALIBRATE: Annotated[bool, RECORD] = True
    """Fit a temperature to the validation images and store it in best.pth, so that probabilities of predict.py say how often the model is right; the weights do not change."""
    TRACK: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], RECORD] = ("tensorboard",)
    """Trackers that show the run: tensorboard (files in the run folder), wandb (Weights & Biases), mlflow; empty: none. See docs/tracking.md."""

    @property
    def train_sizes(self) -> dict[int, int]:
        """The side of training images by epoch: {number of finished epochs: side from then on}."""
        pairs = (each.split(":") for each in self.TRAIN.SIZE_SCHEDULE)
        return {int(epochs): int(side) for epochs, side in pairs} or {0: self.DATA.IMAGE_SIZE}

    @property
    def largest_train_side(self) -> int:
        return max(self.train_sizes.values())
