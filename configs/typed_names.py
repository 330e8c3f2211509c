"""Suggests the setting that people mean who type another name: names of other trainers, short ones, misspelt ones."""

import difflib
import re
from collections.abc import Iterable

from configs.values import ALL_SETTINGS

# {setting (or setting=value, or a flag that sets none): what timm, Hugging Face and others call it}; in lower case, with _ for - and .
# Words with dashes are the arguments of timm's train.py, all of them, with their defaults there (false: a switch; []: several
# values), behind | a short name, and behind : the type of numbers whose default does not show it. Names that resemble the setting's own are not here: difflib finds those.
ALIASES = {
    "-cfg": "c config config_file settings",
    "AMP": "--amp=false mixed_precision use_amp native_amp half",
    "AMP=true PRECISION.DTYPE=bfloat16": "bf16 bfloat16",
    "AMP=true PRECISION.DTYPE=float16": "fp16 float16",
    "COMPILE": "--torchcompile --torchcompile-mode",
    "DATA.BATCH_SIZE": "--batch-size|b=128 bs batch per_device_train_batch_size",
    "DATA.BATCH_SIZE_EVAL": "--validation-batch-size|vb:int per_device_eval_batch_size",
    "DATA.CLASSES": "--class-map",
    "DATA.CROP_PCT": "--crop-pct:float",
    "DATA.CROP_RATIO": "--ratio=[0.75,1.3333333333333333]",
    "DATA.CROP_SCALE": "--scale=[0.08,1.0]",
    "DATA.DATASET": "--dataset",
    "DATA.DATA_PATH": "--data-dir --data root train_dir",
    "DATA.HFLIP": "--hflip=0.5",
    "DATA.IMAGENET_MEAN": "--mean:float=[]",
    "DATA.IMAGENET_STD": "--std:float=[]",
    "DATA.IMAGE_CHANNELS": "--in-chans:int --input-img-mode channels",
    "DATA.IMAGE_SIZE": "--img-size:int --input-size:int=[] imgsz resolution",
    "DATA.INTERPOLATION": "--interpolation",
    "DATA.NUM_WORKERS": "--workers|j=4 dataloader_num_workers",
    "DATA.TRAIN_CROP": "--train-crop-mode",
    "DATA.TRAIN_INTERPOLATION": "--train-interpolation=random",
    "DATA.VAL_FRACTION": "validation_split val_size test_size",
    "DATA.VFLIP": "--vflip=0.0",
    "DEVICE": "--device=cuda accelerator gpu cuda",
    "DEVICE=cpu": "cpu no_cuda use_cpu",
    "DIST.STRATEGY=fsdp2": "fsdp sharding zero deepspeed",
    "EVAL": "e evaluate eval_only test validate do_eval",
    "KEEP_CHECKPOINTS": "--checkpoint-hist=10 save_total_limit",
    "MODEL.DROPOUT": "--drop=0.0 drop_rate",
    "MODEL.DROPPATH": "--drop-path:float drop_path_rate stochastic_depth",
    "MODEL.KWARGS": "--model-kwargs=[]",
    "MODEL.KWARGS.bn_eps": "--bn-eps:float",
    "MODEL.KWARGS.bn_momentum": "--bn-momentum:float",
    "MODEL.KWARGS.drop_block_rate": "--drop-block:float",
    "MODEL.KWARGS.global_pool": "--gp",
    "MODEL.NUM_CLASSES": "--num-classes:int nc classes num_labels",
    "MODEL.PRETRAINED": "--pretrained=false --pretrained-path --initial-checkpoint weights load_from finetune checkpoint ckpt",
    "MODEL.RESUME": "--resume continue resume_from_checkpoint",
    "MODEL.TYPE=timm MODEL.NAME": "--model=resnet50 arch architecture backbone model_name model_name_or_path",
    "NAME": "--experiment exp_name run_name",
    "NGPUS": "nproc_per_node devices",
    "PRECISION.DTYPE": "--amp-dtype=float16",
    "REPORT_FREQ": "--log-interval=50 print_freq logging_steps log_every_n_steps",
    "SAVE": "--output o out output_dir save_dir log_dir work_dir",
    "SAVE_STEPS": "--recovery-interval=0",
    "SEED": "--seed=42",
    "TRACK": "logger report_to",
    "TRACK=mlflow": "mlflow log_mlflow",
    "TRACK=wandb": "--log-wandb=false wandb use_wandb",
    "TRAIN.ACCUM_ITER": "--grad-accum-steps=1 gradient_accumulation_steps accumulate_grad_batches",
    "TRAIN.AUTO_AUGMENT": "--aa policy randaugment",
    "TRAIN.BASE_LR": "--lr:float --lr-base=0.1 learning_rate lr0 init_lr max_lr blr",
    "TRAIN.BCE_TARGET_THRESH": "--bce-target-thresh:float",
    "TRAIN.BEST_METRIC": "--eval-metric=top1",
    "TRAIN.CLASS_WEIGHTS": "--bce-pos-weight:float pos_weight",
    "TRAIN.CLIP_MODE": "--clip-mode=norm",
    "TRAIN.COLOR_JITTER": "--color-jitter=0.4",
    "TRAIN.CUTMIX_ALPHA": "--cutmix=0.0",
    "TRAIN.CUTMIX_MINMAX": "--cutmix-minmax:float=[]",
    "TRAIN.DISTILLATION_ALPHA": "--task-loss-weight:float --distill-loss-weight:float kd_alpha",
    "TRAIN.DISTILLATION_TAU": "--kd-temperature=4.0 temperature",
    "TRAIN.DISTILLATION_TYPE": "--kd-distill-type=logit --kd-token-distill-type=soft --kd-loss-type=kl kd distill distillation",
    "TRAIN.EARLY_STOP": "patience early_stopping_patience",
    "TRAIN.END_LR": "--min-lr=0.0 lrf eta_min",
    "TRAIN.GRAD_CHECKPOINTING": "--grad-checkpointing=false",
    "TRAIN.GRAD_CLIP": "--clip-grad:float clip_grad_norm max_grad_norm",
    "TRAIN.LAST_EPOCH": "--start-epoch:int",
    "TRAIN.LAYER_DECAY": "--layer-decay:float",
    "TRAIN.LINEAR_SCALED_LR": "--lr-base-size=256",
    "TRAIN.LOSS=bce": "--bce-loss=false",
    "TRAIN.LR_SCALING": "--lr-base-scale",
    "TRAIN.LR_SCHEDULER.AFTER_WARMUP": "--warmup-prefix=false",
    "TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS": "--cooldown-epochs=0",
    "TRAIN.LR_SCHEDULER.DECAY_EPOCHS": "--decay-epochs=90.0",
    "TRAIN.LR_SCHEDULER.DECAY_RATE": "--decay-rate|dr=0.1",
    "TRAIN.LR_SCHEDULER.MILESTONES": "--decay-milestones=[90,180,270]",
    "TRAIN.LR_SCHEDULER.NAME": "--sched=cosine scheduler lr_scheduler_type",
    "TRAIN.LR_SCHEDULER.PER_EPOCH": "--sched-on-updates=false",
    "TRAIN.MIXUP_ALPHA": "--mixup=0.0",
    "TRAIN.MIXUP_MODE": "--mixup-mode=batch",
    "TRAIN.MIXUP_OFF_EPOCH": "--mixup-off-epoch=0",
    "TRAIN.MIXUP_PROB": "--mixup-prob=1.0",
    "TRAIN.MIXUP_SWITCH_PROB": "--mixup-switch-prob=0.5",
    "TRAIN.MODEL_EMA": "--model-ema=false ema use_ema",
    "TRAIN.MODEL_EMA_DECAY": "--model-ema-decay=0.9998",
    "TRAIN.MODEL_EMA_WARMUP": "--model-ema-warmup=false",
    "TRAIN.NUM_EPOCHS": "--epochs=300",
    "TRAIN.OPTIMIZER.BETAS": "--opt-betas:float=[]",
    "TRAIN.OPTIMIZER.EPS": "--opt-eps:float",
    "TRAIN.OPTIMIZER.KWARGS": "--opt-kwargs=[] optim_args",
    "TRAIN.OPTIMIZER.MOMENTUM": "--momentum=0.9",
    "TRAIN.OPTIMIZER.NAME": "--opt=sgd optim adamw adam sgd",
    "TRAIN.RANDOM_ERASE_COUNT": "--recount=1",
    "TRAIN.RANDOM_ERASE_MODE": "--remode=pixel",
    "TRAIN.RANDOM_ERASE_PROB": "--reprob=0.0",
    "TRAIN.REPEATED_AUG": "--aug-repeats=0.0",
    "TRAIN.SMOOTHING": "--smoothing=0.1",
    "TRAIN.TEACHER_MODEL": "--kd-model-name teacher",
    "TRAIN.WARMUP_EPOCHS": "--warmup-epochs=5 warmup warmup_ratio",
    "TRAIN.WARMUP_START_LR": "--warmup-lr=0.00001",
    "TRAIN.WEIGHT_DECAY": "--weight-decay=0.00002 wd decay l2",
    "VALIDATE_FREQ": "--val-interval=1 eval_steps check_val_every_n_epoch",
}
# {why there is no such thing, or what comes nearest: what people call it}; words with dashes as above
NOT_HERE = {
    "a run has a number of epochs, TRAIN.NUM_EPOCHS (-epochs), or a time limit, RUN.MAX_TIME": "max_steps num_steps iterations",
    "see TRAIN.LOSS for the losses there are; TRAIN.CLASS_WEIGHTS gives rare classes more weight": "focal_loss --jsd-loss=false",
    "-name (NAME) gives the run's folder its whole name": "tag",
    "training and validation images are found by the names of their folders": "--train-split=train --val-split=validation",
    "the data set says how many images it has": "--train-num-samples:int --val-num-samples:int",
    "what is missing of a data set that can be downloaded is downloaded": "--dataset-download=false",
    "DATA.COLUMNS names the columns": "--input-key --target-key",
    "code of a data set is never executed": "--dataset-trust-remote-code=false",
    "-resume goes on with the optimizer too; -pretrained takes the weights alone": "--no-resume-opt=false",
    "it changes the speed, not the result, and there is none": "--channels-last=false --fuser --fast-norm=false --torchscript=false --no-ddp-bb=false --synchronize-step=false --device-modules=[] --local_rank=0 --pin-mem=false --no-prefetcher=false --use-multi-epochs-loader=false --worker-seeding=all",
    "the classifier starts as timm's default starts it": "--head-init-scale:float --head-init-bias:float",
    "AMP with PRECISION.MODE=naive computes in half precision, with float32 master weights": "--model-dtype",
    "there is no smallest factor of TRAIN.LAYER_DECAY": "--layer-decay-min-scale=0.0 --layer-decay-no-opt-scale:float",
    "rates have no noise": "--lr-noise:float=[] --lr-noise-pct=0.67 --lr-noise-std=1.0",
    "the schedule is not repeated": "--lr-cycle-mul=1.0 --lr-cycle-decay=0.5 --lr-cycle-limit=1",
    "the cosine has no exponent": "--lr-k-decay=1.0",
    "there is no schedule plateau; TRAIN.EARLY_STOP ends a run that gets no better": "--patience-epochs=10",
    "multiply TRAIN.NUM_EPOCHS": "--epoch-repeats=0.0",
    "TRAIN.AUTO_AUGMENT=none, TRAIN.COLOR_JITTER=0, DATA.HFLIP=0 and DATA.TRAIN_CROP=simple come nearest": "--no-aug=false",
    "the policy TRAIN.AUTO_AUGMENT=3a has greyscale and blur": "--color-jitter-prob:float --grayscale-prob:float --gaussian-blur-prob:float",
    "an image is not augmented into several splits": "--aug-splits=0 --resplit=false --split-bn=false",
    "the loss is the mean over the classes; multiply TRAIN.BASE_LR where the optimizer follows the size of gradients": "--bce-sum=false",
    "train.py ignores it; --drop-path is MODEL.DROPPATH": "--drop-connect:float",
    "BatchNorm's statistics are each process's, and those of process 0 are saved": "--sync-bn=false --dist-bn=reduce",
    "the EMA is on the device": "--model-ema-force-cpu=false",
    "train_batch.png shows images of each run": "--save-images=false",
    "an image is evaluated once; scripts/predict.py has -flip": "--tta=0",
    "the variables WANDB_PROJECT and WANDB_TAGS, and a resumed run goes on by itself": "--wandb-project --wandb-tags=[] --wandb-resume-id",
    "TRAIN.SIZE_SCHEDULE changes the size with the epoch": "--train-img-sizes:int=[] --train-batch-sizes:int=[] --train-size-probs:float=[] --train-size-schedule=constant --train-size-schedule-spread=0.65 --train-size-random-mix=0.1 --variable-batch-loss-scale=none",
    "an epoch is all images": "--train-batches-per-epoch|train-steps-per-epoch:int",
    "there is no NaFlex loader": "--naflex-loader=false --naflex-train-seq-lens=[128,256,576,784,1024] --naflex-max-seq-len=576 --naflex-patch-sizes:int=[] --naflex-patch-size-probs:float=[] --naflex-loss-scale=linear --naflex-patchify-channels-first=false",
    "features are not distilled": "--kd-student-feature-dim:int --kd-teacher-feature-dim:int",
}


