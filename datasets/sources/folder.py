"""`imagefolder`: images in class folders, also for the other data sets with that layout."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from unicodedata import normalize

import numpy as np

from configs.schema import Config
from datasets.index import ENDING, TEXT, Index, IndexBuilder, encoded, index_paths, open_or_build
from datasets.sources.images import FileImages, is_within
from datasets.sources.root import (
    TRAIN_NAMES,
    VAL_NAMES,
    choose_parts,
    data_root,
    expected_layout,
    own_split,
    path_below_data,
)
from datasets.transforms.decode import IMAGE_ENDINGS, READ_BY
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError, did_you_mean
from utils.runs import has_files_of_run, is_run_folder
from utils.text import counted, first_of

SYSTEM_FOLDERS = ("__MACOSX", "@eaDir")  # folders of copies or thumbnails, in a Mac's zip files and on network disks
RUNS = "folders of runs"
DATE = re.compile(r"(19|20)\d\d([-_. ]?\d{1,2}){0,2}(\D|$)")  # matches 2024, 2024-05-01, 20240501 birthday
# endings of files that are left out without a warning
NO_IMAGES = (".txt", ".md", ".json", ".xml", ".csv", ".html", ".db", ".ini")
MOST_STRAY = 20  # the most images that may lie next to the folders of a data set
COLUMNS = {"path": TEXT, "target": "<i4", "folder": TEXT, "date": "<i8"}  # two for images, two for folders
INDEX_FILE = f"images{ENDING}"  # a file, because other programs would read a folder here as one more class
EXPECTS = "train/ and val/ (or valid/, validation/, test/) with a folder per class, or a folder per class and no split"


def read_image_folder(config: Config, say: Callable = print) -> tuple[ImageSet | None, ImageSet | None]:
    """Return the images of train/ and val/, or of one folder of class folders and None."""
    root = unwrapped(data_root(config.DATA, EXPECTS), (*TRAIN_NAMES, *VAL_NAMES))
    parts = choose_parts(classes := class_folders(root))
    if parts.train or parts.val:
        return read_split_folders(config, root, EXPECTS)
    image_set = read_class_folders(config, root, classes, classes)
    image_set.split, image_set.doubt = {"training": str(root)}, _why_no_classes(root, classes)
    return image_set, None


def _why_no_classes(root: Path, names: list[str]) -> str:
    """Explain why these folders seem to be data sets instead of classes. Return "" if they do not.

    A class has images, or its images one folder deeper, or in folders by date.
    """
    several: dict[str, list[str]] = {}  # {folder with several subfolders: these}
    for name in names:
        folders, num_images = [], 0
        for entry in os.scandir(root / name):
            if _is_image(entry.name) and entry.is_file():
                num_images += 1
                if num_images > MOST_STRAY:
                    return ""
            elif _is_folder(entry) and not _is_skipped(entry.name) and not is_run_folder(entry.path):
                folders.append(entry.name)
        if num_images >= max(len(folders), 1):
            return ""
        if len(folders) > 1:
            several[name] = sorted(folders)
    if not several or all(DATE.match(folder) for folders in several.values() for folder in folders):
        return ""
    first, folders = next(iter(several.items()))
    return (
        f"DATA.DATA_PATH: {root / first} holds {len(folders):,} folders of images ({first_of(folders, limit=4)}), and the "
        f"other folders of {root} are similar, so -data_path seems to be one folder too high. Name the folder that contains "
        f"the class folders, as in -data_path {shlex.quote(str(root / first))}; if {first_of(names, limit=4)} are the "
        "classes, list them in a file: -opts DATA.CLASSES=classes.txt"
    )


def read_split_folders(config: Config, root: Path, expects: str) -> tuple[ImageSet | None, ImageSet]:
    """Read the folders with training and validation images. The classes are the folders of the training images."""
    parts = choose_parts(subfolders(root))
    parts = parts._replace(unread=sorted([*parts.unread, *_runs_in(root)]))
    if not parts.val or not (parts.train or config.START.EVAL):
        missing = "train" if parts.val else "val"
        hint = ""
        if parts.train:
            hint = f"; to hold out a part of {parts.train}/, use -dataset imagefolder -data_path {root / parts.train}"
        raise DataError(
            f"DATA.DATA_PATH: {root} has no folder {missing}/; {expected_layout(config.DATA, expects)}{hint}"
        )
    train_folder = unwrapped(root / parts.train) if parts.train else None
    classes = class_folders(train_folder) if train_folder else []
    val_folder = unwrapped(root / parts.val, classes)
    val_classes = class_folders(val_folder)
    if train_folder:
        _check_classes(train_folder, classes, val_folder, val_classes)
    train = (
        read_class_folders(config, train_folder, classes, classes) if train_folder and not config.START.EVAL else None
    )
    val = read_class_folders(config, val_folder, val_classes, classes or val_classes)
    val.notes = (*parts.notes(config, root), *(train.notes if train else ()), *val.notes)
    val.split = own_split(train_folder, val_folder)
    return train, val


def _check_classes(train_folder: Path, classes: list[str], val_folder: Path, val_classes: list[str]) -> None:
    """Raise DataError if a validation class is not trained, or if a folder is in both parts."""
    known = {normalize("NFC", name) for name in classes}
    for name in val_classes:
        if normalize("NFC", name) not in known:
            raise DataError(
                f"{val_folder / name}: this class has no folder in {train_folder}, so it would never be trained; "
                f"rename it, remove it, or add its training images{did_you_mean(name, classes)}"
            )
    for name in ("", *val_classes):
        train, val = train_folder / name, val_folder / name
        if train.exists() and (is_within(train, val) or is_within(val, train)):
            raise DataError(
                f"{val} and {train} are the same folder, or one is inside the other, so validation would score images "
                "that were trained on; give validation its own images"
            )


def unwrapped(folder: Path, known: tuple[str, ...] | list[str] = ()) -> Path:
    """Return the folder that contains the class folders. Skip levels with only one folder (a zip file unpacked twice).

    `known`: names of folders that are never skipped, in any Unicode form.
    """
    known = {normalize("NFC", name) for name in known}
    while len(names := subfolders(folder)) == 1 and not {normalize("NFC", names[0]), names[0].lower()} & known:
        inner = folder / names[0]
        if not subfolders(inner) or _images_in(folder) or _images_in(inner):
            break
        folder = inner
    return folder


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the subfolders, without run folders and hidden folders."""
    return sorted(name for name in _all_folders(folder) if not is_run_folder(folder / name))


