"""Images that are decoded from files: single files below a folder, or groups in tars and parquet files."""

import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unicodedata import normalize

import numpy as np

from datasets.image_set import ImageSet, Rows, Storage, chosen
from datasets.index import Index, Texts
from datasets.order import grouped_shuffled
from datasets.pixels import Pixels
from datasets.pixels.rules import ImageReadError
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


class EncodedStorage(Storage):
    """Images that are decoded from the bytes of a file."""

    is_encoded = True

    def read(self, row: int, pixels: Pixels) -> np.ndarray:
        return pixels.decode(self.file_of(row, pixels)[1])

    def kinds(self, row: int, pixels: Pixels) -> Sequence[str]:
        return pixels.kinds(lambda: self.file_of(row, pixels)[1])

    def file_of(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        waits = iter(RETRY_AFTER)
        while True:
            try:
                return self.open_file(row, pixels)
            except OSError as error:
                if error.errno in OF_THE_PROCESS:
                    raise
                seconds = None if error.errno in LASTING else next(waits, None)
                if seconds is None:
                    # All reports name the image, so its path is left out here.
                    reason = error.strerror if error.filename == self.name(row) else error
                    raise ImageReadError(f"{type(error).__name__}: {reason}") from error
            time.sleep(seconds)

    def open_file(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        """Read the file in one attempt. Raise OSError if the file system fails."""
        raise NotImplementedError


class GroupedStorage(EncodedStorage):
    """Images in groups, such as tars or row groups, which are read one after the other."""

    has_keys = True  # whether each image has a name of its own, which is its key

    def __init__(self, index: Index, names: Texts, starts: np.ndarray, rows: range):
        """`names`: the names in the rows of a table. `starts` [groups + 1]: the first row of each group in the table,
        then the number of its rows. `rows`: the rows of the table that are the rows of this storage."""
        self.index, self.names, self.group_starts = index, names, starts
        self.first, self._count = rows.start, len(rows)

    def __len__(self) -> int:
        return self._count

    def place(self, row: int) -> tuple[int, int]:
        """Return the row of an image in the table, and the number of its group."""
        in_table = self.first + row
        return in_table, int(np.searchsorted(self.group_starts, in_table, "right")) - 1

    def stored_name(self, row: int) -> str:
        return os.fsdecode(self.names[self.first + row])

    def key(self, row: int) -> str:
        return self.stored_name(row)

    def keys(self, rows: Rows, count: int) -> Iterable[list[bytes]]:
        is_whole = rows is None and count == len(self.names)
        return self.names.chunks() if self.has_keys and is_whole else super().keys(rows, count)

    def order_of_groups(self, rows: Rows, count: int, reach: int, seed: int, epoch: int) -> np.ndarray:
        """Shuffle the groups, and then move each image by less than `reach` positions, so that a group is read once."""
        starts = np.clip(self.group_starts - self.first, 0, count if rows is None else None)
        if rows is not None:
            is_sorted = bool((rows[1:] >= rows[:-1]).all())
            ensure(is_sorted, "the images of a part must stay in the order of their groups")
            starts = np.searchsorted(rows, starts)
        return grouped_shuffled(starts, reach, seed, epoch)


class FileStorage(EncodedStorage):
    """Images in files below one folder."""

    def __init__(
        self,
        root: Path,
        paths: Sequence[str] | Texts,
        *,
        folder: str = "",
        index: Index | None = None,
        confined: bool = False,
    ):
        """`paths` are relative to `root`; `folder`: the path of `root` below DATA.DATA_PATH, such as val; `index`: that
        has the paths; `confined`: a list names the paths, so no link may lead out of `root`."""
        self.root, self.folder, self.index, self.confined = root, folder, index, confined
        # The paths are not a list of strings, because every loader process would copy its million small objects as soon
        # as their reference counts change.
        self.paths = paths if isinstance(paths, Texts) else Texts.of([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self.paths)

    def _path(self, row: int) -> str:
        return os.fsdecode(self.paths[row])

    def name(self, row: int) -> str:
        path = self._path(row)
        if self.confined:
            return on_disk(self.root, path)
        return os.path.join(self.root, path) if self.root.parts else path  # without ./ in the current folder

    def key(self, row: int) -> str:
        return os.path.normpath(self._path(row))

    def table_name(self, row: int) -> str:
        return os.path.normpath(os.path.join(self.folder, self._path(row)))

    def keys(self, rows: Rows, count: int) -> Iterator[list[bytes]]:
        return map(normal_paths, self.paths.in_chunks(rows))

    def naming(self, rows: Rows, count: int) -> Iterable[bytes | np.ndarray]:
        return self.paths.digest(), *chosen(rows)

    def stamp(self, row: int) -> str:
        try:
            status = os.stat(self.name(row))
        except OSError:
            return f"{self._path(row)}\0missing"
        return f"{self._path(row)}\0{status.st_size}\0{status.st_mtime_ns}"

    def file_sizes(self, rows: Sequence[int]) -> list[int]:
        sizes = []
        for row in rows:
            try:
                sizes.append(os.stat(self.name(row)).st_size)
            except OSError:
                sizes.append(-1)
        return sizes

    def open_file(self, row: int, pixels: Pixels) -> tuple[str, bytes]:
        path = self.name(row)
        # Links to folders were checked with the list; links to files are checked here.
        if self.confined and os.path.islink(path) and not is_within(self.root, path):
            raise DataError(f"{path}: this link leads out of {self.root}; a list may only name files inside it")
        with open(path, "rb", opener=without_waiting) as file:
            if kind := not_a_file(file.fileno()):
                raise ImageReadError(f"it is {kind}")
            size = os.fstat(file.fileno()).st_size
            if size > (most := MOST_BYTES_PER_PIXEL * pixels.max_pixels + 2**20):
                has, may_have = format_bytes_apart(size, most)
                raise ImageReadError(f"the file has {has}; DATA.MAX_PIXELS allows at most {may_have}")
            return os.path.splitext(path)[1], file.read()


def unlabelled_files(paths: Sequence[str], pixels: Pixels, root: Path = Path()) -> ImageSet:
    """Return the images in these files, which have no labels."""
    return ImageSet(FileStorage(root, paths), np.zeros(len(paths), np.uint8), [], pixels=pixels)


def normal_paths(paths: list[bytes]) -> list[bytes]:
    """Normalize paths as FileStorage.key does. For most lists, one check shows that no path needs a change."""
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
