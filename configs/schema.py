"""Every setting: its name, type, default, and one sentence. docs/settings.md is made from this file.

Names and defaults are PaddleViT's where it has the setting; where another default serves better, the sentence says so.
"""

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"  # of a number: to be found out


def setting(
    default: Any,
    sentence: str,
    *,
    choices: tuple = (),
    low: float | None = None,
    high: float | None = None,
    words: tuple = (),
):
    """One setting. `low` and `high` are inclusive bounds for a number, or for each number of a list.

    `words`: what it may be besides a number. Only a seed has no `high`: what is far beyond any use would loop for ever or
    ask for more memory than there is.
    """
    return field(
        default=default, metadata={"sentence": sentence, "choices": choices, "low": low, "high": high, "words": words}
    )


def section(cls: type):
    """A group of settings, one level down in the YAML."""
    return field(default_factory=cls)


@dataclass(frozen=True)
class Data:
    """What the model is shown."""

    DATASET: str = setting("imagenet2012", "Name of the data set; docs/data.md lists them with their folder layouts.")
    DATA_PATH: str = setting("/dataset/imagenet/", "Folder (for csv: folder or file) that holds the data set.")
    BATCH_SIZE: int | str = setting(
        256,
        "Images per process and micro-batch; one update sees BATCH_SIZE x processes x TRAIN.ACCUM_ITER. auto: as many as fit the device, tried out at the start.",
        low=1,
        high=1_000_000,
        words=(AUTO,),
    )
    BATCH_SIZE_EVAL: int | None = setting(
        None, "Images per process in evaluation; not set: BATCH_SIZE.", low=1, high=1_000_000
    )
    IMAGE_SIZE: int = setting(224, "Side of the square image that the model sees, in pixels.", low=1, high=8_192)
    IMAGE_CHANNELS: int = setting(3, "3 for colour, 1 for grey.", choices=(1, 3))
    CROP_PCT: float = setting(
        0.875, "Evaluation resizes the short side to IMAGE_SIZE / CROP_PCT and crops the centre.", low=0.01, high=1.0
    )
    CROP_SCALE: tuple[float, ...] = setting(
        (0.08, 1.0), "Share of the image's area that a random training crop covers: least, most.", low=0.0001, high=1.0
    )
    CROP_RATIO: tuple[float, ...] = setting(
        (3 / 4, 4 / 3), "Width over height of a random training crop: least, most.", low=0.01, high=100.0
    )
    HFLIP: float = setting(0.5, "Probability that a training image is mirrored left to right.", low=0.0, high=1.0)
    INTERPOLATION: str = setting(
        "bicubic", "How images are resized.", choices=("nearest", "bilinear", "bicubic", "lanczos")
    )
    IMAGENET_MEAN: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5), "Mean of each channel, in 0..1, taken off every image.", low=-1_000.0, high=1_000.0
    )
    IMAGENET_STD: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5), "Deviation of each channel, in 0..1, that every image is divided by.", low=1e-6, high=1_000.0
    )
    NUM_WORKERS: int | None = setting(
        None,
        "Loader threads or processes per training process; not set: the cores there are, shared out, at most 8; 0 for sets held in memory. (PaddleViT: 1, which starves a GPU.)",
        low=0,
        high=1_000,
    )
    WORKERS: str = setting(
        "threads",
        "What reads ahead: threads, which share all memory and cost less, or processes, where Python itself is the limit.",
        choices=("threads", "processes"),
    )
    PREFETCH: int | None = setting(
        None,
        "Batches read ahead of the one in use, by processes at least 1 each; not set: 2, and 0 where the CPU computes the model, whose cores then all read and after that all compute.",
        low=0,
        high=1_000,
    )
    DROP_LAST: bool = setting(
        True,
        "Leave out an epoch's last images when they do not fill a whole update (never when that would leave no update).",
    )
    VAL_FRACTION: float = setting(
        0.1, "Share of each class held out for validation, for data sets that come without a split.", low=0.0, high=0.9
    )
    SPLIT_SEED: int = setting(0, "Which images are held out is a function of this seed alone.", low=0)
    KEEP_BACKGROUND: bool = setting(False, "Keep Caltech's background / clutter folder as a class of its own.")
    DOWNLOAD: bool = setting(
        True,
        "Fetch CIFAR or a torchvision data set from its home page when it is not in DATA_PATH; one process does, the others wait.",
    )
    MAX_BAD_FRACTION: float = setting(
        0.01,
        "Share of unreadable images above which the run stops; below it they are replaced and named.",
        low=0.0,
        high=1.0,
    )
    CACHE: str = setting(
        "none",
        "Keep images so that reading them again is cheap: on disk, for later runs too, or in ram, until the run ends.",
        choices=("none", "ram", "disk"),
    )
    CACHE_FORM: str = setting(
        "decoded",
        "How they are kept: decoded, nothing to compute but much room, or as JPEG, a tenth of that.",
        choices=("decoded", "jpeg"),
    )
    CACHE_SIDE: int | None = setting(
        None,
        "Short side that larger images are shrunk to before they are kept; not set: as they are.",
        low=1,
        high=100_000,
    )
    CACHE_QUALITY: int = setting(90, "Quality of kept JPEGs.", low=1, high=100)
    CACHE_PATH: str | None = setting(
        None,
        "Folder of the disk's cache; not set: `cache` in SAVE, where runs write anyway, as DATA_PATH is often read-only.",
    )
    SHUFFLE_BUFFER: int = setting(
        8192,
        "Shards are read in a random order, and a sample comes less than this many places before or after its turn; at least as many as there are images: any order.",
        low=1,
        high=2**31,
    )
    CUT_SHARDS: str = setting(
        "refuse",
        "What to do with a shard whose end is missing: refuse it, or read its whole samples.",
        choices=("refuse", "read"),
    )
    SYNTHETIC_SIZE: int = setting(
        1280, "Images an epoch of the synthetic data set, which lie ready on the device.", low=1, high=100_000_000
    )


