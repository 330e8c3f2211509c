"""Mistakes in settings files and on the command line, each with the names and values that its message must hold.

Their full messages stand in tests/data/messages.json: see tests/test_wording.py.
"""

# A file x.yaml with this text -> names, beside the file's own.
IN_A_FILE = {
    "TRAIN: {BASE_LRR: 1}": "TRAIN.BASE_LRR TRAIN.BASE_LR",
    "TRIAN:\n  BASE_LR: 1": "TRIAN.BASE_LR TRAIN.BASE_LR",
    "BASE_LR: 1": "BASE_LR TRAIN.BASE_LR",
    "train:\n  eps: 1": "train.eps TRAIN.OPTIMIZER.EPS",
    "TRAIN: {MIXUP_ALPHAS: 1}": "TRAIN.MIXUP_ALPHAS TRAIN.MIXUP_ALPHA",
    "QQQ: 1": "QQQ docs/settings.md",
    # What other trainers call it; distant spellings are not guessed.
    "lr: 0.1": "lr TRAIN.BASE_LR?",
    "TRAIN: {LR: 1}": "TRAIN.LR TRAIN.BASE_LR?",
    "optimizer:\n  lr: 1": "optimizer.lr TRAIN.BASE_LR?",
    "early-stopping:\n  patience: 3": "early-stopping.patience best.pth TRAIN.NUM_EPOCHS RUN.MAX_TIME",
    "TRAIN: {EARLY_STOP: 3}": "TRAIN.EARLY_STOP best.pth",
    "LOGGING: {WANDB: true}": "LOGGING.WANDB TensorBoard metrics.csv",
    "TRAIN: {NESTEROV: true}": "TRAIN.NESTEROV docs/settings.md",
    "fp16: true": "fp16 AMP=true PRECISION.DTYPE=float16",
    "TRAIN: 5": "TRAIN '5' TRAIN.NUM_EPOCHS",
    "DATA: {BATCH_SIZE: {TRAIN: 5}}": "DATA.BATCH_SIZE DATA.BATCH_SIZE.TRAIN 1 1,000,000 auto",
    "SEED: 1\nTAG: a\nSEED: 2": "SEED 1 3",
    "TRAIN:\n  END_LR: 1\nSEED: 1\nTRAIN:\n  BASE_LR: 1": "TRAIN 1 4",
    "TRAIN:\n  OPTIMIZER:\n    EPS: 1\n    EPS: 1": "TRAIN.OPTIMIZER.EPS 3 4",
    "SEED: 1\nTAG: 'a": "2 YAML",
    "SEED: 1\n  TAG: a": "2 YAML",
    "TRAIN:\n\tEND_LR: 1": "2 YAML spaces tabs",
    "SEED: 1\nTAG: \x07": "2 YAML",
    "SEED: 1\n---\nSEED: 2": "2 YAML",
    "hello": "`TRAIN:`",
    "- SEED: 1": "`TRAIN:`",
    "SEED: 1\n[a, b]: 1": "2",
    "A: &a {}\nTRAIN:\n  <<: *a": "3 << BASE",
    "MODEL:\n  FREEZE:\n    - a: 1": "3 MODEL.FREEZE",
    # Credentials would be written to files; the message must not hold them either.
    "DATA: {DATASET: shards, DATA_PATH: 'https://me:secret@server/set'}": "DATA.DATA_PATH ~/.netrc",
    "DATA: {DATASET: shards, DATA_PATH: 's3://me:secret@bucket/set'}": "DATA.DATA_PATH AWS_PROFILE",
    "DATA: {DATASET: shards, DATA_PATH: 'https://server/set?X-Amz-Signature=secret'}": "DATA.DATA_PATH ~/.netrc",
    "DATA: {DATASET: shards, DATA_PATH: 'https:/me:secret@server/set'}": "DATA.DATA_PATH https",
    "DATA: {DATASET: shards, DATA_PATH: 'ftp://server/set'}": "DATA.DATA_PATH https:// s3://",
    "DATA: {DATASET: csv, DATA_PATH: 'https://server/set'}": "DATA.DATA_PATH https://server/set -dataset shards",
    # A list where one value belongs, or lists in a list.
    "DATA: {BATCH_SIZE: [32, 64]}": "DATA.BATCH_SIZE [32, 64] 1 1,000,000 auto",
    "TAG: [a, b]": "TAG [a, b]",
    "TRAIN: {OPTIMIZER: {BETAS: [[0.9, 0.99]]}}": "TRAIN.OPTIMIZER.BETAS [[0.9, 0.99]] 0 0.999999",
    'SAVE: "a\\0b"': "SAVE",
    "BASE: [[a.yaml]]": "BASE",
    # Settings that do not fit together.
    "MODEL: {EMBED_DIM: 100, NUM_HEADS: 3}": "MODEL.EMBED_DIM 100 MODEL.NUM_HEADS 3 MODEL.ATTN_HEAD_SIZE",
    "DATA: {IMAGE_SIZE: 8}": "MODEL.PATCH_SIZE 16 (default) DATA.IMAGE_SIZE 8",
    "DATA: {CSV_COLUMNS: [file]}": "DATA.CSV_COLUMNS [file]",
    "DATA: {CSV_COLUMNS: []}": "DATA.CSV_COLUMNS []",
    "DATA: {COLUMNS: [file]}": "DATA.COLUMNS [file]",
    "DATA: {CROP_SCALE: [1.0, 0.5]}": "DATA.CROP_SCALE [1.0, 0.5] [0.08, 1.0]",
    "DATA: {CROP_RATIO: 1}": "DATA.CROP_RATIO [1.0] [0.08, 1.0]",
    "TRAIN: {MIXUP_GROUP: 7}": "TRAIN.MIXUP_GROUP 7",
    "TRAIN: {OPTIMIZER: {BETAS: [0.9]}}": "TRAIN.OPTIMIZER.BETAS [0.9] [0.9, 0.999]",
    "DATA: {IMAGENET_STD: 0.3}": "DATA.IMAGENET_STD [0.3] DATA.IMAGE_CHANNELS 3 (default)",
    "DATA: {IMAGE_CHANNELS: 1, IMAGENET_MEAN: [0.1, 0.2, 0.3]}": "DATA.IMAGENET_MEAN [0.1, 0.2, 0.3] DATA.IMAGE_CHANNELS 1",
    # PaddleViT's older dialects, named as they were written.
    "MODEL: {TRANS: {MLP_DIM: 192}}": "MODEL.TRANS.MLP_DIM MODEL.TRANS.HIDDEN_SIZE MLP_RATIO",
    "MODEL: {TRANS: {MLP_DIM: wide, HIDDEN_SIZE: 64}}": "MODEL.TRANS.MLP_DIM 'wide' 1 100,000",
    "MODEL: {TRANS: {DEPHT: 5}}": "MODEL.TRANS.DEPHT MODEL.TRANS.DEPTH",
    "MODEL: {DEPTH: 4, TRANS: {NUM_LAYERS: 5}}": "MODEL.DEPTH MODEL.TRANS.NUM_LAYERS",
    "MODEL: {TRANS: {HYBRID: True, PATCH_SIZE: 32}}": "MODEL.TRANS.HYBRID 'True' MODEL.TYPE: timm MODEL.NAME vit_base_r50_s16_224",
    # Other models' keys are not called unknown: their type comes first.
    "MODEL:\n  DEPTHS: [2, 2]\n  TYPE: swin\n  NAME: swin_base_patch4_window7_224": (
        "MODEL.TYPE 'swin' vit MODEL.TYPE: timm MODEL.NAME: swin_base_patch4_window7_224"
    ),
}

