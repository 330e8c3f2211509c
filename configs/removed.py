"""Settings of earlier versions that are gone: the values that still load, and what to do instead of the others."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from utils.errors import ConfigError

Texts = Mapping[str, Any]  # {full key: text as in a settings file, or a list of texts}

PATHS_AND_CLASSES = ["image_path", "target"]  # the columns of a CSV file, where nothing else is said


class Removed(NamedTuple):
    """A setting that is gone."""

    accepted: str | tuple[str, ...]  # the former default, and other values by which every run goes today; as YAML
    remedy: str  # what to do instead of the other values: the end of a sentence
    # What it was for (see schema.py). What a run saved of a role that does not change its course is not looked at.
    role: str = "recipe"
    # Given the settings of a file with the former ones, the texts of today's settings that mean the same; None: nothing does.
    becomes: Callable[[Texts], dict[str, Any] | None] | None = None


def _compile(former: Texts) -> dict[str, Any] | None:
    """COMPILE of what three settings said. Whether the model was compiled at all must stand beside the other two."""
    if "COMPILE" not in former or _is_same(former["COMPILE"], "false"):
        return {} if "COMPILE" in former else None
    scope, mode = (_plain(former.get(key)) for key in ("COMPILE_SCOPE", "COMPILE_MODE"))
    if mode not in ("none", "default"):
        return None if scope == "blocks" else {"COMPILE": mode}
    return {"COMPILE": scope}


def _head_size(former: Texts) -> dict[str, Any] | None:
    """Nothing, if it is the only one that there is, of the width and the heads that stand beside it."""
    width, heads, size = (_plain(former.get(f"MODEL.{name}")) for name in ("EMBED_DIM", "NUM_HEADS", "ATTN_HEAD_SIZE"))
    are_whole = all(each.isdigit() for each in (width, heads, size))
    return {} if are_whole and int(heads) * int(size) == int(width) else None


def _rand_augment(former: Texts) -> dict[str, Any]:
    """PaddleViT's RandAugment by the name of its policy."""
    key, policy = "TRAIN.RAND_AUGMENT", former.get("TRAIN.AUTO_AUGMENT")
    if key not in former or _plain(former[key]) != "true":
        return {"TRAIN.AUTO_AUGMENT": "none" if policy is None else policy} if key in former else {}
    magnitude, number = former.get(f"{key}_MAGNITUDE", 9), former.get(f"{key}_LAYERS", 2)
    try:
        return {"TRAIN.AUTO_AUGMENT": f"rand-m{float(magnitude):g}-n{int(number)}-mstd0.5-inc1"}
    except (ValueError, TypeError):
        raise ConfigError(f"{key}_MAGNITUDE is {magnitude!r}, and {key}_LAYERS {number!r}; both are numbers") from None


def _fold(former: Texts) -> dict[str, Any]:
    """FOLD of two numbers, the parts and which of them is held out."""
    total, number = _plain(former["DATA.FOLDS"]), former.get("DATA.FOLD", 0)
    return {"DATA.FOLD": "none" if total == "none" else f"{number}/{total}"}


def _columns(former: Texts) -> dict[str, Any] | None:
    """COLUMNS of three settings: the pair of a CSV file, that of parquet, and a column for each label."""
    here, pair, labels = (_names(former.get(f"DATA.{name}")) for name in ("COLUMNS", "CSV_COLUMNS", "LABEL_COLUMNS"))
    if len(labels) == 1 and labels != ["*"]:  # in COLUMNS two names are those of paths and classes
        return None
    if labels:
        return {"DATA.COLUMNS": [(here or pair or PATHS_AND_CLASSES)[0], *labels]}
    is_read = pair != PATHS_AND_CLASSES and _plain(former.get("DATA.DATASET", "csv")) == "csv"
    return {"DATA.COLUMNS": here or pair} if is_read else {}


