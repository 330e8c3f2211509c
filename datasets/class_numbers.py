"""The number of each class: by DATA.CLASSES, by a checkpoint, or by the labels; and files with the names of classes."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.image_set import Table
from datasets.types import SavedData
from utils.errors import ConfigError, DataError, cause_of, did_you_mean
from utils.files import read_names
from utils.text import counted, first_of, plural, warning

LINE_END = re.compile(r"\r\n?|\n")

Numbered = tuple[list[Table], list[str]]  # the parts, and lines for the log


def number_classes(config: Config, parts: list[Table], saved: SavedData | None, only_validation: bool) -> Numbered:
    """Number the classes of all parts in the same way.

    Use the numbers of the checkpoint that is resumed or evaluated. Without a checkpoint, use the order of DATA.CLASSES,
    and without this file the order of the data: class names that are numbers are sorted by value, and labels that are
    numbers are the class numbers, except that 1 to N become 0 to N - 1.
    """
    lines: list[str] = []
    if config.DATA.CLASSES:
        parts, lines = _number_by_list(config, parts, only_validation)
    elif not (saved and saved.classes):
        may_change_numbers = not (only_validation or config.MODEL.NUM_CLASSES or parts[0].makes_batches)
        parts, lines = _number_by_labels(parts, may_change_numbers)
    if saved and saved.classes:
        parts, more = _number_by_checkpoint(config, parts, saved.classes, only_validation)
        lines = [*lines, *more]
    if parts[0].meaning.labels_are == "names":
        lines = [*lines, *_warn_of_similar_names(parts[0].classes)]
    return parts, lines


def renumber(parts: list[Table], classes: Sequence[str]) -> list[Table]:
    """Number the classes of all parts as in `classes`, which must include the class of every image."""
    lookup = np.array(_numbers_in(classes, parts[0]), dtype=np.int32)
    parts = [replace(part, classes=list(classes)) for part in parts]
    if np.array_equal(lookup, np.arange(len(lookup))):
        return parts  # without a copy, because all processes share the targets of an index
    renumbered = []
    for part in parts:
        meaning, targets = part.meaning.renumber(part.targets, lookup)
        renumbered.append(replace(part, meaning=meaning, targets=targets))
    return renumbered


def _numbers_in(classes: Sequence[str], part: Table) -> list[int]:
    """Return the number in `classes` of each class of the data, or -1 if it is missing."""
    if part.meaning.labels_are == "numbers" and not are_numbers(classes):
        return [number if number < len(classes) else -1 for number in range(len(part.classes))]
    known = {normalize("NFC", name): number for number, name in enumerate(classes)}
    return [known.get(normalize("NFC", name), -1) for name in part.classes]


def _number_by_list(config: Config, parts: list[Table], only_validation: bool) -> Numbered:
    """Number the classes in the order of DATA.CLASSES."""
    # Each name must be unique, because classes are matched by name.
    classes = read_classes(config.DATA.CLASSES, "DATA.CLASSES", "surrogateescape", may_repeat=False)
    problem = f"DATA.CLASSES: {config.DATA.CLASSES} does not have the classes of the data"
    _refuse_other_classes(parts, classes, problem, "add them to the file", may_lack=True)
    parts = renumber(parts, classes)
    if parts[0].meaning.labels_are == "numbers":  # the file has given them names
        parts = [replace(part, meaning=replace(part.meaning, labels_are="listed", folders=())) for part in parts]
    unused = _unused_classes(parts)
    if only_validation or not unused:
        return parts, []
    return parts, [
        warning(f"{config.DATA.CLASSES} names {counted(len(unused), 'class')} that no image has: {first_of(unused)}")
    ]


def _number_by_labels(parts: list[Table], may_change_numbers: bool) -> Numbered:
    """Number the classes of a new run."""
    classes, meaning = parts[0].classes, parts[0].meaning
    if meaning.labels_are == "names" and are_numbers(classes):
        by_value = sorted(classes, key=lambda name: (int(name), name))
        if by_value != classes:  # so that 9 comes before 10
            line = f"class names are numbers, so they are sorted by value: {first_of(by_value)}"
            return renumber(parts, by_value), [line]
    if meaning.labels_are != "numbers":
        return parts, []
    if meaning.folders:
        names = first_of(meaning.folders)
        line = f"the labels are numbers; their classes get the names of their folders: {names}"
        return renumber(parts, meaning.folders), [line]
    unused = _unused_classes(parts) if may_change_numbers else []
    if unused == ["0"]:
        line = f"the labels are the numbers from 1 to {classes[-1]}, so there is no class 0"
        return renumber(parts, classes[1:]), [line]
    if not unused:
        return parts, []
    return parts, [
        warning(
            f"the labels are numbers and mean the classes from 0 to {classes[-1]}, of which {len(unused):,} have no "
            f"image: {first_of(unused)}; if these classes do not exist, number the others without gaps, or write names"
        )
    ]


def _number_by_checkpoint(config: Config, parts: list[Table], classes: list[str], only_validation: bool) -> Numbered:
    """Number the classes as in the checkpoint that is resumed or evaluated."""
    lines, has_numbers = [], parts[0].meaning.labels_are == "numbers"
    new, gone = _differences(parts, classes)
    may_be_renamed = len(new) == len(gone) == 1 and not has_numbers
    if may_be_renamed and config.RESUME.allows("CLASS_NAMES"):
        classes = [new[0] if name == gone[0] else name for name in classes]
        lines.append(f"class {gone[0]} is now called {new[0]} (RESUME.ALLOW_CHANGED)")
    problem = f"DATA.DATA_PATH: {config.DATA.DATA_PATH} does not have the {plural(config.task.noun)} of the checkpoint"
    remedy = "start a new run from the checkpoint's weights with -pretrained"
    if only_validation:
        remedy = "give images of every class of the checkpoint (images of other classes are then left out)"
    if may_be_renamed:
        remedy += "; if a class was only renamed: -opts RESUME.ALLOW_CHANGED=[CLASS_NAMES]"
    # Labels that are numbers always leave gaps.
    _refuse_other_classes(parts, classes, problem, remedy, may_lack=only_validation or has_numbers)
    if has_numbers and not are_numbers(classes):
        names = first_of([f"{number} is {name}" for number, name in enumerate(classes)])
        lines.append(f"the labels are numbers, read as the class numbers of the checkpoint: {names}")
    return renumber(parts, classes), lines


def without_new_classes(part: Table, saved: SavedData) -> Table:
    """Leave out the images of classes that were added since the checkpoint. `left_out` of the result counts them.

    If a class of the checkpoint is missing, an added class may be that class under another name. Then all images stay,
    and the numbering refuses them.
    """
    if not (saved.classes and part.meaning.has_one_name):
        return part
    new, gone = _differences([part], saved.classes)
    counts = dict(zip(part.classes, part.count_classes().tolist(), strict=True))
    left_out = {name: counts[name] for name in new if counts[name]}
    if gone or not left_out:
        return part
    kept = part.take(np.flatnonzero(~part.with_any(np.array([part.classes.index(name) for name in left_out]))))
    names = first_of([f"{name} ({count:,})" for name, count in left_out.items()])
    images = counted(sum(left_out.values()), "image")
    line = warning(f"{images} of classes that the checkpoint does not know are left out and not scored: {names}")
    return replace(kept, left_out=left_out, notes=(*kept.notes, line))


def _unused_classes(parts: list[Table]) -> list[str]:
    """Return the classes that no image has."""
    return [parts[0].classes[number] for number in np.flatnonzero(sum(part.count_classes() for part in parts) == 0)]


def _differences(parts: list[Table], classes: list[str]) -> tuple[list[str], list[str]]:
    """Return the classes of the data that are not in `classes`, and the classes that the data lacks."""
    numbers = _numbers_in(classes, parts[0])
    known = set(numbers)
    new = [name for name, number in zip(parts[0].classes, numbers, strict=True) if number < 0]
    return new, [name for number, name in enumerate(classes) if number not in known]


def _refuse_other_classes(parts: list[Table], classes: list[str], problem: str, remedy: str, may_lack: bool) -> None:
    """Raise DataError if the classes of the parts differ from `classes`.

    `problem` and `remedy` are the start and the end of the message. With `may_lack`, the parts may lack some of
    `classes`, and their own classes without images do not count.
    """
    names = parts[0].classes
    new, gone = _differences(parts, classes)
    if may_lack:
        used = {names[target] for part in parts for target in np.flatnonzero(part.count_classes())}
        new, gone = [name for name in new if name in used], []
    if new or gone:
        changes = [f"{change}: {first_of(changed)}" for change, changed in (("new", new), ("gone", gone)) if changed]
        raise DataError(
            f"{problem}: {counted(len(names), 'class')} in the data, {len(classes)} known ({'; '.join(changes)}); "
            f"rename them to match, or {remedy}{did_you_mean(new[0], classes) if new else ''}"
        )


def _warn_of_similar_names(classes: Sequence[str]) -> list[str]:
    """Warn about names that probably mean the same class, such as cat and Cat, or maine_coon and Maine Coon."""
    spellings: dict[str, list[str]] = {}
    for name in classes:
        plain = normalize("NFC", name).casefold().replace("_", " ").replace("-", " ")
        spellings.setdefault(" ".join(plain.split()), []).append(name)
    alike = [" and ".join(names) for names in spellings.values() if len(names) > 1]
    if not alike:
        return []
    return [warning(f"these are read as different classes: {first_of(alike)}; if they are the same, rename one")]


# --- files with the names of classes ---


def read_classes(name: str, title: str, errors: str = "strict", may_repeat: bool = True) -> list[str]:
    """Return the class names in a text file. `title`: the setting or flag that names the file."""
    try:
        text = read_names(Path(name).expanduser(), errors)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{title}: {name} cannot be read ({cause_of(error)}); name a text file of class names"
        ) from None
    return classes_in(text, f"{title}: {name}", may_repeat)


def classes_in(text: str, where: str, may_repeat: bool = True) -> list[str]:
    """Return the class name of each line. Raise ConfigError if one is empty or, unless `may_repeat`, repeated."""
    classes = [line.strip() for line in LINE_END.split(text.rstrip())]
    seen = set()
    for number, name in enumerate(classes, 1):
        if not name or (name in seen and not may_repeat):
            raise ConfigError(
                f"{where}, line {number} is empty{'' if may_repeat else ' or repeats a name'}; each line must be the "
                "name of a class, starting with class 0"
            )
        seen.add(name)
    return distinct(classes)


def are_numbers(classes: Sequence[str]) -> bool:
    """Return whether all names are numbers."""
    return all(name.isdecimal() for name in classes)


def distinct(classes: list[str]) -> list[str]:
    """Append the class number to each repeated name. For example, ImageNet has two classes called crane."""
    counts = Counter(classes)
    return [f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(classes)]
