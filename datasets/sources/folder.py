"""`imagefolder`: images in class folders, also for the other data sets with that layout."""

import contextlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.class_numbers import read_classes
from datasets.image_set import Table
from datasets.index import ENDING, TEXT, Index, IndexBuilder, encoded, index_paths, open_or_build
from datasets.pixels import Pixels
from datasets.pixels.decode import IMAGE_ENDINGS, READ_BY
from datasets.pixels.kinds import hint_of_formats, kind_of_pixels, readers
from datasets.sources.images import FileStorage, is_within, natural
from datasets.sources.layout import (
    TEST_NAME,
    TRAIN_NAMES,
    VAL_NAMES,
    choose_parts,
    data_root,
    expected_layout,
    own_split,
    path_below_data,
)
from datasets.targets.one_class import OneClass
from datasets.types import SavedData
from utils.commands import page, pip
from utils.errors import ConfigError, DataError
from utils.runs import has_files_of_run, is_run_folder
from utils.text import counted, first_of, warning

SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # folders of copies or thumbnails, in a Mac's zip files and on network disks
RUNS = "folders of runs"
DATE = re.compile(r"(19|20)\d\d([-_. ]?\d{1,2}){0,2}(\D|$)")  # matches 2024, 2024-05-01, 20240501 birthday
# what is left out without a warning: files with these endings, and runs
NO_IMAGES = (".txt", ".md", ".json", ".xml", ".csv", ".html", ".db", ".ini", RUNS)
MOST_STRAY = 20  # the most images that may lie next to the folders of a data set
COLUMNS = {"path": TEXT, "target": "<i4", "folder": TEXT, "date": "<i8"}  # two for images, two for folders
INDEX_FILE = f"images{ENDING}"  # a file, because other programs would read a folder here as one more class
EXPECTS = "train/ and val/ (or valid/, validation/, test/) with a folder per class, or a folder per class and no split"


def read_image_folder(config: Config, only_validation: bool) -> tuple[Table | None, Table | None]:
    """Return the images of train/ and val/, or of one folder of class folders and None."""
    root = unwrapped(data_root(config.DATA, EXPECTS), (*TRAIN_NAMES, *VAL_NAMES))
    parts = choose_parts(classes := class_folders(root))
    if parts.train or parts.val:
        return read_split_folders(config, root, EXPECTS, only_validation)
    images = read_class_folders(config, root, classes)
    return replace(images, split={"training": str(root)}, doubt=_why_no_classes(root, classes)), None


def _why_no_classes(root: Path, names: list[str]) -> str:
    """Explain why these folders seem to be data sets instead of classes. Return "" if they do not.

    A class has images, or its images one folder deeper, or in folders by date.
    """
    several: dict[str, list[str]] = {}  # {folder with several subfolders: these}
    for name in names:
        inside, files = _listed(root / name)
        num_images = sum(map(_is_image, files))
        if num_images > MOST_STRAY:
            return ""
        folders = [each for each in inside if not is_run_folder(root / name / each)]
        if num_images >= max(len(folders), 1):
            return ""
        if len(folders) > 1:
            several[name] = folders
    if not several or all(DATE.match(folder) for folders in several.values() for folder in folders):
        return ""
    first, folders = next(iter(several.items()))
    inner = shlex.quote(str(root / first))
    return (
        f"DATA.DATA_PATH: {root / first} contains folders ({first_of(folders, limit=4)}) instead of images, so "
        f"the path seems to be one folder too high; name {inner} instead, as in halfstep train {inner} or with "
        f"-data_path {inner}, or, if {first_of(names, limit=4)} are the classes, list them in a file: -opts "
        "DATA.CLASSES=classes.txt"
    )


def read_split_folders(config: Config, root: Path, expects: str, only_validation: bool) -> tuple[Table | None, Table]:
    """Read the folders with training and validation images."""
    parts = choose_parts(names := _listed(root)[0])
    if not (parts.val and parts.suffice(only_validation)):
        missing = "train" if parts.val else "val"
        others = f", only {first_of(names, limit=3)}" if names else ""
        raise DataError(
            f"DATA.DATA_PATH: {root} has no folder {missing}/{others}; {expected_layout(config.DATA, expects)}; to "
            "hold out some images of a folder of class folders, use -dataset imagefolder with its path"
        )
    train_folder = unwrapped(root / parts.train) if parts.train else None
    classes = class_folders(train_folder) if train_folder else []
    val_folder = unwrapped(root / parts.val, classes)
    val_classes = class_folders(val_folder)
    if train_folder and (is_within(train_folder, val_folder) or is_within(val_folder, train_folder)):
        raise DataError(
            f"{val_folder} and {train_folder} are the same folder, or one is inside the other, so validation would "
            "score images that were trained on; give validation its own images"
        )
    train = None
    if train_folder and not only_validation:
        train = read_class_folders(config, train_folder, classes, val_classes)
    val = read_class_folders(config, val_folder, val_classes, classes)
    notes = (*parts.notes(only_validation, root), *(train.notes if train else ()), *val.notes)
    return train, replace(val, notes=notes, split=own_split(train_folder, val_folder))


