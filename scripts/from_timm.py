"""Writes a settings file that trains like timm's train.py with the given arguments.

    halfstep from-timm torchrun --nproc_per_node 4 train.py --model resnet50 > my.yaml      a whole command line
    halfstep from-timm output/train/20260102-030405-resnet50-224/args.yaml > my.yaml        train.py's own file

A comment after each setting names the argument that it comes from. Stderr has the command to train with. If an argument
has no equivalent setting, the exit code is 2, and no settings are written.
docs/from-timm.md lists arguments whose setting has another meaning or default.
"""

import ast
import math
import re
import shlex
import sys
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from configs.arguments import add_argument
from configs.flags import parse
from configs.load import resolve, to_yaml
from configs.schema import Arguments as Kwargs
from configs.schema import Shape
from configs.translate.timm_arguments import ACCEPTED, CONVERTED, NOT_NEEDED, TIMM_ARGUMENTS
from configs.values import BOOLS, SETTINGS, flatten, is_none
from configs.yaml_files import Quoted, read_file
from engine.settings_of_weights import layer_from
from scripts.command_line import Parser
from utils.commands import page
from utils.errors import ConfigError, did_you_mean

KWARGS = ("model-kwargs", "opt-kwargs", "pretrained-cfg-overlay")  # their values have the form NAME=VALUE
LOSSES = {None: "cross_entropy", "ce": "cross_entropy", "bce": "bce"}
SCHEDULES = {"cosine": "cosine", "step": "step", "multistep": "step", "constant": "constant", "none": "constant"}
# {train.py's --dataset: DATA.DATASET}
DATASETS = {
    "": "imagefolder",
    "folder": "imagefolder",
    "torch/image_folder": "imagefolder",
    "torch/folder": "imagefolder",
}
OF_TORCHVISION = ("CIFAR10", "CIFAR100", "MNIST", "KMNIST", "ImageNet")
DATASETS |= {f"torch/{name.lower()}": f"torchvision/{name}" for name in OF_TORCHVISION}
DATASETS["torch/fashion_mnist"] = "torchvision/FashionMNIST"

Arguments = dict[str, Any]  # {name: value} of all arguments of train.py
Found = dict[str, tuple[str, Any]]  # {setting: (the argument that it comes from, its value; None: not set)}


class Translation(NamedTuple):
    """The settings for a command of train.py."""

    yaml: str  # the settings that have an effect
    remarks: list[str]  # arguments that are not needed or differ a little
    command: str  # trains with these settings
    args: Arguments


def main(argv: list[str]) -> int:
    translation = translate(argv[1:] if argv[:1] == ["--"] else argv)
    print(translation.yaml, end="")
    print(*translation.remarks, f"train with: {translation.command}", sep="\n", file=sys.stderr)
    return 0


def translate(words: list[str]) -> Translation:
    """Return the settings for a command line of train.py. Raise ConfigError if an argument has no equivalent."""
    if quoted := next((word for word in words if " --" in word or "train.py " in word or " train.py" in word), None):
        raise ConfigError(f"{quoted!r} contains several arguments; leave out the quotes around them")
    launcher, processes, words = read_launcher(words)
    args = read_arguments(words)
    _refuse_unsupported(args)
    settings: Found = {
        row.setting.partition("=")[0]: (row.name, converted(row.name, args[row.name])) for row in CONVERTED
    }
    settings |= _data(args) | _model(args) | _optimizer(args) | _schedule(args, processes) | _regularization(args)
    layers = []
    for key, (name, value) in settings.items():
        # A file has these words for other meanings. In arguments of constructors, text is quoted and keeps its meaning.
        is_word = isinstance(value, str) and (is_none(value) or value.lower() in ("auto", "latest"))
        if is_word and name != "device" and ".KWARGS." not in key:
            raise ConfigError(
                f"--{name} is {value!r}, which has another meaning in a settings file; choose another value"
            )
        if value is not None and value != []:
            layers.append(
                layer_from(f"--{name}" if is_given(name, args) else f"--{name}, train.py's default", {key: value})
            )
    loaded = resolve(parse([]), layers)

    from datasets.transforms.augment import parse_policy  # local: importing torch takes seconds
    from engine.train.optimizers import check_optimizer

    parse_policy(loaded.config.TRAIN)
    check_optimizer(loaded.config)
    values = flatten(loaded.config)
    kept = [key for key, setting in SETTINGS.items() if loaded.origins[key] != "default" and setting.has_effect(values)]
    name = [f"-name={args['experiment']}"] if args["experiment"] else []
    command = f"{launcher} -cfg my.yaml {shlex.join(name)}".strip()
    return Translation(to_yaml(loaded.config, loaded.origins, kept), _remarks(args, processes), command, args)


