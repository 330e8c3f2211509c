"""The arguments of timm's train.py (1.0.31): the setting that has the same effect, or the reason why there is none."""

from typing import Any, NamedTuple

import yaml


class Argument(NamedTuple):
    """An argument of timm's train.py."""

    name: str  # without leading dashes
    setting: str  # a key such as MODEL.DROPOUT, or key=value such as TRAIN.LOSS=bce; '' if there is none
    kind: type  # type of the value, or of each value in a list; bool for a switch without a value
    default: Any = None  # timm's default; a list means that the argument takes several values
    short: str = ""  # another name, without leading dashes; '' if there is none
    reason: str = ""  # why there is no setting, or the closest alternative


# Arguments with a setting that depends on no other argument; scripts/from_timm.py converts their values.
CONVERTED = (
    Argument("amp", "AMP", bool, False),
    Argument("batch-size", "DATA.BATCH_SIZE", int, 128, short="b"),
    Argument("validation-batch-size", "DATA.BATCH_SIZE_EVAL", int, short="vb"),
    Argument("class-map", "DATA.CLASSES", str),
    Argument("ratio", "DATA.CROP_RATIO", float, [0.75, 1.3333333333333333]),
    Argument("scale", "DATA.CROP_SCALE", float, [0.08, 1.0]),
    Argument("hflip", "DATA.HFLIP", float, 0.5),
    Argument("workers", "DATA.NUM_WORKERS", int, 4, short="j"),
    Argument("train-interpolation", "DATA.TRAIN_INTERPOLATION", str, "random"),
    Argument("vflip", "DATA.VFLIP", float, 0.0),
    Argument("device", "DEVICE", str, "cuda"),
    Argument("checkpoint-hist", "KEEP_CHECKPOINTS", int, 10),
    Argument("drop", "MODEL.DROPOUT", float, 0.0),
    Argument("drop-path", "MODEL.DROPPATH", float),
    Argument("bn-eps", "MODEL.KWARGS.bn_eps", float),
    Argument("bn-momentum", "MODEL.KWARGS.bn_momentum", float),
    Argument("drop-block", "MODEL.KWARGS.drop_block_rate", float),
    Argument("gp", "MODEL.KWARGS.global_pool", str),
    Argument("experiment", "NAME", str),
    Argument("amp-dtype", "PRECISION.DTYPE", str, "float16"),
    Argument("log-interval", "REPORT_FREQ", int, 50),
    Argument("output", "SAVE", str),
    Argument("recovery-interval", "SAVE_STEPS", int, 0),
    Argument("seed", "SEED", int, 42),
    Argument("log-wandb", "TRACK=wandb", bool, False),
    Argument("grad-accum-steps", "TRAIN.ACCUM_ITER", int, 1),
    Argument("aa", "TRAIN.AUTO_AUGMENT", str),
    Argument("bce-target-thresh", "TRAIN.BCE_TARGET_THRESH", float),
    Argument("eval-metric", "TRAIN.BEST_METRIC", str, "top1"),
    Argument("clip-mode", "TRAIN.CLIP_MODE", str, "norm"),
    Argument("color-jitter", "TRAIN.COLOR_JITTER", float, 0.4),
    Argument("cutmix", "TRAIN.CUTMIX_ALPHA", float, 0.0),
    Argument("cutmix-minmax", "TRAIN.CUTMIX_MINMAX", float, []),
    Argument("min-lr", "TRAIN.END_LR", float, 0.0),
    Argument("grad-checkpointing", "TRAIN.GRAD_CHECKPOINTING", bool, False),
    Argument("layer-decay", "TRAIN.LAYER_DECAY", float),
    Argument("decay-rate", "TRAIN.LR_SCHEDULER.DECAY_RATE", float, 0.1, short="dr"),
    Argument("mixup", "TRAIN.MIXUP_ALPHA", float, 0.0),
    Argument("mixup-mode", "TRAIN.MIXUP_MODE", str, "batch"),
    Argument("mixup-off-epoch", "TRAIN.MIXUP_OFF_EPOCH", int, 0),
    Argument("mixup-prob", "TRAIN.MIXUP_PROB", float, 1.0),
    Argument("mixup-switch-prob", "TRAIN.MIXUP_SWITCH_PROB", float, 0.5),
    Argument("model-ema", "TRAIN.MODEL_EMA", bool, False),
    Argument("model-ema-decay", "TRAIN.MODEL_EMA_DECAY", float, 0.9998),
    Argument("model-ema-warmup", "TRAIN.MODEL_EMA_WARMUP", bool, False),
    Argument("recount", "TRAIN.RANDOM_ERASE_COUNT", int, 1),
    Argument("remode", "TRAIN.RANDOM_ERASE_MODE", str, "pixel"),
    Argument("reprob", "TRAIN.RANDOM_ERASE_PROB", float, 0.0),
    Argument("aug-repeats", "TRAIN.REPEATED_AUG", float, 0.0),
    Argument("smoothing", "TRAIN.SMOOTHING", float, 0.1),
    Argument("warmup-epochs", "TRAIN.WARMUP_EPOCHS", int, 5),
    Argument("warmup-lr", "TRAIN.WARMUP_START_LR", float, 1e-05),
    Argument("weight-decay", "TRAIN.WEIGHT_DECAY", float, 2e-05),
    Argument("val-interval", "VALIDATE_FREQ", int, 1),
)
# Arguments whose settings depend on several arguments; scripts/from_timm.py computes them.
COMPUTED = (
    Argument("torchcompile", "COMPILE", str),
    Argument("torchcompile-mode", "COMPILE", str),
    Argument("crop-pct", "DATA.CROP_PCT", float),
    Argument("dataset", "DATA.DATASET", str),
    Argument("data-dir", "DATA.DATA_PATH", str),
    Argument("data", "DATA.DATA_PATH", str),
    Argument("mean", "DATA.IMAGENET_MEAN", float, []),
    Argument("std", "DATA.IMAGENET_STD", float, []),
    Argument("in-chans", "DATA.IMAGE_CHANNELS", int),
    Argument("img-size", "DATA.IMAGE_SIZE", int),
    Argument("input-size", "DATA.IMAGE_SIZE", int, []),
    Argument("interpolation", "DATA.INTERPOLATION", str),
    Argument("model-kwargs", "MODEL.KWARGS", str, []),
    Argument("num-classes", "MODEL.NUM_CLASSES", int),
    Argument("pretrained", "MODEL.PRETRAINED", bool, False),
    Argument("pretrained-path", "MODEL.PRETRAINED", str),
    Argument("initial-checkpoint", "MODEL.PRETRAINED", str),
    Argument("model", "MODEL.TYPE=timm MODEL.NAME", str, "resnet50"),
    Argument("lr", "TRAIN.BASE_LR", float),
    Argument("lr-base", "TRAIN.BASE_LR", float, 0.1),
    Argument("clip-grad", "TRAIN.GRAD_CLIP", float),
    Argument("lr-base-size", "TRAIN.LINEAR_SCALED_LR", int, 256),
    Argument("loss", "TRAIN.LOSS", str),
    Argument("bce-loss", "TRAIN.LOSS=bce", bool, False),
    Argument("lr-base-scale", "TRAIN.LR_SCALING", str),
    Argument("warmup-prefix", "TRAIN.LR_SCHEDULER.AFTER_WARMUP", bool, False),
    Argument("cooldown-epochs", "TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS", int, 0),
    Argument("decay-epochs", "TRAIN.LR_SCHEDULER.DECAY_EPOCHS", float),
    Argument("decay-milestones", "TRAIN.LR_SCHEDULER.MILESTONES", int, [90, 180, 270]),
    Argument("sched", "TRAIN.LR_SCHEDULER.NAME", str, "cosine"),
    Argument("sched-on-updates", "TRAIN.LR_SCHEDULER.PER_EPOCH", bool, False),
    Argument("epochs", "TRAIN.NUM_EPOCHS", int, 300),
    Argument("opt-betas", "TRAIN.OPTIMIZER.BETAS", float, []),
    Argument("opt-eps", "TRAIN.OPTIMIZER.EPS", float),
    Argument("opt-kwargs", "TRAIN.OPTIMIZER.KWARGS", str, []),
    Argument("momentum", "TRAIN.OPTIMIZER.MOMENTUM", float, 0.9),
    Argument("opt", "TRAIN.OPTIMIZER.NAME", str, "sgd"),
)
SUPPORTED = (*CONVERTED, *COMPUTED)