def _cache(former: Texts) -> dict[str, Any] | None:
    """CACHE of two settings: whether there is one, which must stand beside the other or before it, and how large its images are."""
    if "DATA.CACHE" not in former:
        return None
    return {} if _plain(former["DATA.CACHE"]) == "none" else {"DATA.CACHE": str(former["DATA.CACHE_SIDE"])}


def _tensorboard(former: Texts) -> dict[str, Any] | None:
    """TRACK with tensorboard in front of the others, or without it."""
    is_written = _plain(former["TENSORBOARD"])
    others = [name for name in _names(former.get("TRACK")) if name != "tensorboard"]
    return {"TRACK": ["tensorboard"] * (is_written == "true") + others} if is_written in ("true", "false") else None


def _names(value: Any) -> list[str]:
    """A list of names, which may be written as one text."""
    if isinstance(value, str):
        value = value.strip("[]() ").split(",")
    names = [str(each).strip().strip("'\"") for each in value or ()]
    return [each for each in names if _plain(each) != "none"]


REMOVED: dict[str, Removed] = {
    "DATA.FOLDS": Removed((), "write DATA.FOLD=0/5 for the first of five parts", "data", _fold),
    **dict.fromkeys(
        ("DATA.CSV_COLUMNS", "DATA.LABEL_COLUMNS"),
        Removed(
            (), "set DATA.COLUMNS: of paths and of classes, or of paths and of each label (or *)", "data", _columns
        ),
    ),
    "MODEL.ATTN_HEAD_SIZE": Removed(
        "none",
        "a head is MODEL.EMBED_DIM / MODEL.NUM_HEADS wide, the only size that timm's VisionTransformer has; change these",
        "model",
        _head_size,
    ),
    "COMPILE_SCOPE": Removed("model", "write COMPILE: blocks (-compile blocks) instead of both", "machine", _compile),
    "COMPILE_MODE": Removed(
        "default", "write it as the value of COMPILE, such as -compile reduce-overhead", "machine", _compile
    ),
    **dict.fromkeys(
        ("TRAIN.RAND_AUGMENT", "TRAIN.RAND_AUGMENT_LAYERS", "TRAIN.RAND_AUGMENT_MAGNITUDE"),
        Removed((), "set TRAIN.AUTO_AUGMENT=rand-m9-n2-mstd0.5-inc1", becomes=_rand_augment),
    ),
    "MODEL.LORA.DROPOUT": Removed("0.0", "MODEL.DROPOUT and MODEL.DROPPATH act on the layers that have adapters"),
    "TRAIN.WEIGHT_DECAY_EXCLUDE_1D": Removed("true", "biases and norms are never decayed"),
    "TRAIN.LR_SCHEDULER.DECAY_SHAPE": Removed("sqrt", "the rate of wsd falls as 1 - sqrt(the part that is done)"),
    "TAG": Removed(("", "default"), "-name (NAME) gives the run's folder its whole name", role="record"),
    "TRAIN.OPTIMIZER.FIRST_MOMENT": Removed(
        "float32",
        "the optimizer's state is always float32; to save memory use DIST.STRATEGY=fsdp2, TRAIN.GRAD_CHECKPOINTING=true"
        " or a smaller -batch_size with a larger -accum_iter",
    ),
    "DATA.CACHE_FORM": Removed(
        "decoded",
        "a cache holds decoded images; DATA.CACHE=256 makes it small",
        role="data",
        becomes=lambda former: {} if former.get("DATA.CACHE", "none") in ("none", "null") else None,
    ),
    "DATA.CACHE_QUALITY": Removed("90", "a cache holds decoded images", role="machine", becomes=lambda former: {}),
    "DATA.CACHE_SIDE": Removed("none", "write it as the value of DATA.CACHE, such as DATA.CACHE=256", becomes=_cache),
    "DATA.DOWNLOAD": Removed(
        "true",
        "put the files of the data set into DATA.DATA_PATH (-data_path): only what is not there is downloaded",
        "machine",
    ),
    "DATA.CUT_SHARDS": Removed(
        "refuse", "a truncated shard is refused by its name; restore it, or leave it out", role="data"
    ),
    **dict.fromkeys(
        ("TRAIN.COLOR_JITTER_HUE", "TRAIN.GRAYSCALE_PROB", "TRAIN.GAUSSIAN_BLUR_PROB"),
        Removed("0.0", "TRAIN.AUTO_AUGMENT=3a makes each image grey, solarized or blurred"),
    ),
    "TRAIN.COLOR_JITTER_PROB": Removed(
        "1.0", "TRAIN.COLOR_JITTER changes every image; a smaller one changes them less"
    ),
    "DATA.AUGMENT_ON": Removed(
        "host", "the loader's workers augment the images, as many as -num_workers (DATA.NUM_WORKERS) says"
    ),
    "DATA.PREFETCH": Removed("null", "halfstep chooses how far ahead of the training it reads", "machine"),
    "DATA.REMOTE_PATIENCE": Removed(
        "120.0", "a request is repeated for two minutes; -resume auto goes on when the server is back", "machine"
    ),
    "DATA.KEEP_BACKGROUND": Removed(
        "false",
        "-dataset imagefolder with the path of 101_ObjectCategories itself reads every folder as a class",
        "data",
    ),
    "DATA.SAMPLER_POWER": Removed("1.0", "a file of TRAIN.CLASS_WEIGHTS gives rare classes any weight"),
    "DATA.SPLIT_SEED": Removed("0", "DATA.FOLD=1/10 to 9/10 hold out other images than DATA.VAL_FRACTION=0.1", "data"),
    "TRAIN.LR_SCHEDULER.PATIENCE": Removed(
        "10", "it was for the schedule plateau; set TRAIN.LR_SCHEDULER.NAME to cosine, step or wsd"
    ),
    "TRAIN.BCE_SUM": Removed(
        "false",
        "the loss is the mean over the classes; multiply TRAIN.BASE_LR where the optimizer follows the size of gradients",
    ),
    "TRAIN.BCE_POS_WEIGHT": Removed("1.0", "name a file with a weight for each class in TRAIN.CLASS_WEIGHTS"),
    "SAVE_WEIGHTS_ONLY": Removed(
        "false",
        "python scripts/export.py output/train-.../best.pth -output best.safetensors writes weights without the optimizer",
        role="record",
    ),
    "PRECISION.ROLLBACKS": Removed(
        "1", "a run rolls back once; PRECISION.MAX_CONSECUTIVE_SKIPS says after how many skipped updates", role="record"
    ),
    "PRECISION.DOCTOR_SKIPS": Removed(
        "10",
        "the doctor looks once, after 10 skipped updates in a row or PRECISION.MAX_CONSECUTIVE_SKIPS",
        role="record",
    ),
    "PRECISION.HYSTERESIS": Removed(
        "consecutive",
        "an update without overflow always resets the count of DECR_EVERY_N_NAN_OR_INF, as in Paddle",
        becomes=lambda saved: {} if _is_same(saved.get("PRECISION.DECR_EVERY_N_NAN_OR_INF"), "1") else None,
    ),
    **{
        f"PRECISION.SHADOW_{name}": Removed(
            default,
            "`python scripts/doctor.py` on the run's folder shows the underflow of each module's gradients",
            role="record",
        )
        for name, default in (("STEPS", "none"), ("COSINE", "0.9"), ("LOSS", "0.05"))
    },
    "TENSORBOARD": Removed((), "set TRACK (-track): the names of all trackers", "record", _tensorboard),
    "DIST.CHECKPOINT": Removed(
        "single",
        "checkpoints follow DIST.STRATEGY: ddp writes one file, fsdp2 one for each process",
        role="machine",
        becomes=lambda former: (
            {} if (former.get("DIST.CHECKPOINT"), former.get("DIST.STRATEGY")) == ("sharded", "fsdp2") else None
        ),
    ),
}