@dataclass(frozen=True)
class Model:
    """What is trained."""

    TYPE: str = setting(
        "vit",
        "vit: a Vision Transformer built from the fields below; timm: the timm model called NAME.",
        choices=("vit", "timm"),
    )
    NAME: str = setting("vit", "For TYPE timm any timm model; for TYPE vit a label that is saved with the weights.")
    NUM_CLASSES: int | None = setting(
        None,
        "Outputs of the classifier; not set: as many as the data has classes. (PaddleViT: 1000.)",
        low=1,
        high=1_000_000,
    )
    PATCH_SIZE: int = setting(16, "Side of a patch in pixels.", low=1, high=8_192)
    EMBED_DIM: int = setting(768, "Width of the model.", low=1, high=100_000)
    DEPTH: int = setting(12, "Number of transformer blocks.", low=1, high=1_000)
    NUM_HEADS: int = setting(12, "Attention heads in each block.", low=1, high=1_000)
    ATTN_HEAD_SIZE: int | None = setting(None, "Width of a head; not set: EMBED_DIM / NUM_HEADS.", low=1, high=100_000)
    MLP_RATIO: float = setting(4.0, "Hidden width of the MLP over EMBED_DIM.", low=0.01, high=100.0)
    QKV_BIAS: bool = setting(True, "Biases on queries, keys and values.")
    DROPOUT: float = setting(0.0, "Dropout after position embedding, attention projection and MLP.", low=0.0, high=0.99)
    ATTENTION_DROPOUT: float = setting(0.0, "Dropout on attention weights.", low=0.0, high=0.99)
    DROPPATH: float = setting(
        0.0, "Probability of skipping a residual branch, rising linearly to this at the last block.", low=0.0, high=0.99
    )
    PRETRAINED: str | None = setting(
        None, "Weights to start from: a file (.pth, .safetensors, .npz, .pdparams) or a timm model name to fetch."
    )
    RESUME: str | None = setting(None, "Checkpoint to go on from; auto: the newest valid one of this TAG under SAVE.")
    FREEZE: tuple[str, ...] = setting(
        (), "Parameters or modules that do not train, as patterns (blocks.0.*); a leading ! exempts."
    )


