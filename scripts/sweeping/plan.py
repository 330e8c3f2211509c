"""The plan of a sweep: its trials, stored in its folder as sweep.json, and the command line of each trial."""

import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.flags import parse
from configs.load import LoadedConfig
from configs.paddlevit import our_name
from configs.values import SETTINGS, convert
from engine.record.saved_files import read_text
from engine.settings import load_settings
from utils.errors import ConfigError, cause_of
from utils.files import creating, write_text

ROOT = Path(__file__).resolve().parent.parent.parent
FILE, LOCK, VERSION = "sweep.json", ".sweep.lock", 2
MOST_TRIALS = 100_000
# Matches one of several values; commas in brackets and quotes do not separate values.
SPLIT = re.compile(r"""(?:\[[^\]]*\]|\([^)]*\)|"[^"]*"|'[^']*'|[^,])+""")
# {setting that the sweep sets for each trial: flag of the sweep for it}
DECIDED = {"SEED": "-seeds", "DATA.FOLD": "-folds", "SAVE": "-output", "NAME": "-output"}


def read_over(words: Sequence[str]) -> dict[str, str]:
    """Return {setting: the text of its values} for KEY=VALUES words."""
    over: dict[str, str] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text.strip() or key in over:
            raise ConfigError(
                f"-over: {word!r} must be KEY=VALUE,VALUE as in TRAIN.BASE_LR=1e-3,3e-3; give each key only once"
            )
        if key in DECIDED:
            raise ConfigError(f"-over: {key} is set by {DECIDED[key]}; leave it out here")
        over[key] = text
    return over


def choices_of(key: str, text: str) -> list[str]:
    """Split the text of a setting's values into one text per value. Raise ConfigError if a value is wrong."""
    setting = SETTINGS.get(key)  # None: a constructor argument, or a wrong name, which load_settings reports
    values = [value.strip() for value in SPLIT.findall(text)]
    if len(values) != len(SPLIT.sub("x", text).split(",")) or "" in values:
        raise ConfigError(f"-over: {key}={text} has an empty value; write none to leave the setting unset")
    if setting and setting.is_list and any(value[0] not in "[(" and value.lower() != "none" for value in values):
        raise ConfigError(f"-over: {key} is a list; write each of its values in brackets, as in {key}=[a,b],[c,d]")
    values = [value[1:-1] if value[0] in "\"'" else value for value in values]
    for value in values if setting else ():
        convert(setting, value, "-over")
    return values


@dataclass(frozen=True)
class Trial:
    """One run of a sweep. `point`: the index of its settings, shared with trials of other seeds and folds."""

    index: int
    point: int
    settings: Mapping[str, str]
    seed: int | None = None
    fold: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the trial's folder."""
        return f"trial-{self.index:03d}"

    def __str__(self) -> str:
        facts = [each for each in (describe(self.settings),) if each]
        facts += [f"{name} {value}" for name, value in (("seed", self.seed), ("fold", self.fold)) if value is not None]
        return f"trial {self.index} ({', '.join(facts)})"


