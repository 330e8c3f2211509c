"""Finds the runs to compare, the differences in their data and settings, and the groups that repeat each other."""

import functools
import glob
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import DATA, MACHINE, RECORD, SCALE
from configs.tables import METRICS, TASKS, TaskRow
from configs.values import SETTINGS, of_role, plain
from datasets.pixels.kinds import kind_of_pixels
from datasets.split.together import joined
from engine.evaluation.groups import GroupTest
from engine.evaluation.image_test import ErrorTest, ImageTest
from engine.evaluation.scores import rank_of
from engine.record.saved_files import read_object, read_table, to_number
from engine.record.saved_run import SavedRun, written
from engine.tasks.class_tables import GROUP
from engine.tasks.number_figures import PREDICTED, shares_of_images
from utils.changed_facts import changed_facts
from utils.errors import ConfigError
from utils.runs import FACTS_OF_IMAGES, NUMBERS, SIZES, Identity, folder_of
from utils.text import first_of, one_line

REPETITION = ("SEED", "DATA.FOLD")  # runs that differ in nothing else are one group
# Settings that do not influence the result of a run, such as the location of the data. They do not separate groups.
WITHOUT_EFFECT = {*of_role(MACHINE, RECORD), *(key for key in of_role(DATA) if SETTINGS[key].may_change), "SEED"}
WITHOUT_EFFECT |= {*SCALE}  # these follow from the images, which differ between folds
NAMED_BY_PATH = {"imagefolder", "csv"}  # the name of an image is its path below the folder of the images
MISSING = "-"
LONGEST_NAME = 48  # maximum characters of settings in a group's name
# {run's folder: {(image, label): whether the run was right, or its absolute error for numbers}}
Common = Mapping[Path, Mapping[tuple[str, str], float]]


def find_runs(sources: Sequence[str], fewest: int = 2) -> tuple[list[SavedRun], list[str]]:
    """Return the runs of the sources, and the reasons why others are left out.

    A source is a run's folder, a folder of runs, or a pattern. If a source is a run's folder, it must be readable. In a
    folder of runs, evaluations and runs without a finished epoch are left out.
    """
    runs, left_out = {}, []
    for source in sources:
        for folder, is_named in _folders(source):
            try:
                runs.setdefault(folder.resolve(), SavedRun.open(folder))
            except ConfigError as error:
                if is_named:
                    raise
                left_out.append(f"left out: {error}")
    if len(runs) < fewest:
        problem = "; ".join(["found only one run" if runs else "found no run with a finished epoch", *left_out])
        raise ConfigError(f"{' '.join(sources)}: {problem}; give two or more runs, or a folder that contains them")
    return list(runs.values()), left_out