@dataclass(frozen=True)
class Optimizer:
    """How weights move."""

    NAME: str = setting("AdamW", "Update rule.", choices=("AdamW", "Adam", "SGD"))
    EPS: float = setting(1e-8, "Added to Adam's denominator.", low=0.0, high=1_000.0)
    BETAS: tuple[float, ...] = setting((0.9, 0.999), "Adam's two decay rates.", low=0.0, high=0.999999)
    MOMENTUM: float = setting(0.9, "SGD's momentum.", low=0.0, high=0.999999)


@dataclass(frozen=True)
class LRScheduler:
    """How the learning rate moves after warm-up."""

    NAME: str = setting(
        "cosine",
        "cosine and step move every update; paddlevit is PaddleViT's cosine, once an epoch; constant stays.",
        choices=("cosine", "paddlevit", "constant", "step"),
    )
    MILESTONES: tuple[int, ...] = setting(
        (),
        "For step: epochs after which the rate is multiplied by DECAY_RATE; not set: every DECAY_EPOCHS.",
        low=1,
        high=1_000_000,
    )
    DECAY_EPOCHS: int = setting(30, "For step: epochs between two drops.", low=1, high=1_000_000)
    DECAY_RATE: float = setting(0.1, "For step: factor of a drop.", low=0.0, high=1.0)


@dataclass(frozen=True)
class Train:
    """How it is trained."""

    NUM_EPOCHS: int = setting(300, "Passes over the training images.", low=1, high=1_000_000)
    LAST_EPOCH: int = setting(
        0,
        "Last finished epoch, 1-based; with weights of another system, training goes on after it.",
        low=0,
        high=1_000_000,
    )
    WARMUP_EPOCHS: float = setting(
        32, "Epochs over which the learning rate rises from WARMUP_START_LR to BASE_LR.", low=0.0, high=1e6
    )
    BASE_LR: float = setting(3e-3, "Highest learning rate.", low=0.0, high=1_000.0)
    WARMUP_START_LR: float = setting(1e-6, "Learning rate of the first update of the warm-up.", low=0.0, high=1_000.0)
    END_LR: float = setting(0.0, "Learning rate that the schedule ends at.", low=0.0, high=1_000.0)
    LINEAR_SCALED_LR: int | None = setting(
        None,
        "The batch size that the three rates above are meant for; they are scaled by global batch over this.",
        low=1,
        high=1_000_000_000,
    )
    WEIGHT_DECAY: float = setting(
        0.3,
        "Decay of weight matrices; biases, norms, class token and position embedding are left alone. (PaddleViT decays all.)",
        low=0.0,
        high=1_000.0,
    )
    GRAD_CLIP: float | None = setting(None, "Largest norm of the gradient; not set: no clipping.", low=0.0, high=1e9)
    ACCUM_ITER: int = setting(1, "Micro-batches per update.", low=1, high=1_000_000)
    GRAD_CHECKPOINTING: bool = setting(
        False,
        "Activation checkpointing: a transformer block keeps its input alone, and computes again in the backward what it needs; far less memory, for the time of another forward. (Other timm models: as timm's `--grad-checkpointing` does it.)",
    )
    SMOOTHING: float = setting(0.0, "Label smoothing.", low=0.0, high=0.99)
    COLOR_JITTER: float = setting(
        0.0,
        "Brightness, contrast and saturation are multiplied by a factor within 1 +- this; without effect beside a policy other than 3a. (PaddleViT's DeiT: 0.4.)",
        low=0.0,
        high=100.0,
    )
    AUTO_AUGMENT: str | None = setting(
        None,
        "Policy of random operations on each training image: original, cifar10, svhn, rand-m9-mstd0.5-inc1, augmix-m3-w3, ta_wide or 3a; docs/augmentation.md explains them. (PaddleViT's true: original.)",
    )
    RAND_AUGMENT: bool = setting(
        False,
        "RandAugment, in place of AUTO_AUGMENT: the policy rand-m9-n2-mstd0.5-inc1, with n and m from the next two settings.",
    )
    RAND_AUGMENT_LAYERS: int = setting(
        2, "Operations of RAND_AUGMENT on an image, each applied every other time.", low=1, high=100
    )
    RAND_AUGMENT_MAGNITUDE: float = setting(9, "Strength of RAND_AUGMENT's operations.", low=0.0, high=10.0)
    MIXUP_ALPHA: float = setting(
        0.0,
        "Mixup: images are blended in pairs, by a share from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 0.8.)",
        low=0.0,
        high=1_000.0,
    )
    CUTMIX_ALPHA: float = setting(
        0.0,
        "Cutmix: a box of the partner is pasted in, its area from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 1.0.)",
        low=0.0,
        high=1_000.0,
    )
    CUTMIX_MINMAX: tuple[float, ...] = setting(
        (), "Cutmix with boxes of such sides instead, as shares of the image's: least, most.", low=0.0, high=1.0
    )
    MIXUP_PROB: float = setting(1.0, "Probability that a batch, pair or image is mixed at all.", low=0.0, high=1.0)
    MIXUP_SWITCH_PROB: float = setting(
        0.5, "Probability of cutmix rather than mixup, where both are on.", low=0.0, high=1.0
    )
    MIXUP_MODE: str = setting(
        "batch",
        "What shares one draw of kind, share and box: the batch of an update, a pair, or an elem, each image on its own.",
        choices=("batch", "pair", "elem"),
    )
    MIXUP_OFF_EPOCH: int = setting(
        0, "Epochs after which nothing is mixed any more; 0: mixed to the end.", low=0, high=1_000_000
    )
    RANDOM_ERASE_PROB: float = setting(
        0.0, "Probability that boxes of a training image are erased. (PaddleViT's DeiT: 0.25.)", low=0.0, high=1.0
    )
    RANDOM_ERASE_MODE: str = setting(
        "pixel",
        "What is put there: pixel, noise; rand, one random colour; const, the mean colour.",
        choices=("pixel", "rand", "const"),
    )
    RANDOM_ERASE_COUNT: int = setting(1, "Most boxes of an image, which share the area.", low=1, high=100)
    REPEATED_AUG: int = setting(
        1,
        "How often an update holds each of its images, augmented anew; an epoch sees 1 / this of the images. (DeiT: 3.)",
        low=1,
        high=1_000,
    )
    MODEL_EMA: bool = setting(False, "Keep a running mean of the weights and evaluate it beside them.")
    MODEL_EMA_DECAY: float = setting(0.99996, "How much of the running mean an update keeps.", low=0.0, high=1.0)
    OPTIMIZER: Optimizer = section(Optimizer)
    LR_SCHEDULER: LRScheduler = section(LRScheduler)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return bool(self.MIXUP_ALPHA or self.CUTMIX_ALPHA or self.CUTMIX_MINMAX)