def _all_folders(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder) if entry.is_dir() and not _is_skipped(entry.name)]


def _runs_in(folder: Path, others: Collection[str] = ()) -> list[str]:
    """Return the sorted names of the run folders in a folder. `others`: folders that are known not to be runs."""
    return sorted(name for name in {*_all_folders(folder)} - {*others} if is_run_folder(folder / name))


def class_folders(folder: Path) -> list[str]:
    """Return the sorted names of the class folders. Raise DataError if there are none."""
    names = subfolders(folder)
    if not names:
        raise DataError(f"{folder}: no class folders; images must be in one folder per class")
    return names


def read_class_folders(
    config: Config, folder: Path, names: list[str], classes: list[str], deep: bool = True
) -> FileImages:
    """Read the images of the class folders `names`. `classes`: all class folders; the sorted classes give the numbers.
    `deep`: also read subfolders."""
    folder_of = {normalize("NFC", name): name for name in classes}
    if twice := next((name for name in classes if folder_of[normalize("NFC", name)] != name), None):
        raise DataError(
            f"{folder / twice}: another class folder has the same name in another Unicode form; merge the two"
        )
    classes = sorted(folder_of)
    number = {name: index for index, name in enumerate(classes)}
    numbers = [number[normalize("NFC", name)] for name in names]
    index = open_or_build(
        index_paths(config, folder / INDEX_FILE),
        COLUMNS,
        {"folders": names, "numbers": numbers, "deep": deep},
        lambda builder: _build(builder, FolderScan(folder, names, deep), numbers),
        lambda index: _is_unchanged(index, folder),
    )
    left_out = Counter(index.facts["left_out"])
    num_runs = left_out.pop(RUNS, 0)
    if beside := _images_in(folder):
        left_out["next to the class folders"] = beside
    image_set = FileImages(folder, index.text("path"), index.column("target"), classes, PixelRules.of(config.DATA))
    image_set.folder = path_below_data(config.DATA, folder)
    image_set.index, image_set.classes_are_names, image_set.is_listing = index, True, True
    image_set.notes = tuple(describe_left_out(folder, left_out))
    image_set.notes += tuple(_describe_runs(folder, _runs_in(folder, names), num_runs))
    return image_set


