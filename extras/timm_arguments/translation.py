"""Finds the settings that train as timm's train.py does with the given arguments, and names the differences."""

import math
from collections import Counter
from statistics import fmean
from typing import Any

from configs.load import LoadedConfig, load, to_yaml
from configs.timm_arguments import OTHER_LOSSES, TIMM_ARGUMENTS
from configs.values import SETTINGS
from extras.timm_arguments.command import Launch
from extras.timm_arguments.settings import ArgumentSettings, saved_key
from models.kwargs import OF_A_MODEL
from utils.errors import ConfigError, did_you_mean
from utils.text import counted

# {name after torch/ in train.py's --dataset: DATA.DATASET}
OF_TORCH = {
    "cifar10": "torchvision/CIFAR10",
    "cifar100": "torchvision/CIFAR100",
    "mnist": "torchvision/MNIST",
    "kmnist": "torchvision/KMNIST",
    "fashion_mnist": "torchvision/FashionMNIST",
    "imagenet": "torchvision/ImageNet",
    "image_folder": "imagefolder",
    "folder": "imagefolder",
}
CHOICES = {
    "kd-distill-type": ("logit", "feature", "token"),
    "kd-token-distill-type": ("soft", "hard"),
    "kd-loss-type": ("kl",),
    "amp-dtype": ("float16", "bfloat16"),
}
NAFLEX_DIVISOR = 8  # batch_divisor of timm's NaFlexMapDatasetWrapper
COMPUTED = ("sched", "opt", "device", "grad-accum-steps")  # arguments whose values cannot be copied into settings


