"""Every setting: its type, bounds and default, and below it what it means. docs/settings.md is made from this file.

Names and defaults are PaddleViT's where it has the setting; a sentence says where a default differs. This file is a
table and as long as there are settings: one place to look up any of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from configs.tables import LOSSES, TORCH_OPTIMIZERS
from utils.text import is_url

AUTO = "auto"  # of a number: find it out at the start
MAX_INT = 2**63 - 1  # of torch's and numpy's integers

# What a setting is for: its role. A section has one, and a field with another names it. All that has to tell settings
# apart asks for the role: what a resumed run may change, what an evaluation takes over, what a comparison leaves out.
DATA = "data"  # which images and labels there are
MODEL = "model"  # what the model is, and how it wants its images: whoever has the weights needs it
RECIPE = "recipe"  # how the weights come about
MACHINE = "machine"  # where and how fast that is computed, with the same result
RECORD = "record"  # what is saved and shown of it
START = "start"  # of one start of the program: a command, and never saved
MAY_CHANGE = "may change"  # also of a role that decides the result: a resumed run may have another value


class Bounds(NamedTuple):
    """The smallest and the largest number that a setting, or a member of a list, may be.

    Values far beyond any use would loop forever or need more memory than there is.
    """

    low: float
    high: float


class Form(NamedTuple):
    """What a text, a list or a number must be besides its type and bounds."""

    fits: Callable[[Any], bool]
    words: str  # the end of a sentence that starts with `it must be`


def to_seconds(text: str) -> float | None:
    """Seconds of "3h30m", "90m", "1.5h", "5400", or Slurm's "03:30:00" and "1-12"; None if the text is not a duration."""
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
    """A file system allows 255 bytes."""
    return len(text.encode(errors="surrogateescape")) <= 200 and not re.search(r"^\.|[/\x00-\x1f\x7f]", text)


RANGE = Form(_is_range, "two numbers, min and max, such as [0.08, 1.0]")
COLUMN_NAMES = Form(
    lambda names: len(names) != 1 and len({*names}) == len(names),
    "the names of two columns, of paths (or images) and of classes, or of more: each once",
)
SIZES = Form(_is_size_schedule, "a list such as 0:128, 60:160, the first with 0 epochs, each later one with more")
FOLD_OF = Form(_is_fold, "a number from 0 and that of all folds, from 2 to 1000, such as 0/5")
FOLDER_NAME = Form(
    _is_folder_name,
    "the name of a folder in SAVE (-output): at most 200 bytes, no /, no control character and no . at its start",
)
LOCAL = Form(
    lambda text: not is_url(text),
    "a folder of this machine, no URL; copy a run to a bucket when it is done, or mount one",
)
TIME_TO_SPEND = Form(
    lambda text: DURATION.fits(text) or re.fullmatch(r"([01]?[0-9]|2[0-3]):[0-5][0-9]", text) is not None,
    "a duration above 0, such as 8h, 90m or 5400 (seconds), or a time of day, such as 07:00",
)
DURATION = Form(
    lambda text: 0 < (to_seconds(text) or 0) <= 1e9, "a duration above 0, such as 3h30m, 90m or 5400 (seconds)"
)


class Only(NamedTuple):
    """The setting beside it, or by its full name, without which a setting has no effect; several are divided by |."""

    key: str
    values: tuple = ()  # with which it has one; none: any that switches something on

    def keys(self, values: Mapping[str, Any], section: str) -> list[str]:
        """The full keys, of {full key: value}."""
        beside = {name: f"{section}.{name}" for name in self.key.split("|")}
        return [key if key in values else name for name, key in beside.items()]

    def applies(self, values: Mapping[str, Any], section: str) -> bool:
        """Whether the setting has an effect with these {full key: value}."""
        found = [values[key] for key in self.keys(values, section)]
        return any(value in self.values if self.values else bool(value) for value in found)


class Alike(NamedTuple):
    """Values of a setting with the same result: a resumed run may go from one to another."""

    values: tuple


class Extra(NamedTuple):
    """The extra that a setting needs: a file or folder of extras/, which may have been deleted."""

    name: str
    without: str = ""  # what a run lacks without it, if the setting's default uses it
    values: tuple = ()  # that need it; none: all that switch something on
    but: tuple = ()  # values that do not need it

    def is_used_by(self, value: Any) -> bool:
        if self.values:
            return value in self.values
        return bool(value) and value not in ("none", "off", *self.but)


class Described(NamedTuple):
    """The table of a setting's values (configs/tables.py), whose sentences end the setting's sentence."""

    table: Mapping[str, Any]


class In(NamedTuple):
    """The section in which a setting of Start is written."""

    section: str


class Fold(NamedTuple):
    """One of the parts into which a set is divided for cross-validation."""

    number: int  # from 0
    total: int


