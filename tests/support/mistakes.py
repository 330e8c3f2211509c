"""Mistakes in settings files and on the command line, each with the names and values that its message must hold."""

# A file x.yaml with this text -> names, beside the file's own.
IN_A_FILE = {
    "TRAIN: {BASE_LRR: 1}": "TRAIN.BASE_LRR TRAIN.BASE_LR",
    "BASE_LR: 1": "BASE_LR TRAIN.BASE_LR",
    "QQQ: 1": "QQQ docs/settings.md",
    # What other trainers call it; distant spellings are not guessed.
    "lr: 0.1": "lr TRAIN.BASE_LR?",
    "optimizer:\n  lr: 1": "optimizer.lr TRAIN.BASE_LR?",
    "early-stopping:\n  patience: 3": "early-stopping.patience TRAIN.EARLY_STOP?",
    "fp16: true": "fp16 AMP=true PRECISION.DTYPE=float16",
    "TRAIN: 5": "TRAIN '5' TRAIN.NUM_EPOCHS",
    "DATA: {BATCH_SIZE: {TRAIN: 5}}": "DATA.BATCH_SIZE DATA.BATCH_SIZE.TRAIN 1 1,000,000 auto",
    "SEED: 1\nNAME: a\nSEED: 2": "SEED 1 3",
    "SEED: 1\nNAME: 'a": "2 YAML",
    "TRAIN:\n\tEND_LR: 1": "2 YAML spaces tabs",
    "SEED: 1\nNAME: \x07": "2 YAML",
    "MODEL: {KWARGS: 5}": "MODEL.KWARGS '5' MODEL.KWARGS.NAME=VALUE null",
    "MODEL: {KWARGS: {global_pool: {a: b}}}": "MODEL.KWARGS.global_pool.a",
    "MODEL: {KWARGS: {x: 1e999}}": "MODEL.KWARGS.x '1e999'",
    "TRAIN: {SIZE_SCHEDULE: [0:128, 60]}": "TRAIN.SIZE_SCHEDULE 60 60:160",
    "TRAIN: {SIZE_SCHEDULE: ['0:128', '60:160', '30:224']}": "TRAIN.SIZE_SCHEDULE 30:224",
    "hello": "`TRAIN:`",
    "SEED: 1\n[a, b]: 1": "2",
    "A: &a {}\nTRAIN:\n  <<: *a": "3 << BASE",
    "MODEL:\n  FREEZE:\n    - a: 1": "3 MODEL.FREEZE",
    # Credentials would be written to files; the message must not hold them either.
    "DATA: {DATASET: shards, DATA_PATH: 'https://me:secret@server/set'}": "DATA.DATA_PATH ~/.netrc",
    "DATA: {DATASET: shards, DATA_PATH: 's3://me:secret@bucket/set'}": "DATA.DATA_PATH AWS_PROFILE",
    "DATA: {DATASET: shards, DATA_PATH: 'https://server/set?X-Amz-Signature=secret'}": "DATA.DATA_PATH ~/.netrc",
    "DATA: {DATASET: shards, DATA_PATH: 'ftp://server/set'}": "DATA.DATA_PATH https:// s3://",
    "DATA: {DATASET: csv, DATA_PATH: 'https://server/set'}": "DATA.DATA_PATH https://server/set -dataset shards",
    # A list where one value belongs, or lists in a list.
    "DATA: {BATCH_SIZE: [32, 64]}": "DATA.BATCH_SIZE [32, 64] 1 1,000,000 auto",
    "TRAIN: {OPTIMIZER: {BETAS: [[0.9, 0.99]]}}": "TRAIN.OPTIMIZER.BETAS [[0.9, 0.99]] 0 0.999999",
    'SAVE: "a\\0b"': "SAVE",
    "BASE: [[a.yaml]]": "BASE",
    # Settings that do not fit together.
    "MODEL: {EMBED_DIM: 100, NUM_HEADS: 3}": "MODEL.EMBED_DIM 100 MODEL.NUM_HEADS 3",
    "DATA: {IMAGE_SIZE: 8}": "MODEL.PATCH_SIZE 16 (default) DATA.IMAGE_SIZE 8",
    "MODEL: {FREEZE: ['*'], LORA: {RANK: 4}}": "MODEL.FREEZE MODEL.LORA.RANK 4",
    "DATA: {DATASET: csv, LABEL_SEPARATOR: ;, COLUMNS: [p, a, b]}": "DATA.LABEL_SEPARATOR ; DATA.COLUMNS [p, a, b]",
    "DATA: {DATASET: parquet, COLUMNS: [p, a, b]}": "DATA.COLUMNS [p, a, b] csv DATA.DATASET parquet",
    "DATA: {DATASET: csv, COLUMNS: [a, b, a]}": "DATA.COLUMNS [a, b, a]",
    "{DATA: {DATASET: csv, LABEL_SEPARATOR: ;}, TRAIN: {LOSS: cross_entropy}}": "TRAIN.LOSS bce DATA.LABEL_SEPARATOR ;",
    "DATA: {DATASET: csv, LABEL_SEPARATOR: ;, SAMPLER: balanced}": "DATA.SAMPLER DATA.LABEL_SEPARATOR ;",
    "TRAIN: {BEST_METRIC: map}": "TRAIN.BEST_METRIC map DATA.LABEL_SEPARATOR DATA.COLUMNS",
    "DATA: {FOLD: 5/5}": "DATA.FOLD 5/5",
    "DATA: {FOLD: 1}": "DATA.FOLD 0/5",
    "DATA: {FOLD: 0/1}": "DATA.FOLD 0/1",
    "DATA: {COLUMNS: [file]}": "DATA.COLUMNS [file]",
    "DATA: {CROP_SCALE: [1.0, 0.5]}": "DATA.CROP_SCALE [1.0, 0.5] [0.08, 1.0]",
    "DATA: {DATASET: parquet, SAMPLER: balanced}": "DATA.SAMPLER balanced DATA.DATASET parquet TRAIN.CLASS_WEIGHTS=auto",
    "DATA: {CROP_RATIO: 1}": "DATA.CROP_RATIO '1' [0.08, 1.0]",
    "TRAIN: {MIXUP_GROUP: 7}": "TRAIN.MIXUP_GROUP 7",
    "TRAIN: {CUTMIX_MINMAX: [0.8, 0.2]}": "TRAIN.CUTMIX_MINMAX",
    "{DATA: {BATCH_SIZE: 7}, TRAIN: {CUTMIX_ALPHA: 1}}": "DATA.BATCH_SIZE 7 TRAIN.CUTMIX_ALPHA 1.0",
    "{DATA: {BATCH_SIZE: 7}, TRAIN: {CUTMIX_MINMAX: [0.2, 0.8]}}": "DATA.BATCH_SIZE 7 TRAIN.CUTMIX_MINMAX",
    "DATA: {IMAGENET_STD: 0.3}": "DATA.IMAGENET_STD [0.3] DATA.IMAGE_CHANNELS 3 (default)",
    "DATA: {IMAGE_CHANNELS: 1, IMAGENET_MEAN: [0.1, 0.2, 0.3]}": "DATA.IMAGENET_MEAN [0.1, 0.2, 0.3] DATA.IMAGE_CHANNELS 1",
    # PaddleViT's older dialects, named as they were written.
    "MODEL: {TRANS: {MLP_DIM: 192}}": "MODEL.TRANS.MLP_DIM MODEL.TRANS.HIDDEN_SIZE MLP_RATIO",
    "MODEL: {TRANS: {MLP_DIM: wide, HIDDEN_SIZE: 64}}": "MODEL.TRANS.MLP_DIM 'wide' 1 100,000",
    "MODEL: {DEPTH: 4, TRANS: {NUM_LAYERS: 5}}": "MODEL.DEPTH MODEL.TRANS.NUM_LAYERS",
    "MODEL: {TRANS: {HYBRID: True, PATCH_SIZE: 32}}": "MODEL.TRANS.HYBRID 'True' MODEL.TYPE: timm MODEL.NAME vit_base_r50_s16_224",
    # Other models' keys are not called unknown: their type comes first.
    "MODEL:\n  DEPTHS: [2, 2]\n  TYPE: pvt\n  NAME: pvt_v2_b0": "MODEL.TYPE 'pvt' vit MODEL.TYPE: timm MODEL.NAME pvt_v2_b0",
}

