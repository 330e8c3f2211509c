"""Writes a settings file that trains as timm's train.py does with these arguments.

    python scripts/from_timm.py --model resnet50 -b 256 --opt lamb --lr 5e-3 > my.yaml
    python scripts/from_timm.py torchrun --nproc_per_node 4 train.py --model resnet50 > my.yaml      a whole command line
    python scripts/from_timm.py output/train/20260102-030405-resnet50-224/args.yaml > my.yaml        what train.py wrote

Beside each setting stands the argument that it comes from. What has no counterpart or differs is named on stderr, and the
command that trains. docs/from-timm.md has a row for each argument.
"""

import argparse
import math
import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from configs.load import load, to_yaml
from configs.schema import Only
from configs.typed_names import timm_arguments
from configs.values import FLOAT, SETTINGS, flatten
from configs.yaml_files import Layer, read_file
from models.kwargs import OF_A_MODEL
from scripts.command_line import Parser
from utils.errors import ConfigError, did_you_mean
from utils.text import counted

WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}  # none is a name: --sched none
ARGUMENTS = timm_arguments()


def main(argv: list[str]) -> int:
    given, processes = read_arguments(argv[1:] if argv[:1] == ["--"] else argv)
    translation = Translation(given, processes)
    print(translation.file(), end="")
    print("\n".join(translation.remarks), file=sys.stderr)
    return 0


def read_arguments(words: list[str]) -> tuple[dict[str, Any], int]:
    """{name without dashes: value} of what is not at its default, and the number of processes that a launcher is told."""
    script = next((at for at, word in enumerate(words) if word.endswith(("train.py", "distributed_train.sh"))), -1)
    launcher, words = " ".join(words[: max(script, 0)]), words[script + 1 :]
    counts = re.findall(r"--(?:nproc.per.node|nnodes)[= ](\d+)", launcher)
    if script >= 0 and words and words[0].isdigit():  # distributed_train.sh 4 --data-dir ...
        counts, words = words[:1], words[1:]
    if len(words) == 1 and words[0].endswith((".yaml", ".yml")):
        words = ["--config", *words]
    parser = Parser(__doc__, usage="from_timm.py ARGUMENT ... | ARGS.YAML", argument_default=argparse.SUPPRESS)
    parser.allow_abbrev = True  # as in train.py
    parser.add_argument("-c", "--config", metavar="FILE", help="an args.yaml; other arguments override it")
    for name, argument in ARGUMENTS.items():
        options = [f"--{name}", *(dash + argument.short for dash in ("-", "--") if argument.short)]
        kind: dict[str, Any] = {"nargs": "*"} if isinstance(argument.default, list) else {}
        if argument.default is False:
            kind = {"action": "store_true"}
        elif name in ("data", "torchcompile"):
            kind = {"nargs": "?", "const": "inductor"}
        parser.add_argument(*(["data"] if name == "data" else options), help=argparse.SUPPRESS, **kind)
    typed = vars(parser.parse_args(words))
    given = _of_file(typed.pop("config")) if "config" in typed else {}
    given |= {_name(key): _value(each) for key, each in typed.items()}
    for name, value in given.items():
        is_number = type(ARGUMENTS[name].default) in (int, float)
        if is_number and type(value) not in (int, float, type(None)):
            raise ConfigError(f"--{name} is {value!r}; it must be a number")
    changed = {name: value for name, value in given.items() if value not in (None, ARGUMENTS[name].default)}
    return changed, math.prod(map(int, counts))


def _of_file(path: str) -> dict[str, Any]:
    """What an args.yaml says."""
    found: dict[str, Any] = {}
    for key, text in read_file(path).items():
        name, _, member = key.partition(".")  # model_kwargs and opt_kwargs are sections
        if _name(name) not in ARGUMENTS:
            raise ConfigError(f"{path}: train.py has no argument {name}{did_you_mean(_name(name), ARGUMENTS)}")
        found[_name(name)] = [*found.get(_name(name), []), f"{member}={text}"] if member else _value(text)
    return {name: value for name, value in found.items() if value != "{}"}


def _name(key: str) -> str:
    return key if key in ARGUMENTS else key.replace("_", "-")


def _value(text: Any) -> Any:
    """Numbers, switches and None of texts, in lists too."""
    if isinstance(text, list):
        return [_value(each) for each in text]
    if not isinstance(text, str) or not FLOAT.fullmatch(text):
        return WORDS.get(text.lower(), text) if isinstance(text, str) else text
    return int(float(text)) if float(text).is_integer() else float(text)