@dataclass(frozen=True)
class Precision:
    """How AMP computes. AMP is the switch, this is the how."""

    DTYPE: str | None = setting(
        None,
        "Half type of AMP; auto: bfloat16 where the device has it, else float16; not set: float16 on CUDA, bfloat16 elsewhere.",
        choices=("float16", "bfloat16", "auto"),
    )
    MODE: str = setting(
        "autocast",
        "autocast: operations in half where that is safe, weights in float32; naive: weights and operations in half, and float32 copies of the weights that the optimizer moves; float8: as autocast in bfloat16, with the large Linear layers in float8 (torchao, on CUDA devices that have it).",
        choices=("autocast", "naive", "float8"),
    )
    RESIDUAL: str = setting(
        "float32",
        "Type of what one transformer block hands to the next under autocast: float32, or half, faster and with less memory.",
        choices=("float32", "half"),
    )
    REDUCE: str = setting(
        "float32",
        "Type in which gradients travel between processes: float32, or half, the half type of autocast, for half the traffic.",
        choices=("float32", "half"),
    )
    MATMUL: str = setting(
        "ieee",
        "How CUDA multiplies float32 matrices: ieee, or tf32, faster and with fewer digits.",
        choices=("ieee", "tf32"),
    )
    INIT_LOSS_SCALING: float = setting(65536.0, "First loss scale, in float16.", low=1.0, high=1e38)
    INCR_EVERY_N_STEPS: int = setting(
        2000, "Good updates in a row after which the scale grows.", low=1, high=1_000_000_000
    )
    INCR_RATIO: float = setting(2.0, "What it is multiplied by then.", low=1.0001, high=1e6)
    DECR_EVERY_N_NAN_OR_INF: int = setting(
        1, "Updates with an overflow after which the scale shrinks. (Fleet: 2.)", low=1, high=1_000_000_000
    )
    DECR_RATIO: float = setting(0.5, "What it is multiplied by then.", low=0.0001, high=0.9999)
    HYSTERESIS: str = setting(
        "consecutive",
        "How overflows are counted: consecutive, a good update starts the count anew, as in Paddle; cumulative, only growing does, as in naive float16 trainers.",
        choices=("consecutive", "cumulative"),
    )
    USE_DYNAMIC_LOSS_SCALING: bool = setting(True, "Move the scale; false: it stays at INIT_LOSS_SCALING.")
    MIN_LOSS_SCALING: float = setting(1.0, "The scale never shrinks below this.", low=1e-6, high=1e38)
    MAX_LOSS_SCALING: float | None = setting(
        None, "The scale never grows above this; not set: no bound.", low=1e-6, high=1e38
    )
    MAX_CONSECUTIVE_SKIPS: int = setting(
        50,
        "Updates skipped in a row, for a gradient that is not finite, after which the run goes back, or stops with exit code 3.",
        low=1,
        high=1_000_000_000,
    )
    ROLLBACKS: int = setting(
        1,
        "How often a run goes back to its last checkpoint from before such a row of updates, and leaves them out; 0: it stops at once.",
        low=0,
        high=1_000,
    )
    DOCTOR_SKIPS: int | None = setting(
        10,
        "Updates skipped in a row after which the run looks, once, for the module that breaks, and writes doctor.yaml; not set: never.",
        low=1,
        high=1_000_000_000,
    )
    CUSTOM_BLACK_LIST: tuple[str, ...] = setting(
        (), "What AMP leaves in float32: module paths (blocks.7.*), classes (LayerNorm), operators (softmax)."
    )
    CUSTOM_WHITE_LIST: tuple[str, ...] = setting((), "What AMP computes in half although it would not: likewise.")

    SHADOW_STEPS: int | None = setting(
        None,
        "Updates between two comparisons of a batch, and of how many gradients underflow, with the same in float32; not set: none.",
        low=1,
        high=1_000_000_000,
    )
    SHADOW_COSINE: float = setting(
        0.9, "A comparison warns when a module's gradient has a smaller cosine to float32's.", low=-1.0, high=1.0
    )
    SHADOW_LOSS: float = setting(0.05, "It warns too when the loss is off by more than this share.", low=0.0, high=1e9)
    EXPLAIN: bool = setting(
        False, "Before training, say of every module in which type it computes, and write precision.csv."
    )


