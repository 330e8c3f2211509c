"""What the config.py of PaddleViT's other families sets where their YAML files say nothing."""

# One family a line. The last column: a, the augmentation that all but MAE have; i, ImageNet's mean and deviation.
# Some config.py have a DROPPATH that their model does not read (ConvMixer, PoolFormer), and VOLO's END_LR is 53-4, which
# Python reads as 49; taken for the 1e-5 of the others.
_TABLE = """
              NUM_EPOCHS WARMUP_EPOCHS WEIGHT_DECAY BASE_LR WARMUP_START_LR END_LR LINEAR_SCALED_LR MODEL_EMA_DECAY DROPPATH
    beit        100        20            0.05         4e-3    0.0             1e-6   512              0.9999          0.1      a
    cait        300        5             0.05         5e-4    1e-6            0.0    512              0.99996         0.1      ai
    coat        300        20            0.05         4e-3    1e-6            1e-5   512              0.99996         -        ai
    coat_lite   300        20            0.05         4e-3    1e-6            1e-5   512              0.99996         -        ai
    convmixer   300        20            0.1          1e-3    1e-6            1e-5   512              -               -        ai
    convnext    300        20            0.05         4e-3    1e-6            1e-5   512              0.9999          -        ai
    deit        300        5             0.05         5e-4    1e-6            0.0    512              0.99996         -        ai
    gatedmlp    300        20            0.1          1e-3    1e-6            1e-5   512              -               0.1      a
    mae         800        40            0.05         1.5e-4  1e-6            0.0    256              -               -        i
    mobileone   300        3             0.01         2e-3    2e-4            2e-4   None             0.9996          -        ai
    mobilevit   300        3             0.01         2e-3    2e-4            2e-4   None             0.9996          -        ai
    poolformer  300        5             0.05         1e-3    1e-6            1e-5   1024             -               -        ai
    regnet      300        5             0.05         5e-4    1e-6            0.0    512              0.99996         -        ai
    resmlp      300        20            0.1          1e-3    1e-6            1e-5   512              -               0.1      ai
    swin        300        20            0.05         5e-4    5e-7            5e-6   512              -               0.1      ai
    volo        300        3             0.05         1e-3    1e-6            1e-5   128              -               -        ai
    xcit        300        5             0.05         5e-4    1e-6            1e-5   512              -               0.1      ai
"""
_AUGMENTATION = (
    "SMOOTHING=0.1 COLOR_JITTER=0.4 RAND_AUGMENT=true MIXUP_ALPHA=0.8 CUTMIX_ALPHA=1.0 RANDOM_ERASE_PROB=0.25"
)
_OTHERS = {
    "beit": "LAYER_DECAY=0.65",
    "mae": "SMOOTHING=0.1 MIXUP_ALPHA=0.8 CUTMIX_ALPHA=1.0 OPTIMIZER.BETAS=[0.9,0.95]",
    "mobileone": "RAND_AUGMENT=false AUTO_AUGMENT=original",
    "swin": "GRAD_CLIP=5.0",
}


def _defaults() -> dict[str, dict[str, str]]:
    names, *rows = (line.split() for line in _TABLE.strip().splitlines())
    families = {}
    for family, *values, kinds in rows:
        texts = {name: text for name, text in zip(names, values, strict=True) if text != "-"}
        if "MODEL_EMA_DECAY" in texts:
            texts["MODEL_EMA"] = "true"
        for words in (_AUGMENTATION if "a" in kinds else "", _OTHERS.get(family, "")):
            texts |= dict(word.split("=") for word in words.split())
        found = {f"{'MODEL' if name == 'DROPPATH' else 'TRAIN'}.{name}": text for name, text in texts.items()}
        if "i" in kinds:
            found |= {"DATA.IMAGENET_MEAN": "[0.485, 0.456, 0.406]", "DATA.IMAGENET_STD": "[0.229, 0.224, 0.225]"}
        families[family] = found
    return families


DEFAULTS = _defaults()  # {MODEL.TYPE in lower case: {setting: text}}
