"""The plan of a sweep: what it trains, kept in its folder as sweep.json, and the command line of each trial."""

import fcntl
import itertools
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from configs.flags import parse
from configs.load import LoadedConfig
from configs.paddlevit.translation import RENAMED
from engine.settings import load_settings
from scripts.sweeping.values import OF_THE_SWEEP, Range, choices_of, describe, range_or_choices
from utils.errors import ConfigError, cause_of
from utils.files import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
FILE, VERSION = "sweep.json", 1
SHOWN = {
    "flags": "flags of the runs",
    "over": "-over",
    "seeds": "-seeds",
    "folds": "-folds",
    "cwd": "folder it is started from",
}


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `point`: the number of its settings, which trials of other seeds and folds have too."""

    index: int
    point: int
    settings: dict[str, str]
    seed: int | None = None
    fold: int | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"trial-{self.index:03d}"

    @property
    def title(self) -> str:
        return f"trial {self.index}"

    def describe(self) -> str:
        """What tells it from the others."""
        facts = [describe(self.settings)] if self.settings else []
        facts += [f"{name} {value}" for name, value in (("seed", self.seed), ("fold", self.fold)) if value is not None]
        return f"{self.title} ({', '.join(facts)})"


@dataclass(frozen=True)
class Plan:
    """`points`: the settings of each point of a grid, or those that optuna has proposed so far."""

    folder: Path  # as typed, from `cwd`
    flags: list[str]  # of the runs, as typed
    over: dict[str, str]
    seeds: list[int]
    folds: int | None = None
    optuna: int | None = None  # how many points it proposes; None: a grid
    cwd: str = field(default_factory=os.getcwd)
    points: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, folder: Path, flags: list[str], over: dict[str, str], **options: Any) -> "Plan":
        """Checked: a mistake in the settings of any point is a ConfigError now."""
        plan = cls(folder, flags, over, **options)
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
        ours = {key: flag for key, flag in OF_THE_SWEEP.items() if key in given}
        ours = {key: flag for key, flag in ours.items() if flag not in ("-seeds", "-folds") or self._sets(flag)}
        for key, flag in ours.items():
            raise ConfigError(f"{key} is given to all trials, but {flag} sets it for each; leave it out")
        config = self.load_point({}).config
        for key, is_set in (
            ("-eval", config.START.EVAL),
            ("-check", config.START.CHECK),
            ("-resume", config.START.RESUME),
        ):
            if is_set:
                raise ConfigError(f"{key}: a sweep trains, and goes on with its own trials; leave it out")

    def _sets(self, flag: str) -> bool:
        return bool(self.seeds if flag == "-seeds" else self.folds)

    def ends(self) -> list[dict[str, str]]:
        """Points at both ends of all that optuna chooses from: if these are right, most others are."""
        found = {key: range_or_choices(key, text) for key, text in self.over.items()}
        ends = {
            key: [to_word(each.low), to_word(each.high)] if isinstance(each, Range) else each
            for key, each in found.items()
        }
        first = {key: values[0] for key, values in ends.items()}
        return [first | {key: value} for key, values in ends.items() for value in values] or [first]

    def load_point(self, point: Mapping[str, str]) -> LoadedConfig:
        """The settings of a trial of this point; what is wrong with them is a ConfigError."""
        return load_settings(self.words(Trial(0, 0, dict(point), *self._first())))

    def _first(self) -> tuple[int | None, int | None]:
        return (self.seeds[0] if self.seeds else None), (0 if self.folds else None)

    @cached_property
    def trials(self) -> list[Trial]:
        """In order: all seeds and folds of a point, then those of the next one."""
        found = itertools.product(enumerate(self.points), self.seeds or [None], self._folds())
        return [Trial(index, number, point, seed, fold) for index, ((number, point), seed, fold) in enumerate(found)]

    @property
    def num_trials(self) -> int:
        """Of all points, also of those that optuna has yet to propose."""
        return (self.optuna or len(self.points)) * max(len(self.seeds), 1) * (self.folds or 1)

    def _folds(self) -> Sequence[int | None]:
        return range(self.folds) if self.folds else [None]

    @property
    def program(self) -> str:
        """The entry of the runs."""
        return "main_multi_gpu.py" if self.num_devices > 1 else "main_single_gpu.py"

    @cached_property
    def num_devices(self) -> int:
        """Devices of one trial (-ngpus)."""
        return self.load_point({}).config.START.NGPUS or 1

    def words(self, trial: Trial) -> list[str]:
        """The flags of a trial without those of its folder."""
        options = [f"{key}={value}" for key, value in trial.settings.items()]
        if trial.fold is not None:
            options.append(f"DATA.FOLD={trial.fold}/{self.folds}")
        seed = [] if trial.seed is None else ["-seed", str(trial.seed)]
        return [*self.flags, *seed, *(["-opts", *options] if options else [])]

    def arguments(self, trial: Trial) -> list[str]:
        """The command line of a trial, without the program: it begins the run, or goes on with it."""
        return [*self.words(trial), "-output", str(self.folder), "-name", trial.name, "-resume", "auto"]

    def command(self, trial: Trial) -> str:
        """As a person types it."""
        return shlex.join(["python", self._program_from_here(), *self.arguments(trial)])

    def command_of_point(self, point: Mapping[str, str]) -> str:
        """The command of a run with these settings, outside of the sweep."""
        return shlex.join(["python", self._program_from_here(), *self.words(Trial(0, 0, dict(point)))])

    def _program_from_here(self) -> str:
        return self.program if Path(self.cwd) == ROOT else str(ROOT / self.program)

    @property
    def path(self) -> Path:
        """The folder, from wherever this start of the sweep is."""
        return Path(self.cwd, self.folder)

    def folder_of(self, trial: Trial) -> Path:
        return self.path / trial.name

    def output_of(self, trial: Trial) -> Path:
        """What the run printed."""
        return self.folder_of(trial).with_suffix(".txt")

    def save(self) -> None:
        """Write sweep.json and commands.sh."""
        facts = {"version": VERSION, **asdict(self), "folder": str(self.folder)}
        commands = [f"cd {shlex.quote(self.cwd)}", *map(self.command, self.trials)]
        self.write(FILE, json.dumps(facts, indent=1) + "\n")
        self.write("commands.sh", "\n".join([*commands, ""]))

    def write(self, name: str, text: str) -> Path:
        """A file in the folder of the sweep."""
        try:
            write_text(self.path / name, text)
        except OSError as error:
            raise ConfigError(
                f"-output: cannot write to {self.folder} ({cause_of(error)}); choose another folder"
            ) from error
        return self.path / name


def to_word(value: float) -> str:
    """A number as a command line has it."""
    return repr(value)


def read_plan(folder: Path) -> Plan | None:
    """The plan that a folder holds, if it is that of a sweep."""
    file = folder / FILE
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        if facts.pop("version") != VERSION:
            raise ConfigError(f"{file} is of another version of halfstep; give -output another folder")
        plan = Plan(**facts | {"folder": Path(facts["folder"])})
        # A folder that was moved is not where the plan says.
        return plan if plan.path.resolve() == folder.resolve() else replace(plan, folder=folder.resolve())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give -output another folder") from error


def continued(then: Plan, now: Plan) -> Plan:
    """The plan of the folder, if what is asked for now is the same; optuna may propose more points than before.

    One that never got to train, because a setting was wrong, gives way.
    """
    if not any(then.folder_of(trial).exists() for trial in then.trials):
        return now
    different = [
        f"{title}: {_shown(getattr(then, name))} -> {_shown(getattr(now, name))}"
        for name, title in SHOWN.items()
        if getattr(then, name) != getattr(now, name)
    ]
    if (then.optuna is None) != (now.optuna is None) or (now.optuna or 0) < len(then.points) * (now.optuna is not None):
        different.append(f"-optuna: {_shown(then.optuna)} -> {_shown(now.optuna)}")
    if different:
        raise ConfigError(
            f"-output: {then.folder} holds another sweep:\n  " + "\n  ".join(different) + "\nput that back, "
            "or give -output another folder"
        )
    return replace(then, optuna=now.optuna)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={text}" for key, text in value.items()) or "none"
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "none"
    return "none" if value is None else str(value)


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
