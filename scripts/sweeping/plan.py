"""The plan of a sweep: what it trains, stored in its folder as sweep.json, and the command line of each trial."""

import fcntl
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

from configs.flags import parse
from configs.load import LoadedConfig
from configs.paddlevit.translation import RENAMED
from configs.schema import Arguments
from configs.typed_names import suggest_key
from configs.values import OPEN_SECTIONS, SETTINGS, START_SETTINGS, convert
from engine.settings import load_settings
from utils.errors import ConfigError, cause_of
from utils.files import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
FILE, VERSION = "sweep.json", 2
RANGE = re.compile(r"(?P<low>[^.]+(?:\.[0-9]+[^.]*)?)\.\.(?P<high>[^:]+)(?::(?P<how>.+))?")
SPLIT = re.compile(r"""(?:\[[^\]]*\]|\([^)]*\)|"[^"]*"|'[^']*'|[^,])+""")  # at commas outside of brackets and quotes
# What the sweep itself decides: {setting: the flag for it}.
DECIDED = {"SEED": "-seeds", "DATA.FOLD": "-folds", "SAVE": "-output", "NAME": "-output"}


class Range(NamedTuple):
    """Numbers from which optuna chooses; `step`: between them, where there is one."""

    low: float
    high: float
    is_whole: bool
    is_log: bool
    step: float | None


def read_over(words: Sequence[str]) -> dict[str, str]:
    """{setting: the text of its values} of KEY=VALUES words."""
    over: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text.strip():
            raise ConfigError(f"-over: {word!r} has no values; write KEY=VALUE,VALUE as in TRAIN.BASE_LR=1e-3,3e-3")
        if key in over:
            raise ConfigError(f"-over: {key} is given twice; write all its values behind one =")
        if key in DECIDED:
            raise ConfigError(f"-over: {key} is set by {DECIDED[key]}; leave it out here")
        if key in START_SETTINGS:
            raise ConfigError(f"-over: {key} does not change what is trained; leave it out, or give it to all trials")
        is_argument = any(key.startswith(f"{section}.") for section in OPEN_SECTIONS)
        if not is_argument and (key not in SETTINGS or SETTINGS[key].kind is Arguments):
            raise ConfigError(f"-over: unknown setting {key}{suggest_key(key, SETTINGS)}")
        over[key] = text
    return over


def choices_of(key: str, text: str) -> list[str]:
    """The values of a setting as -opts takes them."""
    setting = SETTINGS.get(key)
    values = [value.strip() for value in SPLIT.findall(text)]
    if len(values) != len(re.sub(SPLIT, "x", text).split(",")) or "" in values:
        raise ConfigError(f"-over: {key}={text} has an empty value; none stands for a setting that is not set")
    if setting and setting.is_list and any(value[0] not in "[(" and value.lower() != "none" for value in values):
        raise ConfigError(f"-over: {key} is a list; write each of its values in brackets, as in {key}=[a,b],[c,d]")
    if any(RANGE.fullmatch(value) for value in values if not setting or setting.kind in (int, float)):
        raise ConfigError(f"-over: {key}={text} is a range, from which only -optuna N chooses; list its values")
    values = [value[1:-1] if value[0] in "\"'" else value for value in values]
    if len({convert(setting, value, "-over") if setting else value for value in values}) < len(values):
        raise ConfigError(f"-over: {key}={text} has a value twice; leave one out")
    return values