@dataclass(frozen=True)
class Resume:
    """What resuming allows."""

    ALLOW_CHANGED: bool = setting(False, "Go on although settings differ from those that the checkpoint was made with.")


@dataclass(frozen=True)
class Run:
    """How long it may go on."""

    MAX_TIME: str | None = setting(
        None,
        "Time since the program's start, such as 3h30m, 90m or 5400 (seconds), before which the run saves and ends; not set: no limit.",
    )


@dataclass(frozen=True)
class Dist:
    """How the processes of a run share the work, and how they find each other where torchrun, Slurm or MPI do not say it."""

    URL: str | None = setting(None, "Where process 0 is met, as tcp://HOST:PORT; not set: what the launcher says.")
    WORLD_SIZE: int | None = setting(
        None, "Processes of the run, on all machines; not set: what the launcher says.", low=1, high=100_000
    )
    RANK: int | None = setting(
        None, "Which of them this one is, from 0; not set: what the launcher says.", low=0, high=99_999
    )
    TIMEOUT: float = setting(
        1800.0,
        "Seconds to wait for a process that does not come or does not answer, before the run ends and names it.",
        low=1.0,
        high=1e7,
    )
    STRATEGY: str = setting(
        "ddp",
        "How several processes share the model: ddp, each has all of it; fsdp2, each has a part of weights, gradients, optimizer and running mean. With one process both are the same.",
        choices=("ddp", "fsdp2"),
    )
    CHECKPOINT: str = setting(
        "single",
        "single: a checkpoint is one file, written by process 0; sharded: a file for each process, and an index. Either is read by any number of processes.",
        choices=("single", "sharded"),
    )