def converted(name: str, value: Any) -> Any:
    """Return the setting's value for train.py's value of an argument in CONVERTED. None: not set."""
    if name in ("validation-batch-size", "train-interpolation", "recovery-interval"):
        return value or None
    if name == "device":
        return "auto" if value == "cuda" else value
    if name == "log-wandb":
        return ["tensorboard", "wandb"] if value else None
    if name == "model-ema-warmup":
        return "timm" if value else False
    if name == "grad-accum-steps":
        return max(1, value)
    if name == "aug-repeats":
        repeats = value or 1
        return int(repeats) if repeats % 1 == 0 else repeats
    return value


def is_given(name: str, args: Arguments) -> bool:
    return args[name] not in (TIMM_ARGUMENTS[name].default, {})


def read_launcher(words: list[str]) -> tuple[str, int, list[str]]:
    """Return the start of the command that trains in the same processes, their number, and train.py's arguments."""
    place = next((at for at, word in enumerate(words) if word.endswith(("train.py", "distributed_train.sh"))), None)
    if place is None:
        return "halfstep train", 1, words
    rest, is_script = words[place + 1 :], words[place].endswith(".sh")
    variable = re.compile(r"(\w+)=(.*)", re.DOTALL)
    pairs = ((word, variable.fullmatch(word)) for word in words[:place])
    launcher = " ".join(f"{found[1]}={shlex.quote(found[2])}" if found else shlex.quote(word) for word, found in pairs)
    if is_script and rest and rest[0].isdecimal():
        return f"{launcher} halfstep train -ngpus {rest[0]}".strip(), int(rest[0]), rest[1:]
    counts = re.findall(r"--(?:nnodes|nproc\S*?)[ =](\S+)", launcher)
    program = next((word for word in words[:place] if not variable.fullmatch(word)), "python")
    is_known = program.rpartition("/")[2].startswith(("python", "torchrun")) and "WORLD_SIZE=" not in launcher
    if is_script or not is_known or not all(each.isdecimal() and int(each) for each in counts):
        raise ConfigError(
            f"{launcher or words[place]}: the number of processes is unknown; start train.py with python, with "
            "torchrun --nnodes NODES --nproc_per_node PROCESSES, or with distributed_train.sh PROCESSES"
        )
    processes = math.prod(map(int, counts))
    if processes == 1:
        return "halfstep train", 1, rest
    return f"{launcher} --no-python halfstep train", processes, rest


def read_arguments(words: list[str]) -> Arguments:
    """Return the values of all arguments. The words may name an args.yaml."""
    parser = Parser(__doc__, usage="halfstep from-timm ARGUMENT ... | ARGS.YAML")
    parser.allow_abbrev = True  # because train.py allows abbreviations
    parser.add_argument("-c", "--config", metavar="FILE", help="an args.yaml; other arguments override it")
    for name, argument in TIMM_ARGUMENTS.items():
        options = [f"--{name}", *(dash + argument.short for dash in ("-", "--") if argument.short)]
        kind: dict[str, Any] = {"type": argument.kind}
        if argument.kind is bool:
            kind = {"action": "store_true"}
        elif isinstance(argument.default, list):
            kind["nargs"] = "*" if name in KWARGS else "+"
        elif name in ("data", "torchcompile"):
            kind |= {"nargs": "?", "const": "inductor"}
        parser.add_argument(*(["data"] if name == "data" else options), default=argument.default, help="", **kind)
    typed = parser.parse_args(words)
    of_file: dict[str, Any] = {}
    if path := typed.config or (typed.data if str(typed.data).endswith((".yaml", ".yml")) else None):
        words_of_file, of_file = _read_args_yaml(path)
        parser.set_defaults(data=of_file.pop("data", None))
        typed = parser.parse_args([*words_of_file, *(word for word in words if word != path or typed.config)])
    args = {name: getattr(typed, name.replace("-", "_")) for name in TIMM_ARGUMENTS}
    args |= {name: _pairs(name, args[name]) or dict(of_file.get(name, {})) for name in KWARGS}
    for name, argument in TIMM_ARGUMENTS.items():
        if args[name] == "" and argument.default is None and name != "gp":  # in train.py, these are then not set
            args[name] = None
    args["loss"] = args["loss"] or ("bce" if args["bce-loss"] else None)
    return args