OTHER_LOSSES = "TRAIN.LOSS lists the supported losses; TRAIN.CLASS_WEIGHTS gives rare classes more weight"
# {why the result is the same without them: arguments and train.py's defaults. =false is a switch, =[] takes several
# values}
NOT_NEEDED = {
    "it affects only the speed, not the result": """
        channels-last=false fuser fast-norm=false torchscript=false no-ddp-bb=false synchronize-step=false
        device-modules=[] local_rank=0 pin-mem=false no-prefetcher=false use-multi-epochs-loader=false
        worker-seeding=all persistent-workers=true no-persistent-workers=false model-ema-force-cpu=false
        model-ema-force-fp32=false""",
    "missing data sets are downloaded, and all their images are used": (
        "train-num-samples val-num-samples dataset-download=false"
    ),
    "there is no plateau schedule; TRAIN.EARLY_STOP ends a run that no longer improves": "patience-epochs=10",
    "halfstep never executes code of a data set": "dataset-trust-remote-code=false",
    "each run saves training images as train_batch.png": "save-images=false",
    "SAVE_FREQ is the number of epochs between two numbered checkpoints": "save-epochs=[]",
    "set the variables WANDB_PROJECT and WANDB_TAGS; a resumed run automatically continues its W&B run": (
        "wandb-project wandb-tags=[] wandb-resume-id"
    ),
    "timm's train.py ignores this argument; --drop-path is MODEL.DROPPATH": "drop-connect",
    "each process has its own BatchNorm statistics; the statistics of process 0 are saved": "dist-bn=reduce",
}
# {why halfstep cannot train with them, or the closest setting: arguments, as above}
REFUSED = {
    OTHER_LOSSES: """
        jsd-loss=false asl-gamma-pos=1.0 asl-gamma-neg=4.0 asl-clip=0.05 asl-reduction=batchmean poly-epsilon=2.0
        poly-gamma=0.0 poly-alpha twoway-tp=4.0 twoway-tn=1.0 db-neg-scale=2.0 db-init-bias=0.05
        db-focal-gamma=2.0""",
    "TRAIN.CLASS_WEIGHTS weights the classes in the loss by their numbers of images, or as a file says": """
        class-stats loss-pos-weight loss-class-weight loss-weight-power=1.0 loss-weight-beta=0.999 loss-weight-max
        bce-pos-weight""",
    "multiply TRAIN.BASE_LR if the optimizer depends on the scale of gradients": "bce-sum=false",
    "for several labels per image, list the images in a CSV file, with DATA.LABEL_SEPARATOR or a column per class": (
        "task=classification target-format multilabel-threshold=0.5"
    ),
    "TRAIN.TEACHER_MODEL, TRAIN.DISTILLATION_TYPE, _ALPHA and _TAU distil, with a weighted mean of both losses": """
        kd-model-name kd-distill-type=logit kd-token-distill-type=soft kd-loss-type=kl kd-temperature=4.0
        task-loss-weight distill-loss-weight kd-student-feature-dim kd-teacher-feature-dim""",
    "train with -resume FILE, which takes the weights and the epoch of the checkpoint, but no optimizer state": (
        "resume start-epoch no-resume-opt=false"
    ),
    "the settings of the model and of DATA override what the weights say": "pretrained-cfg-overlay=[]",
    "the folder names select training and validation images; DATA.VAL_FRACTION makes a validation set": (
        "train-split=train val-split=validation"
    ),
    "DATA.TRAIN_CROP has timm's crop modes rrc (default) and simple": "train-crop-mode",
    "DATA.COLUMNS names the columns": "input-key target-key",
    "--in-chans 1 or 3 selects greyscale or color images": "input-img-mode",
    "the classifier always has timm's default initialization": "head-init-scale head-init-bias",
    "AMP with PRECISION.MODE=naive computes in half precision, with float32 master weights": "model-dtype",
    "TRAIN.LAYER_DECAY has no minimum factor": "layer-decay-min-scale=0.0 layer-decay-no-opt-scale",
    "the learning rate follows TRAIN.LR_SCHEDULER.NAME, without noise, cycles or exponents": """
        lr-noise=[] lr-noise-pct=0.67 lr-noise-std=1.0 lr-cycle-mul=1.0 lr-cycle-decay=0.5 lr-cycle-limit=1
        lr-k-decay=1.0 lr-decay-fn lr-stable-timescale""",
    "a run trains for all TRAIN.NUM_EPOCHS; RUN.MAX_TIME ends it at a time limit": "stop-epoch",
    "an epoch uses all images once; change TRAIN.NUM_EPOCHS instead": (
        "epoch-repeats=0.0 train-batches-per-epoch train-steps-per-epoch"
    ),
    "TRAIN.AUTO_AUGMENT=none, TRAIN.COLOR_JITTER=0, DATA.HFLIP=0 and DATA.TRAIN_CROP=simple are the closest settings": (
        "no-aug=false"
    ),
    "the policy TRAIN.AUTO_AUGMENT=3a has greyscale and blur": "color-jitter-prob grayscale-prob gaussian-blur-prob",
    "augmentation splits are not supported": "aug-splits=0 resplit=false split-bn=false",
    "each process has its own BatchNorm statistics": "sync-bn=false",
    "each image is evaluated once; halfstep predict has -flip": "tta=0",
    "TRAIN.SIZE_SCHEDULE changes the size with the epoch": """
        train-img-sizes=[] train-batch-sizes=[] train-size-probs=[] train-size-schedule=constant
        train-size-schedule-spread=0.65 train-size-random-mix=0.1 variable-batch-loss-scale=none""",
    "all images are resized to one size": """
        naflex-loader=false naflex-max-seq-len=576 naflex-train-seq-lens=[128,256,576,784,1024]
        naflex-patch-sizes=[] naflex-patch-size-probs=[] naflex-patchify-channels-first=false
        naflex-loss-scale=linear""",
}
# {refused argument: other values with which train.py behaves as halfstep always does}
ACCEPTED = {
    "train-split": ("training",),
    "val-split": ("val", "valid", "eval", "evaluation"),
    "train-crop-mode": ("rrc",),
    "input-img-mode": ("RGB",),
    "model-dtype": ("float32",),
    "bce-pos-weight": ("1", "1.0"),
    "start-epoch": ("0",),
}


def _unsupported(reason: str, word: str) -> Argument:
    """Return the argument NAME=DEFAULT, or NAME without a default."""
    name, _, text = word.partition("=")
    default = yaml.safe_load(text)
    example = default[0] if isinstance(default, list) and default else default
    return Argument(name, "", str if example in (None, []) else type(example), default, reason=reason)


TIMM_ARGUMENTS = {argument.name: argument for argument in SUPPORTED} | {
    argument.name: argument
    for table in (NOT_NEEDED, REFUSED)
    for reason, words in table.items()
    for argument in (_unsupported(reason, word) for word in words.split())
}