# Wrong values of a setting, and what its message says that it must be; key and value are named as well.
_WRONG_VALUES = [
    ("DATA.BATCH_SIZE", "1 1,000,000 auto", ["abc", "0", "12:30", "true", "None", "1_000"]),
    ("DATA.BATCH_SIZE", "1 1,000,000 auto?", ["aut"]),
    ("DATA.BATCH_SIZE_EVAL", "1 1,000,000 None", ["auto", "-1"]),
    ("TRAIN.ACCUM_ITER", "1 1,000,000", ["auto"]),
    ("TRAIN.BASE_LR", "0 1,000", ["nan", ".inf", "1e999", "yes", "3e-3x"]),
    ("DATA.CROP_PCT", "0.01 2", ["87.5"]),
    ("DATA.BATCH_SIZE", "64?", ["6.4e1", "64.0"]),
    ("AMP", "true false", ["1"]),
    ("AMP", "AMP=true PRECISION.DTYPE=float16?", ["fp16"]),
    ("DEVICE", "cuda?", ["gpu"]),
    ("TRAIN.OPTIMIZER.BETAS", "0 0.999999", ["(0.9, 1.5)", "0.9 0.95"]),
    ("TRAIN.LR_SCHEDULER.MILESTONES", "1 1,000,000", ["3, x"]),
    ("PRECISION.DTYPE", "float16 bfloat16 auto None bfloat16?", ["float15"]),
    ("PRECISION.DTYPE", "float16 bfloat16", ["half"]),
]
# -opts with this word -> names.
IN_OPTS = {f"{key}={text}": names for key, names, texts in _WRONG_VALUES for text in texts}