class Translation(ArgumentSettings):
    """The settings for train.py's arguments. `remarks` lists where halfstep differs from train.py.

    Raises ConfigError for arguments with which halfstep cannot train.
    """

    def __init__(self, given: dict[str, Any], launch: Launch):
        if given.get("bce-loss"):  # the old name of --loss bce
            given = {"loss": "bce"} | given
        super().__init__(given, launch.processes)
        self.launch = launch
        self.variables: list[str] = []  # environment variables (NAME=VALUE) in front of the command that trains
        for name in CHOICES:
            self.check_choice(name)
        several = Counter(argument.setting for argument in TIMM_ARGUMENTS.values())
        for name, argument in TIMM_ARGUMENTS.items():
            if argument.reason and name in given:
                self.without_setting(name, argument.reason)
            elif name not in COMPUTED and several[argument.setting] == 1 and saved_key(argument.setting) in SETTINGS:
                self.put(argument.setting, self.args[name], name)
        parts = [self.data, self.sequences, self.model, self.optimizer, self.schedule, self.rate, self.regularization]
        for part in [*parts, self.run]:
            part()
        self.refuse_all()
        loaded = load([], beneath=[*self.layers.values()])
        self.check(loaded)
        kept = self.with_effect(loaded)
        self._yaml = to_yaml(loaded.config, loaded.origins, kept)
        self.name_the_rest(kept)
        self.remarks.append(f"train with: {self.command()}")

    def check_choice(self, name: str) -> None:
        if self.args[name] not in CHOICES[name]:
            raise ConfigError(f"--{name} is {self.args[name]!r}; it must be {' or '.join(CHOICES[name])}")

    def file(self) -> str:
        """Return the settings that have an effect, as YAML."""
        return self._yaml

    def check(self, loaded: LoadedConfig) -> None:
        """Refuse an optimizer or an augmentation policy with which a run would not start."""
        from datasets.transforms.augment import parse_policy  # local: importing torch takes seconds
        from engine.train.optimizers import check_optimizer

        try:
            name = "aa"
            parse_policy(loaded.config.TRAIN)
            name = "opt"
            check_optimizer(loaded.config)
        except ConfigError as error:
            if "pip install" in str(error):  # only the machine that trains needs the package
                self.differs(name, str(error))
                return
            name = "opt-kwargs" if self.args["opt-kwargs"] and "OPTIMIZER.KWARGS" in str(error) else name
            raise ConfigError(f"{self.shown(name)}: {error}") from None

    def data(self) -> None:
        args = self.args
        kind, slash, name = (args["dataset"] or "folder").partition("/")
        kind = kind.lower() if slash else kind
        found = {"folder": "imagefolder", "wds": "shards", "torch": OF_TORCH.get(name.lower())}.get(kind)
        if not found:
            self.refuse("dataset", "docs/data.md lists the supported data sets")
        self.put("DATA.DATASET", found, "dataset")
        self.put("DATA.DATA_PATH", args["data-dir"] or args["data"], "data-dir" if args["data-dir"] else "data")
        if args["train-crop-mode"] not in (None, "rrc"):
            self.refuse("train-crop-mode", "only rrc is supported")
        if args["naflex-loader"]:  # the last update of an epoch has the remaining images, as in train.py
            self.put("DATA.DROP_LAST", False, "naflex-loader")
        elif args["grad-accum-steps"] > 1:
            self.put("DATA.DROP_LAST", False, "grad-accum-steps")
            difference = "the last update of an epoch uses all remaining images; train.py drops a last partial batch"
            remedy = "if less than a batch remains, DATA.DROP_LAST=true makes the number of updates equal"
            self.differs("grad-accum-steps", f"{difference}; {remedy}")
        self.put("TRAIN.ACCUM_ITER", max(1, args["grad-accum-steps"]), "grad-accum-steps")  # as train.py does
        if args["validation-batch-size"] == 0:  # with 0, train.py uses the training batch size
            self.leave_open("DATA.BATCH_SIZE_EVAL")

    def sequences(self) -> None:
        """Set the lengths of sequences of patches, which train.py uses only with --naflex-loader."""
        args, lengths = self.args, self.args["naflex-train-seq-lens"]
        if not args["naflex-loader"]:
            self.leave_open("DATA.TRAIN_TOKENS")
            return
        self.put("DATA.TOKENS", args["naflex-max-seq-len"], "naflex-max-seq-len", "naflex-loader")
        size = max(args["batch-size"] // NAFLEX_DIVISOR * NAFLEX_DIVISOR, 1)
        if size != args["batch-size"]:
            self.differs(
                "batch-size",
                f"train.py's NaFlex loader takes {counted(size, 'image')} per batch (a multiple of {NAFLEX_DIVISOR}, or 1); "
                f"DATA.BATCH_SIZE={size} makes the number of updates equal",
            )
        if len(set(lengths)) > 1:
            self.differs(
                "naflex-loader",
                f"every update has {args['batch-size']} images per process; train.py takes more images of shorter "
                f"sequences, as many as {args['batch-size']} sequences of {max(lengths)} patches fill",
            )
        if args["mixup"] > 0 or args["cutmix"] > 0:
            name = "mixup" if args["mixup"] > 0 else "cutmix"
            self.differs(name, "pairs are neighbours in the shuffled order; train.py pairs images of similar shape")

    def model(self) -> None:
        args, own = self.args, preprocessing(self.args)
        for name in ("mean", "std", "crop-pct", "interpolation"):
            is_own = bool(args[name]) and name in self.given
            self.put(TIMM_ARGUMENTS[name].setting, own[name.replace("-", "_")], name if is_own else "model")
        channels, height, width = own["input_size"]
        if height != width:
            self.refuse("input-size", "images must be square")
        if args["input-img-mode"] not in (None, {1: "L", 3: "RGB"}.get(channels)):
            self.refuse(
                "input-img-mode",
                f"images must be RGB (3 channels) or L (1 channel), and the model has {counted(channels, 'channel')}",
            )
        if channels not in (1, 3):
            name = "in-chans" if args["in-chans"] is not None else "input-size"
            self.refuse(name, "images must have 1 or 3 channels")
        size = "input-size" if args["input-size"] else "img-size" if args["img-size"] is not None else "model"
        self.put("DATA.IMAGE_CHANNELS", channels, "in-chans", "input-img-mode", "input-size")
        self.put("DATA.IMAGE_SIZE", width, size)
        self.put("MODEL.TYPE", "timm", "model")
        self.put("MODEL.NAME", args["model"], "model")
        classes = own["num_classes"] or None if args["num-classes"] is None else args["num-classes"]
        self.put("MODEL.NUM_CLASSES", classes, "num-classes")
        if args["pretrained"]:
            self.put("MODEL.PRETRAINED", args["pretrained-path"] or args["model"], "pretrained", "pretrained-path")
        if args["initial-checkpoint"]:
            self.put("MODEL.PRETRAINED", args["initial-checkpoint"], "initial-checkpoint")
        self.leave_open("MODEL.KWARGS", "TRAIN.OPTIMIZER.KWARGS")
        for name, value in (args["model-kwargs"] or {}).items():
            self.put(OF_A_MODEL.get(name, f"MODEL.KWARGS.{name}"), value, "model-kwargs")

    def optimizer(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers  # local: importing timm takes seconds

        name, arguments = self.args["opt"].lower(), self.args["opt-kwargs"] or {}
        is_sgd = name in ("sgd", "nesterov", "momentum")  # timm's sgd uses Nesterov momentum
        if not is_sgd and name not in list_optimizers():
            near = did_you_mean(name, list_optimizers())
            raise ConfigError(f"{self.shown('opt')}: unknown optimizer{near}; docs/fine-tuning.md lists the optimizers")
        # train.py passes these arguments only to optimizers that take them.
        takes = get_optimizer_info(name)
        own = {"EPS": takes.has_eps, "BETAS": takes.has_betas, "MOMENTUM": takes.has_momentum}
        self.leave_open(*(f"TRAIN.OPTIMIZER.{setting}" for setting, is_taken in own.items() if not is_taken))
        if is_sgd:
            name, arguments = "sgd", {"nesterov": name != "momentum"} | arguments
        self.put("TRAIN.OPTIMIZER.NAME", name, "opt")
        for key, value in arguments.items():
            self.put(f"TRAIN.OPTIMIZER.KWARGS.{key}", value, "opt-kwargs" if self.args["opt-kwargs"] else "opt")

    def schedule(self) -> None:
        args, name = self.args, self.args["sched"]
        warmup, prefix, per_epoch = args["warmup-epochs"], args["warmup-prefix"], not args["sched-on-updates"]
        ours = {"multistep": "step", "none": "constant"}.get(name, name)
        if name not in ("cosine", "step", "multistep", "constant", "none", "wsd"):
            raise ConfigError(
                f"{self.shown('sched')}: unknown schedule; choose cosine, step, multistep, wsd, constant or none"
            )
        decay = args["decay-epochs"]
        if decay is None:  # train.py's defaults
            decay = 0.2 if name == "wsd" else 90
        self.put("TRAIN.LR_SCHEDULER.DECAY_EPOCHS", decay, "decay-epochs")
        cools = ours in ("cosine", "wsd")
        total = args["epochs"] + args["cooldown-epochs"] * cools + warmup * prefix
        self.put("TRAIN.LR_SCHEDULER.NAME", ours, "sched")
        self.put("TRAIN.LR_SCHEDULER.PER_EPOCH", per_epoch, "sched-on-updates")
        self.put("TRAIN.NUM_EPOCHS", total, "epochs", "warmup-prefix", *["cooldown-epochs"] * cools)
        if name == "none":
            self.put("TRAIN.WARMUP_EPOCHS", 0, "sched")
            self.leave_open("TRAIN.WARMUP_START_LR")
        if name == "multistep":
            self.milestones()
        else:
            self.leave_open("TRAIN.LR_SCHEDULER.MILESTONES")
        if name == "wsd":
            length = args["epochs"] - warmup * (not prefix)
            decay *= length if 0 < decay < 1 else 1
            decay = round(decay) if per_epoch else decay
            if not 0 < decay <= length:
                raise ConfigError(
                    f"{self.shown('decay-epochs')}: the value must be above 0 and at most {length}, the number of "
                    "epochs after the warm-up"
                )
            self.put("TRAIN.LR_SCHEDULER.DECAY_FRACTION", decay / total, "decay-epochs")

    def milestones(self) -> None:
        """Set the epochs after which the learning rate falls.

        With milestone 30, timm lowers the rate in the epoch with index 29 or, with --sched-on-updates, in the last
        update before epoch 30.
        """
        is_early = not self.args["sched-on-updates"]
        milestones = [each - is_early for each in self.args["decay-milestones"]]
        self.put("TRAIN.LR_SCHEDULER.MILESTONES", milestones, "decay-milestones")
        self.leave_open("TRAIN.LR_SCHEDULER.DECAY_EPOCHS")
        if not is_early:
            self.differs("sched-on-updates", "the rate falls one update later than in train.py")

    def rate(self) -> None:
        """Set the learning rate: --lr, or the rate that train.py computes from --lr-base and the batch size."""
        args = self.args
        self.leave_open("TRAIN.LINEAR_SCALED_LR", "TRAIN.LR_SCALING")
        if args["lr"]:
            self.put("TRAIN.BASE_LR", args["lr"], "lr")
            return
        if args["lr-base-size"] < 1:
            raise ConfigError(f"{self.shown('lr-base-size')}: the value must be at least 1")
        ratio = args["batch-size"] * self.processes * max(1, args["grad-accum-steps"]) / args["lr-base-size"]
        has_root = any(part in args["opt"].lower() for part in ("ada", "lamb"))
        is_root = args["lr-base-scale"] == "sqrt" if args["lr-base-scale"] else has_root
        rate = args["lr-base"] * (math.sqrt(max(0, ratio)) if is_root else ratio)
        self.put("TRAIN.BASE_LR", rate, "lr-base", "lr-base-size", "lr-base-scale")
        self.differs("lr-base", f"--lr {rate:g}, with {counted(self.processes, 'process')}")

    def regularization(self) -> None:
        args = self.args
        mixes = args["mixup"] > 0 or args["cutmix"] > 0 or bool(args["cutmix-minmax"])
        self.loss(mixes)
        if args["clip-grad"] == 0:
            self.refuse("clip-grad", "with this value train.py sets all gradients to 0")
        if mixes:
            self.put("TRAIN.MIXUP_GROUP", args["batch-size"], "batch-size")
        if mixes and args["reprob"] and not args["naflex-loader"]:
            self.differs("reprob", "images are mixed after erasing; train.py mixes them before erasing")
        repeats = args["aug-repeats"]
        self.put("TRAIN.REPEATED_AUG", 1 if repeats == 0 else repeats, "aug-repeats")
        if args["model-ema-warmup"]:
            self.put("TRAIN.MODEL_EMA_WARMUP", "timm", "model-ema-warmup")
        if args["kd-model-name"]:
            self.distillation()

    def loss(self, mixes: bool) -> None:
        args = self.args
        ours = {None: "cross_entropy", "ce": "cross_entropy", "bce": "bce"}.get(args["loss"])
        if ours is None:
            self.refuse("loss", OTHER_LOSSES)
        if args["bce-loss"] and args["loss"] != "bce":
            raise ConfigError(f"--bce-loss contradicts {self.shown('loss')}; leave one out")
        self.put("TRAIN.LOSS", ours, "loss", "bce-loss")
        if args["bce-loss"] and not mixes and not args["smoothing"]:
            older = "before timm 1.0.31, train.py used cross entropy without smoothing and mixing"
            self.differs("bce-loss", f"{older}; to train like that, set TRAIN.LOSS=cross_entropy")
        self.leave_open("TRAIN.CLASS_WEIGHTS")
        if args["bce-pos-weight"] not in (None, 1) and ours == "bce":
            self.refuse("bce-pos-weight", "the nearest setting is TRAIN.CLASS_WEIGHTS, a file with a weight per class")

    def distillation(self) -> None:
        args = self.args
        is_token = args["kd-distill-type"] == "token"
        kind = args["kd-token-distill-type"] if is_token else "soft"
        self.put("TRAIN.DISTILLATION_TYPE", kind, "kd-distill-type", *["kd-token-distill-type"] * is_token)
        if args["kd-distill-type"] == "feature":
            self.refuse("kd-distill-type", "distillation of features is not supported")
        task = 1 if args["task-loss-weight"] is None else args["task-loss-weight"]
        default = 1 if args["task-loss-weight"] is None else 1 - task
        teacher = default if args["distill-loss-weight"] is None else args["distill-loss-weight"]
        if task < 0 or teacher < 0 or task + teacher == 0:
            raise ConfigError(
                f"--task-loss-weight and --distill-loss-weight are {task:g} and {teacher:g}; neither may be negative, "
                "and one must be positive"
            )
        names = ("task-loss-weight", "distill-loss-weight")
        self.put("TRAIN.DISTILLATION_ALPHA", teacher / (task + teacher), *names)
        if task + teacher != 1:
            self.differs("task-loss-weight", f"the loss equals train.py's loss divided by {task + teacher:g}")

    def run(self) -> None:
        args = self.args
        if not args["recovery-interval"]:
            self.leave_open("SAVE_STEPS")
        device, _, number = args["device"].partition(":")
        self.put("DEVICE", "auto" if device == "cuda" else device, "device")
        if number:
            self.choose_device(device, number)
        if not args["amp"]:
            self.leave_open("PRECISION.DTYPE")
        if args["torchcompile"]:
            mode = None if args["torchcompile-mode"] == "default" else args["torchcompile-mode"]
            self.put("COMPILE", mode or True, "torchcompile", "torchcompile-mode")
        if args["torchcompile"] not in (None, "inductor"):
            self.differs("torchcompile", "the compiler is inductor")
        if args["log-wandb"]:
            self.put("TRACK", ["tensorboard", "wandb"], "log-wandb")
        self.put("NAME", args["experiment"], "experiment")
        self.resume()
        if self.processes > 1:
            self.named.add("dist-bn")
            if args["dist-bn"] != "broadcast":
                self.differs("dist-bn", TIMM_ARGUMENTS["dist-bn"].reason)

    def choose_device(self, kind: str, number: str) -> None:
        """Choose a device such as cuda:1 with an environment variable, because no setting can choose it."""
        if self.processes > 1:
            self.differs("device", "each process uses its own device, as in train.py")
        elif kind != "cuda" or not number.isdecimal():
            self.refuse("device", "halfstep uses the first device of each kind")
        elif not any(each.startswith("CUDA_VISIBLE_DEVICES=") for each in self.launch.variables):
            self.variables.append(f"CUDA_VISIBLE_DEVICES={number}")
        else:
            self.refuse("device", "CUDA_VISIBLE_DEVICES chooses the device; set it to the device to train on")

    def resume(self) -> None:
        """Set the settings for --resume and --start-epoch. Only the weights and epoch of a checkpoint are read."""
        args, epoch = self.args, self.args["start-epoch"]
        path, name = (
            (args["resume"], "resume") if args["resume"] else (args["initial-checkpoint"], "initial-checkpoint")
        )
        restart = "the optimizer state of train.py is not read, so the optimizer starts fresh"
        if args["resume"] and epoch == 0:
            self.put("MODEL.PRETRAINED", path, "resume", "start-epoch")
            self.differs("start-epoch", f"the run starts from these weights (MODEL.PRETRAINED); {restart}")
        elif args["resume"] or (epoch and path):
            self.put("MODEL.RESUME", path, name)
            self.put("TRAIN.LAST_EPOCH", epoch, "start-epoch")
            if args["resume"] == "auto":
                self.differs("resume", "-resume auto continues halfstep's runs, not train.py's")
            elif args["resume"] and not args["no-resume-opt"]:
                self.differs("resume", restart)
            if not args["resume"]:
                self.leave_open("MODEL.PRETRAINED")
        elif epoch:
            self.refuse("start-epoch", "there is no --resume or --initial-checkpoint with the weights of that epoch")
        self.named |= {"start-epoch", "no-resume-opt"}

    def command(self) -> str:
        """Return the command that trains with these settings."""
        words = ["-cfg", "my.yaml"]
        for flag, setting in (("-resume", "MODEL.RESUME"), ("-last_epoch", "TRAIN.LAST_EPOCH"), ("-name", "NAME")):
            if setting in self.layers:
                value = str(self.layers[setting].texts[setting])
                words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
        launch = self.launch._replace(variables=(*self.variables, *self.launch.variables))
        return launch.command(words)


def preprocessing(args: dict[str, Any]) -> dict[str, Any]:
    """Return the input size, mean, std, crop and classes that train.py takes from its arguments and timm's metadata."""
    from timm import get_pretrained_cfg, is_model, list_models  # local: importing timm takes seconds
    from timm.data import resolve_data_config

    if not is_model(args["model"]):
        raise ConfigError(f"--model: timm has no model {args['model']}{did_you_mean(args['model'], list_models())}")
    own = getattr(get_pretrained_cfg(args["model"]), "to_dict", dict)()
    wanted = {name.replace("-", "_"): None if value in ("", []) else value for name, value in args.items()}
    if wanted["input_size"] and len(wanted["input_size"]) != 3:
        raise ConfigError(
            f"--input-size is {args['input-size']}; it must be channels, height and width, such as 3 224 224"
        )
    channels = _channels(args)
    for name in ("mean", "std"):
        if args[name] and len(args[name]) not in (1, channels):
            raise ConfigError(
                f"--{name} is {args[name]}; it must be a number, or one for each of {counted(channels, 'channel')}"
            )
        wanted[name] = args[name] * channels if len(args[name]) == 1 else args[name] or None
    wanted["in_chans"] = channels
    if wanted["input_size"]:
        wanted["input_size"] = [channels, *wanted["input_size"][1:]]
    found = {"num_classes": own.get("num_classes")} | resolve_data_config(wanted, pretrained_cfg=own)
    if channels == 1:  # timm's metadata is for color images
        found |= {name: [fmean(found[name])] for name in ("mean", "std")}
    return found | {"input_size": (channels, *found["input_size"][1:])}


def _channels(args: dict[str, Any]) -> int:
    """Return the number of channels of the images, or raise ConfigError if two arguments contradict each other."""
    of_size = args["input-size"][0] if args["input-size"] else None
    if None not in (args["in-chans"], of_size) and args["in-chans"] != of_size:
        raise ConfigError(
            f"--in-chans is {args['in-chans']}, but --input-size has {counted(of_size, 'channel')}; leave one out"
        )
    found = next((each for each in (args["in-chans"], of_size) if each is not None), None)
    return found if found is not None else 1 if args["input-img-mode"] == "L" else 3