# Wrong values of a setting, and what its message says that it must be; key and value are named as well.
_WRONG_VALUES = [
    ("DATA.BATCH_SIZE", "1 1,000,000 auto", ["abc", "0", "12:30", "1e3", "64.0", "true", "None", "1_000"]),
    ("DATA.BATCH_SIZE", "1 1,000,000 auto?", ["aut"]),
    ("DATA.BATCH_SIZE_EVAL", "1 1,000,000 None", ["auto", "-1"]),
    ("TRAIN.ACCUM_ITER", "1 1,000,000", ["auto"]),
    ("TRAIN.BASE_LR", "0 1,000", ["nan", ".inf", "1e999", "yes", "3e-3x"]),
    ("DATA.CROP_PCT", "0.01 1", ["87.5"]),
    ("AMP", "true false", ["1", "fp16"]),
    ("TRAIN.OPTIMIZER.BETAS", "0 0.999999", ["(0.9, 1.5)", "0.9 0.95"]),
    ("TRAIN.LR_SCHEDULER.MILESTONES", "1 1,000,000", ["3, x"]),
    ("DATA.IMAGE_CHANNELS", "1 3", ["4"]),
    ("TRAIN.OPTIMIZER.NAME", "AdamW Adam SGD AdamW?", ["adamx"]),
    ("PRECISION.DTYPE", "float16 bfloat16 auto None bfloat16?", ["float15"]),
    ("PRECISION.DTYPE", "float16 bfloat16", ["half"]),
    ("PRECISION.INCR_RATIO", "1.0001 1,000,000", ["1"]),
    ("PRECISION.DECR_RATIO", "0.0001 0.9999", ["1", "0"]),
    ("PRECISION.DECR_EVERY_N_NAN_OR_INF", "1 1,000,000,000", ["0"]),
    ("PRECISION.INCR_EVERY_N_STEPS", "1 1,000,000,000", ["0"]),
    ("PRECISION.MIN_LOSS_SCALING", "1e-06 1e+38", ["0"]),
    ("PRECISION.INIT_LOSS_SCALING", "1 1e+38", ["inf"]),
    ("PRECISION.MAX_CONSECUTIVE_SKIPS", "1 1,000,000,000", ["0"]),
    ("PRECISION.DOCTOR_SKIPS", "1 1,000,000,000 None", ["0"]),
    ("PRECISION.SHADOW_STEPS", "1 1,000,000,000 None", ["0"]),
    ("SEED", "0", ["x"]),
]
# -opts with this word -> names.
IN_OPTS = {f"{key}={text}": names for key, names, texts in _WRONG_VALUES for text in texts}

