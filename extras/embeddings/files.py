"""The files with features: a folder of numbered .npz or parquet parts with a record of their origin, or one .npz file."""

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

import numpy as np

from engine.record.saved_files import read_json
from extras.embeddings.embedder import Embedded
from extras.embeddings.photos import Photos
from utils import VERSION
from utils.errors import ConfigError, DataError, cause_of
from utils.files import Kind, locked, refuse_other_kind, replacing, write_text
from utils.text import counted

PART_SIZE = 10_000  # default number of photos per part; the features of a ViT-Base then take 31 MB
RECORD = "_record.json"  # readers of parquet folders skip names that start with _ or .
LOCK = ".lock"
OURS_HIDDEN = (LOCK, f".{RECORD}.tmp")  # files that a killed process may leave before the first part
FORMAT = 1  # version of the record and the parts
KEY = "halfstep"  # the metadata in a part, and the name of the array with the metadata in an .npz file
VERSION_KEY = "halfstep"  # the entry of a record with the version that wrote it
MOST_IN_NPZ = 100_000  # photos; with 768 features each, they take 307 MB of memory until the file is written
NPZ, PARQUET = ".npz", ".parquet"
# Exceptions of numpy and zipfile for a damaged .npz file.
DAMAGE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)
NPZ_KIND = Kind("an .npz file of scripts/embed.py", (b"PK\x03\x04",), f"{KEY}.npy".encode())
# The parts of a record that must be equal to continue, and how error messages call a different value.
COMPARED = {
    "format": "another version of the format",
    "model.architecture": "another model",
    "model.sha256": "other weights (SHA-256)",
    "preprocessing": "other preprocessing",
    "precision": "another precision",
    "device": "another kind of device",
    "batch_size": "another batch size",
    "images.count": "another number of photos",
    "images.sha256": "other photo names (SHA-256)",
    "part_size": "another part size",
}
LENGTH_OF_SHA256, SHOWN = 64, 12  # characters of a checksum in messages


class Rows(NamedTuple):
    """The features of some readable photos, in the order of the photos."""

    indices: np.ndarray  # int64 [n], indices in the list of photos
    features: np.ndarray  # float32 [n, D]


class Table(NamedTuple):
    """The features of the readable photos of a part or a file."""

    indices: np.ndarray  # int64 [n]
    sizes: np.ndarray  # int32 [n, 2]
    features: np.ndarray  # float32 [n, D]


class TableBuffer:
    """Memory for a table. It is allocated once, because new arrays for each part would fragment the memory."""

    def __init__(self, num_rows: int, width: int):
        self._indices, self._sizes = np.empty(num_rows, np.int64), np.empty((num_rows, 2), np.int32)
        self._features = np.empty((num_rows, width), np.float32)

    def fill(self, batches: Iterator[Embedded], num_images: int) -> Table:
        """Return a table of the next batches, which have `num_images` in total. The next call overwrites the table."""
        count = 0
        while num_images > 0:
            batch = next(batches)
            rows = slice(count, count + len(batch.indices))
            self._indices[rows], self._sizes[rows], self._features[rows] = batch.indices, batch.sizes, batch.features
            count, num_images = rows.stop, num_images - batch.num_images
        return Table(self._indices[:count], self._sizes[:count], self._features[:count])


