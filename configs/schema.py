"""Every setting: its name, type, default and help text. docs/settings.md is made from this file.

Names and defaults are PaddleViT's where it has the setting; a help text says where a default differs. This file is a table
and as long as there are settings: one place to look up any of them.
"""

from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"  # of a number: find it out at the start


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    bounds: tuple[float | None, float | None] = (None, None),
    special: tuple = (),
):
    """One setting. `bounds`: inclusive, for a number or each number of a list. `special`: words allowed besides a number.

    Only seeds have no upper bound: values far beyond any use would loop forever or need more memory than there is.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "bounds": bounds, "special": special})


def section(cls: type):
    """A group of settings, one level down in the YAML."""
    return field(default_factory=cls)


@dataclass(frozen=True)
class Data:
    """The data, and how it is loaded."""

    DATASET: str = setting("imagenet2012", "Name of the data set; docs/data.md lists them with their folder layouts.")
    DATA_PATH: str = setting("/dataset/imagenet/", "Folder of the data set (for csv: folder or file).")
    BATCH_SIZE: int | str = setting(
        256,
        "Images per process and micro-batch; one update sees BATCH_SIZE x processes x TRAIN.ACCUM_ITER. auto: as many as fit the device, found by trial at the start.",
        bounds=(1, 1_000_000),
        special=(AUTO,),
    )
    BATCH_SIZE_EVAL: int | None = setting(
        None, "Images per process in evaluation; not set: BATCH_SIZE.", bounds=(1, 1_000_000)
    )
    IMAGE_SIZE: int = setting(224, "Side of the square input image, in pixels.", bounds=(1, 8_192))
    IMAGE_CHANNELS: int = setting(3, "3 for colour, 1 for grey.", choices=(1, 3))
    CROP_PCT: float = setting(
        0.875, "Evaluation resizes the short side to IMAGE_SIZE / CROP_PCT and crops the centre.", bounds=(0.01, 1.0)
    )
    CROP_SCALE: tuple[float, ...] = setting(
        (0.08, 1.0), "Area of a random training crop as a fraction of the image: min, max.", bounds=(0.0001, 1.0)
    )
    CROP_RATIO: tuple[float, ...] = setting(
        (3 / 4, 4 / 3), "Aspect ratio (width / height) of a random training crop: min, max.", bounds=(0.01, 100.0)
    )
    HFLIP: float = setting(0.5, "Probability of a horizontal flip of a training image.", bounds=(0.0, 1.0))
    INTERPOLATION: str = setting(
        "bicubic", "Interpolation for resizing images.", choices=("nearest", "bilinear", "bicubic", "lanczos")
    )
    IMAGENET_MEAN: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5), "Mean of each channel, in [0, 1], subtracted from every image.", bounds=(-1_000.0, 1_000.0)
    )
    IMAGENET_STD: tuple[float, ...] = setting(
        (0.5, 0.5, 0.5),
        "Standard deviation of each channel, in [0, 1], that every image is divided by.",
        bounds=(1e-6, 1_000.0),
    )
    NUM_WORKERS: int | None = setting(
        None,
        "Loader threads or processes per training process; not set: the available cores divided among the processes, at most 8; 0 for data sets in memory. (PaddleViT: 1, which starves a GPU.)",
        bounds=(0, 1_000),
    )
    WORKERS: str = setting(
        "threads",
        "Kind of loader worker: threads share memory and cost less; processes help where Python's interpreter lock limits.",
        choices=("threads", "processes"),
    )
    PREFETCH: int | None = setting(
        None,
        "Batches to read ahead (worker processes: at least 1 each); not set: 2, and 0 on CPUs, whose cores then all read, then all compute.",
        bounds=(0, 1_000),
    )
    DROP_LAST: bool = setting(
        True, "Drop an epoch's last images if they do not fill a whole update (never if that would leave no update)."
    )
    VAL_FRACTION: float = setting(
        0.1, "Fraction of each class held out for validation, for data sets without a split.", bounds=(0.0, 0.9)
    )
    SPLIT_SEED: int = setting(0, "Seed that alone decides which images are held out.", bounds=(0, None))
    KEEP_BACKGROUND: bool = setting(False, "Keep Caltech's background / clutter folder as a class.")
    DOWNLOAD: bool = setting(
        True, "Download CIFAR or a torchvision data set if it is not in DATA_PATH; one process does, the others wait."
    )
    MAX_BAD_FRACTION: float = setting(
        0.01,
        "Maximum tolerated fraction of unreadable images: above it the run stops, below it they are replaced and reported.",
        bounds=(0.0, 1.0),
    )
    CACHE: str = setting(
        "none",
        "Cache images so that reading them again is cheap: on disk, for later runs too, or in ram, until the run ends.",
        choices=("none", "ram", "disk"),
    )
    CACHE_FORM: str = setting(
        "decoded",
        "Encoding of cached images: decoded, which needs no computation but much space, or jpeg, a tenth of the size.",
        choices=("decoded", "jpeg"),
    )
    CACHE_SIDE: int | None = setting(
        None, "Resize larger images to this short side before caching; not set: keep their size.", bounds=(1, 100_000)
    )
    CACHE_QUALITY: int = setting(90, "JPEG quality of cached images.", bounds=(1, 100))
    CACHE_PATH: str | None = setting(
        None, "Folder of the disk cache; not set: `cache` in SAVE, because DATA_PATH is often read-only."
    )
    SHUFFLE_BUFFER: int = setting(
        8192,
        "Shards are read in random order, and a sample moves by less than this many places; as many as there are images: any order.",
        bounds=(1, 2**31),
    )
    CUT_SHARDS: str = setting(
        "refuse",
        "What to do with a truncated shard: refuse it, or read its complete samples.",
        choices=("refuse", "read"),
    )
    SYNTHETIC_SIZE: int = setting(
        1280, "Images per epoch of the synthetic data set, which is generated on the device.", bounds=(1, 100_000_000)
    )


@dataclass(frozen=True)
class Model:
    """The model, and the weights that it starts from."""

    TYPE: str = setting(
        "vit",
        "vit: a Vision Transformer built from the fields below; timm: the timm model NAME.",
        choices=("vit", "timm"),
    )
    NAME: str = setting("vit", "With TYPE timm, any timm model; with TYPE vit, a label that is saved with the weights.")
    NUM_CLASSES: int | None = setting(
        None,
        "Outputs of the classifier; not set: the number of classes of the data. (PaddleViT: 1000.)",
        bounds=(1, 1_000_000),
    )
    PATCH_SIZE: int = setting(16, "Side of a patch in pixels.", bounds=(1, 8_192))
    EMBED_DIM: int = setting(768, "Width of the model.", bounds=(1, 100_000))
    DEPTH: int = setting(12, "Number of transformer blocks.", bounds=(1, 1_000))
    NUM_HEADS: int = setting(12, "Attention heads in each block.", bounds=(1, 1_000))
    ATTN_HEAD_SIZE: int | None = setting(None, "Width of a head; not set: EMBED_DIM / NUM_HEADS.", bounds=(1, 100_000))
    MLP_RATIO: float = setting(4.0, "Hidden width of the MLP divided by EMBED_DIM.", bounds=(0.01, 100.0))
    QKV_BIAS: bool = setting(True, "Use biases for queries, keys and values.")
    DROPOUT: float = setting(
        0.0, "Dropout rate after position embedding, attention projection and MLP.", bounds=(0.0, 0.99)
    )
    ATTENTION_DROPOUT: float = setting(0.0, "Dropout rate of attention weights.", bounds=(0.0, 0.99))
    DROPPATH: float = setting(
        0.0, "Drop path rate of the last block; it rises linearly from 0 at the first.", bounds=(0.0, 0.99)
    )
    PRETRAINED: str | None = setting(
        None, "Weights to start from: a file (.pth, .safetensors, .npz, .pdparams) or a timm model name to download."
    )
    RESUME: str | None = setting(
        None, "Checkpoint to resume from; auto: the newest valid one under SAVE with this TAG."
    )
    FREEZE: tuple[str, ...] = setting(
        (), "Patterns of parameters or modules that are not trained (blocks.0.*); a leading ! exempts."
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer."""

    NAME: str = setting("AdamW", "Optimizer.", choices=("AdamW", "Adam", "SGD"))
    EPS: float = setting(1e-8, "Adam's epsilon.", bounds=(0.0, 1_000.0))
    BETAS: tuple[float, ...] = setting((0.9, 0.999), "Adam's betas.", bounds=(0.0, 0.999999))
    MOMENTUM: float = setting(0.9, "SGD's momentum.", bounds=(0.0, 0.999999))


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate after the warm-up."""

    NAME: str = setting(
        "cosine",
        "cosine and step change the rate at every update; paddlevit is PaddleViT's cosine, once per epoch.",
        choices=("cosine", "paddlevit", "constant", "step"),
    )
    MILESTONES: tuple[int, ...] = setting(
        (),
        "For step: epochs after which the rate is multiplied by DECAY_RATE; not set: every DECAY_EPOCHS.",
        bounds=(1, 1_000_000),
    )
    DECAY_EPOCHS: int = setting(30, "For step: epochs between two decays.", bounds=(1, 1_000_000))
    DECAY_RATE: float = setting(0.1, "For step: factor of a decay.", bounds=(0.0, 1.0))


@dataclass(frozen=True)
class Train:
    """The training recipe."""

    NUM_EPOCHS: int = setting(300, "Passes over the training images.", bounds=(1, 1_000_000))
    LAST_EPOCH: int = setting(
        0,
        "Last finished epoch, 1-based: where training continues with weights of another system.",
        bounds=(0, 1_000_000),
    )
    WARMUP_EPOCHS: float = setting(
        32, "Epochs over which the learning rate rises from WARMUP_START_LR to BASE_LR.", bounds=(0.0, 1e6)
    )
    BASE_LR: float = setting(3e-3, "Peak learning rate.", bounds=(0.0, 1_000.0))
    WARMUP_START_LR: float = setting(1e-6, "Learning rate of the first update of the warm-up.", bounds=(0.0, 1_000.0))
    END_LR: float = setting(0.0, "Learning rate at the end of the schedule.", bounds=(0.0, 1_000.0))
    LINEAR_SCALED_LR: int | None = setting(
        None,
        "Batch size that the three rates above are meant for; they are multiplied by global batch / this.",
        bounds=(1, 1_000_000_000),
    )
    WEIGHT_DECAY: float = setting(
        0.3,
        "Weight decay of matrices; biases, norms, class token and position embedding are not decayed. (PaddleViT decays all.)",
        bounds=(0.0, 1_000.0),
    )
    GRAD_CLIP: float | None = setting(None, "Maximum gradient norm; not set: no clipping.", bounds=(0.0, 1e9))
    ACCUM_ITER: int = setting(1, "Micro-batches per update.", bounds=(1, 1_000_000))
    GRAD_CHECKPOINTING: bool = setting(
        False,
        "Activation checkpointing: a transformer block saves only its input and recomputes the rest in the backward; much less memory for the time of one more forward. (Other timm models: as timm's `--grad-checkpointing`.)",
    )
    SMOOTHING: float = setting(0.0, "Label smoothing.", bounds=(0.0, 0.99))
    COLOR_JITTER: float = setting(
        0.0,
        "Brightness, contrast and saturation are multiplied by a factor in 1 +- this; no effect with a policy other than 3a. (PaddleViT's DeiT: 0.4.)",
        bounds=(0.0, 100.0),
    )
    AUTO_AUGMENT: str | None = setting(
        None,
        "Augmentation policy: original, cifar10, svhn, rand-m9-mstd0.5-inc1, augmix-m3-w3, ta_wide or 3a; docs/augmentation.md explains them. (PaddleViT's true: original.)",
    )
    RAND_AUGMENT: bool = setting(
        False,
        "RandAugment instead of AUTO_AUGMENT: the policy rand-m9-n2-mstd0.5-inc1, with n and m from the next two settings.",
    )
    RAND_AUGMENT_LAYERS: int = setting(
        2, "Operations of RAND_AUGMENT per image, each applied with probability 0.5.", bounds=(1, 100)
    )
    RAND_AUGMENT_MAGNITUDE: float = setting(9, "Magnitude of RAND_AUGMENT's operations.", bounds=(0.0, 10.0))
    MIXUP_ALPHA: float = setting(
        0.0,
        "Mixup: blend pairs of images, with a weight from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 0.8.)",
        bounds=(0.0, 1_000.0),
    )
    CUTMIX_ALPHA: float = setting(
        0.0,
        "Cutmix: paste a box from the paired image, with an area from Beta(alpha, alpha); 0: off. (PaddleViT's DeiT: 1.0.)",
        bounds=(0.0, 1_000.0),
    )
    CUTMIX_MINMAX: tuple[float, ...] = setting(
        (), "Cutmix with boxes of these sides instead, as fractions of the image's: min, max.", bounds=(0.0, 1.0)
    )
    MIXUP_PROB: float = setting(1.0, "Probability that a batch, pair or image is mixed.", bounds=(0.0, 1.0))
    MIXUP_SWITCH_PROB: float = setting(
        0.5, "Probability of cutmix rather than mixup if both are on.", bounds=(0.0, 1.0)
    )
    MIXUP_MODE: str = setting(
        "batch",
        "What shares one random draw of kind, weight and box: the batch of an update, a pair, or an elem (each image).",
        choices=("batch", "pair", "elem"),
    )
    MIXUP_OFF_EPOCH: int = setting(0, "Epochs after which mixing stops; 0: never.", bounds=(0, 1_000_000))
    RANDOM_ERASE_PROB: float = setting(
        0.0, "Probability of random erasing of a training image. (PaddleViT's DeiT: 0.25.)", bounds=(0.0, 1.0)
    )
    RANDOM_ERASE_MODE: str = setting(
        "pixel",
        "Fill of erased boxes: pixel, noise; rand, one random colour; const, the mean colour.",
        choices=("pixel", "rand", "const"),
    )
    RANDOM_ERASE_COUNT: int = setting(1, "Maximum number of boxes per image, which share the area.", bounds=(1, 100))
    REPEATED_AUG: int = setting(
        1,
        "Times that an update contains each of its images, each augmented differently; an epoch sees 1 / this of the images. (DeiT: 3.)",
        bounds=(1, 1_000),
    )
    MODEL_EMA: bool = setting(False, "Keep an exponential moving average (EMA) of the weights, and evaluate both.")
    MODEL_EMA_DECAY: float = setting(0.99996, "Decay of the EMA per update.", bounds=(0.0, 1.0))
    OPTIMIZER: Optimizer = section(Optimizer)
    LR_SCHEDULER: LRScheduler = section(LRScheduler)

    @property
    def mixes(self) -> bool:
        """Whether mixup or cutmix is on."""
        return bool(self.MIXUP_ALPHA or self.CUTMIX_ALPHA or self.CUTMIX_MINMAX)


@dataclass(frozen=True)
class Precision:
    """How AMP computes; AMP is the switch."""

    DTYPE: str | None = setting(
        None,
        "Half type of AMP; auto: bfloat16 if the device supports it, else float16; not set: float16 on CUDA, bfloat16 elsewhere.",
        choices=("float16", "bfloat16", "auto"),
    )
    MODE: str = setting(
        "autocast",
        "autocast: operations in half where that is safe, weights in float32; naive: weights and operations in half, and float32 master weights for the optimizer; float8: autocast in bfloat16, with the large Linear layers in float8 (torchao, on CUDA devices that support it).",
        choices=("autocast", "naive", "float8"),
    )
    RESIDUAL: str = setting(
        "float32",
        "Type of the residual stream between transformer blocks under autocast: float32, or half, which is faster and needs less memory.",
        choices=("float32", "half"),
    )
    REDUCE: str = setting(
        "float32",
        "Type of the gradient all-reduce: float32, or half, the half type of autocast, for half the traffic.",
        choices=("float32", "half"),
    )
    MATMUL: str = setting(
        "ieee",
        "float32 matrix multiplication on CUDA: ieee, or tf32, which is faster and less precise.",
        choices=("ieee", "tf32"),
    )
    INIT_LOSS_SCALING: float = setting(65536.0, "Initial loss scale, for float16.", bounds=(1.0, 1e38))
    INCR_EVERY_N_STEPS: int = setting(
        2000, "Consecutive updates without overflow after which the scale grows.", bounds=(1, 1_000_000_000)
    )
    INCR_RATIO: float = setting(2.0, "What it is multiplied by then.", bounds=(1.0001, 1e6))
    DECR_EVERY_N_NAN_OR_INF: int = setting(
        1, "Updates with an overflow after which the scale shrinks. (Fleet: 2.)", bounds=(1, 1_000_000_000)
    )
    DECR_RATIO: float = setting(0.5, "What it is multiplied by then.", bounds=(0.0001, 0.9999))
    HYSTERESIS: str = setting(
        "consecutive",
        "How overflows are counted: consecutive, an update without overflow resets the count, as in Paddle; cumulative, only growing the scale does.",
        choices=("consecutive", "cumulative"),
    )
    USE_DYNAMIC_LOSS_SCALING: bool = setting(True, "Adapt the scale; false: it stays at INIT_LOSS_SCALING.")
    MIN_LOSS_SCALING: float = setting(1.0, "Minimum loss scale.", bounds=(1e-6, 1e38))
    MAX_LOSS_SCALING: float | None = setting(None, "Maximum loss scale; not set: no limit.", bounds=(1e-6, 1e38))
    MAX_CONSECUTIVE_SKIPS: int = setting(
        50,
        "Consecutive updates skipped because of non-finite gradients after which the run rolls back, or stops with exit code 3.",
        bounds=(1, 1_000_000_000),
    )
    ROLLBACKS: int = setting(
        1,
        "How often a run rolls back to its last checkpoint before such a series of skipped updates, and leaves them out; 0: never.",
        bounds=(0, 1_000),
    )
    DOCTOR_SKIPS: int | None = setting(
        10,
        "Consecutive skipped updates after which the run searches, once, for the module that overflows, and writes doctor.yaml; not set: never.",
        bounds=(1, 1_000_000_000),
    )
    CUSTOM_BLACK_LIST: tuple[str, ...] = setting(
        (), "What AMP keeps in float32: module paths (blocks.7.*), classes (LayerNorm), operators (softmax)."
    )
    CUSTOM_WHITE_LIST: tuple[str, ...] = setting(
        (), "What AMP computes in half although autocast would not, in the same form."
    )

    SHADOW_STEPS: int | None = setting(
        None,
        "Updates between two comparisons of a batch with float32, including how many gradients underflow; not set: none.",
        bounds=(1, 1_000_000_000),
    )
    SHADOW_COSINE: float = setting(
        0.9,
        "A comparison warns if a module's gradient has a smaller cosine similarity to float32's.",
        bounds=(-1.0, 1.0),
    )
    SHADOW_LOSS: float = setting(
        0.05, "A comparison warns if the loss differs by more than this fraction.", bounds=(0.0, 1e9)
    )
    EXPLAIN: bool = setting(
        False, "Before training, report the type in which each module computes, and write precision.csv."
    )


@dataclass(frozen=True)
class Resume:
    """Resuming."""

    ALLOW_CHANGED: bool = setting(False, "Resume although settings differ from the checkpoint's.")


@dataclass(frozen=True)
class Run:
    """Limits of a run."""

    MAX_TIME: str | None = setting(
        None,
        "Time limit since the program's start, such as 3h30m, 90m or 5400 (seconds): the run saves and ends before it; not set: none.",
    )


@dataclass(frozen=True)
class Dist:
    """How processes share the work, and how they find each other where torchrun, Slurm or MPI do not say it."""

    URL: str | None = setting(None, "Address of process 0, as tcp://HOST:PORT; not set: from the launcher.")
    WORLD_SIZE: int | None = setting(
        None, "Number of processes on all machines; not set: from the launcher.", bounds=(1, 100_000)
    )
    RANK: int | None = setting(None, "Rank of this process, from 0; not set: from the launcher.", bounds=(0, 99_999))
    TIMEOUT: float = setting(
        1800.0,
        "Seconds to wait for a process that does not join or respond before the run ends and names it.",
        bounds=(1.0, 1e7),
    )
    STRATEGY: str = setting(
        "ddp",
        "ddp: each process has the whole model; fsdp2: weights, gradients, optimizer and EMA are sharded. The same with one process.",
        choices=("ddp", "fsdp2"),
    )
    CHECKPOINT: str = setting(
        "single",
        "single: one file, written by process 0; sharded: a file per process, and an index. Any number of processes can read either.",
        choices=("single", "sharded"),
    )


@dataclass(frozen=True)
class Config:
    """All settings of a run, read as `config.TRAIN.BASE_LR`; nothing writes to it."""

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
        False, "Check data, weights, memory and disk, print the findings and exit: no training, no run folder."
    )
    SEED: int = setting(0, "Seed of weights, order, augmentation and dropout.", bounds=(0, None))
    SAVE: str = setting("./output", "Folder in which every run creates its own folder.")
    TAG: str = setting("", "Suffix of the run folder's name; not a path.")
    SAVE_FREQ: int = setting(
        10, "Epochs between two numbered checkpoints; last.pth is written after every epoch.", bounds=(1, 1_000_000)
    )
    SAVE_STEPS: int | None = setting(
        None, "Updates between two saves within an epoch; not set: none.", bounds=(1, 1_000_000_000)
    )
    KEEP_CHECKPOINTS: int = setting(
        3, "How many numbered checkpoints to keep, besides last.pth and best.pth.", bounds=(1, 1_000_000)
    )
    REPORT_FREQ: int = setting(20, "Updates between two log lines.", bounds=(1, 1_000_000_000))
    VALIDATE_FREQ: int = setting(
        1, "Epochs between two evaluations; the last epoch is always evaluated.", bounds=(1, 1_000_000)
    )
    DEVICE: str = setting(
        "auto", "Device; auto: CUDA, else XPU, else MPS, else the CPU.", choices=("auto", "cuda", "xpu", "mps", "cpu")
    )
    NGPUS: int | None = setting(
        None,
        "Processes that main_multi_gpu.py starts without a launcher; not set: one per visible device.",
        bounds=(1, 1_000),
    )
    COMPILE: bool = setting(False, "Compile the model with torch.compile: faster on GPUs, after a minute or more.")
    COMPILE_SCOPE: str = setting(
        "model",
        "What to compile: the whole model, or each of its blocks, which compiles in a fraction of the time.",
        choices=("model", "blocks"),
    )
    COMPILE_MODE: str = setting(
        "default",
        "torch.compile's mode; reduce-overhead uses CUDA graphs, for small models and batches; max-autotune benchmarks kernels.",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    DETERMINISTIC: bool = setting(
        False, "Use only deterministic kernels: slower on GPUs, where bit-identical resume needs it."
    )
    PROFILE: int | None = setting(
        None,
        "Updates to trace shortly after the start, into trace.json.gz for ui.perfetto.dev; not set: none.",
        bounds=(1, 10_000),
    )
    TENSORBOARD: bool = setting(True, "Write TensorBoard files to the run folder.")
