"""ImageNet's official tar files, a tar of one tar for each class, read in place: nothing is unpacked."""

import functools
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import Config, Data
from datasets.index.file import TEXT, Index, IndexWriter
from datasets.index.place import index_paths, note_of_memory, open_or_build, progress
from datasets.index.stamp import FileStamp, changed_during_run, stamps_in, stamps_of
from datasets.sources.imagenet.devkit import DEVKIT, read_devkit
from datasets.sources.imagenet.kaggle import SOLUTION, find_solution, read_solution, targets_of
from datasets.sources.images import EncodedImages
from datasets.sources.root import own_split
from datasets.sources.shards.tar import HeaderReader, Member, Tar, TruncatedTarError
from datasets.transforms.decode import KNOWN_ENDINGS
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageSet
from utils.errors import DataError

TRAIN_TAR, VAL_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
CLASS_TAR = re.compile(r"n\d{8}\.tar")
NUM_THREADS = 16  # which mostly wait for the disk
MAX_OPEN_TARS = 128  # of one process, whose limit for open files may be 256
INDEX_COLUMNS = {"label": "<i4", "name": TEXT, "file": "<i4", "offset": "<i8", "size": "<i8"}


class TarPart:
    """A tar inside another, read like a Tar."""

    def __init__(self, tar: Tar, member: Member):
        self.tar, self.start, self.size = tar, member.offset, member.size
        self.path = f"{tar.path}: {member.name}"

    def read(self, offset: int, size: int) -> bytes:
        return self.tar.read(self.start + offset, max(min(size, self.size - offset), 0))


class TarFiles(NamedTuple):
    """The tars of a data set: of tars with a class each, or with one class; of validation images; their labels."""

    train: list[Path]
    val: Path | None
    labels: Path | None  # LOC_val_solution.csv, or the development kit


def find_tar_files(root: Path) -> TarFiles | None:
    """The official tars of ILSVRC2012 in this folder, or tars of one class each; `root` may be a tar of such tars."""
    if root.is_file():
        return TarFiles([root], None, None) if root.suffix == ".tar" else None
    train, val, kit = (root / name for name in (TRAIN_TAR, VAL_TAR, DEVKIT))
    if train.is_file() or val.is_file():
        labels = find_solution(root) or (kit if kit.is_file() else None)
        return TarFiles([train] if train.is_file() else [], val, labels)
    of_classes = sorted(path for path in root.iterdir() if CLASS_TAR.fullmatch(path.name))
    return TarFiles(of_classes, None, None) if of_classes else None


def read_tar_files(config: Config, root: Path, files: TarFiles) -> tuple[ImageSet | None, ImageSet | None]:
    """Training and validation images, or all images and None."""
    if files.val and not files.labels:
        raise DataError(
            f"DATA.DATA_PATH: {files.val} has images without classes, and neither {DEVKIT} nor {SOLUTION} is in {root}; "
            "put one of them there"
        )
    missing = None if files.train or config.EVAL else TRAIN_TAR
    missing = missing or (files.val.name if files.val and not files.val.is_file() else None)
    if missing:
        raise DataError(
            f"DATA.DATA_PATH: {root} has no {missing}; put it there, or unpack all tars and read the folders"
        )
    index = _open_index(config, root, files)
    num_train, classes = index.facts["num_train"], index.facts["classes"]
    rows = (range(num_train), range(num_train, len(index.column("label"))))
    for tars, part in ((files.train, rows[0]), ([files.val] * bool(files.val), rows[1])):
        if tars and not part:
            raise DataError(f"{tars[0]}: there are no images in it; get it again, or remove it")
    train, val = (TarImages(config.DATA, index, part) if part else None for part in rows)
    for image_set in (train, val):
        if image_set is not None:
            image_set.classes = list(classes)
            image_set.split = own_split(root / TRAIN_TAR if files.val else root, files.val)
            image_set.notes = tuple(note_of_memory(index, str(root)))
    return (None if config.EVAL and val is not None else train), val


class TarImages(EncodedImages):
    """Images in tars, at known positions. Those of a class lie together, so an epoch reads them in any order."""

    classes_are_names = True

    def __init__(self, data: Data, index: Index, rows: range):
        """`rows`: the part of the index that this set has."""
        super().__init__(index.column("label")[rows.start : rows.stop], [])
        self.rules, self.first = PixelRules.of(data), rows.start
        self.files = stamps_in(index.facts["made_of"])
        self.numbers, self.offsets, self.sizes = (index.column(name) for name in ("file", "offset", "size"))
        self.names = index.text("name")

    def name(self, index: int) -> str:
        return f"{self._file(index).path}: {self.key(index)}"

    def key(self, index: int) -> str:
        return os.fsdecode(self.names[self.first + self.row(index)])

    def split_keys(self) -> Iterable[list[bytes]]:
        is_whole = self.rows is None and len(self) == len(self.names)
        return self.names.chunks() if is_whole else super().split_keys()

    def stamp(self, index: int) -> str:
        file = self._file(index)
        return f"{file.path.name}\0{file.size}\0{file.mtime_ns}\0{self.offsets[self.first + self.row(index)]}"

    def _file(self, index: int) -> FileStamp:
        return self.files[self.numbers[self.first + self.row(index)]]

    def open_file(self, index: int) -> tuple[str, bytes]:
        row = self.first + self.row(index)
        try:
            data = _opened(self._file(index)).read(int(self.offsets[row]), int(self.sizes[row]))
        except OSError:
            _opened.cache_clear()  # a stale handle stays stale: the next attempt opens the tar again
            raise
        return os.path.splitext(self.key(index))[1], data