def pyarrow_parquet() -> ModuleType:
    """Return pyarrow's module for parquet files. Raise ConfigError if pyarrow is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"-output: a folder of parquet files needs pyarrow ({error}); pip install pyarrow, or name a folder for .npz "
            f"files, whose name does not end in {PARQUET}"
        ) from None
    return pyarrow.parquet


def text_of(path: bytes) -> str:
    """Return a path as text. Bytes that are not UTF-8 become escapes such as \\xff, because the files have only text."""
    return path.decode("utf-8", errors="backslashreplace")


def as_json(facts: dict[str, Any]) -> str:
    return json.dumps(facts)  # ASCII, because file names may not be valid text


def has_parquet(folder: Path) -> bool:
    """Return whether the parts of a folder are parquet files: as its name says, or as an older version began it."""
    return folder.suffix.lower() == PARQUET or any(folder.glob(f"part-*{PARQUET}"))


class PartFolder:
    """A folder of parts. Part n starts with photo n * part_size, so no part depends on another."""

    def __init__(self, folder: Path, photos: Photos, facts: dict[str, Any], part_size: int):
        """`facts`: the model and its settings, as Embedder.facts returns them."""
        self.folder, self.photos, self.part_size = folder, photos, part_size
        self.is_parquet = has_parquet(folder)
        self.record = {"format": FORMAT, VERSION_KEY: VERSION} | facts
        self.record |= {"images": photos.facts(), "part_size": part_size}

    @property
    def num_parts(self) -> int:
        return -(-len(self.photos) // self.part_size)

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:05d}{PARQUET if self.is_parquet else NPZ}"

    def range(self, part: int) -> range:
        """Return the indices of the photos of a part."""
        return range(part * self.part_size, min((part + 1) * self.part_size, len(self.photos)))

    def missing(self) -> list[int]:
        return [part for part in range(self.num_parts) if not self.path(part).exists()]

    @contextlib.contextmanager
    def prepared(self) -> Iterator[list[int]]:
        """Yield the missing parts, and keep other processes from writing to the folder meanwhile.

        Raise ConfigError if the folder has other content, or parts that were made with another model or other settings.
        """
        if (self.folder / RECORD).is_file():
            self._check_record()
            if not self.missing():  # nothing will be written, so the folder may be read-only
                yield []
                return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._refuse_other_content()
            lock = contextlib.ExitStack()
            file = lock.enter_context(locked(self.folder / LOCK))
        except OSError as error:
            raise ConfigError(
                f"-output: cannot write to {self.folder} ({cause_of(error)}); choose another folder"
            ) from None
        with lock:
            if file is None:
                raise ConfigError(
                    f"-output: another process is writing to {self.folder}; wait until it ends, or name another folder"
                )
            self._write_record()
            yield self.missing()

    def _refuse_other_content(self) -> None:
        names = sorted(name for name in os.listdir(self.folder) if name not in OURS_HIDDEN)
        if names and not (self.folder / RECORD).is_file():
            raise ConfigError(
                f"-output: {self.folder} has other files ({names[0]}) and no {RECORD}; name a new or empty folder"
            )

    def _check_record(self) -> None:
        """Raise ConfigError unless the parts of the folder were made from these photos in the same way."""
        path = self.folder / RECORD
        known = read_json(path)
        for name, title in COMPARED.items():
            old, new = _value(known, name), _value(self.record, name)
            if old != new:
                raise ConfigError(
                    f"-output: {self.folder} was written with {title}: {_difference(old, new)}; repeat the first "
                    "command, or name another folder"
                )
        if known.get(VERSION_KEY) != VERSION and self.missing():
            raise ConfigError(
                f"-output: {self.folder} was started by halfstep {known.get(VERSION_KEY)}, and this is {VERSION}; "
                "continue with that version, or name another folder"
            )
        self.record = known  # the remaining parts get exactly the same metadata

    def _write_record(self) -> None:
        path = self.folder / RECORD
        if path.is_file():
            self._check_record()
            return
        try:
            write_text(path, json.dumps(self.record, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"-output: cannot write {path} ({cause_of(error)}); choose another folder") from None

    def write(self, part: int, table: Table) -> None:
        """Write one part. The file gets its name when it is completely on disk."""
        try:
            with replacing(self.path(part)) as file:
                (write_parquet if self.is_parquet else write_arrays)(file, self.photos, self.record, table)
        except OSError as error:
            raise DataError(
                f"-output: {self.path(part)} cannot be written ({cause_of(error)}); repeat the command to continue"
            ) from None

    def num_rows(self) -> int:
        """Return the number of rows of all parts. Check that each part belongs to the record."""
        return sum(self._count(part) for part in range(self.num_parts))

    def _count(self, part: int) -> int:
        with self._opened(part) as file, self._naming_damage(part):
            return file.metadata.num_rows if self.is_parquet else len(file["paths"])

    def read(self) -> Iterator[Rows]:
        """Yield the rows of each part."""
        for part in range(self.num_parts):
            with self._opened(part) as file, self._naming_damage(part):
                texts, features = (read_parquet if self.is_parquet else read_arrays)(file)
                features = features.reshape(len(texts), self.record["model"]["features"])
            indices = np.fromiter(self._indices(part, texts), np.int64)
            if len(indices) != len(texts):
                raise self._damage(part, "its paths are not in the list of photos")
            yield Rows(indices, features)

    def _indices(self, part: int, texts: list[str]) -> Iterator[int]:
        """Yield the index of each row's photo. The rows are in the order of the photos; unreadable photos have none."""
        numbers = self.range(part)
        remaining = iter(texts)
        wanted = next(remaining, None)
        for index, path in zip(numbers, self.photos.paths.chunk(numbers.start, numbers.stop), strict=True):
            if text_of(path) == wanted:
                yield index
                wanted = next(remaining, None)

    def _opened(self, part: int) -> Any:
        """Return a part as a ParquetFile or an NpzFile, which is a context manager and holds the file open."""
        with self._naming_damage(part):
            if self.is_parquet:
                file = pyarrow_parquet().ParquetFile(self.path(part))
                metadata = (file.schema_arrow.metadata or {}).get(KEY.encode(), b"").decode()
            else:
                file = np.load(self.path(part), allow_pickle=False)
                metadata = str(file[KEY])
        if metadata != as_json(self.record):
            raise self._damage(part, "its metadata differ from the record")
        return file

    @contextlib.contextmanager
    def _naming_damage(self, part: int) -> Iterator[None]:
        damage: tuple[type[Exception], ...] = DAMAGE
        if self.is_parquet:
            import pyarrow

            damage += (pyarrow.ArrowException,)
        try:
            yield
        except damage as error:
            raise self._damage(part, (str(error) or type(error).__name__).splitlines()[0]) from None

    def _damage(self, part: int, problem: str) -> DataError:
        return DataError(
            f"-output: {self.path(part)} is damaged or from another folder ({problem}); delete it, and repeat the "
            "command to compute it again"
        )


