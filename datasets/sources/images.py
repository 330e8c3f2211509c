"""Image sets that read image files, and the checks of their paths."""

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

import numpy as np

from datasets.index import CHUNK, Texts
from datasets.order import grouped_shuffled
from datasets.pixels import Pixels
from datasets.types import ImageReadError, ImageSet
from utils.errors import DataError, ensure, not_a_file
from utils.files import without_waiting
from utils.text import format_bytes_apart

MOST_BYTES_PER_PIXEL = 8  # an uncompressed file with four channels of 16 bits
LONGEST = 4096  # characters of the longest path that a system opens
RETRY_AFTER = (0.5, 2.0)  # seconds before each retry; a network file system or a disk may recover
# Errors that a retry cannot fix: no such file, no permission, a folder or socket instead of a file.
LASTING = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ELOOP}
LASTING |= {errno.ENAMETOOLONG}
OF_THE_PROCESS = {errno.EMFILE, errno.ENFILE}  # too many open files: the image is good, so it must not be replaced


class EncodedImages(ImageSet):
    """Images that are decoded from the bytes of a file."""

    def read(self, index: int) -> np.ndarray:
        return self.pixels.decode(self.file(index)[1])

    def look_into(self, is_remote: bool) -> tuple[Pixels, list[str]]:
        return self.pixels.look_into(self, is_remote)

    def kinds(self, index: int) -> Sequence[str]:
        return self.pixels.kinds(lambda: self.file(index)[1])

    def file(self, index: int) -> tuple[str, bytes]:
        waits = iter(RETRY_AFTER)
        while True:
            try:
                return self.open_file(index)
            except OSError as error:
                if error.errno in OF_THE_PROCESS:
                    raise
                seconds = None if error.errno in LASTING else next(waits, None)
                if seconds is None:
                    # All reports name the image, so its path is left out here.
                    reason = error.strerror if error.filename == self.name(index) else error
                    raise ImageReadError(f"{type(error).__name__}: {reason}") from error
            time.sleep(seconds)

    def open_file(self, index: int) -> tuple[str, bytes]:
        """Read the file in one attempt. Raise OSError if the file system fails."""
        raise NotImplementedError


class GroupedImages(EncodedImages):
    """Images in groups, such as tars or row groups, which are read one after the other."""

    has_keys = True  # whether each image has a name of its own, which is its key

    def __init__(
        self,
        targets: np.ndarray,
        pixels: Pixels,
        names: Texts,
        starts: np.ndarray,
        first: int = 0,
    ):
        """`names`: the names in the rows of a table.

        `starts` [groups + 1]: the first row of each group, then the number
        of rows. `first`: the row of the first image of this set."""
        super().__init__(targets, [])
        self.pixels, self.names, self.group_starts, self.first = pixels, names, starts, first

    def table_row(self, index: int) -> int:
        return self.first + self.row(index)

    def place(self, index: int) -> tuple[int, int]:
        """Return the row of an image in the table, and the number of its group."""
        row = self.table_row(index)
        return row, int(np.searchsorted(self.group_starts, row, "right")) - 1

    def stored_name(self, index: int) -> str:
        return os.fsdecode(self.names[self.table_row(index)])

    def key(self, index: int) -> str:
        return self.stored_name(index)

    def all_keys(self) -> Iterable[list[bytes]]:
        is_whole = self.rows is None and len(self) == len(self.names)
        return self.names.chunks() if self.has_keys and is_whole else super().all_keys()

    def order_of_groups(self, reach: int, seed: int, epoch: int) -> np.ndarray:
        """Shuffle the groups, and then move each image by less than `reach` positions, so that a group is read once."""
        starts = np.clip(self.group_starts - self.first, 0, len(self) if self.rows is None else None)
        if self.rows is not None:
            is_sorted = bool((self.rows[1:] >= self.rows[:-1]).all())
            ensure(is_sorted, "the images of a part must stay in the order of their groups")
            starts = np.searchsorted(self.rows, starts)
        return grouped_shuffled(starts, reach, seed, epoch)


