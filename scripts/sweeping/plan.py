"""The plan of a sweep: what it trains, stored in its folder as sweep.json, and the command line of each trial."""

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
SPLIT = re.compile(r"""(?:\[[^\]]*\]|\([^)]*\)|"[^"]*"|'[^']*'|[^,])+""")  # at commas outside of brackets and quotes
# What the sweep itself decides: {setting: the flag for it}.
DECIDED = {"SEED": "-seeds", "DATA.FOLD": "-folds", "SAVE": "-output", "NAME": "-output"}


def read_over(words: Sequence[str]) -> dict[str, str]:
    """{setting: the text of its values} of KEY=VALUES words."""
    over: dict[str, str] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text.strip() or key in over:
            raise ConfigError(f"-over: {word!r} must be KEY=VALUE,VALUE as in TRAIN.BASE_LR=1e-3,3e-3, each key once")
        if key in DECIDED:
            raise ConfigError(f"-over: {key} is set by {DECIDED[key]}; leave it out here")
        over[key] = text
    return over


def choices_of(key: str, text: str) -> list[str]:
    """The values of a setting as -opts takes them."""
    setting = SETTINGS.get(key)  # None: an argument of a constructor, or a mistake that loading the settings names
    values = [value.strip() for value in SPLIT.findall(text)]
    if len(values) != len(SPLIT.sub("x", text).split(",")) or "" in values:
        raise ConfigError(f"-over: {key}={text} has an empty value; none stands for a setting that is not set")
    if setting and setting.is_list and any(value[0] not in "[(" and value.lower() != "none" for value in values):
        raise ConfigError(f"-over: {key} is a list; write each of its values in brackets, as in {key}=[a,b],[c,d]")
    values = [value[1:-1] if value[0] in "\"'" else value for value in values]
    for value in values if setting else ():
        convert(setting, value, "-over")
    return values


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
    """The settings of a trial in one line, without their sections."""
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())


