"""Suggests the setting that an unknown name most likely means: another trainer's name, a short form, or a typo."""

import difflib
import re
from collections.abc import Iterable

from configs.translate.timm_arguments import OTHER_LOSSES, TIMM_ARGUMENTS
from configs.values import ALL_SETTINGS, SECTIONS, Text, quoted
from utils.commands import page
from utils.errors import SIMILAR

# {setting, setting=value, or flag without a setting: its names in Hugging Face and other trainers}. The names are in
# lower case, and each - or dot is written as _. The arguments of timm's train.py are in timm_arguments.py. Names that
# resemble the name of the setting are not listed, because difflib finds them.
ALIASES = {
    "-cfg": "c config config_file settings",
    "AMP": "mixed_precision use_amp native_amp half",
    "AMP=true PRECISION.DTYPE=bfloat16": "bf16 bfloat16",
    "AMP=true PRECISION.DTYPE=float16": "fp16 float16",
    "DATA.BATCH_SIZE": "bs batch per_device_train_batch_size",
    "DATA.BATCH_SIZE_EVAL": "per_device_eval_batch_size",
    "DATA.DATA_PATH": "root train_dir",
    "DATA.IMAGE_CHANNELS": "channels",
    "DATA.IMAGE_SIZE": "imgsz resolution",
    "DATA.NUM_WORKERS": "dataloader_num_workers",
    "DATA.VAL_FRACTION": "validation_split val_size test_size",
    "DEVICE": "accelerator gpu cuda",
    "DEVICE=cpu": "cpu no_cuda use_cpu",
    "DIST.STRATEGY=fsdp2": "fsdp sharding zero deepspeed",
    "EVAL": "e evaluate eval_only test validate do_eval",
    "KEEP_CHECKPOINTS": "save_total_limit",
    "MODEL.DROPOUT": "drop_rate",
    "MODEL.DROPPATH": "drop_path_rate stochastic_depth",
    "MODEL.NUM_CLASSES": "nc classes num_labels",
    "MODEL.PRETRAINED": "weights load_from finetune checkpoint ckpt",
    "MODEL.RESUME": "continue resume_from_checkpoint",
    "MODEL.TYPE=timm MODEL.NAME": "arch architecture backbone model_name model_name_or_path",
    "NAME": "exp_name run_name",
    "NGPUS": "nproc_per_node devices",
    "REPORT_FREQ": "print_freq logging_steps log_every_n_steps",
    "SAVE": "o out output_dir save_dir log_dir work_dir",
    "TRACK": "logger report_to",
    "TRACK=mlflow": "mlflow log_mlflow",
    "TRACK=wandb": "wandb use_wandb",
    "TRAIN.ACCUM_ITER": "gradient_accumulation_steps accumulate_grad_batches",
    "TRAIN.AUTO_AUGMENT": "policy randaugment",
    "TRAIN.BASE_LR": "learning_rate lr0 init_lr max_lr blr",
    "TRAIN.CLASS_WEIGHTS": "pos_weight",
    "TRAIN.DISTILLATION_ALPHA": "kd_alpha",
    "TRAIN.DISTILLATION_TAU": "temperature",
    "TRAIN.DISTILLATION_TYPE": "kd distill distillation",
    "TRAIN.EARLY_STOP": "patience early_stopping_patience",
    "TRAIN.END_LR": "lrf eta_min",
    "TRAIN.GRAD_CLIP": "clip_grad_norm max_grad_norm",
    "TRAIN.LR_SCHEDULER.NAME": "scheduler lr_scheduler_type",
    "TRAIN.MODEL_EMA": "ema use_ema",
    "TRAIN.OPTIMIZER.KWARGS": "optim_args",
    "TRAIN.OPTIMIZER.NAME": "optim adamw adam sgd",
    "TRAIN.TEACHER_MODEL": "teacher",
    "TRAIN.WARMUP_EPOCHS": "warmup warmup_ratio",
    "TRAIN.WEIGHT_DECAY": "wd decay l2",
    "VALIDATE_FREQ": "eval_steps check_val_every_n_epoch",
}
# {why there is no such setting, or the closest alternative: names in other trainers}
NOT_HERE = {
    "set the length of a run with TRAIN.NUM_EPOCHS (-epochs), or a time limit with "
    "RUN.MAX_TIME": "max_steps num_steps iterations",
    OTHER_LOSSES: "focal_loss",
    "-name (NAME) sets the name of the run's folder": "tag",
}


def _by_name(table: dict[str, str], of_timm: dict[str, str]) -> dict[str, str]:
    """Return {name: setting or reason} for the names in a table and for timm's names, with _ instead of -."""
    others = {name: meaning for meaning, names in table.items() for name in names.split()}
    return others | {name.replace("-", "_"): meaning for name, meaning in of_timm.items() if meaning}


_TIMM = {name: each for each in TIMM_ARGUMENTS.values() for name in (each.name, each.short) if name}
_TARGETS = _by_name(ALIASES, {name: each.setting for name, each in _TIMM.items()})
_REASONS = _by_name(NOT_HERE, {name: each.reason for name, each in _TIMM.items()})
MOST_WORDS = 20  # only this many words at the end of a long key are looked up


def why_no_setting(key: str, text: Text) -> str:
    """Return the error message for an unknown key in a file or in -opts."""
    if key == "BASE":
        return "BASE is for files only; name another file with -cfg"
    if key in SECTIONS:
        inside = next(each for each in ALL_SETTINGS if each.startswith(key + "."))
        return f"{key} is {quoted(text)}, but it is a section; set one of its settings, such as {inside}"
    return f"unknown key {key}{suggest_key(key, [*ALL_SETTINGS, 'BASE'])}"


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown key in a file or -opts. `known`: the keys to choose from."""
    parts = re.split(r"[.-]", key.lower())[-MOST_WORDS:]
    # For train.early_stop.patience: train_early_stop_patience, early_stop_patience, patience.
    for name in ("_".join(parts[start:]) for start in range(len(parts))):
        if name in _REASONS:
            return f"; {_REASONS[name]}"
        if name in _TARGETS:
            return f"; did you mean {_TARGETS[name]}?"
    leaf = {each: each.rpartition(".")[2].lower() for each in known}
    names = difflib.get_close_matches(parts[-1], set(leaf.values()), n=1, cutoff=SIMILAR)
    # If several sections have this name, choose the key whose full name is the most similar.
    near = difflib.get_close_matches(key.upper(), [each for each in known if leaf[each] in names], n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else f"; {page('docs/settings.md')} lists all settings"


def setting_meant(name: str) -> str:
    """Return the setting for a name from another trainer, or '' if the name is unknown."""
    return _TARGETS.get(name.lstrip("-").lower().replace("-", "_"), "")


def suggest_flag(flag: str, settings: dict[str, str]) -> str:
    """Return the end of a message about an unknown flag.

    `settings`: {flag: its setting, or the flag if it has none}.
    """
    name = flag.lstrip("-").lower().replace("-", "_").rpartition(".")[2]
    if name in _REASONS:
        return f"; {_REASONS[name]}"
    known = {key.rpartition(".")[2].lower(): key for key in ALL_SETTINGS}
    known |= {each.lstrip("-"): settings[each] for each in settings}
    near = [name] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
    target = _TARGETS.get(name) or next((known[each] for each in near), "")
    flags = {key: each for each, key in settings.items()}
    options = []
    for word in target.split():
        key, _, value = word.partition("=")
        options.append(f"{flags[key]} {value}" if key in flags else f"-opts {key}={value or '...'}")
    return f"; did you mean {' '.join(options).replace(' true', '').strip()}?" if options else ""
