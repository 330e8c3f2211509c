"""The arguments of timm's train.py, each with the equivalent setting of halfstep, or the reason why there is none."""

from typing import Any, NamedTuple

OTHER_LOSSES = "TRAIN.LOSS lists the supported losses; TRAIN.CLASS_WEIGHTS gives rare classes more weight"


class Argument(NamedTuple):
    """An argument of timm's train.py."""

    name: str  # without leading dashes
    setting: str  # a key such as MODEL.DROPOUT, or key=value such as TRAIN.LOSS=bce; '' if there is none
    kind: type  # type of the value, or of each value in a list; bool for a switch without a value
    default: Any = None  # timm's default; a list means that the argument takes several values
    short: str = ""  # another name, without leading dashes; '' if there is none
    reason: str = ""  # why there is no setting, or the closest alternative

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, list)


SUPPORTED = (
    Argument("amp", "AMP", bool, False),
    Argument("torchcompile", "COMPILE", str),
    Argument("torchcompile-mode", "COMPILE", str),
    Argument("batch-size", "DATA.BATCH_SIZE", int, 128, short="b"),
    Argument("validation-batch-size", "DATA.BATCH_SIZE_EVAL", int, short="vb"),
    Argument("class-map", "DATA.CLASSES", str),
    Argument("crop-pct", "DATA.CROP_PCT", float),
    Argument("ratio", "DATA.CROP_RATIO", float, [0.75, 1.3333333333333333]),
    Argument("scale", "DATA.CROP_SCALE", float, [0.08, 1.0]),
    Argument("dataset", "DATA.DATASET", str),
    Argument("data-dir", "DATA.DATA_PATH", str),
    Argument("data", "DATA.DATA_PATH", str),
    Argument("hflip", "DATA.HFLIP", float, 0.5),
    Argument("mean", "DATA.IMAGENET_MEAN", float, []),
    Argument("std", "DATA.IMAGENET_STD", float, []),
    Argument("in-chans", "DATA.IMAGE_CHANNELS", int),
    Argument("input-img-mode", "DATA.IMAGE_CHANNELS", str),
    Argument("img-size", "DATA.IMAGE_SIZE", int),
    Argument("input-size", "DATA.IMAGE_SIZE", int, []),
    Argument("interpolation", "DATA.INTERPOLATION", str),
    Argument("workers", "DATA.NUM_WORKERS", int, 4, short="j"),
    Argument("naflex-loader", "DATA.TOKENS", bool, False),
    Argument("naflex-max-seq-len", "DATA.TOKENS", int, 576),
    Argument("train-crop-mode", "DATA.TRAIN_CROP", str),
    Argument("train-interpolation", "DATA.TRAIN_INTERPOLATION", str, "random"),
    Argument("naflex-train-seq-lens", "DATA.TRAIN_TOKENS", int, [128, 256, 576, 784, 1024]),
    Argument("vflip", "DATA.VFLIP", float, 0.0),
    Argument("device", "DEVICE", str, "cuda"),
    Argument("checkpoint-hist", "KEEP_CHECKPOINTS", int, 10),
    Argument("drop", "MODEL.DROPOUT", float, 0.0),
    Argument("drop-path", "MODEL.DROPPATH", float),
    Argument("model-kwargs", "MODEL.KWARGS", str, []),
    Argument("bn-eps", "MODEL.KWARGS.bn_eps", float),
    Argument("bn-momentum", "MODEL.KWARGS.bn_momentum", float),
    Argument("drop-block", "MODEL.KWARGS.drop_block_rate", float),
    Argument("gp", "MODEL.KWARGS.global_pool", str),
    Argument("num-classes", "MODEL.NUM_CLASSES", int),
    Argument("pretrained", "MODEL.PRETRAINED", bool, False),
    Argument("pretrained-path", "MODEL.PRETRAINED", str),
    Argument("initial-checkpoint", "MODEL.PRETRAINED", str),
    Argument("resume", "MODEL.RESUME", str),
    Argument("model", "MODEL.TYPE=timm MODEL.NAME", str, "resnet50"),
    Argument("experiment", "NAME", str),
    Argument("amp-dtype", "PRECISION.DTYPE", str, "float16"),
    Argument("log-interval", "REPORT_FREQ", int, 50),
    Argument("output", "SAVE", str),
    Argument("recovery-interval", "SAVE_STEPS", int, 0),
    Argument("seed", "SEED", int, 42),
    Argument("log-wandb", "TRACK=wandb", bool, False),
    Argument("grad-accum-steps", "TRAIN.ACCUM_ITER", int, 1),
    Argument("aa", "TRAIN.AUTO_AUGMENT", str),
    Argument("lr", "TRAIN.BASE_LR", float),
    Argument("lr-base", "TRAIN.BASE_LR", float, 0.1),
    Argument("bce-target-thresh", "TRAIN.BCE_TARGET_THRESH", float),
    Argument("eval-metric", "TRAIN.BEST_METRIC", str, "top1"),
    Argument("bce-pos-weight", "TRAIN.CLASS_WEIGHTS", float),
    Argument("clip-mode", "TRAIN.CLIP_MODE", str, "norm"),
    Argument("color-jitter", "TRAIN.COLOR_JITTER", float, 0.4),
    Argument("cutmix", "TRAIN.CUTMIX_ALPHA", float, 0.0),
    Argument("cutmix-minmax", "TRAIN.CUTMIX_MINMAX", float, []),
    Argument("task-loss-weight", "TRAIN.DISTILLATION_ALPHA", float),
    Argument("distill-loss-weight", "TRAIN.DISTILLATION_ALPHA", float),
    Argument("kd-temperature", "TRAIN.DISTILLATION_TAU", float, 4.0),
    Argument("kd-distill-type", "TRAIN.DISTILLATION_TYPE", str, "logit"),
    Argument("kd-token-distill-type", "TRAIN.DISTILLATION_TYPE", str, "soft"),
    Argument("kd-loss-type", "TRAIN.DISTILLATION_TYPE", str, "kl"),
    Argument("min-lr", "TRAIN.END_LR", float, 0.0),
    Argument("grad-checkpointing", "TRAIN.GRAD_CHECKPOINTING", bool, False),
    Argument("clip-grad", "TRAIN.GRAD_CLIP", float),
    Argument("start-epoch", "TRAIN.LAST_EPOCH", int),
    Argument("layer-decay", "TRAIN.LAYER_DECAY", float),
    Argument("lr-base-size", "TRAIN.LINEAR_SCALED_LR", int, 256),
    Argument("loss", "TRAIN.LOSS", str),
    Argument("bce-loss", "TRAIN.LOSS=bce", bool, False),
    Argument("lr-base-scale", "TRAIN.LR_SCALING", str),
    Argument("warmup-prefix", "TRAIN.LR_SCHEDULER.AFTER_WARMUP", bool, False),
    Argument("cooldown-epochs", "TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS", int, 0),
    Argument("decay-epochs", "TRAIN.LR_SCHEDULER.DECAY_EPOCHS", float),
    Argument("decay-rate", "TRAIN.LR_SCHEDULER.DECAY_RATE", float, 0.1, short="dr"),
    Argument("decay-milestones", "TRAIN.LR_SCHEDULER.MILESTONES", int, [90, 180, 270]),
    Argument("sched", "TRAIN.LR_SCHEDULER.NAME", str, "cosine"),
    Argument("sched-on-updates", "TRAIN.LR_SCHEDULER.PER_EPOCH", bool, False),
    Argument("mixup", "TRAIN.MIXUP_ALPHA", float, 0.0),
    Argument("mixup-mode", "TRAIN.MIXUP_MODE", str, "batch"),
    Argument("mixup-off-epoch", "TRAIN.MIXUP_OFF_EPOCH", int, 0),
    Argument("mixup-prob", "TRAIN.MIXUP_PROB", float, 1.0),
    Argument("mixup-switch-prob", "TRAIN.MIXUP_SWITCH_PROB", float, 0.5),
    Argument("model-ema", "TRAIN.MODEL_EMA", bool, False),
    Argument("model-ema-decay", "TRAIN.MODEL_EMA_DECAY", float, 0.9998),
    Argument("model-ema-warmup", "TRAIN.MODEL_EMA_WARMUP", bool, False),
    Argument("epochs", "TRAIN.NUM_EPOCHS", int, 300),
    Argument("opt-betas", "TRAIN.OPTIMIZER.BETAS", float, []),
    Argument("opt-eps", "TRAIN.OPTIMIZER.EPS", float),
    Argument("opt-kwargs", "TRAIN.OPTIMIZER.KWARGS", str, []),
    Argument("momentum", "TRAIN.OPTIMIZER.MOMENTUM", float, 0.9),
    Argument("opt", "TRAIN.OPTIMIZER.NAME", str, "sgd"),
    Argument("recount", "TRAIN.RANDOM_ERASE_COUNT", int, 1),
    Argument("remode", "TRAIN.RANDOM_ERASE_MODE", str, "pixel"),
    Argument("reprob", "TRAIN.RANDOM_ERASE_PROB", float, 0.0),
    Argument("aug-repeats", "TRAIN.REPEATED_AUG", float, 0.0),
    Argument("smoothing", "TRAIN.SMOOTHING", float, 0.1),
    Argument("kd-model-name", "TRAIN.TEACHER_MODEL", str),
    Argument("warmup-epochs", "TRAIN.WARMUP_EPOCHS", int, 5),
    Argument("warmup-lr", "TRAIN.WARMUP_START_LR", float, 1e-05),
    Argument("weight-decay", "TRAIN.WEIGHT_DECAY", float, 2e-05),
    Argument("val-interval", "VALIDATE_FREQ", int, 1),
)