def find_test_folders(val: Table) -> list[Path]:
    """Return the folders test/ beside the training and validation folders of an imagefolder: usually one or none.

    They must have class folders, and only of known classes, so that -eval can read it.
    """
    if val.split.get("rule") != "folders" or not val.is_listing:
        return []
    parent, validation, folders = Path(val.split["training"]).parent, Path(val.split["validation"]), []
    with contextlib.suppress(OSError):  # the folders were moved during the run
        for folder in (parent / name for name in _listed(parent)[0] if name.lower() == TEST_NAME):
            classes = {normalize("NFC", name) for name in subfolders(folder)}
            if classes and classes <= {*val.classes} and not is_within(folder, validation):
                folders.append(folder)
    return folders


def unwrapped(folder: Path, known: Collection[str] = ()) -> Path:
    """Return the folder that contains the class folders. Skip levels with only one folder (a zip file unpacked twice).

    `known`: names of folders that are never skipped, in any Unicode form.
    """
    known = {normalize("NFC", name) for name in known}
    while len(names := subfolders(folder)) == 1 and not {normalize("NFC", names[0]), names[0].lower()} & known:
        inner = folder / names[0]
        if not subfolders(inner) or _count_images(folder) or _count_images(inner):
            break
        folder = inner
    return folder


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders, without run folders and hidden folders."""
    return [name for name in _listed(folder)[0] if not is_run_folder(folder / name)]


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders. Raise DataError if there are none."""
    names = subfolders(folder)
    if not names:
        raise DataError(_why_no_class_folders(folder))
    return names


def _why_no_class_folders(folder: Path) -> str:
    """Return the error message for a folder without class folders: it is empty, or has only files."""
    command = f"halfstep train {shlex.quote(str(folder))}"
    num_images = _count_images(folder)
    if num_images:
        images = f"{counted(num_images, 'image')}, but no class folders"
        return (
            f"{folder}: it has {images}; move the images of each class into a folder of their own, then {command}; if "
            "these images are one class, name the folder above"
        )
    return (
        f"{folder}: it has no class folders and no images; put a folder with the images of each class into it, "
        f"then {command}"
    )


def read_class_folders(
    config: Config, folder: Path, names: list[str], others: Collection[str] = (), deep: bool = True
) -> Table:
    """Read the images of the class folders `names`. `others`: classes of another part. `deep`: also read subfolders."""
    classes = sorted({normalize("NFC", name) for name in (*names, *others)})
    number = {name: index for index, name in enumerate(classes)}
    numbers = [number[normalize("NFC", name)] for name in names]
    endings = (*IMAGE_ENDINGS, *kind_of_pixels(config.DATA.PIXELS).own_endings)
    index = open_or_build(
        index_paths(config, folder / INDEX_FILE),
        COLUMNS,
        {"folders": names, "numbers": numbers, "deep": deep, "endings": endings},
        lambda builder: _build(builder, FolderScan(folder, names, deep, endings), numbers),
        lambda index: _is_unchanged(index, folder),
    )
    left_out = Counter(index.facts["left_out"])
    folders, files = _listed(folder)
    runs = [name for name in {*folders} - {*names} if is_run_folder(folder / name)]
    left_out += Counter({"next to the class folders": sum(map(_is_image, files)), RUNS: len(runs)})
    below = path_below_data(config.DATA, folder)
    return Table(
        FileStorage(folder, index.text("path"), folder=below, index=index),
        index.column("target"),
        classes,
        OneClass(labels_are="names"),
        notes=tuple(describe_left_out(folder, left_out)),
        is_listing=True,
    )