def _read_args_yaml(path: str) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments in an args.yaml as words, and by name its `data` and sections such as model_kwargs."""
    words, others = [], dict.fromkeys(KWARGS, Kwargs())
    for key, text in read_file(path).items():
        section, _, member = key.partition(".")
        name = section if section in TIMM_ARGUMENTS else section.replace("_", "-")
        if name not in TIMM_ARGUMENTS:
            raise ConfigError(f"{path}: train.py has no argument {key}{did_you_mean(name, TIMM_ARGUMENTS)}")
        argument, option = TIMM_ARGUMENTS[name], [f"--{name}={text}"]
        if name in KWARGS:
            others[name] = add_argument(others[name], section, key, text, path) if member else others[name]
        elif text == [] or (text in ("", "~", "null") and not isinstance(text, Quoted)):
            continue
        elif name == "data":
            others["data"] = text
        elif argument.kind is bool:
            words += {True: [f"--{name}"], False: []}.get(BOOLS.get(str(text).lower()), option)
        else:
            words += [f"--{name}", *text] if isinstance(argument.default, list) and isinstance(text, list) else option
    return words, others


def _pairs(name: str, words: list[str]) -> dict[str, Any]:
    """Return {name: value} for words NAME=VALUE. A value is a Python literal as in train.py, or otherwise text."""
    pairs: dict[str, Any] = {}
    for key, equals, text in (word.partition("=") for word in words):
        if not equals:
            raise ConfigError(f"--{name}: {key!r} has no =; write NAME=VALUE")
        try:
            pairs[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            pairs[key] = text
        if isinstance(pairs[key], dict | set | bytes):
            raise ConfigError(f"--{name}: {key} is {text}; it must be a number, True, False, None, text, or a list")
    return pairs


def _shown(name: str, args: Arguments) -> str:
    """Return an argument as it is typed."""
    value = args[name]
    if value is True:
        return f"--{name}"
    words = value if isinstance(value, list) else [value]
    return " ".join([f"--{name}", *map(str, words)])


def _refuse(name: str, args: Arguments, reason: str) -> ConfigError:
    return ConfigError(f"halfstep cannot train with {_shown(name, args)}: {reason}")


def _refuse_unsupported(args: Arguments) -> None:
    """Raise ConfigError if arguments without a setting change what train.py does."""
    refused: dict[str, list[str]] = {}  # {reason: arguments}
    for name, argument in TIMM_ARGUMENTS.items():
        is_accepted = argument.reason in ("", *NOT_NEEDED) or args[name] in ACCEPTED.get(name, ())
        if is_given(name, args) and not is_accepted:
            refused.setdefault(argument.reason, []).append(_shown(name, args))
    if refused:
        lines = "".join(f"\n  {' '.join(shown)}: {reason}" for reason, shown in refused.items())
        raise ConfigError(f"halfstep cannot train with these arguments; leave them out:{lines}")


def _remarks(args: Arguments, processes: int) -> list[str]:
    """Return a line for each argument that is not needed, or that differs a little."""
    remarks = {name: each.reason for name, each in TIMM_ARGUMENTS.items() if each.reason in NOT_NEEDED}
    remarks = {name: reason for name, reason in remarks.items() if is_given(name, args)}
    if processes > 1 and args["dist-bn"] != "broadcast":
        remarks["dist-bn"] = TIMM_ARGUMENTS["dist-bn"].reason
    if args["grad-accum-steps"] > 1:
        remarks["grad-accum-steps"] = (
            "the last update of an epoch uses all remaining images; train.py drops a last partial batch"
        )
    if args["reprob"] and _mixes(args):
        remarks["reprob"] = "images are mixed after erasing; train.py mixes them before erasing"
    return [f"{_shown(name, args)}: {reason}" for name, reason in remarks.items()]


def _mixes(args: Arguments) -> bool:
    return args["mixup"] > 0 or args["cutmix"] > 0 or bool(args["cutmix-minmax"])


def _data(args: Arguments) -> Found:
    name = args["dataset"] or ""
    dataset = "shards" if name.startswith("wds/") else DATASETS.get(name.lower())
    if dataset is None:
        raise _refuse("dataset", args, f"{page('docs/data.md')} lists the supported data sets")
    backend, mode = args["torchcompile"], args["torchcompile-mode"]
    compile_mode = True if mode in (None, "default") else mode
    if backend not in (None, "inductor"):
        raise _refuse("torchcompile", args, "the compiler is inductor")
    return {
        "DATA.DATASET": ("dataset", dataset),
        "DATA.DATA_PATH": ("data-dir", args["data-dir"]) if args["data-dir"] else ("data", args["data"]),
        "DATA.DROP_LAST": ("grad-accum-steps", False if args["grad-accum-steps"] > 1 else None),
        "COMPILE": ("torchcompile", compile_mode if backend else None),
    }


def _model(args: Arguments) -> Found:
    """Return the model and the preprocessing that train.py takes from its arguments and timm's metadata."""
    from timm import get_pretrained_cfg, is_model, list_models  # local: importing timm takes seconds
    from timm.data import resolve_data_config

    from models.kwargs import OF_A_MODEL

    if not is_model(args["model"]):
        raise ConfigError(f"--model: timm has no model {args['model']}{did_you_mean(args['model'], list_models())}")
    size, channels = args["input-size"], args["in-chans"]
    if size and (len(size) != 3 or channels not in (None, size[0])):
        raise _refuse("input-size", args, "it must be CHANNELS HEIGHT WIDTH, and agree with --in-chans")
    channels = channels or (size[0] if size else 3)
    for name in ("mean", "std"):
        if len(args[name]) not in (0, 1, channels):
            raise _refuse(name, args, f"it must be one number, or one for each of {channels} channels")
    own = getattr(get_pretrained_cfg(args["model"]), "to_dict", dict)()
    of_timm = {name.replace("-", "_"): None if value in ("", []) else value for name, value in args.items()}
    images = resolve_data_config(of_timm | {"in_chans": channels}, pretrained_cfg=own)
    if channels == 1:  # timm's metadata is for color images
        images |= {name: [fmean(images[name])] for name in ("mean", "std")}
    classes = (own.get("num_classes") or None) if args["num-classes"] is None else args["num-classes"]
    weights = ("pretrained", args["pretrained-path"] or args["model"]) if args["pretrained"] else ("pretrained", None)
    if args["initial-checkpoint"]:
        weights = ("initial-checkpoint", args["initial-checkpoint"])
    origins = {name: name if args[name] else "model" for name in ("mean", "std", "crop-pct", "interpolation")}
    of_size = "img-size" if args["img-size"] else "model"
    of_model = {OF_A_MODEL.get(name, f"MODEL.KWARGS.{name}"): value for name, value in args["model-kwargs"].items()}
    return {
        "MODEL.TYPE": ("model", "timm"),
        "MODEL.NAME": ("model", args["model"]),
        "MODEL.NUM_CLASSES": ("num-classes", classes),
        "MODEL.PRETRAINED": weights,
        "DATA.IMAGE_SIZE": ("input-size" if size else of_size, Shape(*images["input_size"][1:]).size),
        "DATA.IMAGE_CHANNELS": ("input-size" if size else "in-chans", channels),
        "DATA.IMAGENET_MEAN": (origins["mean"], list(images["mean"])),
        "DATA.IMAGENET_STD": (origins["std"], list(images["std"])),
        "DATA.CROP_PCT": (origins["crop-pct"], images["crop_pct"]),
        "DATA.INTERPOLATION": (origins["interpolation"], images["interpolation"]),
        **{setting: ("model-kwargs", value) for setting, value in of_model.items()},
    }