class Arguments(Mapping):
    """Arguments by name, for a constructor that is not ours: the value of a setting that is itself a section.

    Immutable, hashable and picklable. Its values are None, booleans, numbers, texts and tuples of these.
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
    """The data, and how it is loaded."""

    role: ClassVar[str] = DATA

    DATASET: str = "imagenet2012"
    """Name of the data set; docs/data.md lists them with their folder layouts."""
    DATA_PATH: Annotated[str, MAY_CHANGE] = "/dataset/imagenet/"
    """Folder of the data set (for csv: folder or file; for shards also a URL: docs/data.md, "Shards on a server")."""
    BATCH_SIZE: Annotated[
        int | Literal["auto"], Bounds(1, 1_000_000), RECIPE, MAY_CHANGE, Extra("memory", values=(AUTO,))
    ] = 256
    """Images per process and micro-batch; one update sees BATCH_SIZE x processes x TRAIN.ACCUM_ITER. auto: as many as fit the device, found by trial at the start."""
    BATCH_SIZE_EVAL: Annotated[int | None, Bounds(1, 1_000_000), MACHINE] = None
    """Images per process in evaluation; not set: BATCH_SIZE."""
    IMAGE_SIZE: Annotated[int, Bounds(1, 8_192), MODEL] = 224
    """Side of the square input image, in pixels."""
    IMAGE_CHANNELS: Annotated[Literal[1, 3], MODEL] = 3
    """3 for colour, 1 for grey."""
    CROP_PCT: Annotated[float, Bounds(0.01, 2.0), MODEL] = 0.875
    """Evaluation resizes to IMAGE_SIZE / CROP_PCT and crops the centre; above 1 the image is framed in black."""
    CROP_MODE: Annotated[Literal["center", "squash", "border"], MODEL] = "center"
    """What evaluation resizes to that: the short side (center), both sides (squash), or the long side, framed in the mean (border); as timm's crop modes."""
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
    TRAIN_INTERPOLATION: Annotated[Literal["random", "nearest", "bilinear", "bicubic", "lanczos"] | None, RECIPE] = None
    """Interpolation of training images, also in rotations and shifts of a policy; random: bilinear or bicubic, drawn each time; not set: INTERPOLATION."""
    IMAGENET_MEAN: Annotated[tuple[float, ...], Bounds(-1_000.0, 1_000.0), MODEL] = (0.5, 0.5, 0.5)
    """Mean of each channel, in [0, 1], subtracted from every image."""
    IMAGENET_STD: Annotated[tuple[float, ...], Bounds(1e-6, 1_000.0), MODEL] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, in [0, 1], that every image is divided by."""
    NUM_WORKERS: Annotated[int | None, Bounds(0, 1_000), MACHINE] = None
    """Loader threads or processes per training process; not set: its share of the cores, from 4 on less one; on CPUs at most 8, and 0 for data sets in memory. (PaddleViT: 1, which starves a GPU.)"""
    WORKERS: Annotated[Literal["auto", "threads", "processes"], MACHINE] = "auto"
    """Kind of loader worker: threads share memory and cost less; processes help where Python's interpreter lock limits. auto: processes on GPUs from 5 workers on (with TRAIN.AUTO_AUGMENT or COLOR_JITTER from 3 on, for data sets in memory always), if shared memory has room; else threads."""
    DROP_LAST: Annotated[bool, RECIPE] = True
    """Drop an epoch's last images if they do not fill a whole update (never if that would leave no update)."""
    SAMPLER: Annotated[Literal["shuffle", "balanced"], RECIPE] = "shuffle"
    """What an epoch draws: shuffle, each image once; balanced, as many images, the same number of each class: images of rare classes several times, of common ones a part."""
    VAL_FRACTION: Annotated[float, Bounds(0.0, 0.9), Only("FOLD", (None,))] = 0.1
    """Fraction of the images held out for validation, for data sets without a split."""
    FOLD: Annotated[str | None, FOLD_OF] = None
    """Cross-validation, for data sets without a split: 0/5 divides their images into five parts and holds out the first in place of VAL_FRACTION, 4/5 the last."""
    GROUP_BY: Annotated[str | None, Only("DATASET", ("csv",))] = None
    """For csv: a column; images with the same value in it are held out together (those of one person, or one scene)."""
    CLASSES: Annotated[str | None, MAY_CHANGE] = None
    """Text file with a class name per line, the first that of class 0; it numbers the classes of the data. Not set: by name."""
    LABEL_SEPARATOR: str | None = None
    """For csv, several labels an image: what divides them in the column of classes, such as | in `cat|dog`; an empty cell is an image without labels. TRAIN.LOSS is bce then, and TRAIN.BEST_METRIC map."""
    COLUMNS: Annotated[tuple[str, ...], COLUMN_NAMES, Only("DATASET", ("csv", "parquet"))] = ()
    """For csv and parquet: the names of two columns, of the paths (in parquet of the images) and of their classes; empty: image_path and target (in parquet image and label). For csv with several labels an image: the column of paths, and those of the classes, which have 1 (or true) for their images and 0 (or false) for others; *: all others."""
    EXIF: Literal["apply", "ignore"] | None = None
    """Turn photos upright as their EXIF orientation says, or leave them as the camera wrote them; not set: apply for imagefolder, csv, shards and parquet, ignore for the data sets with published figures."""
    MAX_PIXELS: Annotated[int, Bounds(1, 2**40), MAY_CHANGE] = 200_000_000
    """Larger images count as unreadable: a small file can decompress to gigabytes."""
    MAX_BAD_FRACTION: Annotated[float, Bounds(0.0, 1.0), MAY_CHANGE] = 0.01
    """Maximum tolerated fraction of unreadable images: above it the run stops, below it they are replaced and reported. Three are always tolerated, unless this is 0."""
    CACHE: Annotated[
        int | Literal["none", "disk"], Bounds(1, 100_000), RECIPE, Alike(("none", "disk")), Extra("cache")
    ] = "none"
    """Cache decoded images on disk, also for later runs, so that reading them again is cheap: disk, or a number of pixels, to which the short side of larger images is reduced before."""
    CACHE_PATH: Annotated[str | None, LOCAL, MACHINE] = None
    """Folder of the disk cache, of shards from a server, and of indexes of data in a read-only folder; not set: `cache` in SAVE."""
    SHUFFLE_BUFFER: Annotated[int, Bounds(1, 2**31), RECIPE, Only("DATASET", ("shards", "parquet"))] = 8192
    """Shards (and row groups of parquet) are read in random order, and a sample moves by less than this many places; as many as there are images: any order."""
    REMOTE_CACHE_GB: Annotated[float | None, Bounds(0.001, 1e9), MACHINE, Extra("remote")] = None
    """For shards on a server: how much of them CACHE_PATH may hold, in 10^9 bytes; the tars used longest ago are dropped. Not set: all, or 80% of the disk's free space."""
    SYNTHETIC_SIZE: Annotated[int, Bounds(1, 100_000_000), Only("DATASET", ("synthetic", "fractals"))] = 1280
    """Images per epoch of the data sets synthetic and fractals, which are computed."""

    @property
    def fold(self) -> Fold | None:
        """The part that is held out in cross-validation."""
        return Fold(*map(int, self.FOLD.split("/"))) if self.FOLD else None

    @property
    def cache_side(self) -> int | None:
        """The short side to which a cache reduces larger images; None: they keep their size."""
        return None if isinstance(self.CACHE, str) else self.CACHE

    @property
    def has_label_columns(self) -> bool:
        """Whether each class has a column of 0 and 1."""
        return len(self.COLUMNS) > 2 or self.COLUMNS[1:] == ("*",)

    @property
    def has_several_labels(self) -> bool:
        """Whether an image can have any number of labels."""
        return bool(self.LABEL_SEPARATOR) or self.has_label_columns

    @property
    def train_interpolation(self) -> str:
        """Interpolation of training images by name, or random."""
        return self.TRAIN_INTERPOLATION or self.INTERPOLATION