# These words behind -cfg x.yaml -> names.
ON_THE_COMMAND_LINE = {
    "-last_epoch -1": "-last_epoch TRAIN.LAST_EPOCH '-1' 0 1,000,000",
    "-amp maybe": "-amp AMP 'maybe' true false",
    "-batch_size": "-batch_size -h",
    "-bach_size 8": "-bach_size -batch_size? -h",
    "--batch-size=8": "--batch-size -batch_size? -h",
    "-data_path my photos": "'photos' 'my photos' -h",
    "-out=here": "-out -output? -h",
    "-workers 2": "-workers -num_workers? -h",
    "-hflip 0": "-hflip -opts DATA.HFLIP=... -h",
    "--label-smoothing 0.1": "--label-smoothing -opts TRAIN.SMOOTHING=... -h",
    "--warmup-epochs 3": "--warmup-epochs -opts TRAIN.WARMUP_EPOCHS=... -h",
    "--fp16": "--fp16 -amp -amp_dtype float16? -h",
    "--no-cuda": "--no-cuda -opts DEVICE=cpu? -h",
    "--patience=3": "--patience -opts TRAIN.EARLY_STOP=... -h",
    "--jsd-loss": "--jsd-loss TRAIN.LOSS -h",
    "TRAIN.BASE_LR=1": "'TRAIN.BASE_LR=1' -opts",
    "-opts TRAIN.LAYER_DECAY=1.5": "-opts TRAIN.LAYER_DECAY '1.5' 0.0001 1 None",
    "-opts DIST.STRATEGY=fsdp2 TRAIN.CLIP_MODE=agc TRAIN.GRAD_CLIP=0.02": "TRAIN.CLIP_MODE agc DIST.STRATEGY fsdp2",
    "-opts TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=none": "TRAIN.TEACHER_MODEL TRAIN.DISTILLATION_TYPE soft",
    "-c=x.yaml": "-c -cfg? -h",
    "-seed 1 y.yaml": "'y.yaml' -cfg",
    "-opts SEED 1": "-opts 'SEED' KEY=VALUE TRAIN.BASE_LR=1e-3",
    "-opts TRAIN=1": "-opts TRAIN '1'",
    "-opts BASE=x.yaml": "-opts BASE -cfg",
    "-opts MODEL.KWARGS.x=[1": "-opts MODEL.KWARGS.x '[1'",
    "-opts MODEL.TRANS.DEPTH=0": "-opts MODEL.DEPTH '0' 1 1,000",
    "-opts MODEL.EMBED_DIM=96000 MODEL.DEPTH=1000": "MODEL.EMBED_DIM 96000 MODEL.DEPTH 1000 1e+11",
    "-opts TAG=a": "TAG a -name",
    "-tag a": "-tag -name",
    "-name ../x": "NAME ../x -name -output",
    "-name a\x1bb": "NAME -name -output",
    f"-name {'x' * 201}": "NAME 200",
    f"-opts RUN.MAX_TIME={'9' * 400}": "RUN.MAX_TIME 3h30m",
    "-opts RESUME.ALLOW_CHANGED=[SEED,TRAIN.BASE_LRR]": "RESUME.ALLOW_CHANGED GLOBAL_BATCH TRAIN.BASE_LR",
    "-amp -opts PRECISION.MODE=float8 PRECISION.DTYPE=float16": "PRECISION.DTYPE float16 PRECISION.MODE float8",
    "-compile reduce-overhead -accum_iter 2": "COMPILE reduce-overhead TRAIN.ACCUM_ITER 2",
    "-compile max-autotune -accum_iter 2": "COMPILE max-autotune TRAIN.ACCUM_ITER 2",
    "-dataset digits -data_path photos": "DATA.DATA_PATH photos -data_path digits -dataset imagefolder",
    "-opts DATA.DATASET=fractals DATA.DATA_PATH=photos": "DATA.DATA_PATH photos fractals -dataset imagefolder",
    "-opts MODEL.NAME=resnet18": "MODEL.NAME resnet18 MODEL.TYPE=timm",
    "-amp -opts PRECISION.INIT_LOSS_SCALING=8 PRECISION.MAX_LOSS_SCALING=4": (
        "PRECISION.INIT_LOSS_SCALING 8 PRECISION.MAX_LOSS_SCALING 4"
    ),
    "-amp -opts PRECISION.MIN_LOSS_SCALING=16 PRECISION.MAX_LOSS_SCALING=4": (
        "PRECISION.MIN_LOSS_SCALING 16 PRECISION.MAX_LOSS_SCALING 4"
    ),
}

