"""The table of run hashes: short runs with many settings, each started in several ways.

tests/runs/test_run_hashes.py compares the ways. scripts/maintenance/run_hashes.py prints the hashes of a checkout.
"""

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.configs import ema
from tests.support.image_sets import write_tar
from tests.support.parquet_files import write_parquet

# An epoch has three updates of 8 images and a shorter one.
BASE = """
DATA:
  {DATASET: imagefolder, DATA_PATH: photos, VAL_FRACTION: 0.25, NUM_WORKERS: 0,
   IMAGE_SIZE: 8, CROP_SCALE: [0.5, 1], BATCH_SIZE: 8, DROP_LAST: false}
MODEL: {TYPE: vit, PATCH_SIZE: 4, EMBED_DIM: 16, DEPTH: 2, NUM_HEADS: 2}
TRAIN: {NUM_EPOCHS: 2, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, WEIGHT_DECAY: 0.05}
TRACK: []
REPORT: false
CALIBRATE: false
REPORT_FREQ: 1
"""
EMA = " ".join(ema(0.9))
# Half-precision updates that round differently stay close to each other with SGD; Adam divides by tiny gradients.
SGD = "TRAIN.OPTIMIZER.NAME=SGD TRAIN.BASE_LR=0.1"
BFLOAT16, FLOAT16 = f"AMP=true PRECISION.DTYPE=bfloat16 {SGD}", f"AMP=true PRECISION.DTYPE=float16 {SGD}"
SKIPS = "PRECISION.INIT_LOSS_SCALING=1e12 PRECISION.DECR_RATIO=1e-3 PRECISION.INCR_EVERY_N_STEPS=3"
MIXES = "TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1"
TEACHER = "TRAIN.TEACHER_MODEL={teacher}"
TIMM = "MODEL.TYPE=timm MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
SIZE = "MODEL.KWARGS.patch_size=4 MODEL.KWARGS.embed_dim=16 MODEL.KWARGS.depth=2 MODEL.KWARGS.num_heads=2"
NATIVE = "DATA.PIXELS=native DATA.IMAGE_CHANNELS=5"
# {row: settings}. {teacher} is best.pth of the first row.
OF_TRAINING = {
    "float32": "",
    # Precision
    "bfloat16": BFLOAT16,
    "float16": f"{FLOAT16} {EMA} {SKIPS}",
    "naive": f"{BFLOAT16} PRECISION.MODE=naive {EMA}",
    "naive_float16": f"{FLOAT16} PRECISION.MODE=naive {SKIPS}",
    "float8": "AMP=true PRECISION.MODE=float8",
    "half_residual": f"{BFLOAT16} PRECISION.RESIDUAL=half PRECISION.REDUCE=half",
    "operator_lists": f"{BFLOAT16} PRECISION.CUSTOM_BLACK_LIST=[blocks.0.mlp] PRECISION.CUSTOM_WHITE_LIST=[layer_norm]",
    # Optimizers, schedules, clipping
    "sgd": "TRAIN.OPTIMIZER.NAME=SGD TRAIN.OPTIMIZER.KWARGS.nesterov=true TRAIN.BASE_LR=0.1",
    "adam": "TRAIN.OPTIMIZER.NAME=Adam TRAIN.LR_SCHEDULER.NAME=constant TRAIN.WARMUP_EPOCHS=1",
    "lamb": f"TRAIN.OPTIMIZER.NAME=lamb {EMA}",
    "muon": "TRAIN.OPTIMIZER.NAME=muon TRAIN.LR_SCHEDULER.NAME=wsd TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS=1",
    "sgdw": f"{FLOAT16.replace('SGD', 'sgdw')} {SKIPS}",  # an optimizer of timm, which must be able to skip
    "adafactor": "TRAIN.OPTIMIZER.NAME=adafactor TRAIN.LR_SCHEDULER.NAME=step TRAIN.LR_SCHEDULER.DECAY_EPOCHS=0.5",
    "adan": "TRAIN.OPTIMIZER.NAME=adan TRAIN.LR_SCHEDULER.NAME=paddlevit",
    "rates_per_epoch": "TRAIN.LR_SCHEDULER.PER_EPOCH=true TRAIN.LINEAR_SCALED_LR=16 TRAIN.LR_SCALING=sqrt",
    "clipped_norm": "TRAIN.GRAD_CLIP=0.5",
    "clipped_values": "TRAIN.GRAD_CLIP=0.01 TRAIN.CLIP_MODE=value",
    "adaptive_clipping": "TRAIN.GRAD_CLIP=0.01 TRAIN.CLIP_MODE=agc",
    "layer_decay": f"TRAIN.LAYER_DECAY=0.5 {EMA}",
    # Weights that are averaged, frozen, dropped or adapted
    "ema": f"{EMA} TRAIN.MODEL_EMA_WARMUP=false",
    "ema_warm_up": "TRAIN.MODEL_EMA=true",
    "frozen": "MODEL.FREEZE=[blocks.0.*]",
    "lora": f"MODEL.LORA.RANK=2 {EMA}",
    "dropout": f"MODEL.DROPPATH=0.3 MODEL.DROPOUT=0.1 MODEL.ATTENTION_DROPOUT=0.1 {EMA}",
    "checkpointing": "TRAIN.GRAD_CHECKPOINTING=true MODEL.DROPPATH=0.3",
    "batch_norm": f"{TIMM} MODEL.NAME=test_efficientnet DATA.IMAGE_SIZE=32 DATA.DROP_LAST=true",
    # Classes and losses
    "balanced": f"DATA.SAMPLER=balanced TRAIN.REPEATED_AUG=2 {EMA}",
    "class_weights": f"TRAIN.CLASS_WEIGHTS=auto TRAIN.SMOOTHING=0.1 {MIXES}",
    "binary_loss": f"TRAIN.LOSS=bce TRAIN.BCE_TARGET_THRESH=0.2 TRAIN.CLASS_WEIGHTS=auto {MIXES}",
    "several_labels": "DATA.DATASET=csv DATA.DATA_PATH=lists/labels.csv DATA.LABEL_SEPARATOR=|",
    "numbers": f"DATA.DATASET=csv DATA.DATA_PATH=lists/numbers.csv TRAIN.OBJECTIVE=numbers {EMA} TRAIN.MIXUP_ALPHA=0.8"
    " DATA.COLUMNS=[image_path,width,number]",
    # Teachers
    "soft_distillation": f"TRAIN.DISTILLATION_TYPE=soft TRAIN.DISTILLATION_TAU=2 {TEACHER} {EMA} {MIXES}",
    "hard_distillation": f"TRAIN.DISTILLATION_TYPE=hard {TEACHER} TRAIN.SIZE_SCHEDULE=[0:12,1:8]",
    "token_distillation": f"TRAIN.DISTILLATION_TYPE=hard {TEACHER} {TIMM} {SIZE} "
    "MODEL.NAME=deit_tiny_distilled_patch16_224",
    # Length of the run
    "accumulation": "DATA.BATCH_SIZE=2 TRAIN.ACCUM_ITER=4",
    "whole_updates": f"DATA.DROP_LAST=true VALIDATE_FREQ=2 {EMA}",
    "early_stopping": "TRAIN.EARLY_STOP=1 TRAIN.NUM_EPOCHS=9 TRAIN.BASE_LR=1e-30 TRAIN.BEST_METRIC=loss",
}
# These settings choose images, which is independent of DIST.STRATEGY.
OF_IMAGES = {
    # Augmentation
    "mixup": f"TRAIN.MIXUP_ALPHA=0.8 {EMA}",
    "cutmix": "TRAIN.CUTMIX_ALPHA=1 TRAIN.MIXUP_MODE=pair TRAIN.MIXUP_PROB=0.8 TRAIN.SMOOTHING=0.1",
    "cutmix_of_limited_sides": "TRAIN.CUTMIX_MINMAX=[0.2,0.8] TRAIN.MIXUP_MODE=elem",
    "groups": f"{MIXES} TRAIN.MIXUP_GROUP=4 TRAIN.MIXUP_OFF_EPOCH=1",
    "randaugment": "TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1 DATA.VFLIP=0.5",
    "augmix": "TRAIN.AUTO_AUGMENT=augmix-m3-w3 DATA.TRAIN_CROP=simple",
    "three_augment": "TRAIN.AUTO_AUGMENT=3a TRAIN.COLOR_JITTER=0.3 DATA.TRAIN_INTERPOLATION=random",
    "erasing": "TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.RANDOM_ERASE_COUNT=2",
    "repeated": f"TRAIN.REPEATED_AUG=2 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.RANDOM_ERASE_MODE=rand {MIXES}",
    "wide_images": f"DATA.IMAGE_SIZE=4x16 TRAIN.RANDOM_ERASE_PROB=0.5 TRAIN.AUTO_AUGMENT=rand-m9 {MIXES}",
    "growing_images": f"TRAIN.SIZE_SCHEDULE=[0:4,1:12] {MIXES}",
    # Sources
    "digits": "DATA.DATASET=digits DATA.IMAGE_CHANNELS=1 DATA.IMAGENET_MEAN=[0.5] DATA.IMAGENET_STD=[0.5]"
    " DATA.FOLD=0/2 DATA.BATCH_SIZE=64",
    "lists": "DATA.DATASET=imagenet2012 DATA.DATA_PATH=lists DATA.NUM_WORKERS=2 DATA.WORKERS=threads",
    "csv": "DATA.DATASET=csv DATA.DATA_PATH=lists/classes.csv DATA.NUM_WORKERS=1 DATA.WORKERS=processes",
    "shards": "DATA.DATASET=shards DATA.DATA_PATH=shards DATA.SHUFFLE_BUFFER=4",
    "parquet": "DATA.DATASET=parquet DATA.DATA_PATH=parquet DATA.SHUFFLE_BUFFER=4",
    "synthetic": "DATA.DATASET=synthetic DATA.SYNTHETIC_SIZE=28 MODEL.NUM_CLASSES=3",
    # Images with the values of their files
    "native_pixels": f"{NATIVE} DATA.DATA_PATH=pixels DATA.CACHE=disk TRAIN.COLOR_JITTER=0.3 "
    f"TRAIN.RANDOM_ERASE_PROB=0.5 DATA.TRAIN_CROP=simple {MIXES}",
    "native_shards": f"{NATIVE} DATA.DATASET=shards DATA.DATA_PATH=pixel-shards DATA.SHUFFLE_BUFFER=4 {EMA}",
    "cache": "DATA.CACHE=disk",
    "cache_of_small_images": "DATA.CACHE=9",
}
ROWS = OF_TRAINING | OF_IMAGES
# {way: (processes, settings)}
WAYS = {
    "straight": (1, ""),
    "killed": (1, "SAVE_STEPS=1"),
    "split": (1, "DATA.BATCH_SIZE={half} TRAIN.ACCUM_ITER={twice}"),
    "two": (2, "DATA.BATCH_SIZE={half}"),
    "fsdp2": (2, "DATA.BATCH_SIZE={half} DIST.STRATEGY=fsdp2"),
}
# 25 training images: in the last update of an epoch, one of two processes has none.
PHOTOS = {"bird": (11, 20), "cat": (6, 120), "dog": (11, 200)}  # {class: (number of photos, shade)}
SIDES = [(8, 8), (12, 8), (8, 12), (16, 10)]