def _describe_runs(root: Path, beside: list[str], num_inside: int) -> list[str]:
    """Describe the run folders next to the class folders and inside them. Their pictures are not read."""
    found = [f"next to the classes: {first_of(beside)}"] * bool(beside)
    found += [f"inside them: {num_inside}"] * bool(num_inside)
    total = len(beside) + num_inside
    return [f"not read: {counted(total, 'folder')} of runs in {root} ({'; '.join(found)})"] if total else []


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

    def __init__(self, root: Path, names: list[str], deep: bool = True):
        self.root, self.names, self.deep = root, names, deep
        self.left_out = Counter()
        self.folders: list[str] = []  # listed folders, relative to the root
        self.dates: list[int] = []  # dates of these folders before they were listed
        self._linked = set()  # real paths of folders that are read
        for name in names:
            target = os.path.realpath(root / name)
            if target in self._linked:
                raise DataError(
                    f"{root / name} is a link to another class folder, so its images would have two classes; remove it"
                )
            self._linked.add(target)

    def images_below(self, name: str) -> list[str]:
        """Return the paths of a class's images relative to the root, sorted because file systems differ in order."""
        paths, others, waiting = [], Counter(), [name]
        while waiting:
            inside = waiting.pop()
            date = _date(self.root, inside)
            folders, files = self._list(inside)
            if inside != name and has_files_of_run(files):
                others[RUNS] += 1
                continue
            self.folders.append(inside)
            self.dates.append(date)
            folders = [each for each in folders if self.deep and self._is_read(os.path.join(self.root, inside, each))]
            if inside == name:
                self._refuse_repeated(name, folders)
            below = f"{inside}/" if inside else ""  # os.path.join would take most of the scan's time
            waiting += [f"{below}{each}" for each in reversed(folders)]
            for file in files:
                if _is_image(file):
                    paths.append(f"{below}{file}")
                elif not file.startswith("."):
                    others[os.path.splitext(file)[1].lower() or "without ending"] += 1
        if not paths and others.keys() == {RUNS}:
            raise DataError(
                f"{self.root / name}: no images in this folder, only folders of runs; keep runs outside {self.root}, "
                "in another folder (-output)"
            )
        if not paths:
            found = f", only files that are not read ({first_of(sorted(others))})" if others else ""
            raise DataError(
                f"{self.root / name}: no images in this folder{found}; add some ({' '.join(IMAGE_ENDINGS)}) or "
                "remove it"
            )
        self.left_out += others
        return sorted(paths)

    def _list(self, inside: str) -> tuple[list[str], list[str]]:
        """Return the sorted names of the subfolders, and the names of the files."""
        folders, files = [], []
        with os.scandir(os.path.join(self.root, inside)) as entries:
            for entry in entries:
                (folders if _is_folder(entry) else files).append(entry.name)
        return sorted(folders), files

    def _is_read(self, folder: str) -> bool:
        """Return whether to enter a folder. A link into the data, or a second link to a folder, would repeat images."""
        if _is_skipped(os.path.basename(folder)):
            return False
        if not os.path.islink(folder):
            return True
        target = os.path.realpath(folder)
        if target in self._linked or is_within(self.root, target) or is_within(target, self.root):
            self.left_out["links to folders that are already read"] += 1
            return False
        self._linked.add(target)
        return True

    def _refuse_repeated(self, name: str, folders: list[str]) -> None:
        repeated = sorted(set(folders) & set(self.names))
        if len(repeated) > 1:
            raise DataError(
                f"{self.root / name}: this class folder has subfolders named like other classes "
                f"({first_of(repeated)}), as if a zip file was unpacked twice; remove it, or rename the subfolders"
            )


def describe_left_out(root: Path, left_out: Counter) -> list[str]:
    """Describe the files that are not read, if there are any. Warn if some may be images."""
    if not left_out:
        return []
    warning = "" if all(reason in NO_IMAGES for reason in left_out) else "warning: "
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(left_out.items()))
    is_heif = any(READ_BY.get(ending) == "pillow_heif" for ending in left_out)
    hint = "; pip install pillow-heif reads HEIC" if is_heif else ""
    return [f"{warning}{root}: {counted(left_out.total(), 'file')} left out ({reasons}){hint}"]


def _is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder or a link to a folder. Return False for a link that cannot be followed."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_image(file: str) -> bool:
    return file.lower().endswith(IMAGE_ENDINGS) and not file.startswith(".")


def _images_in(folder: Path) -> int:
    """Return the number of images directly in a folder."""
    return sum(_is_image(entry.name) and entry.is_file() for entry in os.scandir(folder))


def _is_skipped(folder: str) -> bool:
    return folder.startswith(".") or folder in SYSTEM_FOLDERS