# Instead of the small ViT.
RESNET = "MODEL.TYPE=timm MODEL.NAME=resnet18 MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
# The whole program with these words behind the small settings, in an empty folder -> names.
IN_A_RUN = {
    "-opts TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=regnety_16": "TRAIN.TEACHER_MODEL regnety_16 regnety_160",
    "-opts TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=resnet18": "TRAIN.TEACHER_MODEL resnet18 1000 10",
    "-opts TRAIN.SIZE_SCHEDULE=[0:6]": "TRAIN.SIZE_SCHEDULE 6 4 8",
    "-opts TRAIN.SIZE_SCHEDULE=[0:4] MODEL.KWARGS.dynamic_img_size=false": "MODEL.KWARGS.dynamic_img_size TRAIN.SIZE_SCHEDULE",
    "-opts TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=file": "TRAIN.TEACHER_MODEL file",
    "-opts TRAIN.OPTIMIZER.NAME=adamx": "TRAIN.OPTIMIZER.NAME adamx adamax",
    "-opts TRAIN.OPTIMIZER.KWARGS.betaas=[0.9,0.99]": "TRAIN.OPTIMIZER.KWARGS.betaas betas",
    "-opts TRAIN.OPTIMIZER.NAME=sgdschedulefree": "TRAIN.LR_SCHEDULER.NAME cosine sgdschedulefree constant",
    "-opts TRAIN.OPTIMIZER.NAME=sgdschedulefree TRAIN.LR_SCHEDULER.NAME=constant TRAIN.MODEL_EMA=true": "TRAIN.MODEL_EMA",
    f"-opts TRAIN.OPTIMIZER.NAME=sgdschedulefree TRAIN.LR_SCHEDULER.NAME=constant {RESNET}": "sgdschedulefree BatchNorm",
    "-opts TRAIN.OPTIMIZER.NAME=kron": "TRAIN.OPTIMIZER.NAME kron muon",
    "-opts TRAIN.OPTIMIZER.NAME=lamb DIST.STRATEGY=fsdp2": "TRAIN.OPTIMIZER.NAME lamb DIST.STRATEGY fsdp2",
    "-opts TRAIN.OPTIMIZER.NAME=lamb TRAIN.OPTIMIZER.KWARGS.eps=x": "TRAIN.OPTIMIZER.KWARGS lamb 'x'",
    "-opts TRAIN.OPTIMIZER.NAME=SGD TRAIN.OPTIMIZER.KWARGS.nestrov=true": "TRAIN.OPTIMIZER.KWARGS.nestrov nesterov",
    "-opts DATA.BATCH_SIZE=auto TRAIN.OPTIMIZER.NAME=adamm": "TRAIN.OPTIMIZER.NAME adamm adam",
    "-opts MODEL.KWARGS.global_pol=avg": "MODEL.KWARGS.global_pol global_pool",
    "-opts MODEL.KWARGS.zzz=1": "MODEL.KWARGS.zzz init_values",
    "-opts MODEL.KWARGS.img_size=8": "MODEL.KWARGS.img_size DATA.IMAGE_SIZE",
    "-opts MODEL.KWARGS.act_layer=gelux": "MODEL.KWARGS act_layer gelux MODEL.KWARGS=null",
    "-opts MODEL.KWARGS.features_only=true": "MODEL.KWARGS.features_only",
    "-opts MODEL.LORA.RANK=17": "MODEL.LORA.RANK 17 16 blocks.0.attn.qkv",
    "-opts MODEL.LORA.RANK=4 MODEL.LORA.TARGETS=[blocks.7]": "MODEL.LORA.TARGETS blocks.7",
    "-dataset cifar1": "cifar1 cifar10",
    "-opts DEVICE=xpu": "DEVICE xpu",
    "-amp -opts PRECISION.CUSTOM_WHITE_LIST=[LayerNrm]": "PRECISION.CUSTOM_WHITE_LIST LayerNrm LayerNorm",
    "-dataset imagenet2012 -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset parquet -data_path nowhere": "DATA.DATA_PATH nowhere",
    "-dataset parquet -data_path file": "file",
    "-opts TRAIN.CLASS_WEIGHTS=nothing.csv": "TRAIN.CLASS_WEIGHTS nothing.csv auto",
    "-pretrained nothing.pth": "MODEL.PRETRAINED nothing.pth",
    "-resume nothing.pth": "-resume nothing.pth",
    "-eval": "-pretrained -resume",
    "-output file/output": "SAVE file/output",
}