def write_data(folder: Path) -> None:
    """Write the settings file and the images of all rows into a folder, the current folder of the runs."""
    (folder / "base.yaml").write_text(BASE)
    rng, rows, files, content = np.random.default_rng(0), [], {}, {"image": [], "label": []}
    others, arrays = np.random.default_rng(1), {}
    for label, (name, (count, shade)) in enumerate(PHOTOS.items()):
        (folder / "lists" / name).mkdir(parents=True)
        (folder / "pixels" / name).mkdir(parents=True)
        for number in range(count):
            width, height = SIDES[number % 4]
            pixels = (rng.integers(50, size=(height, width, 3)) + shade).astype(np.uint8)
            path = folder / "lists" / name / f"{number}.png"
            Image.fromarray(pixels).save(path)
            array = folder / "pixels" / name / f"{number}.npy"
            np.save(array, (others.integers(5000, size=(height, width, 5)) + 100 * shade).astype(np.uint16))
            arrays |= {f"{name}{number}.npy": array.read_bytes(), f"{name}{number}.cls": str(label).encode()}
            rows.append((f"{name}/{number}.png", label, name))
            files |= {f"{name}{number}.png": path.read_bytes(), f"{name}{number}.cls": str(label).encode()}
            content["image"].append({"bytes": path.read_bytes(), "path": path.name})
            content["label"].append(label)
    shutil.copytree(folder / "lists", folder / "photos")
    texts = {
        "train_list.txt": [f"{path} {label}" for path, label, _ in rows[::2]],
        "val_list.txt": [f"{path} {label}" for path, label, _ in rows[1::2]],
        "classes.csv": ["image_path,target", *(f"{path},{name}" for path, _, name in rows)],
        "labels.csv": [
            "image_path,target",
            *(f"{path},{name}{'|small' * (index % 3 == 0)}" for index, (path, _, name) in enumerate(rows)),
        ],
        "numbers.csv": [
            "image_path,width,number",
            *(
                f"{path},{SIDES[index % 4][0]},{'' if index % 5 == 0 else index / 4}"
                for index, (path, *_) in enumerate(rows)
            ),
        ],
    }
    for name, lines in texts.items():
        (folder / "lists" / name).write_text("\n".join(lines) + "\n")
    for number in range(4):
        tar = f"{'val' if number == 3 else 'train'}-{number:06d}.tar"
        for shards, samples in (("shards", files), ("pixel-shards", arrays)):
            write_tar(folder / shards / tar, dict(list(samples.items())[number * 14 : (number + 1) * 14]))
    write_parquet(folder / "parquet" / "0.parquet", content, {"label": list(PHOTOS)}, group=5)


def words_of(row: str, way: str, teacher: Path) -> list[str]:
    """Return the flags of a run, apart from its output folder. `teacher`: best.pth of the first row."""
    own = dict(word.split("=", 1) for word in ROWS[row].split())
    batch, passes = int(own.get("DATA.BATCH_SIZE", 8)), int(own.get("TRAIN.ACCUM_ITER", 1))
    options = f"{ROWS[row]} {WAYS[way][1]}".format(teacher=teacher, half=batch // 2, twice=2 * passes)
    return ["-cfg", "base.yaml", "-resume", "auto", "-opts", "SEED=1", *options.split()]