@dataclass(frozen=True)
class Sweep:
    """`points`: the settings of each point of the grid."""

    flags: list[str]  # of the runs, as typed
    over: dict[str, str]
    seeds: list[int]
    folds: int | None = None
    cwd: str = field(default_factory=os.getcwd)
    points: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def new(cls, flags: list[str], over: dict[str, str], **options: Any) -> "Sweep":
        """A sweep that is checked: a mistake in the settings of any point is a ConfigError now."""
        choices = [choices_of(key, text) for key, text in over.items()]
        points = [dict(zip(over, values, strict=True)) for values in itertools.product(*choices)]
        sweep = cls(flags, over, points=points, **options)
        sweep.check()
        sweep.load_point({})
        if sweep.num_trials > MOST_TRIALS:
            raise ConfigError(
                f"{sweep.num_trials:,} trials; at most {MOST_TRIALS:,} in a sweep: give fewer values, seeds or folds"
            )
        for point in points:
            sweep.load_point(point)
        return sweep

    def is_whole(self) -> bool:
        """Whether all values are of the right types and sizes, in a sweep that was read from a file."""
        texts = [
            *self.flags,
            self.cwd,
            *(each for pairs in (self.over, *self.points) for pair in pairs.items() for each in pair),
        ]
        numbers = [*self.seeds, self.folds or 1]
        are_right = all(isinstance(each, str) for each in texts) and all(type(each) is int for each in numbers)
        return are_right and numbers[-1] > 0 < self.num_trials <= MOST_TRIALS

    def check(self) -> None:
        if not (self.over or self.seeds or self.folds):
            raise ConfigError("nothing to sweep; give -over KEY=VALUE,VALUE, -seeds 0,1,2 or -folds 5")
        given = {our_name(key) for layer in parse(self.flags).layers for key in layer.texts}
        decided = dict.fromkeys(self.over, "-over") | DECIDED
        unused = {flag for flag, values in (("-seeds", self.seeds), ("-folds", self.folds)) if not values}
        for key, flag in decided.items():
            if key in given and flag not in unused:
                raise ConfigError(
                    f"{key} is given to all trials, but {flag} sets it for each; leave it out there or here"
                )

    def load_point(self, point: Mapping[str, str]) -> LoadedConfig:
        """The settings of a trial of this point; what is wrong with them is a ConfigError."""
        seed, fold = self.seeds[0] if self.seeds else None, 0 if self.folds else None
        loaded = load_settings(self.words(Trial(0, 0, point, seed, fold)))
        start = loaded.config.START
        for flag, is_set in (("-eval", start.EVAL), ("-check", start.CHECK), ("-resume", start.RESUME)):
            if is_set:
                raise ConfigError(f"{flag}: a sweep trains, and goes on with its own trials; leave it out")
        return loaded

    @cached_property
    def trials(self) -> list[Trial]:
        """The trials in order: all seeds and folds of a point, then those of the next one."""
        folds = range(self.folds) if self.folds else [None]
        products = itertools.product(enumerate(self.points), self.seeds or [None], folds)
        return [Trial(index, number, point, seed, fold) for index, ((number, point), seed, fold) in enumerate(products)]

    @property
    def num_trials(self) -> int:
        return len(self.points) * max(len(self.seeds), 1) * (self.folds or 1)

    def words(self, trial: Trial) -> list[str]:
        """The flags of a trial without those of its folder."""
        options = [f"{key}={value}" for key, value in trial.settings.items()]
        options += [] if trial.fold is None else [f"DATA.FOLD={trial.fold}/{self.folds}"]
        seed = [] if trial.seed is None else ["-seed", str(trial.seed)]
        return [*self.flags, *seed, *(["-opts", *options] if options else [])]

    @cached_property
    def program(self) -> str:
        """The entry of the runs."""
        return "main_multi_gpu.py" if (self.load_point({}).config.START.NGPUS or 1) > 1 else "main_single_gpu.py"

    def command(self, trial: Trial, folder: Path) -> list[str]:
        """The command line of a trial, without the interpreter: it begins the run, or goes on with it."""
        place = ["-output", str(folder), "-name", trial.name, "-resume", "auto"]
        return [str(ROOT / self.program), *self.words(trial), *place]

    def command_of_point(self, point: Mapping[str, str]) -> str:
        """The command of a run with these settings, outside of the sweep."""
        return shlex.join(["python", self.program, *self.words(Trial(0, 0, point))])

    def save(self, folder: Path) -> None:
        with naming(folder):
            write_text(folder / FILE, json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")

    def goes_on(self, former: "Sweep", folder: Path) -> "Sweep":
        """Return the sweep of the folder, `former`, if what is asked for now is the same.

        It is replaced if none of its trials has started, as after a wrong setting.
        """
        if not any((folder / trial.name).exists() for trial in former.trials):
            return self
        names = ("flags", "over", "seeds", "folds", "cwd")
        changed = [name for name in names if getattr(former, name) != getattr(self, name)]
        if changed:
            lines = (f"  {name}: {getattr(former, name)} -> {getattr(self, name)}" for name in changed)
            raise ConfigError(f"-output: {folder} holds another sweep; name another folder:\n" + "\n".join(lines))
        return former


@contextlib.contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Refuse a folder that cannot be written to."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"-output: cannot write to {folder} ({cause_of(error)}); choose another folder") from None


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep, if it is not there; one with other things is refused."""
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FILE).exists() and any(each.name[0] != "." for each in folder.iterdir()):
            raise ConfigError(f"-output: {folder} is not empty and holds no sweep; give a new folder")
        with open(folder / LOCK, "r+b", opener=creating):  # no link or pipe, which somebody put there
            pass


def read_sweep(folder: Path) -> Sweep | None:
    """Return the sweep of a folder; None if it has none."""
    if not (folder / FILE).exists():
        return None
    try:
        facts = json.loads(read_text(folder / FILE))
        if facts.pop("version") != VERSION:
            raise ValueError("it is of another version of halfstep")
        sweep = Sweep(**facts)
        if not sweep.is_whole():
            raise ValueError("its values are not of a sweep")
        return sweep
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}); give -output another folder") from error