# Flags of scripts that are gone: what to do instead.
REMOVED_FLAGS = {
    "-last": "name the checkpoints to average, as in FOLDER/checkpoint-*.pth",
    "-megabytes": "-samples_per_shard sets the size of a shard",
    "-weights": "name a checkpoint as often as it counts: scripts/export.py A A A B takes three quarters of A",
    "-greedy": "name the checkpoints to average, of those that scored best",
    "-csv": "scripts/models.py prints its table, -all the whole of it",
    "-without_weights": "models without weights are listed where no other has that name",
    "-optuna": "list the values of a grid, first a coarse one, then a finer one around its best point: -over KEY=A,B,C",
    "-jobs": "start a sweep for each device with CUDA_VISIBLE_DEVICES set, each with a part of the grid and a folder of its own",
}

# Values that are gone of settings that stay: what to do instead.
REMOVED_VALUES = {
    **dict.fromkeys(
        (("DATA.TRAIN_CROP", "rkrc"), ("DATA.TRAIN_CROP", "rkrr")),
        "set rrc, with DATA.CROP_SCALE=[0.8,1] for crops that keep most of an image",
    ),
    (
        "TRAIN.LR_SCHEDULER.NAME",
        "plateau",
    ): "set cosine, step or wsd, which are functions of the step, and TRAIN.EARLY_STOP to "
    "end a run that gets no better",
}


