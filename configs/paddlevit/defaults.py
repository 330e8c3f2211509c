"""What the config.py of PaddleViT's other families sets where their YAML files say nothing."""

_MEAN_AND_STD = {"DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]", "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]"}

# The same in all of them but MAE's.
_AUGMENTATION = {
    "TRAIN.SMOOTHING": "0.1",
    "TRAIN.COLOR_JITTER": "0.4",  # where there is no policy
    "TRAIN.RAND_AUGMENT": "true",
    "TRAIN.MIXUP_ALPHA": "0.8",
    "TRAIN.CUTMIX_ALPHA": "1.0",
    "TRAIN.RANDOM_ERASE_PROB": "0.25",
}


def _training(epochs: int, warmup: int, decay: str, rates: tuple[str, str, str], batch: int | None) -> dict[str, str]:
    """`rates`: BASE_LR, WARMUP_START_LR, END_LR; `batch`: the size that they are stated for."""
    base, start, end = rates
    return {
        "TRAIN.NUM_EPOCHS": str(epochs),
        "TRAIN.WARMUP_EPOCHS": str(warmup),
        "TRAIN.WEIGHT_DECAY": decay,
        "TRAIN.BASE_LR": base,
        "TRAIN.WARMUP_START_LR": start,
        "TRAIN.END_LR": end,
        "TRAIN.LINEAR_SCALED_LR": str(batch),
    }


def _ema(decay: str) -> dict[str, str]:
    return {"TRAIN.MODEL_EMA": "true", "TRAIN.MODEL_EMA_DECAY": decay}


_DROPPATH = {"MODEL.DROPPATH": "0.1"}
_COMMON = _AUGMENTATION | _MEAN_AND_STD
_COAT = _COMMON | _training(300, 20, "0.05", ("4e-3", "1e-6", "1e-5"), 512) | _ema("0.99996")
_DEIT = _COMMON | _training(300, 5, "0.05", ("5e-4", "1e-6", "0.0"), 512) | _ema("0.99996")
_MIXER = _AUGMENTATION | _training(300, 20, "0.1", ("1e-3", "1e-6", "1e-5"), 512) | _DROPPATH
_MOBILE = _COMMON | _training(300, 3, "0.01", ("2e-3", "2e-4", "2e-4"), None) | _ema("0.9996")

# {MODEL.TYPE in lower case: {setting: text}}
DEFAULTS: dict[str, dict[str, str]] = {
    "beit": _AUGMENTATION
    | _training(100, 20, "0.05", ("4e-3", "0.0", "1e-6"), 512)
    | _ema("0.9999")
    | _DROPPATH
    | {"TRAIN.LAYER_DECAY": "0.65"},
    "cait": _DEIT | _DROPPATH,
    "coat": _COAT,
    "coat_lite": _COAT,
    # Its config.py has a DROPPATH that its model does not read; PoolFormer's too.
    "convmixer": _COMMON | _training(300, 20, "0.1", ("1e-3", "1e-6", "1e-5"), 512),
    "convnext": _COAT | _ema("0.9999"),
    "deit": _DEIT,
    "gatedmlp": _MIXER,
    "mae": _MEAN_AND_STD
    | _training(800, 40, "0.05", ("1.5e-4", "1e-6", "0.0"), 256)
    | {
        "TRAIN.SMOOTHING": "0.1",
        "TRAIN.MIXUP_ALPHA": "0.8",
        "TRAIN.CUTMIX_ALPHA": "1.0",
        "TRAIN.OPTIMIZER.BETAS": "[0.9, 0.95]",
    },
    "mobileone": _MOBILE | {"TRAIN.RAND_AUGMENT": "false", "TRAIN.AUTO_AUGMENT": "original"},
    "mobilevit": _MOBILE,
    "poolformer": _COMMON | _training(300, 5, "0.05", ("1e-3", "1e-6", "1e-5"), 1024),
    "regnet": _DEIT,
    "resmlp": _MIXER | _MEAN_AND_STD,
    "swin": _COMMON
    | _training(300, 20, "0.05", ("5e-4", "5e-7", "5e-6"), 512)
    | _DROPPATH
    | {"TRAIN.GRAD_CLIP": "5.0"},
    # Its END_LR is 53-4, which Python reads as 49; taken for the 1e-5 of the others.
    "volo": _COMMON | _training(300, 3, "0.05", ("1e-3", "1e-6", "1e-5"), 128),
    "xcit": _COMMON | _training(300, 5, "0.05", ("5e-4", "1e-6", "1e-5"), 512) | _DROPPATH,
}