def _names(table: dict[str, str]) -> dict[str, str]:
    """{each name in a table, with _ for -: its row}"""
    words = ((re.split("[:=]", word)[0], row) for row, words in table.items() for word in words.split())
    return {each.strip("-").replace("-", "_"): row for names, row in words for each in names.split("|")}


_TARGETS, _REASONS = _names(ALIASES), _names(NOT_HERE)
MOST_WORDS = 20  # of a key that are looked up: all that follow each
_CUTOFF = 0.75  # of the similarity of spelling; below it guesses mislead


def suggest_key(key: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown key in a file or -opts; `known`: the keys to choose from."""
    parts = re.split(r"[.-]", key.lower())[-MOST_WORDS:]
    for name in ("_".join(parts[start:]) for start in range(len(parts))):  # early_stop.patience, patience
        if name in _REASONS:
            return f"; {_REASONS[name]}"
        if name in _TARGETS:
            return f"; did you mean {_TARGETS[name]}?"
    leaf = {each: each.rpartition(".")[2].lower() for each in known}
    names = difflib.get_close_matches(parts[-1], set(leaf.values()), n=1, cutoff=_CUTOFF)
    # Of equal names in several sections, the one whose full name is the most similar.
    near = difflib.get_close_matches(key.upper(), [each for each in known if leaf[each] in names], n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else "; docs/settings.md lists them"


def setting_meant(name: str) -> str:
    """Return the setting that other trainers call by this name, '' for an unknown name."""
    return _TARGETS.get(name.lstrip("-").lower().replace("-", "_"), "")


def suggest_flag(flag: str, settings: dict[str, str]) -> str:
    """The end of a message about an unknown flag; `settings`: {flag: the setting that it sets, or the flag itself}."""
    name = flag.lstrip("-").lower().replace("-", "_").rpartition(".")[2]
    if f"-{name}" in settings:
        return f"; did you mean -{name}?"
    if name in _REASONS:
        return f"; {_REASONS[name]}"
    leaves = {key.rpartition(".")[2].lower(): key for key in ALL_SETTINGS}
    target = _TARGETS.get(name) or leaves.get(name)
    if target is None:
        if near := difflib.get_close_matches(f"-{name}", settings, n=1, cutoff=_CUTOFF):
            return f"; did you mean {near[0]}?"
        near = difflib.get_close_matches(name, leaves, n=1, cutoff=_CUTOFF)
        if not near:
            return ""
        target = leaves[near[0]]
    flags = {key: each for each, key in settings.items()}
    words = []
    for word in target.split():
        key, _, value = word.partition("=")
        words.append(f"{flags[key]} {value}" if key in flags else f"-opts {key}={value or '...'}")
    return f"; did you mean {' '.join(words).replace(' true', '').strip()}?"