@dataclass(frozen=True)
class Config:
    """A whole run. Read it as `config.TRAIN.BASE_LR`; nothing writes to it."""

    DATA: Data = section(Data)
    MODEL: Model = section(Model)
    TRAIN: Train = section(Train)
    PRECISION: Precision = section(Precision)
    RESUME: Resume = section(Resume)
    RUN: Run = section(Run)
    DIST: Dist = section(Dist)
    AMP: bool = setting(False, "Mixed precision: autocast and a GradScaler, in training and evaluation.")
    EVAL: bool = setting(False, "Evaluate only.")
    CHECK: bool = setting(
        False, "Look at data, weights, memory and disk, print what was found, and end: no training, no run folder."
    )
    SEED: int = setting(0, "Weights, order, augmentation and dropout are functions of this seed.", low=0)
    SAVE: str = setting("./output", "Folder in which every run gets a folder of its own.")
    TAG: str = setting("", "Added to the name of the run's folder: a name, not a path.")
    SAVE_FREQ: int = setting(
        10, "Epochs between two kept checkpoints; last.pth is written after every epoch.", low=1, high=1_000_000
    )
    SAVE_STEPS: int | None = setting(
        None, "Updates between two saves within an epoch; not set: none.", low=1, high=1_000_000_000
    )
    KEEP_CHECKPOINTS: int = setting(
        3, "How many of the kept checkpoints stay, besides last.pth and best.pth.", low=1, high=1_000_000
    )
    REPORT_FREQ: int = setting(20, "Updates between two lines of the log.", low=1, high=1_000_000_000)
    VALIDATE_FREQ: int = setting(
        1, "Epochs between two evaluations; the last epoch always ends with one.", low=1, high=1_000_000
    )
    DEVICE: str = setting(
        "auto",
        "Where to compute; auto: CUDA, else XPU, else MPS, else the CPU.",
        choices=("auto", "cuda", "xpu", "mps", "cpu"),
    )
    NGPUS: int | None = setting(
        None, "Processes that a plain main_multi_gpu.py starts; not set: one per visible device.", low=1, high=1_000
    )
    COMPILE: bool = setting(False, "Compile the model with torch.compile: faster on GPUs, after a minute or more.")
    COMPILE_SCOPE: str = setting(
        "model",
        "What is compiled: the model as a whole, or each of its blocks, which takes a fraction of the time to compile.",
        choices=("model", "blocks"),
    )
    COMPILE_MODE: str = setting(
        "default",
        "torch.compile's mode; reduce-overhead runs CUDA graphs, for small models and batches; max-autotune tries kernels for long.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    DETERMINISTIC: bool = setting(
        False, "Use deterministic kernels only, slower on a GPU; needed there for bit-identical resume."
    )
    PROFILE: int | None = setting(
        None,
        "Updates to trace, a few after the start, into trace.json.gz for ui.perfetto.dev; not set: none.",
        low=1,
        high=10_000,
    )
    TENSORBOARD: bool = setting(True, "Write TensorBoard files into the run's folder.")


_LATER = "not part of this version, so it has no effect"

# PaddleViT's other keys: accepted, so that its files work unmodified, and named in one line each when set.
IGNORED = {
    "LOCAL_RANK": "the launcher says which process this is",
    "MODEL.PATCH_GRID": "the number of patches follows from IMAGE_SIZE and PATCH_SIZE",
    "TRAIN.MODEL_EMA_FORCE_CPU": "the running mean lies where the model lies",
    "TRAIN.LAYER_DECAY": _LATER,
    "TRAIN.RANDOM_ERASE_SPLIT": "every image is a batch of its own to random erasing, so there is nothing to split",
    "TRAIN.DISTILLATION_TYPE": _LATER,
    "TRAIN.DISTILLATION_ALPHA": _LATER,
    "TRAIN.DISTILLATION_TAU": _LATER,
    "TRAIN.TEACHER_MODEL": _LATER,
}
