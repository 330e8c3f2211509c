"""What people type for a setting that has another name here: names of other trainers, short ones, misspelt ones."""

import difflib
import re
from collections.abc import Iterable

from configs.values import ALL_SETTINGS

# {setting (or setting=value, or a flag that sets none): what people call it}; in lower case, with _ for - and .
ALIASES = {
    "-cfg": "c config cfg_file config_file settings yaml",
    "AMP": "mixed_precision use_amp native_amp half",
    "AMP=true PRECISION.DTYPE=bfloat16": "bf16 bfloat16",
    "AMP=true PRECISION.DTYPE=float16": "fp16 float16",
    "CHECK": "dry_run validate_config",
    "COMPILE": "torchcompile torch_compile",
    "DATA.BATCH_SIZE": "b bs batch batchsize train_batch_size per_device_train_batch_size batch_size_per_gpu mini_batch",
    "DATA.BATCH_SIZE_EVAL": "vb val_batch_size validation_batch_size eval_batch_size per_device_eval_batch_size",
    "DATA.CROP_RATIO": "ratio",
    "DATA.CROP_SCALE": "scale",
    "DATA.DATASET": "data_set dataset_name data_name",
    "DATA.DATA_PATH": "data data_dir dir root dataset_path train_dir train_path",
    "DATA.DOWNLOAD": "dataset_download",
    "DATA.FOLD": "folds fold_index val_fold kfold k_fold k_folds kfolds num_folds n_folds n_splits num_splits cv",
    "DATA.HFLIP": "flip fliplr horizontal_flip",
    "DATA.IMAGENET_MEAN": "mean",
    "DATA.IMAGENET_STD": "std",
    "DATA.IMAGE_CHANNELS": "in_chans in_channels channels num_channels input_channels",
    "DATA.IMAGE_SIZE": "img_size imgsz img image input_size resolution size crop_size train_crop_size",
    "DATA.NUM_WORKERS": "j worker workers num_worker nw n_workers num_proc dataloader_num_workers",
    "DATA.SAMPLER=balanced": "weighted_sampler class_balanced balanced_sampler oversample oversampling",
    "DATA.TRAIN_CROP": "train_crop_mode crop_mode",
    "DATA.TRAIN_INTERPOLATION": "train_interpolation",
    "DATA.VAL_FRACTION": "val_split validation_split val_ratio val_size holdout test_size",
    "DATA.VFLIP": "flipud vertical_flip",
    "DEVICE": "accelerator gpu cuda",
    "DEVICE=cpu": "cpu no_cuda use_cpu no_gpu",
    "DIST.STRATEGY": "sharding zero deepspeed",
    "DIST.STRATEGY=fsdp2": "fsdp fsdp2",
    "DIST.URL": "master_addr master_port init_method",
    "EVAL": "e evaluate eval_only test test_only validate val do_eval",
    "KEEP_CHECKPOINTS": "checkpoint_hist save_total_limit keep_last keep_checkpoint_max",
    "MODEL.ATTENTION_DROPOUT": "attn_drop attn_drop_rate attention_dropout_rate",
    "MODEL.DEPTH": "layers num_layers n_layers num_hidden_layers",
    "MODEL.DROPOUT": "drop drop_rate dropout_rate",
    "MODEL.DROPPATH": "drop_path drop_path_rate stochastic_depth",
    "MODEL.EMBED_DIM": "dim width hidden_size hidden_dim embedding_dim",
    "MODEL.FREEZE": "freeze_backbone frozen freeze_layers",
    "MODEL.TYPE=timm MODEL.NAME": "a model arch architecture backbone net network model_name model_name_or_path model_type",
    "MODEL.NUM_CLASSES": "nc classes n_classes num_labels nb_classes",
    "MODEL.NUM_HEADS": "heads n_heads num_attention_heads",
    "MODEL.PATCH_SIZE": "patch patches",
    "MODEL.PRETRAINED": "weights init initial_checkpoint load load_from pretrain pretrained_path finetune checkpoint ckpt",
    "MODEL.RESUME": "auto_resume continue resume_from resume_from_checkpoint restore",
    "NAME": "experiment exp exp_name run_name experiment_name",
    "NGPUS": "gpus num_gpus n_gpus nproc nproc_per_node devices num_processes",
    "PRECISION.DTYPE": "precision torch_dtype model_dtype",
    "PRECISION.INIT_LOSS_SCALING": "loss_scale initial_loss_scale init_scale",
    "PRECISION.MATMUL=tf32": "tf32 allow_tf32",
    "REPORT_FREQ": "p print_freq log_interval log_freq logging_steps log_every_n_steps log_every",
    "RUN.MAX_TIME": "time_limit walltime",
    "SAVE": "o out output_dir out_dir save_dir save_path log_dir logdir work_dir project",
    "SAVE_FREQ": "save_period save_every save_every_epoch save_interval checkpoint_interval",
    "SAVE_STEPS": "recovery_interval save_every_n_steps",
    "SEED": "random_seed manual_seed random_state",
    "TENSORBOARD": "tb use_tensorboard log_tb",
    "TRACK": "tracker trackers logger report_to",
    "TRACK=mlflow": "mlflow use_mlflow log_mlflow",
    "TRACK=wandb": "wandb use_wandb log_wandb",
    "TRAIN.ACCUM_ITER": "accum accumulate accumulation accum_steps accumulation_steps grad_accum grad_accum_steps "
    "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches update_freq",
    "TRAIN.AUTO_AUGMENT": "aa augment augmentation aug policy randaugment trivialaugment",
    "TRAIN.BASE_LR": "lr learning_rate lr0 learningrate initial_lr init_lr max_lr peak_lr lr_base blr",
    "TRAIN.BCE_POS_WEIGHT": "pos_weight",
    "TRAIN.CLASS_WEIGHTS": "class_weight weight_per_class",
    "TRAIN.CLIP_MODE": "agc gradient_clip_algorithm clip_type",
    "TRAIN.COLOR_JITTER": "jitter colour_jitter",
    "TRAIN.CUTMIX_ALPHA": "cutmix",
    "TRAIN.DISTILLATION_ALPHA": "kd_alpha distill_alpha",
    "TRAIN.DISTILLATION_TAU": "temperature kd_temperature distillation_temperature",
    "TRAIN.DISTILLATION_TYPE": "kd distill distillation kd_distill_type kd_loss_type",
    "TRAIN.EARLY_STOP": "patience early_stopping earlystop earlystopping es_patience early_stopping_patience",
    "TRAIN.END_LR": "min_lr lrf final_lr eta_min lr_min",
    "TRAIN.GRAD_CHECKPOINTING": "gradient_checkpointing checkpointing activation_checkpointing remat recompute",
    "TRAIN.GRAD_CLIP": "clip clip_grad clip_grad_norm grad_norm max_norm max_grad_norm gradient_clip_val clipping",
    "TRAIN.LAYER_DECAY": "llrd layer_lr_decay layerwise_lr_decay lr_layer_decay layer_wise_lr_decay",
    "TRAIN.LINEAR_SCALED_LR": "lr_base_size scale_lr base_batch_size",
    "TRAIN.LOSS": "criterion loss_fn loss_function",
    "TRAIN.LOSS=bce": "bce_loss binary_cross_entropy",
    "TRAIN.LR_SCALING": "lr_base_scale",
    "TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS": "cooldown",
    "TRAIN.LR_SCHEDULER.DECAY_FRACTION": "cooldown_fraction decay_fraction",
    "TRAIN.LR_SCHEDULER.DECAY_RATE": "gamma lr_decay lr_gamma lr_factor",
    "TRAIN.LR_SCHEDULER.DECAY_EPOCHS": "step_size lr_step_size",
    "TRAIN.LR_SCHEDULER.MILESTONES": "decay_milestones lr_steps lr_milestones",
    "TRAIN.LR_SCHEDULER.NAME": "sched scheduler lr_scheduler lr_scheduler_type lr_schedule schedule",
    "TRAIN.MIXUP_ALPHA": "mixup mix",
    "TRAIN.MODEL_EMA": "ema use_ema",
    "TRAIN.MODEL_EMA_DECAY": "ema_decay",
    "TRAIN.NUM_EPOCHS": "n_epochs epoch epochs max_epochs max_epoch num_train_epochs total_epochs",
    "TRAIN.OPTIMIZER.BETAS": "beta1 beta2 beta adam_beta1 adam_beta2 opt_betas",
    "TRAIN.OPTIMIZER.EPS": "epsilon adam_epsilon opt_eps",
    "TRAIN.OPTIMIZER.MOMENTUM": "m mom",
    "TRAIN.OPTIMIZER.KWARGS": "opt_kwargs opt_args optim_args optimizer_args optimizer_kwargs",
    "TRAIN.OPTIMIZER.NAME": "opt optim optimizer_type optimizer_name adamw adam sgd optimiser optimizer",
    "TRAIN.OPTIMIZER.NAME=lion": "lion",
    "TRAIN.OPTIMIZER.NAME=lamb": "lamb",
    "TRAIN.OPTIMIZER.NAME=muon": "muon",
    "TRAIN.OPTIMIZER.NAME=adafactor": "adafactor",
    "TRAIN.OPTIMIZER.NAME=AdamWScheduleFree TRAIN.LR_SCHEDULER.NAME=constant": "schedule_free schedulefree",
    "TRAIN.RANDOM_ERASE_PROB": "reprob random_erase random_erasing erase erasing",
    "TRAIN.REPEATED_AUG": "aug_repeats repeated_augmentation ra_sampler",
    "TRAIN.SMOOTHING": "label_smoothing ls label_smoothing_factor smooth",
    "TRAIN.TEACHER_MODEL": "teacher kd_model_name kd_teacher",
    "TRAIN.WARMUP_EPOCHS": "warmup warm_up warmup_iters lr_warmup_epochs warmup_steps warmup_ratio warmup_t",
    "TRAIN.WARMUP_START_LR": "warmup_lr warmup_init_lr lr_warmup_decay",
    "TRAIN.WEIGHT_DECAY": "wd decay l2 weight_decay_rate",
    "VALIDATE_FREQ": "val_interval eval_freq eval_interval val_freq eval_steps check_val_every_n_epoch validation_freq",
}
# {what people call something that does not exist here: what comes nearest}
NOT_HERE = {
    "wandb_project wandb_entity": "wandb's own variables name them, as in WANDB_PROJECT=vit; TRACK=wandb switches it on",
    "clearml comet neptune aim": (
        "there is no such tracker; TRACK has wandb and mlflow, and TensorBoard files (TENSORBOARD) are written"
    ),
    "max_steps max_iter max_iters total_steps num_steps train_steps iterations": (
        "a run has a number of epochs, TRAIN.NUM_EPOCHS (-epochs), or a time limit, RUN.MAX_TIME"
    ),
    "focal focal_loss jsd_loss": "TRAIN.LOSS is cross_entropy or bce; TRAIN.CLASS_WEIGHTS gives rare classes more weight",
    "channels_last memory_format": "there is no choice of memory format",
    "sync_bn sync_batchnorm syncbn": "there is no synchronised BatchNorm",
    "debug verbose v quiet": "there is no such mode; REPORT_FREQ sets how often a line is logged, and -check tests a run",
    "version": "there is no such flag; the top of CHANGELOG.md names the version",
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
    """The same for an unknown flag; `settings`: {flag: the setting that it sets, or the flag itself}."""
    name = flag.lstrip("-").lower().replace("-", "_").rpartition(".")[2]
    if f"-{name}" in settings:
        return f"; did you mean -{name}?"
    if name in _REASONS:
        return f"; {_REASONS[name]}"
    target = _TARGETS.get(name) or next((key for key in ALL_SETTINGS if key.rpartition(".")[2].lower() == name), None)
    if target is None:
        near = difflib.get_close_matches(f"-{name}", settings, n=1, cutoff=_CUTOFF)
        return f"; did you mean {near[0]}?" if near else ""
    flags = {key: each for each, key in settings.items()}
    words = []
    for word in target.split():
        key, _, value = word.partition("=")
        words.append(f"{flags[key]} {value}" if key in flags else f"-opts {key}={value or '...'}")
    return f"; did you mean {' '.join(words).replace(' true', '').strip()}?"