def _value(record: dict[str, Any], name: str) -> Any:
    """Return the value of a dotted name, or None."""
    for key in name.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _difference(old: Any, new: Any) -> str:
    """Describe how two values differ. For two dicts, show the first different key. Checksums are shortened."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(key for key in new if old.get(key) != new[key])
        return f"{key} {old.get(key)}, now {new[key]}"
    return ", now ".join(each[:SHOWN] if len(each) == LENGTH_OF_SHA256 else each for each in (str(old), str(new)))


def check_npz(path: Path, num_photos: int) -> None:
    """Raise ConfigError if the file cannot be written, or would have too many photos."""
    if num_photos > MOST_IN_NPZ:
        raise ConfigError(
            f"-output: {path} would have {counted(num_photos, 'photo')}, more than the {MOST_IN_NPZ:,} allowed in an .npz "
            "file, whose features are all in memory; name a folder instead, to write several files"
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        problem = f"{path} is a folder" if path.is_dir() else f"cannot write to the folder {path.parent}"
        raise ConfigError(f"-output: {problem}; choose another place")
    refuse_other_kind("-output", path, NPZ_KIND)


def write_npz(path: Path, photos: Photos, facts: dict[str, Any], table: Table) -> None:
    """Write the paths, sizes and features of all readable photos to one file."""
    record = {"format": FORMAT, VERSION_KEY: VERSION} | facts | {"images": photos.facts()}
    try:
        with replacing(path) as file:
            write_arrays(file, photos, record, table)
    except OSError as error:
        raise DataError(f"-output: {path} cannot be written ({cause_of(error)}); choose another place") from None


def texts_of(photos: Photos, table: Table) -> list[str]:
    return [text_of(photos.paths[index]) for index in table.indices.tolist()]


def write_arrays(file: IO[bytes], photos: Photos, record: dict[str, Any], table: Table) -> None:
    """Write an .npz file."""
    paths = np.array(texts_of(photos, table), np.str_)
    np.savez(file, **{KEY: np.array(as_json(record)), "paths": paths, "sizes": table.sizes, "features": table.features})


def read_arrays(file: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    return file["paths"].tolist(), file["features"]


def write_parquet(file: IO[bytes], photos: Photos, record: dict[str, Any], table: Table) -> None:
    import pyarrow

    features = pyarrow.array(table.features.reshape(-1))
    columns = {
        "path": pyarrow.array(texts_of(photos, table), pyarrow.string()),
        "width": pyarrow.array(table.sizes[:, 0]),
        "height": pyarrow.array(table.sizes[:, 1]),
        "features": pyarrow.FixedSizeListArray.from_arrays(features, table.features.shape[1]),
    }
    rows = pyarrow.table(columns).replace_schema_metadata({KEY: as_json(record)})
    # Features are hardly ever equal, so dictionary encoding would only take time.
    pyarrow_parquet().write_table(rows, file, use_dictionary=False)


def read_parquet(file: Any) -> tuple[list[str], np.ndarray]:
    table = file.read(["path", "features"])
    return table["path"].to_pylist(), table["features"].combine_chunks().flatten().to_numpy()