# These describe the model of TYPE vit; a timm model's name already says all of them.
VIT_FIELDS = ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "MLP_RATIO", "QKV_BIAS", "POS_EMBED")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters, which are trained in place of the weights that they lie beside; needs the package peft."""

    role: ClassVar[str] = RECIPE

    RANK: Annotated[int, Bounds(0, 100_000), Extra("lora")] = 0
    """Rank of the adapters; 0: none, all weights are trained."""
    ALPHA: Annotated[float, Bounds(1e-6, 1e6), Only("RANK")] = 16.0
    """What an adapter adds is multiplied by ALPHA / RANK."""
    TARGETS: Annotated[tuple[str, ...], Only("RANK")] = ("*.attn.qkv", "*.attn.proj", "*.mlp.fc1", "*.mlp.fc2")
    """Patterns of the linear layers that get one; all-linear: all but the classifier, which is trained whole."""


@dataclass(frozen=True)
class Model:
    """The model, and the weights that it starts from."""

    role: ClassVar[str] = MODEL

    TYPE: Literal["vit", "timm"] = "vit"
    """vit: a Vision Transformer built from the fields below; timm: the timm model NAME."""
    NAME: str = "vit"
    """With TYPE timm, any timm model; with TYPE vit, a label that is saved with the weights."""
    NUM_CLASSES: Annotated[int | None, Bounds(1, 1_000_000), DATA] = None
    """Outputs of the classifier; not set: the number of classes of the data. (PaddleViT: 1000.)"""
    PATCH_SIZE: Annotated[int, Bounds(1, 8_192)] = 16
    """Side of a patch in pixels."""
    EMBED_DIM: Annotated[int, Bounds(1, 100_000)] = 768
    """Width of the model."""
    DEPTH: Annotated[int, Bounds(1, 1_000)] = 12
    """Number of transformer blocks."""
    NUM_HEADS: Annotated[int, Bounds(1, 1_000)] = 12
    """Attention heads in each block."""
    MLP_RATIO: Annotated[float, Bounds(0.01, 100.0)] = 4.0
    """Hidden width of the MLP divided by EMBED_DIM."""
    QKV_BIAS: bool = True
    """Use biases for queries, keys and values."""
    POS_EMBED: Literal["learn", "sincos2d", "none"] = "learn"
    """Position embedding: learned; sincos2d, fixed sines and cosines of row and column, as in the plain ViT; or none."""
    DROPOUT: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Dropout rate after position embedding, attention projection and MLP; of a timm model before the classifier. Not set, as the next two: a timm model's own, 0 with TYPE vit."""
    ATTENTION_DROPOUT: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Dropout rate of attention weights."""
    DROPPATH: Annotated[float | None, Bounds(0.0, 0.99), RECIPE] = None
    """Drop path rate of the last block; it rises linearly from 0 at the first."""
    PRETRAINED: Annotated[str | None, RECIPE, MAY_CHANGE] = None
    """Weights to start from: a file (.pth, .safetensors, .npz, .pdparams), a run (its folder, or latest), or a timm model name to download."""
    FREEZE: Annotated[tuple[str, ...], RECIPE] = ()
    """Patterns of parameters or modules that are not trained (blocks.0.*); a leading ! exempts; classifier: whatever it is called in this model."""
    KWARGS: Arguments = Arguments()
    """Further arguments of timm's constructor, such as global_pool: avg or init_values: 1e-5; what has a setting of its own is refused."""
    LORA: Lora = Lora()


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    role: ClassVar[str] = RECIPE

    NAME: Annotated[str, Extra("optimizers", but=tuple(TORCH_OPTIMIZERS))] = "AdamW"
    """AdamW, Adam and SGD (without Nesterov) are torch's, with fused kernels; also any name of timm.optim.list_optimizers(), such as lamb, lion, muon, nadamw or adafactor. In any case of letters."""
    EPS: Annotated[float | None, Bounds(0.0, 1_000.0)] = None
    """Adam's epsilon; not set, of this and the next two: what the optimizer has by itself (AdamW and Adam 1e-8)."""
    BETAS: Annotated[
        tuple[float, ...],
        Bounds(0.0, 0.999999),
        Form(lambda betas: len(betas) in (0, 2), "two numbers, such as [0.9, 0.999]"),
    ] = ()
    """Adam's betas; not set: the optimizer's own (AdamW and Adam [0.9, 0.999])."""
    MOMENTUM: Annotated[float | None, Bounds(0.0, 0.999999)] = None
    """SGD's momentum; not set: the optimizer's own (SGD 0.9)."""
    KWARGS: Arguments = Arguments()
    """Further arguments of the optimizer's constructor, such as nesterov: true for SGD; what has a setting of its own is refused."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate after the warm-up."""

    role: ClassVar[str] = RECIPE

    NAME: Literal["cosine", "paddlevit", "constant", "step", "wsd"] = "cosine"
    """cosine; paddlevit, PaddleViT's cosine, once per epoch; constant; step; wsd, constant until it decays in the last DECAY_FRACTION of the run."""
    PER_EPOCH: Annotated[bool, Only("NAME", ("cosine", "constant", "step", "wsd"))] = False
    """Change the rate once per epoch, as timm does by default, and not at every update."""
    AFTER_WARMUP: Annotated[bool, Only("NAME", ("cosine", "paddlevit", "step"))] = True
    """For cosine and step: it begins where the warm-up ends; false (and not set, for step): it covers all epochs, and the warm-up replaces its beginning, as timm's default does."""
    COOLDOWN_EPOCHS: Annotated[int, Bounds(0, 1_000_000), Only("NAME", ("cosine", "paddlevit", "wsd"))] = 0
    """For cosine and wsd: last epochs at END_LR, which NUM_EPOCHS includes."""
    DECAY_FRACTION: Annotated[float, Bounds(0.0, 1.0), Only("NAME", ("wsd",))] = 0.2
    """For wsd: part of NUM_EPOCHS in which the rate falls to END_LR."""
    MILESTONES: Annotated[tuple[int, ...], Bounds(0, 1_000_000), Only("NAME", ("step",))] = ()
    """For step: epochs after which the rate is multiplied by DECAY_RATE; not set: every DECAY_EPOCHS."""
    DECAY_EPOCHS: Annotated[float, Bounds(0.001, 1_000_000), Only("NAME", ("step",))] = 30.0
    """For step: epochs between two decays."""
    DECAY_RATE: Annotated[float, Bounds(0.0, 1.0), Only("NAME", ("step",))] = 0.1
    """For step: factor of a decay."""