# These words behind -cfg x.yaml -> names.
ON_THE_COMMAND_LINE = {
    f"-seed {2**63}": f"-seed SEED '{2**63}' 2**63",
    "-batch_size 0": "-batch_size DATA.BATCH_SIZE '0' 1 1,000,000 auto",
    "-batch_size=abc": "-batch_size DATA.BATCH_SIZE 'abc' 1 1,000,000 auto",
    "-last_epoch -1": "-last_epoch TRAIN.LAST_EPOCH '-1' 0 1,000,000",
    "-amp maybe": "-amp AMP 'maybe' true false",
    "-batch_size": "-batch_size -h",
    "-bach_size 8": "-bach_size -batch_size? -h",
    "--batch-size=8": "--batch-size -batch_size? -h",
    "-out=here": "-out -output? -h",
    "-workers 2": "-workers -num_workers? -h",
    "-hflip 0": "-hflip -opts DATA.HFLIP=... -h",
    "--lr 0.1": "--lr -opts TRAIN.BASE_LR=... -h",
    "--warmup-epochs 3": "--warmup-epochs -opts TRAIN.WARMUP_EPOCHS=... -h",
    "-b 8": "-b -batch_size? -h",
    "--fp16": "--fp16 -amp -amp_dtype float16? -h",
    "--no-cuda": "--no-cuda -opts DEVICE=cpu? -h",
    "--patience=3": "--patience best.pth -epochs -h",
    "--log-wandb": "--log-wandb TensorBoard -h",
    "TRAIN.BASE_LR=1": "'TRAIN.BASE_LR=1' -opts",
    # PaddleViT's keys that do nothing here are told in files, and refused where somebody types them.
    "-opts TRAIN.LAYER_DECAY=1.5": "-opts TRAIN.LAYER_DECAY '1.5' 0.0001 1 None",
    "-opts DIST.STRATEGY=fsdp2 TRAIN.CLIP_MODE=agc TRAIN.GRAD_CLIP=0.02": "TRAIN.CLIP_MODE agc DIST.STRATEGY fsdp2",
    "-opts TRAIN.LLRD=0.75": "-opts TRAIN.LLRD TRAIN.LAYER_DECAY?",
    "-opts TRAIN.LR_SCHEDULER.NAME=poly": "-opts TRAIN.LR_SCHEDULER.NAME 'poly' cosine wsd plateau",
    "-opts TRAIN.DISTILLATION_TYPE=hard": "-opts TRAIN.DISTILLATION_TYPE 'hard'",
    "-opts TRAIN.MODEL_EMA_FORCE_CPU=true": "-opts TRAIN.MODEL_EMA_FORCE_CPU 'true'",
    "-c=x.yaml": "-c -cfg? -h",
    "-seed 1 y.yaml": "'y.yaml' -cfg",
    "-opts SEED 1": "-opts 'SEED' KEY=VALUE TRAIN.BASE_LR=1e-3",
    "-opts BASE=y.yaml": "-opts BASE -cfg",
    "-opts TRAIN.LR=1": "-opts TRAIN.LR TRAIN.BASE_LR?",
    "-opts TRAIN=1": "-opts TRAIN '1'",
    "-opts MODEL.TRANS.DEPTH=0": "-opts MODEL.DEPTH '0' 1 1,000",
    "-opts MODEL.EMBED_DIM=96000 MODEL.DEPTH=1000": "MODEL.EMBED_DIM 96000 MODEL.DEPTH 1000 1e+11",
    "-opts TAG=../../x": "TAG ../../x -opts",
    f"-opts TAG={'x' * 201}": "TAG 200",
    f"-opts RUN.MAX_TIME={'9' * 400}": "RUN.MAX_TIME 3h30m",
    "-compile -accum_iter 2 -opts COMPILE_MODE=reduce-overhead": "COMPILE_MODE reduce-overhead TRAIN.ACCUM_ITER 2",
    "-amp -opts PRECISION.INIT_LOSS_SCALING=8 PRECISION.MIN_LOSS_SCALING=16": (
        "PRECISION.INIT_LOSS_SCALING 8 PRECISION.MIN_LOSS_SCALING 16"
    ),
    "-amp -opts PRECISION.INIT_LOSS_SCALING=8 PRECISION.MAX_LOSS_SCALING=4": (
        "PRECISION.INIT_LOSS_SCALING 8 PRECISION.MAX_LOSS_SCALING 4"
    ),
    "-amp -opts PRECISION.MIN_LOSS_SCALING=16 PRECISION.MAX_LOSS_SCALING=4": (
        "PRECISION.MIN_LOSS_SCALING 16 PRECISION.MAX_LOSS_SCALING 4"
    ),
}

