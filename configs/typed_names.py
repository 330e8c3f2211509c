"""Suggests the setting that people mean who type another name: names of other trainers, short ones, misspelt ones."""

import difflib
import re
from collections.abc import Iterable

from configs.values import ALL_SETTINGS

# {setting (or setting=value, or a flag that sets none): what timm, Hugging Face and others call it}; in lower case, with _ for - and .
# Names that resemble the setting's own are not here: difflib finds those.
ALIASES = {
    "-cfg": "c config config_file settings",
    "AMP": "mixed_precision use_amp native_amp half",
    "AMP=true PRECISION.DTYPE=bfloat16": "bf16 bfloat16",
    "AMP=true PRECISION.DTYPE=float16": "fp16 float16",
    "DATA.BATCH_SIZE": "b bs batch per_device_train_batch_size",
    "DATA.BATCH_SIZE_EVAL": "vb validation_batch_size per_device_eval_batch_size",
    "DATA.CROP_RATIO": "ratio",
    "DATA.CROP_SCALE": "scale",
    "DATA.DATA_PATH": "data data_dir root train_dir",
    "DATA.IMAGENET_MEAN": "mean",
    "DATA.IMAGENET_STD": "std",
    "DATA.IMAGE_CHANNELS": "in_chans channels",
    "DATA.IMAGE_SIZE": "imgsz input_size resolution",
    "DATA.NUM_WORKERS": "j workers dataloader_num_workers",
    "DATA.VAL_FRACTION": "validation_split val_size test_size",
    "DEVICE": "accelerator gpu cuda",
    "DEVICE=cpu": "cpu no_cuda use_cpu",
    "DIST.STRATEGY=fsdp2": "fsdp sharding zero deepspeed",
    "EVAL": "e evaluate eval_only test validate do_eval",
    "KEEP_CHECKPOINTS": "checkpoint_hist save_total_limit",
    "MODEL.DROPOUT": "drop drop_rate",
    "MODEL.DROPPATH": "drop_path_rate stochastic_depth",
    "MODEL.KWARGS": "model_kwargs",
    "MODEL.NUM_CLASSES": "nc classes num_labels",
    "MODEL.PRETRAINED": "weights initial_checkpoint load_from finetune checkpoint ckpt",
    "MODEL.RESUME": "continue resume_from_checkpoint",
    "MODEL.TYPE=timm MODEL.NAME": "model arch architecture backbone model_name model_name_or_path",
    "NAME": "experiment exp_name run_name",
    "NGPUS": "nproc_per_node devices",
    "REPORT_FREQ": "print_freq log_interval logging_steps log_every_n_steps",
    "SAVE": "o out output_dir save_dir log_dir work_dir",
    "SAVE_STEPS": "recovery_interval",
    "TRACK": "logger report_to",
    "TRACK=mlflow": "mlflow log_mlflow",
    "TRACK=wandb": "wandb use_wandb log_wandb wandb_project",
    "TRAIN.ACCUM_ITER": "grad_accum_steps gradient_accumulation_steps accumulate_grad_batches",
    "TRAIN.AUTO_AUGMENT": "aa policy randaugment",
    "TRAIN.BASE_LR": "lr learning_rate lr0 init_lr max_lr blr lr_base",
    "TRAIN.BEST_METRIC": "eval_metric",
    "TRAIN.CLASS_WEIGHTS": "pos_weight bce_pos_weight",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "TRAIN.DISTILLATION_ALPHA": "kd_alpha task_loss_weight",
    "TRAIN.DISTILLATION_TAU": "temperature kd_temperature",
    "TRAIN.DISTILLATION_TYPE": "kd distill distillation kd_token_distill_type",
    "TRAIN.EARLY_STOP": "patience early_stopping_patience",
    "TRAIN.END_LR": "min_lr lrf eta_min",
    "TRAIN.GRAD_CLIP": "clip_grad clip_grad_norm max_grad_norm",
    "TRAIN.LINEAR_SCALED_LR": "lr_base_size",
    "TRAIN.LOSS=bce": "bce_loss",
    "TRAIN.LR_SCALING": "lr_base_scale",
    "TRAIN.LR_SCHEDULER.AFTER_WARMUP": "warmup_prefix",
    "TRAIN.LR_SCHEDULER.NAME": "sched scheduler lr_scheduler_type",
    "TRAIN.LR_SCHEDULER.PER_EPOCH": "sched_on_updates",
    "TRAIN.MIXUP_ALPHA": "mixup",
    "TRAIN.MODEL_EMA": "ema use_ema",
    "TRAIN.OPTIMIZER.BETAS": "opt_betas",
    "TRAIN.OPTIMIZER.KWARGS": "opt_kwargs optim_args",
    "TRAIN.OPTIMIZER.NAME": "opt optim adamw adam sgd",
    "TRAIN.RANDOM_ERASE_COUNT": "recount",
    "TRAIN.RANDOM_ERASE_MODE": "remode",
    "TRAIN.RANDOM_ERASE_PROB": "reprob",
    "TRAIN.REPEATED_AUG": "aug_repeats",
    "TRAIN.TEACHER_MODEL": "teacher kd_model_name",
    "TRAIN.WARMUP_EPOCHS": "warmup warmup_ratio",
    "TRAIN.WEIGHT_DECAY": "wd decay l2",
    "VALIDATE_FREQ": "val_interval eval_steps check_val_every_n_epoch",
}
# {what people call something that does not exist here: what comes nearest}
NOT_HERE = {
    "max_steps num_steps iterations": "a run has a number of epochs, TRAIN.NUM_EPOCHS (-epochs), or a time limit, RUN.MAX_TIME",
    "focal_loss jsd_loss": "see TRAIN.LOSS for the losses there are; TRAIN.CLASS_WEIGHTS gives rare classes more weight",
    "tag": "-name (NAME) gives the run's folder its whole name",
}
_TARGETS = {name: target for target, names in ALIASES.items() for name in names.split()}
_REASONS = {name: reason for names, reason in NOT_HERE.items() for name in names.split()}
_CUTOFF = 0.75  # of the similarity of spelling; below it guesses mislead


def suggest_key(key: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown key in a file or -opts; `known`: the keys to choose from."""
    parts = re.split(r"[.-]", key.lower())
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
