"""The index of a tar shard: its samples and the positions of their images, stored beside the tar."""

import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from datasets.sources.labels import MAX_CLASSES
from datasets.sources.shards.tar import HeaderReader, Member, Tar, TruncatedTarError
from datasets.transforms.decode import KNOWN_ENDINGS
from utils.errors import DataError
from utils.files import replacing

VERSION = 1
NUM_PIECES, PIECE = 64, 8192  # what is compared of a tar, pieces in bytes; of half a MiB it is everything
MAX_LABEL_BYTES = 1 << 20  # a larger .json file is not a label


@dataclass(frozen=True)
class Shard:
    """A tar and its samples. `size` and `mtime_ns` are those of the tar when it was scanned or recognised."""

    path: Path
    size: int
    mtime_ns: int
    checksum: bytes
    samples: np.ndarray  # [N] with the fields offset, size, label and name of each image
    cut: bool  # the file ends before the tar does


def scan(path: Path) -> Shard:
    """Read the headers and labels of a tar."""
    tar, samples = Tar(path), _Samples(path)
    headers, cut = HeaderReader(tar), False
    try:
        for member in headers.members():
            samples.add(member, headers)
    except TruncatedTarError:
        cut = True
    return Shard(path, tar.size, tar.mtime_ns, checksum(tar), samples.table(whole=not cut), cut)


def checksum(tar: Tar) -> bytes:
    """Of pieces from all over the tar, by which an index recognises its copy, which has another date."""
    starts = np.linspace(0, max(tar.size - PIECE, 0), NUM_PIECES, dtype=int).tolist()
    return hashlib.blake2b(b"".join(tar.read(start, PIECE) for start in starts), digest_size=16).digest()


class _Samples:
    """The files of one tar, grouped into samples by their names up to the first dot."""

    def __init__(self, path: Path):
        self.path = path
        self.images: dict[str, Member] = {}
        self.labels: dict[str, int] = {}  # of .cls files, which take precedence
        self.json_labels: dict[str, int] = {}

    def add(self, member: Member, headers: HeaderReader) -> None:
        folder, slash, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        key, ending = folder + slash + stem, ending.lower()
        if not stem:  # hidden files, such as macOS adds
            return
        if f".{ending}" in KNOWN_ENDINGS:
            if key in self.images:
                raise DataError(
                    f"{self.path}: the sample {key!r} has two images, {self.images[key].name!r} and {member.name!r}; "
                    "each sample needs a name of its own"
                )
            self.images[key] = member
        elif ending == "cls":
            text = headers.read(member.offset, min(member.size, 64)).strip()
            self.labels[key] = self._number(member, int(text) if text.isdigit() else text.decode(errors="replace"))
        elif ending == "json" and member.size <= MAX_LABEL_BYTES:
            label = _label_in(headers.read(member.offset, member.size))
            if label is not None:
                self.json_labels[key] = self._number(member, label)

    def _number(self, member: Member, label: int | str) -> int:
        if not isinstance(label, int) or not 0 <= label < MAX_CLASSES:
            raise DataError(f"{self.path}: {member.name!r} contains {label!r}, which is not a class number (from 0)")
        return label

    def table(self, whole: bool) -> np.ndarray:
        """The samples with both image and label. In a `whole` tar every sample must have both."""
        labels = self.json_labels | self.labels
        lacking = next((key for key in labels | self.images if key not in labels or key not in self.images), None)
        if whole and lacking is not None:
            lacks, endings = (
                ("label", ".cls or .json") if lacking in self.images else ("image", " ".join(KNOWN_ENDINGS))
            )
            raise DataError(f"{self.path}: the sample {lacking!r} has no {lacks} ({endings}); complete or remove it")
        rows = [
            (member.offset, member.size, labels[key], os.fsencode(member.name))
            for key, member in self.images.items()
            if key in labels
        ]
        width = max((len(row[3]) for row in rows), default=1)
        return np.array(rows, dtype=[("offset", "i8"), ("size", "i8"), ("label", "i8"), ("name", f"S{width}")])


def _label_in(data: bytes) -> int | None:
    """The label in {"label": 3} or {"cls": 3}; None in anything else."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    label = content.get("label", content.get("cls")) if isinstance(content, dict) else None
    return label if type(label) is int else None  # True is an int too


def index_path(tar: Path) -> Path:
    return tar.with_suffix(".idx.npz")


def load_index(path: Path) -> Shard | None:
    """The shard from its index; None if there is no valid index, or if the tar has changed since."""
    stat = path.stat()
    shard = read_index(path, stat.st_size)
    is_dated = shard is not None and shard.mtime_ns == stat.st_mtime_ns
    if shard is None or not is_dated and shard.checksum != checksum(Tar(path)):
        return None
    return replace(shard, mtime_ns=stat.st_mtime_ns)


def read_index(path: Path, size: int) -> Shard | None:
    """The shard as its index describes it; None if there is none that is valid for a tar of this size."""
    if not index_path(path).is_file():  # a pipe would block
        return None
    try:
        with np.load(index_path(path), allow_pickle=False) as content:
            stamp, samples, cut = content["stamp"].tolist(), content["samples"], bool(content["cut"])
            known = content["checksum"].tobytes() if "checksum" in content else b""  # none in older indexes
        offsets, sizes, labels, _ = (samples[field] for field in ("offset", "size", "label", "name"))
        inside = (0 <= sizes) & (sizes <= size) & (0 <= offsets) & (offsets <= size - sizes)
        right = inside & (0 <= labels) & (labels < MAX_CLASSES)
        if stamp[:2] != [VERSION, size] or samples.ndim != 1 or not right.all():
            return None
        return Shard(path, size, stamp[2], known, samples, cut)
    except Exception:  # numpy raises many types on a damaged file; scan the tar again
        return None


def save_index(shard: Shard) -> bool:
    """Write the index. Returns whether that was possible; concurrent readers see the old index or the new one."""
    stamp = np.array([VERSION, shard.size, shard.mtime_ns])
    try:
        with replacing(index_path(shard.path), shared=True) as file:
            np.savez(
                file,
                stamp=stamp,
                samples=shard.samples,
                cut=shard.cut,
                checksum=np.frombuffer(shard.checksum, np.uint8),
            )
    except OSError:
        return False
    return True
