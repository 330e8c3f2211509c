"""Collects the settings that replace arguments of timm's train.py, with remarks about these arguments."""

import re
from typing import Any

from configs.load import LoadedConfig
from configs.timm_arguments import TIMM_ARGUMENTS
from configs.values import SETTINGS, Text, flatten, is_none
from configs.yaml_files import Layer, Quoted
from extras.timm_arguments.command import KWARGS
from utils.errors import ConfigError

# Arguments that halfstep does not have and does not need, because it trains the same way without them.
NOT_NEEDED = set(
    """train-num-samples val-num-samples dataset-download dataset-trust-remote-code channels-last fuser fast-norm torchscript
    no-ddp-bb synchronize-step device-modules local_rank pin-mem no-prefetcher use-multi-epochs-loader worker-seeding
    patience-epochs drop-connect model-ema-force-cpu save-images wandb-project wandb-tags wandb-resume-id
    kd-student-feature-dim kd-teacher-feature-dim naflex-loss-scale save-epochs model-ema-force-fp32 persistent-workers
    no-persistent-workers""".split()
)
# {argument: other arguments that train.py uses only together with it}
NEEDED = {
    "layer-decay": ("layer-decay-min-scale", "layer-decay-no-opt-scale"),
    "lr-noise": ("lr-noise-pct", "lr-noise-std"),
    "lr-cycle-limit": ("lr-cycle-mul", "lr-cycle-decay"),
    "loss": (
        *("bce-sum", "asl-gamma-pos", "asl-gamma-neg", "asl-clip", "asl-reduction", "poly-epsilon", "poly-gamma"),
        *("poly-alpha", "twoway-tp", "twoway-tn", "db-neg-scale", "db-init-bias", "db-focal-gamma"),
    ),
    "task": ("target-format", "multilabel-threshold"),
    "class-stats": ("loss-weight-power", "loss-weight-beta", "loss-weight-max"),
    "sched": ("lr-decay-fn", "lr-stable-timescale"),
    "dataset": ("input-key", "target-key", "epoch-repeats"),
    "resume": ("no-resume-opt",),
}
# {argument: values with which train.py behaves as halfstep always does}
SAME = {
    "train-split": ("train", "training"),
    "val-split": ("validation", "val", "valid", "eval", "evaluation"),
    "model-dtype": ("float32",),
    "lr-decay-fn": ("1-sqrt",),
}
# Settings that are paths, and words with a special meaning in them. A file called auto is written as ./auto.
PATHS = ("DATA.DATA_PATH", "DATA.CLASSES", "MODEL.PRETRAINED", "MODEL.RESUME", "SAVE")
WORDS = ("auto", "latest")


def saved_key(setting: str) -> str:
    """Return the setting, or its section if the section takes any key: MODEL.KWARGS for MODEL.KWARGS.global_pool."""
    return re.sub(r"KWARGS\..*", "KWARGS", setting)


class ArgumentSettings:
    """Settings, the arguments that they come from, remarks on arguments, and reasons to refuse arguments."""

    def __init__(self, given: dict[str, Any], processes: int):
        self.given, self.processes = given, processes
        self.args = {name: each.default for name, each in TIMM_ARGUMENTS.items()} | given
        self.layers: dict[str, Layer] = {}  # {setting: layer that sets it}
        self.sources: dict[str, tuple[str, ...]] = {}  # {setting: the arguments that it comes from}
        self.named: set[str] = set()  # arguments that have a remark or need no remark
        self.remarks: list[str] = []
        self.refusals: list[str] = []

    def shown(self, name: str) -> str:
        """Return an argument and its value as they are typed in a command."""
        value = self.args[name]
        values = [f"{key}={each}" for key, each in value.items()] if isinstance(value, dict) else value
        words = values if isinstance(values, list) else [values]
        words = [each for each in words if each is not None and each is not True]
        texts = (str(each).removesuffix(".0" * isinstance(each, float)) or "''" for each in words)
        return " ".join([name if name == "data" else f"--{name}", *texts])

    def differs(self, name: str, remark: str) -> None:
        """Add a remark on an argument that halfstep does not need or implements slightly differently."""
        self.named.add(name)
        self.remarks.append(f"{self.shown(name)}: {remark}")

    def refuse(self, name: str, reason: str) -> None:
        """Add a refusal of an argument with which halfstep cannot train."""
        self.refusals.append(f"{self.shown(name)}: {reason}")

    def refuse_all(self) -> None:
        """Raise ConfigError if an argument was refused."""
        if len(self.refusals) == 1:
            raise ConfigError(f"{self.refusals[0]}; leave it out")
        if self.refusals:
            lines = "".join(f"\n  {each}" for each in self.refusals)
            raise ConfigError(f"halfstep cannot train with these; leave them out:{lines}")

    def without_setting(self, name: str, reason: str) -> None:
        """Add a remark or a refusal for an argument that no setting replaces."""
        needed = next((each for each, others in NEEDED.items() if name in others), None)
        if needed and needed not in self.given:
            self.differs(name, f"has no effect without --{needed}, as in train.py")
        elif self.args[name] in SAME.get(name, ()):
            self.named.add(name)
        elif name == "val-split" and not self.args[name]:
            self.refuse(name, "without a split, train.py does not validate; halfstep always does (DATA.VAL_FRACTION)")
        elif name == "sync-bn" and self.processes == 1:
            self.differs(name, "has no effect with one process, as in train.py")
        elif name in NOT_NEEDED:
            self.differs(name, reason)
        elif name not in ("dist-bn", "no-resume-opt"):  # other methods handle these two
            self.refuse(name, reason)

    def put(self, setting: str, value: Any, name: str, *others: str) -> None:
        """Set a setting to a value that follows from these arguments. None and [] leave the setting unchanged."""
        if value is None or value == []:
            return
        origin = f"--{name}" if name in self.given else f"--{name}, train.py's default"
        self.layers[setting] = Layer(origin, {setting: self._text(setting, value, name)})
        self.sources[setting] = (name, *others)

    def _text(self, setting: str, value: Any, name: str) -> Text:
        """Return the text that means exactly this value in a settings file."""
        if isinstance(value, list | tuple):
            return [each if isinstance(each, str | list) else str(each) for each in value]
        if not isinstance(value, str):
            return str(value)
        if "KWARGS." in setting:
            return value if isinstance(value, Quoted) or name in KWARGS else Quoted(value)
        if setting in PATHS and (is_none(value) or value.lower() in WORDS) and (name, value) != ("resume", "auto"):
            return f"./{value}"
        if is_none(value) and (name, value) != ("train-interpolation", ""):
            raise ConfigError(f"--{name} is {value!r}, which a settings file reads as no value; choose another value")
        return value

    def leave_open(self, *settings: str) -> None:
        for setting in settings:
            self.layers.pop(setting, None)

    def with_effect(self, loaded: LoadedConfig) -> list[str]:
        """Return the settings of this translation that have an effect in combination with the others."""
        values = flatten(loaded.config)
        return [key for key, each in SETTINGS.items() if loaded.origins[key] != "default" and each.has_effect(values)]

    def name_the_rest(self, kept: list[str]) -> None:
        """Add a remark on each argument that has no effect in combination with the others, in halfstep or in train.py.

        An example is a parameter of an unused schedule.
        """
        kept_layers = (key for key in self.layers if saved_key(key) in kept or key not in SETTINGS)
        used = {name for key in kept_layers for name in self.sources[key]}
        for name in self.given:
            if name not in used | self.named:
                self.differs(name, "has no effect with the other arguments, as in train.py")