@functools.lru_cache(MAX_OPEN_TARS)
def _opened(file: FileStamp) -> Tar:
    """An open tar. One that leaves the cache is closed when the last thread has finished reading from it."""
    tar = Tar(file.path)
    if (tar.size, tar.mtime_ns) != file[1:]:
        raise changed_during_run(file.path)
    return tar


def _open_index(config: Config, root: Path, files: TarFiles) -> Index:
    made_of = stamps_of([*files.train, *filter(None, (files.val, files.labels))])
    beside = root.with_suffix(".index") if root.is_file() else root / "imagenet.index"
    return open_or_build(
        index_paths(config, beside),
        lambda index: index.facts.get("made_of") == made_of,
        lambda path: _build(path, files, made_of),
    )


def _build(path: Path | None, files: TarFiles, made_of: list) -> Index:
    writer, num_train = IndexWriter(path, INDEX_COLUMNS), 0
    parts = [(number, *part) for number, file in enumerate(files.train) for part in _class_tars(file)]
    val = sorted(_images_in(Tar(files.val)), key=lambda image: image.name) if files.val else []
    synsets = _val_synsets(files, val) if files.val else {}
    classes = sorted({synset for _, synset, _ in parts} or set(synsets.values()))
    numbers = {synset: number for number, synset in enumerate(classes)}
    with ThreadPoolExecutor(NUM_THREADS, "tars") as pool:
        read = progress(pool.map(lambda part: _images_in(part[2]), parts), "index", len(parts), "tar")
        for (number, synset, part), images in zip(parts, read, strict=True):
            start = part.start if isinstance(part, TarPart) else 0
            _add(writer, number, images, [numbers[synset]] * len(images), start)
            num_train += len(images)
    if files.val:
        names = [Path(image.name).name for image in val]
        _add(writer, len(files.train), val, targets_of(names, files.val, files.labels, synsets, classes), 0)
    return writer.finish({"made_of": made_of, "classes": classes, "num_train": num_train})


def _add(writer: IndexWriter, file: int, images: list[Member], targets: list[int], start: int) -> None:
    writer.add("label", np.array(targets, np.int32))
    writer.add("name", [os.fsencode(image.name) for image in images])
    writer.add("file", np.full(len(images), file))
    writer.add("offset", np.array([start + image.offset for image in images], np.int64))
    writer.add("size", np.array([image.size for image in images], np.int64))


def _class_tars(file: Path) -> Iterator[tuple[str, Tar | TarPart]]:
    """Synset and images of each class: this tar itself, or the tars in it."""
    tar = Tar(file)
    if CLASS_TAR.fullmatch(file.name):
        yield file.stem, tar
        return
    members = [member for member in _members(tar) if member.name.endswith(".tar")]
    if not members:
        raise DataError(f"{file}: there are no tars of classes (n01440764.tar) in it; get it again")
    for member in members:
        yield Path(member.name).stem, TarPart(tar, member)


def _images_in(tar: Tar | TarPart) -> list[Member]:
    names = [each for each in _members(tar) if not Path(each.name).name.startswith(".")]
    return [each for each in names if Path(each.name).suffix.lower() in KNOWN_ENDINGS]


def _members(tar: Tar | TarPart) -> list[Member]:
    members = HeaderReader(tar).members()
    found = []
    try:
        found.extend(members)
    except TruncatedTarError:
        after = f" after {found[-1].name}" if found else ""
        raise DataError(f"{tar.path} is truncated{after}; get it again, or complete the download") from None
    return found


def _val_synsets(files: TarFiles, images: list[Member]) -> dict[str, str]:
    """The class of each validation image by its name without ending."""
    if files.labels.name == SOLUTION:
        return read_solution(files.labels)
    in_order = read_devkit(files.labels)
    if len(in_order) != len(images):
        raise DataError(
            f"{files.val}: {len(images):,} images, but {files.labels} has the classes of {len(in_order):,}; get both again"
        )
    return dict(zip((Path(image.name).stem for image in images), in_order, strict=True))
