"""The index of a tar shard: which samples it holds and where their images lie, kept beside the tar."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datasets.sources.folder import IMAGE_ENDINGS
from datasets.sources.listing import MOST_CLASSES
from datasets.sources.shards.tar import CutTar, HeaderReader, Member, Tar
from utils.errors import DataError
from utils.files import replacing

VERSION = 1
NUM_THREADS = 16  # they mostly wait for the disk
MOST_LABEL = 1 << 20  # bytes of a label file; a larger one describes something else


@dataclass(frozen=True)
class Shard:
    """A tar and the samples in it. `size` and `mtime_ns` are the tar's when it was looked through."""

    path: Path
    size: int
    mtime_ns: int
    samples: np.ndarray  # with the fields offset, size, label and name, of each image
    cut: bool  # the file ends before the tar does

    @property
    def last_name(self) -> str:
        return os.fsdecode(self.samples["name"][-1]) if len(self.samples) else "nothing"

    def name(self, index: int) -> str:
        """What messages call a sample."""
        return f"{self.path}: {os.fsdecode(self.samples['name'][index])}"


def read_shards_of(paths: Sequence[Path], title: str) -> tuple[list[Shard], bool]:
    """All shards, and whether every index is kept. Those without a valid index are looked through, with a bar."""
    from tqdm import tqdm

    with ThreadPoolExecutor(NUM_THREADS, "shards") as pool:
        shards = dict(zip(paths, pool.map(load_index, paths), strict=True))
        missing = [path for path in paths if shards[path] is None]
        if not missing:
            return list(shards.values()), True
        # disable=None: only where a person looks at a terminal.
        made = tqdm(pool.map(scan, missing), f"index of {title}", len(missing), unit="tar", disable=None)
        shards |= zip(missing, made, strict=True)
        kept = list(pool.map(save_index, (shards[path] for path in missing)))
    return list(shards.values()), all(kept)


def scan(path: Path) -> Shard:
    """Look through the tar's headers, and read its labels."""
    tar, samples = Tar(path), _Samples(path)
    headers, cut = HeaderReader(tar), False
    try:
        for member in headers.members():
            samples.add(member, headers)
    except CutTar:
        cut = True
    return Shard(path, tar.size, tar.mtime_ns, samples.table(whole=not cut), cut)


class _Samples:
    """The files of one tar, put together by their names up to the first dot."""

    def __init__(self, path: Path):
        self.path = path
        self.images: dict[str, Member] = {}
        self.labels: dict[str, int] = {}  # of .cls, which goes before
        self.json_labels: dict[str, int] = {}

    def add(self, member: Member, headers: HeaderReader) -> None:
        folder, slash, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        key, ending = folder + slash + stem, ending.lower()
        if not stem:  # hidden files, such as a Mac adds
            return
        if f".{ending}" in IMAGE_ENDINGS:
            if key in self.images:
                raise DataError(
                    f"{self.path}: the sample {key!r} has two images, {self.images[key].name!r} and {member.name!r}; give "
                    "each sample a name of its own"
                )
            self.images[key] = member
        elif ending == "cls":
            text = headers.read(member.offset, min(member.size, 64)).strip()
            self.labels[key] = self._number(member, int(text) if text.isdigit() else text.decode(errors="replace"))
        elif ending == "json" and member.size <= MOST_LABEL:
            label = _label_in(headers.read(member.offset, member.size))
            if label is not None:
                self.json_labels[key] = self._number(member, label)

    def _number(self, member: Member, label: int | str) -> int:
        if not isinstance(label, int) or not 0 <= label < MOST_CLASSES:
            raise DataError(
                f"{self.path}: {member.name!r} holds {label!r}, which is no class number; they count from 0"
            )
        return label

    def table(self, whole: bool) -> np.ndarray:
        """The samples that have both an image and a label, which all must have if the tar is `whole`."""
        labels = self.json_labels | self.labels
        lacking = next((key for key in labels | self.images if key not in labels or key not in self.images), None)
        if whole and lacking is not None:
            lacks, endings = (
                ("label", ".cls or .json") if lacking in self.images else ("image", " ".join(IMAGE_ENDINGS))
            )
            raise DataError(f"{self.path}: the sample {lacking!r} has no {lacks} ({endings}); mend or remove it")
        rows = [
            (member.offset, member.size, labels[key], os.fsencode(member.name))
            for key, member in self.images.items()
            if key in labels
        ]
        width = max((len(row[3]) for row in rows), default=1)
        return np.array(rows, dtype=[("offset", "i8"), ("size", "i8"), ("label", "i8"), ("name", f"S{width}")])


def _label_in(data: bytes) -> int | None:
    """{"label": 3} or {"cls": 3}; anything else is no label."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    label = content.get("label", content.get("cls")) if isinstance(content, dict) else None
    return label if type(label) is int else None  # True is an int too


def index_path(tar: Path) -> Path:
    return tar.with_suffix(".idx.npz")


def load_index(path: Path) -> Shard | None:
    """The shard as its index has it; nothing if there is no index, or if the tar has changed since."""
    stat = path.stat()
    if not index_path(path).is_file():  # a pipe would keep us waiting
        return None
    try:
        with np.load(index_path(path), allow_pickle=False) as content:
            stamp, samples, cut = content["stamp"].tolist(), content["samples"], bool(content["cut"])
        offsets, sizes, labels, _ = (samples[field] for field in ("offset", "size", "label", "name"))
        inside = (0 <= sizes) & (sizes <= stat.st_size) & (0 <= offsets) & (offsets <= stat.st_size - sizes)
        right = inside & (0 <= labels) & (labels < MOST_CLASSES)
        if stamp != [VERSION, stat.st_size, stat.st_mtime_ns] or samples.ndim != 1 or not right.all():
            return None
        return Shard(path, stat.st_size, stat.st_mtime_ns, samples, cut)
    except Exception:  # a damaged file raises whatever its bytes stumble into; it is made anew
        return None


def save_index(shard: Shard) -> bool:
    """Whether that could be done; whoever reads meanwhile sees the old index or the new one."""
    stamp = np.array([VERSION, shard.size, shard.mtime_ns])
    try:
        with replacing(index_path(shard.path), shared=True) as file:
            np.savez(file, stamp=stamp, samples=shard.samples, cut=shard.cut)
    except OSError:
        return False
    return True