def describe(settings: Mapping[str, str]) -> str:
    """Return the settings of a trial as one line, without their sections: BASE_LR=0.001 DEPTH=4."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


@dataclass(frozen=True)
class Sweep:
    """The flags that all runs share, and the settings (`points`), seeds and folds that vary between the runs."""

    flags: list[str]  # flags of the runs, as typed
    over: dict[str, str]
    seeds: list[int]
    folds: int | None = None
    cwd: str = field(default_factory=os.getcwd)
    points: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, flags: list[str], over: dict[str, str], **options: Any) -> "Sweep":
        """Return a new sweep. Raise ConfigError if the settings of any point are wrong."""
        choices = [choices_of(key, text) for key, text in over.items()]
        points = [dict(zip(over, values, strict=True)) for values in itertools.product(*choices)]
        sweep = cls(flags, over, points=points, **options)
        sweep.check()
        sweep.load_point({})
        if sweep.num_trials > MOST_TRIALS:
            raise ConfigError(
                f"{sweep.num_trials:,} trials exceed the limit of {MOST_TRIALS:,}; give fewer values, seeds or folds"
            )
        for point in points:
            sweep.load_point(point)
        return sweep

    def check(self) -> None:
        if not (self.over or self.seeds or self.folds):
            raise ConfigError("nothing to sweep; give -over KEY=VALUE,VALUE, -seeds 0,1,2 or -folds 5")
        given = {our_name(key) for layer in parse(self.flags).layers for key in layer.texts}
        decided = dict.fromkeys(self.over, "-over") | DECIDED
        unused = {flag for flag, values in (("-seeds", self.seeds), ("-folds", self.folds)) if not values}
        for key, flag in decided.items():
            if key in given and flag not in unused:
                raise ConfigError(
                    f"{key} is set for all trials, but {flag} sets it for each trial; leave one of the two out"
                )

    def load_point(self, point: Mapping[str, str]) -> LoadedConfig:
        """Return the settings of a trial of this point. Raise ConfigError if they are wrong."""
        seed, fold = self.seeds[0] if self.seeds else None, 0 if self.folds else None
        loaded = load_settings(self.words(Trial(0, 0, point, seed, fold)))
        start = loaded.config.START
        for flag, is_set in (("-eval", start.EVAL), ("-check", start.CHECK), ("-resume", start.RESUME)):
            if is_set:
                raise ConfigError(f"{flag}: a sweep only trains, and resumes its own trials; leave {flag} out")
        return loaded

    @cached_property
    def trials(self) -> list[Trial]:
        """Return the trials in order: all seeds and folds of a point, then of the next point."""
        folds = range(self.folds) if self.folds else [None]
        products = itertools.product(enumerate(self.points), self.seeds or [None], folds)
        return [Trial(index, number, point, seed, fold) for index, ((number, point), seed, fold) in enumerate(products)]

    @property
    def num_trials(self) -> int:
        return len(self.points) * max(len(self.seeds), 1) * (self.folds or 1)

    def words(self, trial: Trial) -> list[str]:
        """Return the flags of a trial, without the flags for its folder."""
        options = [f"{key}={value}" for key, value in trial.settings.items()]
        options += [] if trial.fold is None else [f"DATA.FOLD={trial.fold}/{self.folds}"]
        seed = [] if trial.seed is None else ["-seed", str(trial.seed)]
        return [*self.flags, *seed, *(["-opts", *options] if options else [])]

    @cached_property
    def program(self) -> str:
        """Return the name of the program that runs the trials."""
        return "main_multi_gpu.py" if (self.load_point({}).config.START.NGPUS or 1) > 1 else "main_single_gpu.py"

    def command(self, trial: Trial, folder: Path) -> list[str]:
        """Return the command line that starts or resumes a trial, without the interpreter."""
        place = ["-output", str(folder), "-name", trial.name, "-resume", "auto"]
        return [str(ROOT / self.program), *self.words(trial), *place]

    def command_of_point(self, point: Mapping[str, str]) -> str:
        """Return the command that trains with these settings outside the sweep."""
        return shlex.join(["python", self.program, *self.words(Trial(0, 0, point))])

    def save(self, folder: Path) -> None:
        with naming(folder):
            write_text(folder / FILE, json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    def or_saved(self, former: "Sweep", folder: Path) -> "Sweep":
        """Return `former`, the sweep saved in the folder. Raise ConfigError if it differs from this one.

        If no trial of the saved sweep has started, for example because a setting was wrong, return this sweep,
        which replaces the saved one.
        """
        if not any((folder / trial.name).exists() for trial in former.trials):
            return self
        names = ("flags", "over", "seeds", "folds", "cwd")
        changed = [name for name in names if getattr(former, name) != getattr(self, name)]
        if changed:
            lines = (f"  {name}: {getattr(former, name)} -> {getattr(self, name)}" for name in changed)
            raise ConfigError(f"-output: {folder} has another sweep; name another folder:\n" + "\n".join(lines))
        return former


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Turn an OSError in the `with` block into a ConfigError that names the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from None


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep if it does not exist. Raise ConfigError if it has other contents."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists() and any(each.name[0] != "." for each in folder.iterdir()):
            raise ConfigError(f"-output: {folder} is not empty, but has no {FILE}; give a new folder")
        with open(folder / LOCK, "r+b", opener=creating):  # fails if the lock file is a link or a pipe
            pass


def read_sweep(folder: Path) -> Sweep | None:
    """Read the sweep in a folder. Return None if there is none."""
    if not (folder / FILE).exists():
        return None
    try:
        facts = json.loads(read_text(folder / FILE))
        if facts.pop("version") != VERSION:
            raise ValueError("another version of halfstep wrote it")
        return Sweep(**facts)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"cannot read {folder / FILE} ({error}); give -output another folder") from error