# The whole program with these words behind the small settings, in an empty folder -> names.
IN_A_RUN = {
    "-dataset cifar1": "cifar1 cifar10",
    "-amp -opts PRECISION.CUSTOM_WHITE_LIST=[LayerNrm]": "PRECISION.CUSTOM_WHITE_LIST LayerNrm LayerNorm",
    "-amp -opts PRECISION.CUSTOM_BLACK_LIST=[blocks.9.mlp]": "PRECISION.CUSTOM_BLACK_LIST blocks.9.mlp blocks.1.mlp",
    "-amp -opts PRECISION.CUSTOM_BLACK_LIST=[head] PRECISION.CUSTOM_WHITE_LIST=[head]": (
        "PRECISION.CUSTOM_BLACK_LIST PRECISION.CUSTOM_WHITE_LIST head"
    ),
    "-dataset imagenet2012 -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset imagefolder -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset csv -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset parquet -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset parquet -data_path file": "file",
    "-dataset caltech101 -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset caltech256 -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-pretrained nothing.pth": "MODEL.PRETRAINED nothing.pth",
    "-resume nothing.pth": "-resume nothing.pth",
    "-eval": "-pretrained -resume",
    "-output file/output": "SAVE file/output",
    "-output /proc/halfstep": "SAVE /proc/halfstep",
}