def _optimizer(args: Arguments) -> Found:
    from timm.optim import get_optimizer_info, list_optimizers  # local: importing timm takes seconds

    name, kwargs = args["opt"].lower(), args["opt-kwargs"]
    is_sgd = name in ("sgd", "nesterov", "momentum")  # timm's sgd uses Nesterov momentum
    if not is_sgd and name not in list_optimizers():
        raise _refuse("opt", args, f"unknown optimizer{did_you_mean(name, list_optimizers())}")
    takes = get_optimizer_info(name)  # train.py passes these arguments only to optimizers that take them
    origin = "opt-kwargs" if kwargs else "opt"
    if is_sgd:
        kwargs = {"nesterov": name != "momentum"} | kwargs
    return {
        "TRAIN.OPTIMIZER.NAME": ("opt", "sgd" if is_sgd else name),
        "TRAIN.OPTIMIZER.EPS": ("opt-eps", args["opt-eps"] if takes.has_eps else None),
        "TRAIN.OPTIMIZER.BETAS": ("opt-betas", args["opt-betas"] if takes.has_betas else None),
        "TRAIN.OPTIMIZER.MOMENTUM": ("momentum", args["momentum"] if takes.has_momentum else None),
        **{f"TRAIN.OPTIMIZER.KWARGS.{key}": (origin, value) for key, value in kwargs.items()},
    }