def range_or_choices(key: str, text: str) -> Range | list[str]:
    """For optuna: LOW..HIGH, with :log or :STEP behind it, or a list of values."""
    setting, parts = SETTINGS.get(key), RANGE.fullmatch(text)
    if not (parts and setting and setting.kind in (int, float) and not setting.is_list):
        return choices_of(key, text)
    low, high = (convert(setting, parts[name], "-over") for name in ("low", "high"))
    is_log = parts["how"] == "log"
    try:
        step = setting.kind(parts["how"]) if parts["how"] and not is_log else None
    except ValueError:
        raise ConfigError(f"-over: {key}={text} must be LOW..HIGH, LOW..HIGH:log or LOW..HIGH:STEP") from None
    is_ordered = None not in (low, high) and low < high and (low > 0 or not is_log)
    if not is_ordered or (step is not None and not 0 < step < float("inf")):
        raise ConfigError(
            f"-over: {key}={text}: the first number must be the smaller one, above 0 for log, and the step above 0"
        )
    return Range(low, high, setting.kind is int, is_log, step)


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `point`: the number of its settings, which trials of other seeds and folds have too."""

    index: int
    point: int
    settings: Mapping[str, str]
    seed: int | None = None
    fold: int | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"trial-{self.index:03d}"

    def __str__(self) -> str:
        facts = [each for each in (describe(self.settings),) if each]
        facts += [f"{name} {value}" for name, value in (("seed", self.seed), ("fold", self.fold)) if value is not None]
        return f"trial {self.index} ({', '.join(facts)})"


def describe(settings: Mapping[str, str]) -> str:
    """The settings of a trial in one line; sections are left out where the names alone tell them apart."""
    names = [key.rpartition(".")[2] for key in settings]
    short = len(set(names)) == len(names)
    return " ".join(f"{name if short else key}={settings[key]}" for key, name in zip(settings, names, strict=True))


@dataclass(frozen=True)
class Plan:
    """`points`: the settings of each point of a grid, or those that optuna has proposed so far."""

    flags: list[str]  # of the runs, as typed
    over: dict[str, str]
    seeds: list[int]
    folds: int | None = None
    optuna: int | None = None  # how many points it proposes; None: a grid
    cwd: str = field(default_factory=os.getcwd)
    points: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, flags: list[str], over: dict[str, str], **options: Any) -> "Plan":
        """A plan that is checked: a mistake in the settings of any point is a ConfigError now."""
        plan = cls(flags, over, **options)
        plan.check()
        if plan.optuna is None:
            choices = [choices_of(key, text) for key, text in over.items()]
            points = [dict(zip(over, values, strict=True)) for values in itertools.product(*choices)]
            plan = replace(plan, points=points)
        for point in plan.points or plan.ends():
            plan.load_point(point)
        return plan

    def check(self) -> None:
        if not (self.over or self.seeds or self.folds):
            raise ConfigError("nothing to sweep; give -over KEY=VALUE,VALUE, -seeds 0,1,2 or -folds 5")
        if self.optuna and not self.over:
            raise ConfigError("-optuna: nothing to choose from; give -over KEY=LOW..HIGH or KEY=VALUE,VALUE")
        given = {RENAMED.get(key, key) for layer in parse(self.flags).layers for key in layer.texts}
        if twice := sorted(given & self.over.keys()):
            raise ConfigError(f"-over: {twice[0]} is also given to all trials; leave it out there or here")
        free = {flag for flag, values in (("-seeds", self.seeds), ("-folds", self.folds)) if not values}
        for key, flag in DECIDED.items():
            if key in given and flag not in free:
                raise ConfigError(f"{key} is given to all trials, but {flag} sets it for each; leave it out")
        start = self.load_point({}).config.START
        for key, is_set in (("-eval", start.EVAL), ("-check", start.CHECK), ("-resume", start.RESUME)):
            if is_set:
                raise ConfigError(f"{key}: a sweep trains, and goes on with its own trials; leave it out")

    def ends(self) -> list[dict[str, str]]:
        """Points at both ends of all that optuna chooses from: if these are right, most others are."""
        space = {key: range_or_choices(key, text) for key, text in self.over.items()}
        ends = {
            key: [repr(each.low), repr(each.high)] if isinstance(each, Range) else each for key, each in space.items()
        }
        first = {key: values[0] for key, values in ends.items()}
        return [first | {key: value} for key, values in ends.items() for value in values]

    def load_point(self, point: Mapping[str, str]) -> LoadedConfig:
        """The settings of a trial of this point; what is wrong with them is a ConfigError."""
        seed, fold = self.seeds[0] if self.seeds else None, 0 if self.folds else None
        return load_settings(self.words(Trial(0, 0, point, seed, fold)))

    @cached_property
    def trials(self) -> list[Trial]:
        """In order: all seeds and folds of a point, then those of the next one."""
        folds = range(self.folds) if self.folds else [None]
        products = itertools.product(enumerate(self.points), self.seeds or [None], folds)
        return [Trial(index, number, point, seed, fold) for index, ((number, point), seed, fold) in enumerate(products)]

    @property
    def num_trials(self) -> int:
        """The number of trials of all points, also of those that optuna has yet to propose."""
        return (self.optuna or len(self.points)) * max(len(self.seeds), 1) * (self.folds or 1)

    def words(self, trial: Trial) -> list[str]:
        """The flags of a trial without those of its folder."""
        options = [f"{key}={value}" for key, value in trial.settings.items()]
        options += [] if trial.fold is None else [f"DATA.FOLD={trial.fold}/{self.folds}"]
        seed = [] if trial.seed is None else ["-seed", str(trial.seed)]
        return [*self.flags, *seed, *(["-opts", *options] if options else [])]

    @cached_property
    def program(self) -> Path:
        """The entry of the runs."""
        is_multi = (self.load_point({}).config.START.NGPUS or 1) > 1
        return ROOT / ("main_multi_gpu.py" if is_multi else "main_single_gpu.py")

    def command(self, trial: Trial, folder: Path) -> list[str]:
        """The command line of a trial, without the interpreter: it begins the run, or goes on with it."""
        place = ["-output", str(folder), "-name", trial.name, "-resume", "auto"]
        return [str(self.program), *self.words(trial), *place]

    def command_of_point(self, point: Mapping[str, str]) -> str:
        """The command of a run with these settings, outside of the sweep."""
        return shlex.join(["python", self.program.name, *self.words(Trial(0, 0, point))])

    def save(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / FILE, json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder"
            ) from error

    def goes_on(self, former: "Plan", folder: Path) -> "Plan":
        """The plan of the folder, if what is asked for now is the same; optuna may propose more points than before.

        One that never came to train, because a setting was wrong, gives way.
        """
        if not any((folder / trial.name).exists() for trial in former.trials):
            return self
        names = ("flags", "over", "seeds", "folds", "cwd")
        differences = [name for name in names if getattr(former, name) != getattr(self, name)]
        if (former.optuna is None) != (self.optuna is None) or (self.optuna or 0) < len(former.points) * bool(
            self.optuna
        ):
            differences.append("optuna")
        if differences:
            lines = (f"  {name}: {getattr(former, name)} -> {getattr(self, name)}" for name in differences)
            raise ConfigError(
                f"-output: {folder} holds another sweep; put that back, or name another:\n" + "\n".join(lines)
            )
        return replace(former, optuna=self.optuna)


def read_plan(folder: Path) -> Plan | None:
    """The plan that a folder holds, if it is that of a sweep."""
    try:
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if facts.pop("version") == 1:  # of halfstep 0.1.0, whose plan also names its folder
            facts.pop("folder")
        return Plan(**facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}); give -output another folder") from error


def lock(folder: Path) -> IO[str]:
    """Make the folder if need be, and lock it against a second sweep until this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists() and any(each.name[0] != "." for each in folder.iterdir()):
            raise ConfigError(f"-output: {folder} is not empty and holds no sweep; give a new folder")
        file = open(folder / ".sweep.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system, even after kill -9
    except OSError as error:
        raise ConfigError(f"-output: another sweep is at work in {folder}; wait for it or stop it") from error
    return file