class Translation:
    """The settings of given arguments; `remarks` says what is not the same."""

    def __init__(self, given: dict[str, Any], processes: int):
        self.given, self.processes = given, processes
        self.args = {name: each.default for name, each in ARGUMENTS.items()} | given
        self.layers: dict[str, Layer] = {}  # {setting: its layer}
        self.remarks: list[str] = []
        several = Counter(argument.setting for argument in ARGUMENTS.values())
        for name, argument in ARGUMENTS.items():
            if argument.reason and name in given:
                self.differs(name, argument.reason)
            elif several[argument.setting] == 1 and re.sub(r"KWARGS\..*", "KWARGS", argument.setting) in SETTINGS:
                self.put(argument.setting, self.args[name], name)
        for part in (self.data, self.model, self.optimizer, self.schedule, self.rate, self.regularization, self.run):
            part()

    def differs(self, name: str, what: str) -> None:
        value = self.args[name]
        values = value if isinstance(value, list) else [value]
        shown = " ".join([f"--{name}", *(str(each) for each in values if each is not None and each is not True)])
        self.remarks.append(f"{shown}: {what}")

    def put(self, setting: str, value: Any, name: str) -> None:
        """Set a setting because of an argument; None and an empty list leave it as it is."""
        if value is not None and value != []:
            text = [str(each) for each in value] if isinstance(value, list | tuple) else str(value)
            origin = f"--{name}" if name in self.given else f"--{name}, train.py's default"
            self.layers[setting] = Layer(origin, {setting: text})

    def leave_open(self, *settings: str) -> None:
        for setting in settings:
            self.layers.pop(setting, None)

    def file(self) -> str:
        """The settings that were put and have an effect, as YAML."""
        loaded = load([], beneath=[*self.layers.values()])
        values = flatten(loaded.config)
        put = [key for key in SETTINGS if loaded.origins[key] != "default"]
        marks = {key: [mark for mark in SETTINGS[key].marks if isinstance(mark, Only)] for key in put}
        kept = [key for key in put if all(mark.applies(values, key.rpartition(".")[0]) for mark in marks[key])]
        return to_yaml(loaded.config, loaded.origins, kept)

    def data(self) -> None:
        args = self.args
        kind, _, name = (args["dataset"] or "").partition("/")
        known = {"": "imagefolder", "folder": "imagefolder", "torch": f"torchvision/{name}", "wds": "shards"}
        if kind not in known:
            self.differs("dataset", "docs/data.md has the data sets that there are; the file has imagefolder")
        self.put("DATA.DATASET", known.get(kind, "imagefolder"), "dataset")
        self.put("DATA.DATA_PATH", args["data-dir"] or args["data"], "data-dir" if args["data-dir"] else "data")
        if args["train-crop-mode"] not in (None, "rrc"):
            self.differs("train-crop-mode", "there is none; the file has rrc")
            self.leave_open("DATA.TRAIN_CROP")
        if args["grad-accum-steps"] > 1:
            self.put("DATA.DROP_LAST", False, "grad-accum-steps")
            what = "the last update of an epoch is of all images that are left, in train.py of whole batches"
            remedy = "if less than a batch is left, set DATA.DROP_LAST=true for as many updates"
            self.differs("grad-accum-steps", f"{what}; {remedy}")

    def model(self) -> None:
        args, own = self.args, preprocessing(self.args)
        for name in ("mean", "std", "crop-pct", "interpolation"):
            self.put(ARGUMENTS[name].setting, own[name.replace("-", "_")], name if name in self.given else "model")
        channels, height, width = own["input_size"]
        if height != width:
            self.differs("input-size", f"images are square; the file has the width, {width}")
        if args["input-img-mode"] not in (None, "RGB", "L"):
            self.differs("input-img-mode", "images are colour (RGB) or grey (L)")
        self.put("DATA.IMAGE_CHANNELS", channels, "in-chans")
        self.put("DATA.IMAGE_SIZE", width, next((name for name in ("img-size", "input-size") if args[name]), "model"))
        self.put("MODEL.TYPE", "timm", "model")
        self.put("MODEL.NAME", args["model"], "model")
        self.put("MODEL.NUM_CLASSES", args["num-classes"] or own["num_classes"] or None, "num-classes")
        if args["pretrained"]:
            self.put("MODEL.PRETRAINED", args["pretrained-path"] or args["model"], "pretrained")
        self.put("MODEL.PRETRAINED", args["initial-checkpoint"], "initial-checkpoint")
        self.leave_open("MODEL.KWARGS", "TRAIN.OPTIMIZER.KWARGS")
        for name, value in _pairs(args["model-kwargs"]).items():
            self.put(OF_A_MODEL.get(name, f"MODEL.KWARGS.{name}"), value, "model-kwargs")

    def optimizer(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers  # local: importing timm takes seconds

        name, arguments = str(self.args["opt"]).lower(), _pairs(self.args["opt-kwargs"])
        if name in ("sgd", "nesterov", "momentum"):  # timm's sgd is Nesterov's
            name, arguments = "sgd", {"nesterov": name != "momentum"} | arguments
        elif name not in list_optimizers():
            self.differs("opt", "there is none; set another in the file")
        elif not get_optimizer_info(name).has_momentum:
            self.leave_open("TRAIN.OPTIMIZER.MOMENTUM")  # train.py passes it on to those that take it
        self.put("TRAIN.OPTIMIZER.NAME", name, "opt")
        for key, value in arguments.items():
            self.put(f"TRAIN.OPTIMIZER.KWARGS.{key}", value, "opt-kwargs" if self.args["opt-kwargs"] else "opt")

    def schedule(self) -> None:
        args, name = self.args, self.args["sched"]
        warmup, prefix, per_epoch = args["warmup-epochs"], args["warmup-prefix"], not args["sched-on-updates"]
        ours = {"multistep": "step", "none": "constant"}.get(name, name)
        if ours not in ("cosine", "step", "constant", "wsd"):
            self.differs("sched", "there is none; the file has cosine")
            ours = "cosine"
        cooldown = args["cooldown-epochs"] if ours in ("cosine", "wsd") else 0
        total = args["epochs"] + cooldown + warmup * prefix
        self.put("TRAIN.LR_SCHEDULER.NAME", ours, "sched")
        self.put("TRAIN.LR_SCHEDULER.PER_EPOCH", per_epoch, "sched-on-updates")
        self.put("TRAIN.NUM_EPOCHS", total, "epochs")
        if name == "none":
            self.put("TRAIN.WARMUP_EPOCHS", 0, "sched")
        if name == "multistep":  # timm's milestone 30 is the epoch with index 29
            milestones = [each - 1 for each in args["decay-milestones"]]
            self.put("TRAIN.LR_SCHEDULER.MILESTONES", milestones, "decay-milestones")
            if not per_epoch:
                self.differs(
                    "sched-on-updates", "train.py decays an update before a milestone, the file an epoch before"
                )
        else:
            self.leave_open("TRAIN.LR_SCHEDULER.MILESTONES")
        if name == "wsd":
            length = args["epochs"] - warmup * (not prefix)
            decay = args["decay-epochs"] * (length if args["decay-epochs"] < 1 else 1)
            self.put(
                "TRAIN.LR_SCHEDULER.DECAY_FRACTION", (round(decay) if per_epoch else decay) / total, "decay-epochs"
            )

    def rate(self) -> None:
        """--lr, or what train.py computes of the other three."""
        args = self.args
        self.leave_open("TRAIN.LINEAR_SCALED_LR", "TRAIN.LR_SCALING")
        if args["lr"]:
            self.put("TRAIN.BASE_LR", args["lr"], "lr")
            return
        ratio = args["batch-size"] * self.processes * args["grad-accum-steps"] / args["lr-base-size"]
        has_root = any(part in str(args["opt"]).lower() for part in ("ada", "lamb"))
        is_root = args["lr-base-scale"] == "sqrt" if args["lr-base-scale"] else has_root
        rate = args["lr-base"] * (math.sqrt(ratio) if is_root else ratio)
        self.put("TRAIN.BASE_LR", rate, "lr-base")
        self.differs("lr-base", f"--lr {rate:g}, with {counted(self.processes, 'process')}")

    def regularization(self) -> None:
        args = self.args
        mixes = args["mixup"] > 0 or args["cutmix"] > 0 or bool(args["cutmix-minmax"])
        if args["bce-loss"] and not mixes and not args["smoothing"]:
            self.differs("bce-loss", "without smoothing and mixing train.py uses the cross entropy; so does the file")
        elif args["bce-loss"]:
            self.put("TRAIN.LOSS", "bce", "bce-loss")
        self.leave_open("TRAIN.CLASS_WEIGHTS")
        if args["bce-pos-weight"]:
            self.differs("bce-pos-weight", "name a file with a weight for each class in TRAIN.CLASS_WEIGHTS")
        if mixes:
            self.put("TRAIN.MIXUP_GROUP", args["batch-size"], "batch-size")
        if mixes and args["reprob"]:
            self.differs("reprob", "images are mixed after erasing, in train.py before")
        self.put("TRAIN.REPEATED_AUG", max(1, args["aug-repeats"]), "aug-repeats")
        if args["model-ema-warmup"]:
            self.differs("model-ema-warmup", "the decay is updates / (updates + 9), in train.py 1 - updates ** (-2/3)")
        if args["kd-model-name"]:
            self.distillation()

    def distillation(self) -> None:
        args = self.args
        is_token = args["kd-distill-type"] == "token"
        kind = args["kd-token-distill-type"] if is_token else "soft"
        self.put("TRAIN.DISTILLATION_TYPE", kind, "kd-distill-type")
        if args["kd-distill-type"] == "feature":
            self.differs("kd-distill-type", "features are not distilled; the file has logits")
        task = 1 if args["task-loss-weight"] is None else args["task-loss-weight"]
        default = 1 if args["task-loss-weight"] is None else 1 - task
        teacher = default if args["distill-loss-weight"] is None else args["distill-loss-weight"]
        self.put("TRAIN.DISTILLATION_ALPHA", teacher / (task + teacher), "task-loss-weight")
        if task + teacher != 1:
            self.differs("task-loss-weight", f"the loss is that of train.py divided by {task + teacher:g}")

    def run(self) -> None:
        args = self.args
        if not args["recovery-interval"]:
            self.leave_open("SAVE_STEPS")
        device = str(args["device"]).partition(":")[0]
        self.put("DEVICE", "auto" if device == "cuda" else device, "device")
        if args["torchcompile"]:
            self.put("COMPILE", args["torchcompile-mode"] or True, "torchcompile")
        if args["torchcompile"] not in (None, "inductor"):
            self.differs("torchcompile", "the compiler is inductor")
        if args["log-wandb"]:
            self.put("TRACK", ["tensorboard", "wandb"], "log-wandb")
        flags = {"-resume": args["resume"], "-last_epoch": args["start-epoch"], "-name": args["experiment"]}
        if self.processes > 1:
            self.differs("dist-bn", ARGUMENTS["dist-bn"].reason)
            flags["-ngpus"] = self.processes
        script = "main_multi_gpu.py" if self.processes > 1 else "main_single_gpu.py"
        words = [f" {flag} {value}" for flag, value in flags.items() if value]
        self.remarks.append(f"train with: python {script} -cfg my.yaml{''.join(words)}")


def _pairs(words: list) -> dict[str, str]:
    """{name: value} of --model-kwargs and --opt-kwargs: NAME=VALUE, whose values are Python's."""
    pairs = [str(word).partition("=") for word in words]
    return {name: value for name, _, value in pairs}


def preprocessing(args: dict[str, Any]) -> dict[str, Any]:
    """Size, mean, crop and classes as train.py takes them from its arguments and from what timm says of the model."""
    from timm import get_pretrained_cfg, is_model, list_models  # local: importing timm takes seconds
    from timm.data import resolve_data_config

    if not is_model(args["model"]):
        raise ConfigError(f"--model: timm has no model {args['model']}{did_you_mean(args['model'], list_models())}")
    own = getattr(get_pretrained_cfg(args["model"]), "to_dict", dict)()
    wanted = {name.replace("-", "_"): value or None for name, value in args.items()}
    wanted["in_chans"] = wanted["in_chans"] or (1 if args["input-img-mode"] == "L" else None)
    found = {"num_classes": own.get("num_classes")} | resolve_data_config(wanted, pretrained_cfg=own)
    if wanted["in_chans"] == 1:  # what timm says of the model is of images in colour
        found |= {name: [fmean(found[name])] for name in ("mean", "std")}
        found["input_size"] = (1, *found["input_size"][1:])
    return found


if __name__ == "__main__":
    sys.exit(exit_code(main, ["--", *sys.argv[1:]]))  # behind which the dashes stay as train.py's