class FileImages(EncodedImages):
    """Images in files below one folder."""

    folder = ""  # the path of `root` below DATA.DATA_PATH, such as val
    groups: Texts | None = None  # the group of each image if DATA.GROUP_BY is set; a group stays in one part

    def __init__(
        self,
        root: Path,
        paths: Sequence[str] | Texts,
        targets: Sequence[int] | np.ndarray,
        classes: list[str],
        pixels: Pixels,
        *,
        confined: bool = False,
    ):
        """`paths` are relative to `root`; `confined`: a list names the paths, so no link may lead out of `root`."""
        super().__init__(targets, classes)
        self.root, self.pixels, self.confined = root, pixels, confined
        # The paths are not a list of strings, because every loader process would copy its million small objects as soon
        # as their reference counts change.
        self.paths = paths if isinstance(paths, Texts) else Texts.of([os.fsencode(path) for path in paths])

    def name(self, index: int) -> str:
        path = self._path(index)
        if self.confined:
            return on_disk(self.root, path)
        return os.path.join(self.root, path) if self.root.parts else path  # without ./ in the current folder

    def stamp(self, index: int) -> str:
        try:
            status = os.stat(self.name(index))
        except OSError:
            return f"{self._path(index)}\0missing"
        return f"{self._path(index)}\0{status.st_size}\0{status.st_mtime_ns}"

    def key(self, index: int) -> str:
        return os.path.normpath(self._path(index))

    def table_name(self, index: int) -> str:
        return os.path.normpath(os.path.join(self.folder, self._path(index)))

    def all_keys(self) -> Iterator[list[bytes]]:
        return map(normal_paths, self._in_chunks(self.paths))

    @property
    def has_groups(self) -> bool:
        return self.groups is not None

    def split_keys(self) -> Iterator[list[bytes]]:
        return self.all_keys() if self.groups is None else self._in_chunks(self.groups)

    def naming(self) -> tuple[bytes | np.ndarray, ...]:
        return self.paths.digest(), *self._chosen()

    def file_sizes(self, indices: Sequence[int]) -> list[int]:
        sizes = []
        for index in indices:
            try:
                sizes.append(os.stat(self.name(index)).st_size)
            except OSError:
                sizes.append(-1)
        return sizes

    def _in_chunks(self, column: Texts) -> Iterator[list[bytes]]:
        """Return an iterator over the values of a column for the images of this set."""
        if self.rows is None:
            return column.chunks()
        return (column.select(self.rows[start : start + CHUNK]) for start in range(0, len(self), CHUNK))

    def _path(self, index: int) -> str:
        return os.fsdecode(self.paths[self.row(index)])

    def open_file(self, index: int) -> tuple[str, bytes]:
        path = self.name(index)
        # Links to folders were checked with the list; links to files are checked here.
        if self.confined and os.path.islink(path) and not is_within(self.root, path):
            raise DataError(f"{path}: this link leads out of {self.root}; a list may only name files inside it")
        with open(path, "rb", opener=without_waiting) as file:
            if kind := not_a_file(file.fileno()):
                raise ImageReadError(f"it is {kind}")
            size = os.fstat(file.fileno()).st_size
            if size > (most := MOST_BYTES_PER_PIXEL * self.pixels.max_pixels + 2**20):
                has, may_have = format_bytes_apart(size, most)
                raise ImageReadError(f"the file has {has}; DATA.MAX_PIXELS allows at most {may_have}")
            return os.path.splitext(path)[1], file.read()


def unlabelled_files(paths: Sequence[str], pixels: Pixels, root: Path = Path()) -> FileImages:
    """Return the images in these files, which have no labels."""
    return FileImages(root, paths, np.zeros(len(paths), np.uint8), [], pixels)


def normal_paths(paths: list[bytes]) -> list[bytes]:
    """Normalize paths as FileImages.key does. For most lists, one check of all paths shows that none needs a change."""
    together = b"\n" + b"\n".join(paths) + b"\n"
    if any(each in together for each in (b"./", b"//", b"/\n", b"/.\n", b"/..\n", b"\n\n")):
        return [os.path.normpath(path) for path in paths]
    return paths


def on_disk(root: Path, path: str) -> str:
    """Return the path of the file or folder that a list names below `root`.

    The list may have another Unicode form of its name: a Mac writes umlauts as two characters.
    """
    listed = os.path.join(root, path)
    if path.isascii() or os.path.isabs(path) or os.path.lexists(listed):
        return listed
    names, path = path.split("/"), str(root)
    for name in names:
        forms = [os.path.join(path, form) for form in (name, normalize("NFC", name), normalize("NFD", name))]
        path = next(filter(os.path.lexists, forms), forms[0])
    return path


def stays_inside(root: Path, folder: str) -> bool:
    """Return whether a folder that a list names is inside `root`, after resolving links."""
    return len(folder) > LONGEST or is_within(root, on_disk(root, folder))  # no file can have a longer path


def is_within(root: str | Path, path: str | Path) -> bool:
    """Return whether a path is inside a folder, after resolving the links in both paths."""
    root, path = os.path.realpath(root), os.path.realpath(path)
    return os.path.commonpath([root, path]) == root


def natural(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that orders numbers in names by value: 2.jpg before 10.jpg."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))], name