# {why there is no setting, or the closest alternative: the arguments}
UNSUPPORTED = {
    OTHER_LOSSES: (
        Argument("jsd-loss", "", bool, False),
        Argument("asl-gamma-pos", "", float, 1.0),
        Argument("asl-gamma-neg", "", float, 4.0),
        Argument("asl-clip", "", float, 0.05),
        Argument("asl-reduction", "", str, "batchmean"),
        Argument("poly-epsilon", "", float, 2.0),
        Argument("poly-gamma", "", float, 0.0),
        Argument("poly-alpha", "", float),
        Argument("twoway-tp", "", float, 4.0),
        Argument("twoway-tn", "", float, 1.0),
        Argument("db-neg-scale", "", float, 2.0),
        Argument("db-init-bias", "", float, 0.05),
        Argument("db-focal-gamma", "", float, 2.0),
    ),
    "TRAIN.CLASS_WEIGHTS weights the classes in the loss by their numbers of images, or as a file says": (
        Argument("class-stats", "", str),
        Argument("loss-pos-weight", "", str),
        Argument("loss-class-weight", "", str),
        Argument("loss-weight-power", "", float, 1.0),
        Argument("loss-weight-beta", "", float, 0.999),
        Argument("loss-weight-max", "", float),
    ),
    "for several labels per image, list the images in a CSV file, with DATA.LABEL_SEPARATOR or a column per class": (
        Argument("task", "", str, "classification"),
        Argument("target-format", "", str),
        Argument("multilabel-threshold", "", float, 0.5),
    ),
    "the settings of the model and of DATA override what the weights say": (
        Argument("pretrained-cfg-overlay", "", str, []),
    ),
    "the folder names select training and validation images": (
        Argument("train-split", "", str, "train"),
        Argument("val-split", "", str, "validation"),
    ),
    "the number of images comes from the data set": (
        Argument("train-num-samples", "", int),
        Argument("val-num-samples", "", int),
    ),
    "data sets that can be downloaded are downloaded if they are missing": (
        Argument("dataset-download", "", bool, False),
    ),
    "DATA.COLUMNS names the columns": (
        Argument("input-key", "", str),
        Argument("target-key", "", str),
    ),
    "halfstep never executes code of a data set": (Argument("dataset-trust-remote-code", "", bool, False),),
    "-resume also restores the optimizer; -pretrained loads only the weights": (
        Argument("no-resume-opt", "", bool, False),
    ),
    "it affects only the speed, not the result": (
        Argument("channels-last", "", bool, False),
        Argument("fuser", "", str),
        Argument("fast-norm", "", bool, False),
        Argument("torchscript", "", bool, False),
        Argument("no-ddp-bb", "", bool, False),
        Argument("synchronize-step", "", bool, False),
        Argument("device-modules", "", str, []),
        Argument("local_rank", "", int, 0),
        Argument("pin-mem", "", bool, False),
        Argument("no-prefetcher", "", bool, False),
        Argument("use-multi-epochs-loader", "", bool, False),
        Argument("worker-seeding", "", str, "all"),
        Argument("persistent-workers", "", bool, True),
        Argument("no-persistent-workers", "", bool, False),
    ),
    "the classifier always has timm's default initialization": (
        Argument("head-init-scale", "", float),
        Argument("head-init-bias", "", float),
    ),
    "AMP with PRECISION.MODE=naive computes in half precision, with float32 master weights": (
        Argument("model-dtype", "", str),
    ),
    "TRAIN.LAYER_DECAY has no minimum factor": (
        Argument("layer-decay-min-scale", "", float, 0.0),
        Argument("layer-decay-no-opt-scale", "", float),
    ),
    "noise on the learning rate is not supported": (
        Argument("lr-noise", "", float, []),
        Argument("lr-noise-pct", "", float, 0.67),
        Argument("lr-noise-std", "", float, 1.0),
    ),
    "schedules with cycles are not supported": (
        Argument("lr-cycle-mul", "", float, 1.0),
        Argument("lr-cycle-decay", "", float, 0.5),
        Argument("lr-cycle-limit", "", int, 1),
    ),
    "the decay of the wsd schedule is always 1-sqrt": (Argument("lr-decay-fn", "", str),),
    "the schedule rsqrt is not supported": (Argument("lr-stable-timescale", "", float),),
    "a run trains for all TRAIN.NUM_EPOCHS; RUN.MAX_TIME ends it at a time limit": (Argument("stop-epoch", "", int),),
    "SAVE_FREQ is the number of epochs between two numbered checkpoints": (Argument("save-epochs", "", int, []),),
    "the cosine schedule has no exponent": (Argument("lr-k-decay", "", float, 1.0),),
    "there is no plateau schedule; TRAIN.EARLY_STOP ends a run that no longer improves": (
        Argument("patience-epochs", "", int, 10),
    ),
    "multiply TRAIN.NUM_EPOCHS by this number instead": (Argument("epoch-repeats", "", float, 0.0),),
    "TRAIN.AUTO_AUGMENT=none, TRAIN.COLOR_JITTER=0, DATA.HFLIP=0 and DATA.TRAIN_CROP=simple are the closest settings": (
        Argument("no-aug", "", bool, False),
    ),
    "the policy TRAIN.AUTO_AUGMENT=3a has greyscale and blur": (
        Argument("color-jitter-prob", "", float),
        Argument("grayscale-prob", "", float),
        Argument("gaussian-blur-prob", "", float),
    ),
    "augmentation splits are not supported": (
        Argument("aug-splits", "", int, 0),
        Argument("resplit", "", bool, False),
        Argument("split-bn", "", bool, False),
    ),
    "the loss is the mean over the classes; multiply TRAIN.BASE_LR if the optimizer depends on the scale of gradients": (
        Argument("bce-sum", "", bool, False),
    ),
    "timm's train.py ignores this argument; --drop-path is MODEL.DROPPATH": (Argument("drop-connect", "", float),),
    "each process has its own BatchNorm statistics; the statistics of process 0 are saved": (
        Argument("sync-bn", "", bool, False),
        Argument("dist-bn", "", str, "reduce"),
    ),
    "the EMA is always on the device": (Argument("model-ema-force-cpu", "", bool, False),),
    "the EMA is always in float32": (Argument("model-ema-force-fp32", "", bool, False),),
    "each run saves training images as train_batch.png": (Argument("save-images", "", bool, False),),
    "each image is evaluated once; scripts/predict.py has -flip": (Argument("tta", "", int, 0),),
    "set the variables WANDB_PROJECT and WANDB_TAGS; a resumed run automatically continues its W&B run": (
        Argument("wandb-project", "", str),
        Argument("wandb-tags", "", str, []),
        Argument("wandb-resume-id", "", str),
    ),
    "TRAIN.SIZE_SCHEDULE changes the size with the epoch": (
        Argument("train-img-sizes", "", int, []),
        Argument("train-batch-sizes", "", int, []),
        Argument("train-size-probs", "", float, []),
        Argument("train-size-schedule", "", str, "constant"),
        Argument("train-size-schedule-spread", "", float, 0.65),
        Argument("train-size-random-mix", "", float, 0.1),
        Argument("variable-batch-loss-scale", "", str, "none"),
    ),
    "an epoch always uses all images": (Argument("train-batches-per-epoch", "", int, short="train-steps-per-epoch"),),
    "all patches have the size of the model's patches, in timm's own layout": (
        Argument("naflex-patch-sizes", "", int, []),
        Argument("naflex-patch-size-probs", "", float, []),
        Argument("naflex-patchify-channels-first", "", bool, False),
    ),
    "all updates have the same number of images": (Argument("naflex-loss-scale", "", str, "linear"),),
    "distillation of features is not supported": (
        Argument("kd-student-feature-dim", "", int),
        Argument("kd-teacher-feature-dim", "", int),
    ),
}

TIMM_ARGUMENTS = {each.name: each for each in SUPPORTED} | {
    each.name: each._replace(reason=reason) for reason, arguments in UNSUPPORTED.items() for each in arguments
}