def _is_unchanged(index: Index, folder: Path) -> bool:
    """Return whether the dates of the folders show that no image was added, renamed or removed after indexing."""
    folders = (os.fsdecode(each) for chunk in index.text("folder").chunks() for each in chunk)
    dated = zip(folders, index.column("date").tolist(), strict=True)
    try:
        return all(_date(folder, each) == date for each, date in dated)
    except OSError:
        return False


def _date(root: Path, folder: str) -> int:
    return os.stat(os.path.join(root, folder)).st_mtime_ns


def _build(builder: IndexBuilder, scan: "FolderScan", numbers: list[int]) -> dict:
    """Add the images of the class folders to the index. `numbers`: the class number of each folder."""
    for name, number in zip(scan.names, numbers, strict=True):
        paths = scan.images_below(name)
        builder.add("path", encoded(paths))
        builder.add("target", np.full(len(paths), number))
    builder.add("folder", encoded(scan.folders))
    builder.add("date", np.array(scan.dates))
    return {"left_out": scan.left_out}


class FolderScan:
    """Finds the images of class folders, and counts the files that it leaves out, by reason."""

    def __init__(self, root: Path, names: list[str], deep: bool = True, endings: tuple[str, ...] = IMAGE_ENDINGS):
        self.root, self.names, self.deep, self.endings = root, names, deep, endings
        self.left_out = Counter()
        self.folders: list[str] = []  # listed folders, relative to the root
        self.dates: list[int] = []  # dates of these folders before they were listed
        self._linked = set()  # real paths of linked folders that are read
        for name in names:
            if not self._is_read(name):
                raise DataError(
                    f"{root / name} is a link to another class folder, so its images would have two classes; remove it"
                )

    def images_below(self, name: str) -> list[str]:
        """Return the paths of a class's images relative to the root, sorted because file systems differ in order."""
        paths, others, waiting = [], Counter(), [name]
        while waiting:
            inside = waiting.pop()
            date = _date(self.root, inside)
            folders, files = _listed(self.root / inside)
            if inside != name and has_files_of_run(files):
                others[RUNS] += 1
                continue
            self.folders.append(inside)
            self.dates.append(date)
            below = f"{inside}/" if inside else ""  # os.path.join would take most of the scan's time
            if inside == name:
                self._refuse_repeated(name, folders)
            if self.deep:
                waiting += [f"{below}{each}" for each in reversed(folders) if self._is_read(f"{below}{each}")]
            for file in files:
                if _is_image(file, self.endings):
                    paths.append(f"{below}{file}")
                elif not file.startswith("."):
                    others[os.path.splitext(file)[1].lower() or "without ending"] += 1
        if not paths:
            reason = f", only what is not read ({first_of(sorted(others))})" if others else ""
            reason += hint_of_formats(others)
            if RUNS in others:
                reason += "; keep runs elsewhere (-output)"
            raise DataError(
                f"{self.root / name}: no images in this folder{reason}; add some ({' '.join(IMAGE_ENDINGS)}) or "
                "remove it"
            )
        self.left_out += others
        return sorted(paths)

    def _is_read(self, folder: str) -> bool:
        """Return whether to enter a folder. A link into the data, or a second link to a folder, would repeat images."""
        path = os.path.join(self.root, folder)
        if not os.path.islink(path):
            return True
        target = os.path.realpath(path)
        if target in self._linked or is_within(self.root, target) or is_within(target, self.root):
            self.left_out["links to folders that are already read"] += 1
            return False
        self._linked.add(target)
        return True

    def _refuse_repeated(self, name: str, folders: list[str]) -> None:
        repeated = sorted({*folders} & {*self.names})
        if len(repeated) > 1:
            raise DataError(
                f"{self.root / name}: this class folder has subfolders named like other classes "
                f"({first_of(repeated)}), as if a zip file was unpacked twice; remove it, or rename the subfolders"
            )


def images_for_any_model(folder: Path, report: Callable[[str], object]) -> list[str]:
    """Return all images in and below a folder, 2.jpg before 10.jpg. Report which files are left out."""
    scan = FolderScan(folder, [], endings=(*IMAGE_ENDINGS, *readers()))
    images = sorted(scan.images_below(""), key=natural)
    for line in describe_left_out(folder, scan.left_out):
        report(line)
    return images