@dataclass(frozen=True)
class Train:
    """The training recipe."""

    role: ClassVar[str] = RECIPE

    NUM_EPOCHS: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 300
    """Passes over the training images."""
    BUDGET: Annotated[str | None, TIME_TO_SPEND, MAY_CHANGE, Extra("budget")] = None
    """The time that the run may take, over all its starts (8h, 90m), or the time of day at which it ends (07:00): it chooses its number of updates by its own speed, NUM_EPOCHS at most, and shortens the schedule in proportion, so that it ends in time at END_LR; not set: NUM_EPOCHS."""
    SIZE_SCHEDULE: Annotated[tuple[str, ...], SIZES] = ()
    """Sizes of training images, each as EPOCHS:PIXELS, the size after so many epochs: 0:128, 60:160, 80:224. Evaluation is at DATA.IMAGE_SIZE throughout; empty: training too."""
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
    """Batch size that the three rates above are meant for; they are multiplied by global batch / this (LR_SCALING)."""
    LR_SCALING: Annotated[Literal["linear", "sqrt"], Only("LINEAR_SCALED_LR")] = "linear"
    """How LINEAR_SCALED_LR scales: by global batch / batch size, or by the square root of that, as timm does for Adam and its kin."""
    LAYER_DECAY: Annotated[float | None, Bounds(0.0001, 1.0)] = None
    """Layer-wise learning rates: each layer's is that of the layer above it times this, from the classifier down, as timm's --layer-decay; not set: one rate for all."""
    WEIGHT_DECAY: Annotated[float, Bounds(0.0, 1_000.0)] = 0.3
    """Weight decay of matrices; biases, norms, class token and position embedding are not decayed. (PaddleViT decays all.)"""
    GRAD_CLIP: Annotated[float | None, Bounds(0.0, 1e9)] = None
    """Limit of CLIP_MODE; not set: no clipping."""
    CLIP_MODE: Annotated[Literal["norm", "value", "agc"], Only("GRAD_CLIP")] = "norm"
    """What GRAD_CLIP limits: norm, that of all gradients together; value, each gradient; agc, the norm of a unit's gradient as a fraction of its weights' norm (adaptive clipping, not of the classifier)."""
    EARLY_STOP: Annotated[int | None, Bounds(1, 1_000_000), MAY_CHANGE] = None
    """Evaluations in a row without a new best one (best.pth) after which the run ends; not set: it goes on to NUM_EPOCHS."""
    ACCUM_ITER: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 1
    """Micro-batches per update."""
    GRAD_CHECKPOINTING: Annotated[bool, MACHINE] = False
    """Activation checkpointing: a transformer block saves only its input and recomputes the rest in the backward; much less memory for the time of one more forward. (Other timm models: as timm's `--grad-checkpointing`.)"""
    SMOOTHING: Annotated[float, Bounds(0.0, 0.99)] = 0.0
    """Label smoothing."""
    LOSS: Annotated[Literal[*LOSSES], Described(LOSSES)] = "cross_entropy"
    """Training loss"""
    BCE_TARGET_THRESH: Annotated[float | None, Bounds(0.0, 1.0), Only("LOSS", ("bce",))] = None
    """For bce: targets above this, after smoothing and mixing, become 1, the others 0; not set: they stay as they are."""
    CLASS_WEIGHTS: str | None = None
    """Weights of the classes in the training loss: auto, images / (classes x images of the class), so that the mean over the images is 1; or a CSV file with a class and its weight in each line; none: all 1."""
    DISTILLATION_TYPE: Annotated[Literal["none", "soft", "hard"], Extra("distillation")] = "none"
    """Learn from a teacher too: soft, its probabilities of the classes; hard, the class it chooses."""
    DISTILLATION_ALPHA: Annotated[float, Bounds(0.0, 1.0), Only("DISTILLATION_TYPE", ("soft", "hard"))] = 0.5
    """Weight of the teacher in the loss; that of the labels is 1 - this."""
    DISTILLATION_TAU: Annotated[float, Bounds(0.01, 1_000.0), Only("DISTILLATION_TYPE", ("soft",))] = 1.0
    """For soft: temperature that teacher's and student's logits are divided by."""
    TEACHER_MODEL: Annotated[str | None, Only("DISTILLATION_TYPE", ("soft", "hard"))] = "regnety_160.deit_in1k"
    """The teacher: a timm model, or the checkpoint of a run, with the classes of the data. (PaddleViT: a file of RegNetY-16GF.)"""
    TEACHER_PRETRAINED: Annotated[str | None, Only("DISTILLATION_TYPE", ("soft", "hard"))] = None
    """Weights of a teacher from timm: a file or a name; not set: timm's own of TEACHER_MODEL."""
    COLOR_JITTER: Annotated[float, Bounds(0.0, 100.0)] = 0.0
    """Brightness, contrast and saturation are multiplied by a factor in 1 +- this; no effect with a policy other than 3a. (PaddleViT's DeiT: 0.4.)"""
    AUTO_AUGMENT: str | None = None
    """Augmentation policy: original, v0, rand-m9-mstd0.5-inc1, augmix-m3-w3, ta_wide or 3a; docs/augmentation.md explains them. (PaddleViT's true: original.)"""
    MIXUP_ALPHA: Annotated[float, Bounds(0.0, 1_000.0)] = 0.0
    """Mixup: blend pairs of images, with a weight from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 0.8.)"""
    CUTMIX_ALPHA: Annotated[float, Bounds(0.0, 1_000.0)] = 0.0
    """Cutmix: paste a box from the paired image, with an area from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 1.0.)"""
    CUTMIX_MINMAX: Annotated[
        tuple[float, ...], Bounds(0.0, 1.0), Form(lambda sides: not sides or _is_range(sides), RANGE.words)
    ] = ()
    """Cutmix with boxes of these sides instead, as fractions of the image's: min, max."""
    MIXUP_PROB: Annotated[float, Bounds(0.0, 1.0), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 1.0
    """Probability that a batch, pair or image is mixed."""
    MIXUP_SWITCH_PROB: Annotated[float, Bounds(0.0, 1.0), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 0.5
    """Probability of cutmix rather than mixup if both are on."""
    MIXUP_MODE: Annotated[Literal["batch", "pair", "elem"], Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = "batch"
    """What shares one random draw of kind, weight and box: a batch (of MIXUP_GROUP images), a pair, or an elem (each image)."""
    MIXUP_GROUP: Annotated[
        int | None,
        Bounds(2, 1_000_000),
        Form(lambda number: number % 2 == 0, "an even number, because images are mixed in pairs, or None"),
        Only("MIXUP_MODE", ("batch",)),
    ] = 128
    """For MIXUP_MODE batch: neighbouring images of an update that share a draw, however they are split over processes and micro-batches; an even number; not set: all of an update."""
    MIXUP_OFF_EPOCH: Annotated[int, Bounds(0, 1_000_000), Only("MIXUP_ALPHA|CUTMIX_ALPHA|CUTMIX_MINMAX")] = 0
    """Epochs after which mixing stops; 0: never."""
    RANDOM_ERASE_PROB: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    """Probability of random erasing of a training image. (PaddleViT's DeiT: 0.25.)"""
    RANDOM_ERASE_MODE: Annotated[Literal["pixel", "rand", "const"], Only("RANDOM_ERASE_PROB")] = "pixel"
    """Fill of erased boxes: pixel, noise; rand, one random colour; const, the mean colour."""
    RANDOM_ERASE_COUNT: Annotated[int, Bounds(1, 100), Only("RANDOM_ERASE_PROB")] = 1
    """Maximum number of boxes per image, which share the area."""
    REPEATED_AUG: Annotated[int, Bounds(1, 1_000)] = 1
    """Times that an update contains each of its images, each augmented differently; an epoch sees 1 / this of the images. (DeiT: 3.)"""
    MODEL_EMA: bool = False
    """Keep an exponential moving average (EMA) of the weights, and evaluate both."""
    MODEL_EMA_DECAY: Annotated[float, Bounds(0.0, 1.0), Only("MODEL_EMA")] = 0.99996
    """Decay of the EMA per update."""
    MODEL_EMA_WARMUP: Annotated[bool, Only("MODEL_EMA")] = True
    """Begin with a smaller decay, updates / (updates + 9), so that short runs fill the EMA too; false: MODEL_EMA_DECAY from the second update on. The first update's weights are where it begins."""
    BEST_METRIC: Annotated[
        Literal["top1", "top5", "loss", "macro_recall", "macro_f1", "micro_f1", "map"], MAY_CHANGE
    ] = "top1"
    """The metric of the validation that decides which epoch is best.pth; of equal ones the smaller loss decides. micro_f1 and map are for several labels an image, where map is the default."""
    OPTIMIZER: Optimizer = Optimizer()
    LR_SCHEDULER: LRScheduler = LRScheduler()

    @property
    def augments(self) -> bool:
        """Whether a policy or colour jitter changes training images."""
        return bool(self.AUTO_AUGMENT or self.COLOR_JITTER)

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on."""
        return bool(self.MIXUP_ALPHA or self.CUTMIX_ALPHA or self.CUTMIX_MINMAX)


@dataclass(frozen=True)
class Precision:
    """How AMP computes; AMP is the switch."""

    role: ClassVar[str] = RECIPE

    DTYPE: Annotated[Literal["float16", "bfloat16", "auto"] | None, Only("AMP")] = None
    """Half type of AMP; auto: bfloat16 if the device supports it, else float16; not set: float16 on CUDA, bfloat16 elsewhere."""
    MODE: Annotated[Literal["autocast", "naive", "float8"], Only("AMP"), Extra("float8", values=("float8",))] = (
        "autocast"
    )
    """autocast: operations in half where that is safe, weights in float32; naive: weights and operations in half, and float32 master weights for the optimizer; float8: autocast in bfloat16, with the large Linear layers in float8 (torchao, on CUDA devices that support it)."""
    RESIDUAL: Annotated[Literal["auto", "bfloat16", "float32", "half"], Only("AMP")] = AUTO
    """Type of the residual stream between transformer blocks under autocast: float32, or half, which rounds more and gains time with COMPILE; bfloat16: half where that is bfloat16 on a GPU; auto: as bfloat16 with COMPILE, else float32."""
    REDUCE: Annotated[Literal["float32", "half"], Only("AMP")] = "float32"
    """Type of the gradient all-reduce: float32, or half, the half type of autocast, for half the traffic."""
    MATMUL: Literal["ieee", "tf32"] = "ieee"
    """float32 matrix multiplication on CUDA: ieee, or tf32, which is faster and less precise."""
    INIT_LOSS_SCALING: Annotated[float, Bounds(1.0, 1e38)] = 65536.0
    """Initial loss scale, for float16."""
    INCR_EVERY_N_STEPS: Annotated[int, Bounds(1, 1_000_000_000)] = 2000
    """Consecutive updates without overflow after which the scale grows."""
    INCR_RATIO: Annotated[float, Bounds(1.0001, 1e6)] = 2.0
    """What it is multiplied by then."""
    DECR_EVERY_N_NAN_OR_INF: Annotated[int, Bounds(1, 1_000_000_000)] = 1
    """Consecutive updates with an overflow after which the scale shrinks. (Fleet: 2.)"""
    DECR_RATIO: Annotated[float, Bounds(0.0001, 0.9999)] = 0.5
    """What it is multiplied by then."""
    USE_DYNAMIC_LOSS_SCALING: bool = True
    """Adapt the scale; false: it stays at INIT_LOSS_SCALING."""
    MIN_LOSS_SCALING: Annotated[float, Bounds(1e-6, 1e38)] = 1.0
    """Minimum loss scale."""
    MAX_LOSS_SCALING: Annotated[float | None, Bounds(1e-6, 1e38)] = None
    """Maximum loss scale; not set: no limit."""
    MAX_CONSECUTIVE_SKIPS: Annotated[int, Bounds(1, 1_000_000_000)] = 50
    """Consecutive updates skipped because of non-finite gradients after which the run rolls back, or stops with exit code 3."""
    CUSTOM_BLACK_LIST: Annotated[tuple[str, ...], Only("AMP"), Extra("operator_lists")] = ()
    """What AMP keeps in float32: module paths (blocks.7.*), classes (LayerNorm), operators (softmax)."""
    CUSTOM_WHITE_LIST: Annotated[tuple[str, ...], Only("AMP"), Extra("operator_lists")] = ()
    """What AMP computes in half although autocast would not, in the same form."""


@dataclass(frozen=True)
class Dist:
    """How processes share the work."""

    role: ClassVar[str] = MACHINE

    TIMEOUT: Annotated[float, Bounds(1.0, 1e7)] = 1800.0
    """Seconds to wait for a process that does not join or respond before the run ends and names it."""
    STRATEGY: Literal["ddp", "fsdp2"] = "ddp"
    """ddp: each process has the whole model; fsdp2: weights, gradients, optimizer and EMA are sharded, and a checkpoint is a file per process with an index. The same with one process; any number of processes can read either checkpoint."""


@dataclass(frozen=True)
class Start:
    """What one start of the program is to do: commands in the form of settings, which are not saved with the run.

    The code has all of them in `config.START`. In files, behind -opts and in messages, some have the section that `In` names:
    `config.START.MAX_TIME` is the setting RUN.MAX_TIME, and `config.START.RESUME` is MODEL.RESUME.
    """

    role: ClassVar[str] = START
    EVAL: bool = False
    """Evaluate only."""
    RESUME: Annotated[str | None, In("MODEL")] = None
    """Checkpoint or run (its folder, or latest, the newest) to resume; auto: the newest valid one of run NAME, or of the run under SAVE that was saved last."""
    NAME: Annotated[str, FOLDER_NAME] = ""
    """Name of the run's folder in SAVE, without a date; it must be new, or with -resume auto that of the run to continue."""
    CHECK: bool = False
    """Check data, weights, memory and disk, print the findings and exit: no training, no run folder."""
    CHECK_IMAGES: Annotated[int | None, Bounds(1, 1_000_000_000)] = None
    """With CHECK, read at most this many images of each set, spread evenly over it; not set: all."""
    EXPLAIN: Annotated[bool, In("PRECISION"), Extra("explain")] = False
    """Before training, report the type in which each module computes, and write precision.csv."""
    PROFILE: Annotated[int | None, Bounds(1, 10_000), Extra("profiler")] = None
    """Updates to trace shortly after the start, into trace.json.gz for ui.perfetto.dev; not set: none."""
    MAX_TIME: Annotated[str | None, DURATION, In("RUN")] = None
    """Time limit since the program's start, such as 3h30m, 90m, 5400 (seconds) or Slurm's 1-12:00:00: the run saves and ends before it; not set: none."""
    ALLOW_CHANGED: Annotated[tuple[str, ...], In("RESUME")] = ()
    """Names of settings that may differ from the checkpoint's; also GLOBAL_BATCH, NUM_IMAGES, IMAGES, CLASS_NAMES, SPLIT and AUGMENTATION."""
    LAST_EPOCH: Annotated[int, Bounds(0, 1_000_000), In("TRAIN")] = 0
    """Last finished epoch, 1-based: where training continues with weights of another system."""
    NGPUS: Annotated[int | None, Bounds(1, 1_000)] = None
    """Processes that main_multi_gpu.py starts without a launcher; not set: one per visible device."""
    URL: Annotated[str | None, In("DIST")] = None
    """Address of process 0, as tcp://HOST:PORT; not set: from the launcher."""
    WORLD_SIZE: Annotated[int | None, Bounds(1, 100_000), In("DIST")] = None
    """Number of processes on all machines; not set: from the launcher."""
    RANK: Annotated[int | None, Bounds(0, 99_999), In("DIST")] = None
    """Rank of this process, from 0; not set: from the launcher."""

    def allows(self, name: str) -> bool:
        """Return whether a resumed run may have another value of this setting, or GLOBAL_BATCH and so on."""
        return name in self.ALLOW_CHANGED


@dataclass(frozen=True)
class Config:
    """All settings of a run, read as `config.TRAIN.BASE_LR`; nothing writes to it. START is not saved."""

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
    """Seed of weights, order, augmentation and dropout."""
    SAVE: Annotated[str, LOCAL, RECORD] = "./output"
    """Folder in which every run creates its own folder."""
    SAVE_FREQ: Annotated[int, Bounds(1, 1_000_000), RECORD] = 10
    """Epochs between two numbered checkpoints; last.pth is written after every epoch."""
    SAVE_STEPS: Annotated[int | None, Bounds(1, 1_000_000_000), RECORD] = None
    """Updates between two saves within an epoch; not set: none."""
    KEEP_CHECKPOINTS: Annotated[int, Bounds(0, 1_000_000), RECORD] = 3
    """How many numbered checkpoints to keep, besides last.pth, previous.pth and best.pth; 0: none is written."""
    REPORT_FREQ: Annotated[int, Bounds(1, 1_000_000_000), RECORD] = 20
    """Updates between two log lines."""
    VALIDATE_FREQ: Annotated[int, Bounds(1, 1_000_000), MAY_CHANGE] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    DEVICE: Annotated[Literal["auto", "cuda", "xpu", "mps", "cpu"], MACHINE] = "auto"
    """Device; auto: CUDA, else XPU, else MPS, else the CPU."""
    COMPILE: bool | Literal["blocks", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = False
    """Compile with torch.compile: faster on GPUs, after a minute or more; blocks: each block by itself, in less time."""
    DETERMINISTIC: bool = False
    """Use only deterministic kernels: slower on GPUs, where bit-identical resume needs it."""
    REPORT: Annotated[
        bool, RECORD, Extra("report", "no report.html, no curves, and no tables and pictures of images")
    ] = True
    """Draw what went wrong (confusion.png, mistakes.png) and what the model is trained on (train_batch.png), and write report.html; tables of the same are written in any case."""
    TRACK: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow"], ...], RECORD, Extra("trackers", "no TensorBoard")
    ] = ("tensorboard",)
    """Trackers that show the run: tensorboard (files in the run folder), wandb (Weights & Biases), mlflow; empty: none. docs/tracking.md"""

    @property
    def train_sizes(self) -> dict[int, int]:
        """{epochs done: side of training images from then on}"""
        pairs = (each.split(":") for each in self.TRAIN.SIZE_SCHEDULE)
        return {int(epochs): int(side) for epochs, side in pairs} or {0: self.DATA.IMAGE_SIZE}

    @property
    def largest_train_side(self) -> int:
        return max(self.train_sizes.values())