def _schedule(args: Arguments, processes: int) -> Found:
    name, per_epoch, milestones = args["sched"], not args["sched-on-updates"], None
    if name not in SCHEDULES:
        raise _refuse("sched", args, f"choose {', '.join(SCHEDULES)}; for wsd, set TRAIN.LR_SCHEDULER.NAME")
    if name == "multistep":
        if not per_epoch:
            raise _refuse("sched-on-updates", args, "with multistep, the rate would fall one update later")
        milestones = [each - 1 for each in args["decay-milestones"]]  # timm's epoch 30 is our epoch 29
    cooldown = args["cooldown-epochs"] if name == "cosine" else None
    decay = 90.0 if args["decay-epochs"] is None else args["decay-epochs"]
    epochs = args["epochs"] + (cooldown or 0) + args["warmup-epochs"] * args["warmup-prefix"]
    settings: Found = {
        "TRAIN.LR_SCHEDULER.NAME": ("sched", SCHEDULES[name]),
        "TRAIN.LR_SCHEDULER.PER_EPOCH": ("sched-on-updates", per_epoch),
        "TRAIN.LR_SCHEDULER.MILESTONES": ("decay-milestones", milestones),
        "TRAIN.LR_SCHEDULER.DECAY_EPOCHS": ("decay-epochs", None if milestones else decay),
        "TRAIN.LR_SCHEDULER.COOLDOWN_EPOCHS": ("cooldown-epochs", cooldown),
        "TRAIN.LR_SCHEDULER.AFTER_WARMUP": ("warmup-prefix", args["warmup-prefix"]),
        "TRAIN.NUM_EPOCHS": ("epochs", epochs),
        "TRAIN.BASE_LR": ("lr", args["lr"]) if args["lr"] else ("lr-base", _scaled_rate(args, processes)),
    }
    if name == "none":
        settings |= {"TRAIN.WARMUP_EPOCHS": ("sched", 0), "TRAIN.WARMUP_START_LR": ("sched", None)}
    return settings


def _scaled_rate(args: Arguments, processes: int) -> float:
    """Return the rate that train.py computes from --lr-base and the number of images of an update."""
    if args["lr-base-size"] < 1:
        raise _refuse("lr-base-size", args, "it must be at least 1")
    ratio = args["batch-size"] * processes * max(1, args["grad-accum-steps"]) / args["lr-base-size"]
    has_root = any(part in args["opt"].lower() for part in ("ada", "lamb"))
    is_root = args["lr-base-scale"] == "sqrt" if args["lr-base-scale"] else has_root
    return args["lr-base"] * (math.sqrt(max(0, ratio)) if is_root else ratio)


def _regularization(args: Arguments) -> Found:
    if args["loss"] not in LOSSES or (args["bce-loss"] and args["loss"] != "bce"):
        raise _refuse("loss", args, "the supported losses are ce and bce")
    if args["clip-grad"] == 0:
        raise _refuse("clip-grad", args, "with this value train.py sets all gradients to 0")
    return {
        "TRAIN.LOSS": ("bce-loss" if args["bce-loss"] else "loss", LOSSES[args["loss"]]),
        "TRAIN.GRAD_CLIP": ("clip-grad", args["clip-grad"]),
        "TRAIN.MIXUP_GROUP": ("batch-size", args["batch-size"] if _mixes(args) else None),
    }


if __name__ == "__main__":  # with --, argparse leaves the two-dash flags of train.py unchanged
    sys.exit(exit_code(main, ["--", *sys.argv[1:]]))