def _folders(source: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each run up to two levels below `source`, and whether it is `source` itself."""
    path = folder_of(source)
    folders_named = [path] if path.exists() else sorted(map(Path, glob.glob(str(path))))
    if not folders_named:
        raise ConfigError(f"{source}: no such folder; give folders of runs, or a folder that contains them")
    for folder_named in folders_named:
        patterns = ("config.yaml", "*/config.yaml", "*/*/config.yaml")
        inside = next((files for pattern in patterns if (files := sorted(folder_named.glob(pattern)))), [])
        folders = [file.parent for file in inside]
        if not folders and folder_named == path:
            folders = [path]  # open() reports the missing file
        yield from ((folder, folder == path) for folder in sorted(folders, key=_start_of))


def _start_of(folder: Path) -> tuple[str, str]:
    """Return a sort key: the oldest run comes first, as the baseline."""
    known = Identity.of(read_object(folder / "status.json"))
    return known.began if known else "", folder.name


# --- are these the same data? ---


def data_of(run: SavedRun) -> dict[str, str]:
    """Return the facts that identify the data of a run. Only those of the settings are known without status.json."""
    facts = {"DATA.DATASET": str(run.settings["DATA.DATASET"]), "classes": str(run.run_facts.get("classes"))}
    return facts | images_of(run)


def images_of(run: SavedRun) -> dict[str, str]:
    """Return the recorded numbers and digests of the images, their labels and files."""
    recorded = run.run_facts.get("data", {})
    return {fact: str(recorded[fact]) for fact in (*NUMBERS, *FACTS_OF_IMAGES) if fact in recorded}


def other_data(runs: Sequence[SavedRun]) -> list[str]:
    """Return how the data of each run differ from the data of an earlier run."""
    differences = [f"{run.folder} has no record of its data" for run in runs if not images_of(run)]
    for run in runs:
        facts = data_of(run)
        first = next(other for other in runs if _fold_of(other) == _fold_of(run))
        if first is run:
            first = runs[0]
            if folds_of(run) == folds_of(first):  # the other folds of a cross-validation have other images
                facts = {fact: value for fact, value in facts.items() if fact not in images_of(run)}
        if changed := changed_facts(data_of(first), facts):
            texts = [f"{fact} ({values})" for fact, values in changed.items()]
            differences.append(f"{first_of(texts, limit=4)} of {first.folder} and {run.folder}")
    return differences


def _fold_of(run: SavedRun) -> str | None:
    return run.settings["DATA.FOLD"]


def folds_of(run: SavedRun) -> str:
    """Return the number of folds of a run, or ''."""
    return (_fold_of(run) or "").rpartition("/")[2]


@functools.cache
def scored(folder: Path, has_classes: bool) -> dict[tuple[str, str], Any]:
    """Return {(image, label): whether the best weights were right}; {} if single-label predictions are incomplete.

    For numbers, a label is the text of the true numbers, and the value a list of absolute errors.
    """
    rows = read_table(folder / "predictions.csv") if (folder / "results.json").exists() else []
    if rows and not has_classes:
        names = [name for name in rows[0] if f"{name}{PREDICTED}" in rows[0]]
        columns = [[f"{name}{end}" for name in names] for end in ("", PREDICTED)]
        numbers = [[[to_number(row[name]) for name in part] for row in rows] for part in columns]
        true, predicted = np.array(numbers, np.float64)
        images = [(row["image"], "\n".join(row[name] for name in names)) for row in rows]
        sizes = np.abs(predicted - true).tolist()
        return {image: each for image, each in zip(images, sizes, strict=True) if not np.isnan(each).all()}
    if not all("image" in row and "label" in row and to_number(row.get("probability", "")) is not None for row in rows):
        return {}
    return {(row["image"], row["label"]): row["label"] == row.get("prediction") for row in rows}


def groups_in(runs: Sequence[SavedRun], images: Sequence[tuple[str, str]]) -> np.ndarray | None:
    """Return the group of each image by the tables of the runs, or None if each image is a group of its own."""
    columns = []
    for run in runs:
        numbers = {row["image"]: row[GROUP] for row in read_table(run.folder / "predictions.csv") if row.get(GROUP)}
        if numbers:
            columns.append(np.array([numbers.get(image, f"alone {image}") for image, _ in images]))
    return joined(*columns) if columns else None


def task_of(run: SavedRun) -> TaskRow:
    """Return what the model learned. A task of another version counts as classes."""
    return TASKS.get(run.settings["TRAIN.OBJECTIVE"], TASKS["classes"])


def common_images(runs: Sequence[SavedRun]) -> Common:
    """Return for each run whether it was right on the images that all runs have scored with the same label.

    For numbers: the share of each image in the mean absolute error, see `shares_of_images`.
    """
    if not all(have_same_files(runs[0], run) for run in runs[1:]):
        return {run.folder: {} for run in runs}
    tables = {run.folder: scored(run.folder, task_of(run).has_classes) for run in runs}
    common = sorted(set.intersection(*map(set, tables.values())))
    values = {folder: [table[image] for image in common] for folder, table in tables.items()}
    if common and not task_of(runs[0]).has_classes:
        values = {folder: shares_of_images(np.array(errors)).tolist() for folder, errors in values.items()}
    return {folder: dict(zip(common, each, strict=True)) for folder, each in values.items()}


def have_same_files(run: SavedRun, other: SavedRun) -> bool:
    """Return whether an image name means the same file in both runs: the data folder is the same, or a copy.

    A folder counts as a copy if its validation images are the same.
    """
    is_same_folder = run.run_facts.get("data_path") == other.run_facts.get("data_path")
    changed = changed_facts(images_of(run), images_of(other))
    return is_same_folder or not any("validation" in fact for fact in changed)


def image_test(run: SavedRun, other: SavedRun) -> ImageTest | ErrorTest | GroupTest | None:
    """Return the test of two runs on the images that both scored, or None if they have no scored images in common."""
    common = common_images([run, other])
    one, two = common[run.folder], common[other.folder]
    groups = groups_in([run, other], [*one])
    if groups is not None and one:
        differences = np.array([float(two[each]) - float(one[each]) for each in one])
        return GroupTest(differences, groups, is_accuracy=task_of(run).has_classes)
    if one and not task_of(run).has_classes:
        return ErrorTest(np.array([two[each] - one[each] for each in one]))
    only_first, only_second = (
        sum(first[each] > second[each] for each in one) for first, second in ((one, two), (two, one))
    )
    return ImageTest(len(one), only_first, only_second) if one else None


def check_data(runs: Sequence[SavedRun], is_allowed: bool) -> tuple[str, Common | None]:
    """Return a warning about different data, and the images to compare the runs on (None: all images of each run)."""
    differences = first_of(other_data(runs), "; ", limit=4)
    if not differences or is_allowed:
        return (
            differences
            and f"the runs have different data, so their figures are not directly comparable: {differences}",
            None,
        )
    kinds = {run.settings["DATA.DATASET"] for run in runs}
    common = common_images(runs) if len(kinds) == 1 or kinds <= NAMED_BY_PATH else None
    if not (common and common[runs[0].folder]):
        raise ConfigError(
            f"these runs have different data and no validation images in common, so their figures are not comparable; "
            f"they differ in {differences}. Give runs on the same data, or compare them anyway with -any_data"
        )
    most = max(len(scored(run.folder, task_of(run).has_classes)) for run in runs)
    share = f"{len(common[runs[0].folder]):,} of {most:,} images"
    return (
        f"the runs have different data, so they are compared on the {share} that all have scored: {differences}",
        common,
    )


class DataSet(NamedTuple):
    """Runs on the same data, or with validation images in common."""

    runs: list[SavedRun]
    warning: str  # see `check_data`
    common: Common | None

    @property
    def name(self) -> str:
        """Return the folder of the data, or else the kind of data set, with the number of images of the first run."""
        run = self.runs[0]
        place, images = run.run_facts.get("data_path") or run.settings["DATA.DATASET"], images_of(run)
        return ", ".join([place, *(f"{images[number]} {number}" for number in NUMBERS if number in images)])


def by_data(runs: Sequence[SavedRun], is_allowed: bool) -> list[DataSet]:
    """Return the runs of each data set, in the order of their first runs: one data set if `is_allowed`.

    Raise ConfigError if no two runs are comparable.
    """
    try:
        return [DataSet([*runs], *check_data(runs, is_allowed))]
    except ConfigError:
        # Runs on the same data stay together. A run that only shares some validation images with them may join.
        members = _joined([[run] for run in runs], lambda both: not other_data(both))
        members = _joined(members, _are_comparable)
        if max(map(len, members)) < 2:
            raise
    return [
        DataSet(members_of_one, *check_data(members_of_one, is_allowed))
        if len(members_of_one) > 1
        else DataSet(members_of_one, "", None)
        for members_of_one in members
    ]


def _joined(parts: Sequence[list[SavedRun]], fits: Callable[[list[SavedRun]], bool]) -> list[list[SavedRun]]:
    """Return the parts, each joined with the first earlier one with which it fits."""
    joined: list[list[SavedRun]] = []
    for part in parts:
        host = next((other for other in joined if fits([*other, *part])), None)
        if host is None:
            joined.append([*part])
        else:
            host.extend(part)
    return joined


def _are_comparable(runs: Sequence[SavedRun]) -> bool:
    try:
        check_data(runs, is_allowed=False)
    except ConfigError:
        return False
    return True


# --- groups of repeated runs ---


def identity_of(run: SavedRun) -> dict[str, str]:
    """Return {setting or fact: value as text, without credentials} of everything that influences the result of a run.

    Seed and fold are left out, since they tell repetitions apart. With folds, the facts about images differ too.
    A setting without effect, such as PATCH_SIZE of a timm model, gets its default.
    """
    values = {key: plain(SETTINGS[key].default) if is_idle(key, run) else each for key, each in run.settings.items()}
    left_out = without_effect(run)
    identity = {key: written(value) for key, value in values.items() if key not in left_out}
    identity["DATA.DATA_PATH"] = written(run.run_facts.get("data_path", run.settings["DATA.DATA_PATH"]))
    if fold := _fold_of(run):
        identity["DATA.FOLD"] = folds_of(run)
    if "images_per_update" in run.run_facts:
        identity["images_per_update"] = str(run.run_facts["images_per_update"])
    return identity | ({} if fold else images_of(run))


def without_effect(run: SavedRun) -> set[str]:
    """Return the settings that do not tell runs apart."""
    return WITHOUT_EFFECT.union(kind_of_pixels(run.settings["DATA.PIXELS"]).measured)


def is_idle(key: str, run: SavedRun) -> bool:
    """Return whether a setting has no effect in a run, because of another setting."""
    return key in SETTINGS and not SETTINGS[key].has_effect(run.settings)


def differing(runs: Sequence[SavedRun]) -> dict[str, list[str]]:
    """Return {setting or fact that differs between the runs: its value in each run, MISSING if it has no effect}."""
    identities = [identity_of(run) for run in runs]
    settings = dict.fromkeys((key for run in runs for key in run.settings if key not in without_effect(run)), MISSING)
    known, changes = {}, {}
    for identity in identities:
        values = settings | identity
        changes |= changed_facts(known, values)
        known = values | known
    return {
        key: [_shown(run, key, identity.get(key, MISSING)) for run, identity in zip(runs, identities, strict=True)]
        for key in known
        if key in changes
    }


def _shown(run: SavedRun, fact: str, value: str) -> str:
    """Return a value as it is shown: MISSING for a setting without effect, a digest for 64 file sizes."""
    if value == MISSING or is_idle(fact, run):
        return MISSING
    return hashlib.sha256(value.encode()).hexdigest()[:12] if fact.startswith(SIZES) else value


@dataclass(frozen=True)
class Group:
    """Runs that differ only in seed and fold."""

    number: int  # counted from 1
    settings: dict[str, str]  # the settings that differ between groups, with their values in this group
    runs: list[SavedRun]
    metric: str
    common: Common | None = None  # the images to compare; None: all images

    @cached_property
    def name(self) -> str:
        """Return the group's number, with its settings if they are short, or else with the folder of its first run."""
        parts = [f"{key.rpartition('.')[2]} {value}" for key, value in self.settings.items() if value != MISSING]
        title = one_line(", ".join(parts))
        name = title if title and len(title) <= LONGEST_NAME else one_line(self.runs[0].folder.resolve().name)
        return f"{self.number}: {name}"

    @cached_property
    def repetitions(self) -> list[Any]:
        """Return a key for each run: seed and fold, plus the folder if an earlier run has the same seed and fold."""
        keys: list[Any] = []
        for run in self.runs:
            key = tuple(str(run.settings[name]) for name in REPETITION)
            keys.append(key if key not in keys else (*key, str(run.folder)))
        return keys

    @cached_property
    def best(self) -> dict[Any, float]:
        """Return {repetition: best value of the metric} for the runs that measured it."""
        values = zip(self.repetitions, map(self.best_of, self.runs), strict=True)
        return {key: value for key, value in values if value is not None}

    def best_of(self, run: SavedRun) -> float | None:
        """Return the run's best value of the metric, or None if it was never measured."""
        if self.common is not None:
            mean = float(np.mean([*self.common[run.folder].values()]))
            return 100 * mean if task_of(run).has_classes else mean
        if run.metric == self.metric:
            return run.best.value if run.best.exists else None
        names = [f"eval_{self.metric}{suffix}" for suffix in run.suffixes]
        values = [row[name] for row in run.epochs for name in names if row.get(name) is not None]
        return max(values, key=lambda value: rank_of(self.metric, value, 0.0), default=None)


def group_runs(runs: Sequence[SavedRun], metric: str | None, common: Common | None = None) -> list[Group]:
    """Return the groups in the order of their first runs.

    Without `metric`, the metric of the runs is used, or top-1 if the runs have different metrics. For `common` images,
    only top-1 is known, or the MAE of numbers.
    """
    known = task_of(runs[0]).metric_of_images
    chosen = {run.metric for run in runs} if common is None else {known}
    compared = metric or (chosen.pop() if len(chosen) == 1 else known)
    if common is not None and compared != known:
        raise ConfigError(
            f"-metric {metric}: these runs use different data, and on their common images only {known} is known; leave "
            "-metric out, or add -any_data"
        )
    without = [run for run in runs if not any(f"eval_{compared}" in row for row in run.epochs)]
    if without and metric:
        name = f"{without[0].folder} has no {METRICS[metric].title}"
        raise ConfigError(f"-metric {metric}: {name}; choose another metric, or leave the run out")
    settings = differing(runs)
    members: dict[tuple[str, ...], list[SavedRun]] = {}
    for run, *values in zip(runs, *settings.values(), strict=True):
        members.setdefault(tuple(values), []).append(run)
    return [
        Group(
            number,
            _settings_of(members_of_group, dict(zip(settings, values, strict=True))),
            members_of_group,
            compared,
            common,
        )
        for number, (values, members_of_group) in enumerate(members.items(), start=1)
    ]


def _settings_of(runs: Sequence[SavedRun], settings: dict[str, str]) -> dict[str, str]:
    """Return the settings of a group as they are shown: with its folds instead of their number."""
    folds = sorted({fold for run in runs if (fold := _fold_of(run))})
    return settings | {"DATA.FOLD": first_of(folds)} if folds and "DATA.FOLD" in settings else settings