def images_among(paths: list[str], pixels: Pixels, report: Callable[[str], object]) -> list[str]:
    """Return the paths of the images among the files of a folder, which was listed before the model was known."""
    names_of_kinds = {ending: kind.name for ending, kind in readers().items() if ending not in pixels.own_endings}
    kept = [path for path in paths if not path.lower().endswith(tuple(names_of_kinds))]
    left_out = [path.lower() for path in {*paths}.difference(kept)]
    names = sorted({name for ending, name in names_of_kinds.items() if any(path.endswith(ending) for path in left_out)})
    why = f"that only a model with DATA.PIXELS={' or '.join(names)} takes"
    if not kept and paths:
        raise ConfigError(f"none of {counted(len(paths), 'file')} is an image for this model: left out those {why}")
    if left_out:
        report(f"left out {counted(len(paths) - len(kept), 'file')} {why}")
    return kept


def refuse_doubtful(config: Config, saved: SavedData | None, whole: Table) -> None:
    """Raise DataError if the folders do not look like classes, unless settings or the earlier run name them all."""
    if not whole.doubt:
        return
    if config.DATA.CLASSES:
        known = read_classes(config.DATA.CLASSES, "DATA.CLASSES", "surrogateescape", may_repeat=False)
    else:
        known = saved.classes if saved else []
    if not {*whole.classes} <= {normalize("NFC", name) for name in known}:
        raise DataError(whole.doubt)


def refuse_output_inside(parts: Iterable[Table], output: str) -> None:
    """Raise ConfigError if the output folder is inside a folder from which all images are read."""
    for part in parts:
        links = [Path(entry.path) for entry in os.scandir(part.root) if entry.is_symlink() and _is_folder(entry)]
        # Without train/ and val/, runs directly in the root are not read: run folders next to classes are left out.
        is_beside = part.split.keys() == {"training"} and os.path.realpath(output) == os.path.realpath(part.root)
        place = next((each for each in (part.root, *links) if is_within(each, output)), None)
        if place and not is_beside:
            raise ConfigError(
                f"SAVE: {output} is in {place}, so the run's own pictures would be read as data; choose a folder "
                "outside with -output"
            )


def describe_left_out(root: Path, left_out: Counter) -> list[str]:
    """Describe what is not read, if there is anything. Warn if some of it may be images."""
    if not left_out:
        return []
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(left_out.items()))
    is_heif = any(READ_BY.get(ending) == "pillow_heif" for ending in left_out)
    hint = f"; {pip('install')} pillow-heif reads HEIC" if is_heif else ""
    hint += hint_of_formats(left_out, f" ({page('docs/pixels.md')})")
    line = f"{root}: left out: {reasons}{hint}"
    return [line if all(reason in NO_IMAGES for reason in left_out) else warning(line)]


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders in a folder, without hidden and system ones, and those of the files."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not _is_folder(entry):
                files.append(entry.name)
            elif not entry.name.startswith(".") and entry.name not in SYSTEM_FOLDERS:
                folders.append(entry.name)
    return sorted(folders), files


def _is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder or a link to a folder. Return False for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_image(file: str, endings: tuple[str, ...] = IMAGE_ENDINGS) -> bool:
    return file.lower().endswith(endings) and not file.startswith(".")


def _count_images(folder: Path) -> int:
    """Return the number of images directly in a folder."""
    return sum(map(_is_image, _listed(folder)[1]))


# --- Caltech101 and Caltech256 in the layout of their archives, split by position ---


# The folder with the class folders, the folders that may contain it, and the background class, which is left out.
CALTECH101 = ("101_ObjectCategories", ("", "caltech101", "caltech-101"), "BACKGROUND_Google")
CALTECH256 = ("256_ObjectCategories", ("", "caltech256"), "257.clutter")


def read_caltech(config: Config) -> Table:
    """Return images of 101_ObjectCategories/NAME/image_0001.jpg, or of 256_ObjectCategories/001.NAME/001_0001.jpg."""
    folder, parents, background = CALTECH256 if "256" in config.DATA.DATASET else CALTECH101
    expects = f"the folder {folder}/ with a folder per class"
    root = data_root(config.DATA, expects)
    candidates = [root / parent / folder for parent in parents] + ([root] if root.name == folder else [])
    present = next((each for each in candidates if each.is_dir()), None)
    if present is None:
        raise DataError(f"DATA.DATA_PATH: {root} has no {folder}/; {expected_layout(config.DATA, expects)}")
    # Subfolders are not read, because the dog folder of Caltech256 contains a stray folder with other images.
    classes = [name for name in class_folders(present) if name != background]
    images = read_class_folders(config, present, classes, deep=False)
    return replace(images, split={"rule": "position", "training": str(present)})