# Settings without effect, -opts words beside them -> what the note names besides them: why.
WITHOUT_EFFECT = {
    ("PRECISION.RESIDUAL=half", ""): "AMP -amp",
    ("PRECISION.MODE=float8", ""): "AMP -amp",
    ("PRECISION.MODE=naive", ""): "AMP -amp",
    ("PRECISION.CUSTOM_BLACK_LIST=[head]", ""): "AMP -amp",
    ("PRECISION.REDUCE=half", ""): "AMP -amp",
    ("PRECISION.RESIDUAL=half", "PRECISION.MODE=naive AMP=true"): "PRECISION.MODE naive",
    ("PRECISION.SHADOW_LOSS=0.5", ""): "PRECISION.SHADOW_STEPS",
    ("CHECK_IMAGES=3", ""): "CHECK -check",
    ("PROFILE=3", "EVAL=true"): "EVAL",
    ("DIST.STRATEGY=fsdp2", "EVAL=true"): "EVAL",
    ("COMPILE_SCOPE=blocks", ""): "COMPILE -compile",
    ("DATA.CACHE_SIDE=9 DATA.CACHE_PATH=x", ""): "DATA.CACHE none disk ram",
    ("DATA.CACHE_QUALITY=80", "DATA.CACHE=disk"): "DATA.CACHE_FORM decoded jpeg",
    ("DATA.CACHE_PATH=x", "DATA.CACHE=ram"): "DATA.CACHE ram",
    ("DATA.SHUFFLE_BUFFER=9", ""): "DATA.DATASET shards parquet",
    ("DATA.SYNTHETIC_SIZE=9", ""): "DATA.DATASET synthetic fractals",
    ("DATA.EXIF=apply DATA.MAX_PIXELS=9", ""): "digits",
    ("DATA.AUGMENT_ON=device", ""): "TRAIN",
    ("TRAIN.COLOR_JITTER_PROB=0.5", ""): "TRAIN.COLOR_JITTER TRAIN.COLOR_JITTER_HUE 0",
    ("TRAIN.RAND_AUGMENT_LAYERS=3", ""): "TRAIN.RAND_AUGMENT",
    ("TRAIN.AUTO_AUGMENT=svhn", "TRAIN.RAND_AUGMENT=true"): "TRAIN.RAND_AUGMENT",
    ("TRAIN.MIXUP_MODE=elem", ""): "TRAIN.MIXUP_ALPHA TRAIN.CUTMIX_ALPHA 0",
    ("TRAIN.MIXUP_GROUP=32", "TRAIN.MIXUP_ALPHA=1 TRAIN.MIXUP_MODE=elem"): "TRAIN.MIXUP_MODE",
    ("TRAIN.CLIP_MODE=value", "TRAIN.GRAD_CLIP=null"): "TRAIN.GRAD_CLIP",
    ("TRAIN.LR_SCALING=sqrt", ""): "TRAIN.LINEAR_SCALED_LR",
    ("TRAIN.LR_SCHEDULER.DECAY_FRACTION=0.5", ""): "TRAIN.LR_SCHEDULER.NAME wsd",
    ("TRAIN.LR_SCHEDULER.PATIENCE=3", "TRAIN.LR_SCHEDULER.NAME=step"): "TRAIN.LR_SCHEDULER.NAME plateau",
    ("TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS=3", "TRAIN.LR_SCHEDULER.NAME=constant"): "TRAIN.LR_SCHEDULER.NAME cosine wsd",
    ("TRAIN.LR_SCHEDULER.AFTER_WARMUP=false", "TRAIN.LR_SCHEDULER.NAME=wsd"): "TRAIN.LR_SCHEDULER.NAME cosine",
    ("TRAIN.LR_SCHEDULER.PER_EPOCH=true", "TRAIN.LR_SCHEDULER.NAME=paddlevit"): "paddlevit",
    ("TRAIN.END_LR=0.1", "TRAIN.LR_SCHEDULER.NAME=constant"): "TRAIN.LR_SCHEDULER.NAME constant",
    ("TRAIN.RANDOM_ERASE_COUNT=3", ""): "TRAIN.RANDOM_ERASE_PROB 0",
    ("TRAIN.MODEL_EMA_DECAY=0.9", ""): "TRAIN.MODEL_EMA",
    ("TRAIN.LR_SCHEDULER.DECAY_EPOCHS=3", ""): "TRAIN.LR_SCHEDULER.NAME step",
}