def translate_removed(
    texts: Texts, former: Texts, origin: str, roles: tuple[str, ...] = ("data", "model", "recipe", "machine", "record")
) -> dict[str, Any]:
    """Return today's settings for the former ones of a file, a flag, -opts or a run; refuse those that nothing stands for.

    `former`: these texts, and those of the layers before. `roles`: of the settings that are refused; others are dropped.
    """
    translated: dict[str, Any] = {}
    schedule = "TRAIN.LR_SCHEDULER."
    recorded = {*(f"{schedule}{name}" for name in ("NAME", "DECAY_RATE", "DECAY_EPOCHS")), "TRAIN.OPTIMIZER.MOMENTUM"}
    if (
        recorded <= texts.keys()
        and texts[f"{schedule}NAME"] == "step"
        and "." not in str(texts[f"{schedule}DECAY_EPOCHS"])
    ):
        # While DECAY_EPOCHS was whole it had no effect, and was saved as true.
        translated[f"{schedule}AFTER_WARMUP"] = "false"
    for key in filter(texts.__contains__, REMOVED):  # always in the same order
        today = _today(key, former)
        if today is None and REMOVED[key].role in roles:
            end = "leave it out" if origin.startswith(("-opts", "flag ")) else "remove this line"
            raise ConfigError(
                f"{origin}: {key} is {former[key]!r}, but this setting was removed; {REMOVED[key].remedy}, and {end}"
            )
        translated |= today or {}
    return translated


def not_translated(saved: Texts) -> dict[str, Any]:
    """The former settings that a run saved, that changed its course, and that nothing stands for: {name: value}."""
    former = sorted(REMOVED.keys() & saved.keys())
    decisive = (key for key in former if REMOVED[key].role in ("data", "model", "recipe"))
    return {key: saved[key] for key in decisive if _today(key, saved) is None}


def _today(key: str, former: Texts) -> dict[str, Any] | None:
    """Today's settings for one former setting, {} where none is needed, None where it is refused."""
    accepted = REMOVED[key].accepted
    if any(_is_same(former[key], each) for each in ([accepted] if isinstance(accepted, str) else accepted)):
        return {}
    return REMOVED[key].becomes(former) if REMOVED[key].becomes else None


def _is_same(text: Any, accepted: str) -> bool:
    """Whether a text, or a value that a run saved, is the accepted one: `1`, `1.0`, `None` and `null` in any spelling."""
    one, other = (_plain(each) for each in (text, accepted))
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _plain(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(_plain, value))
    word = "" if value is None else str(value).strip().strip("()[]").replace(" ", "").lower()
    words = {"": "none", "null": "none", "~": "none", "yes": "true", "on": "true", "no": "false", "off": "false"}
    return words.get(word, word)