# Settings in a file that others leave without effect -> what the note names besides them.
WITHOUT_EFFECT = {
    "PRECISION: {MODE: naive}": "AMP",
    "DATA: {AUGMENT_ON: device}": "TRAIN.AUTO_AUGMENT TRAIN.COLOR_JITTER",
    "DATA: {VAL_FRACTION: 0.5, FOLD: 0/5}": "DATA.FOLD 0/5",
    "MODEL: {LORA: {ALPHA: 8}}": "MODEL.LORA.RANK 0",
    "TRAIN: {MIXUP_MODE: elem}": "TRAIN.MIXUP_ALPHA TRAIN.CUTMIX_ALPHA 0.0",
    "TRAIN: {MIXUP_GROUP: 32, MIXUP_ALPHA: 1, MIXUP_MODE: elem}": "TRAIN.MIXUP_MODE",
    "TRAIN: {LR_SCHEDULER: {MILESTONES: '30, 60'}}": "TRAIN.LR_SCHEDULER.NAME cosine step",
}

# Typed settings that only another schedule knows -> names.
OF_ANOTHER_CHOICE = {
    "DECAY_FRACTION=0.5": "cosine wsd",
    "AFTER_WARMUP=false NAME=wsd": "wsd cosine",
    "DECAY_EPOCHS=3": "cosine step",
}
