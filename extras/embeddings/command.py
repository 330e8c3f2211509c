"""The three uses of scripts/embed.py: write features to files, classify with examples, find similar photos."""

import contextlib
import ctypes
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from datasets.sources.images import FileImages
from datasets.types import ImageReadError
from engine.predict.output import NUM_COLUMNS, THUMBNAIL, UNSURE, Mark, Output, write_picture
from engine.predict.pictures import Tile, contact_sheet, describe_missing, fitted
from engine.predict.predictor import Prediction
from extras.embeddings.embedder import Embedded, Embedder
from extras.embeddings.files import (
    NPZ,
    PART_SIZE,
    PartFolder,
    Rows,
    TableBuffer,
    check_npz,
    has_parquet,
    pyarrow_parquet,
    write_npz,
)
from extras.embeddings.nearest import (
    NEAREST,
    TEMPERATURE,
    Examples,
    Similar,
    embed_one,
    example_classes,
    most_similar,
    read_examples,
)
from extras.embeddings.photos import Photos, find_photos
from utils.errors import ConfigError
from utils.text import counted, one_line

NUM_SIMILAR = 20  # photos that -near prints without -top
Report = Callable[[str], None]


def is_npz(output: Path | None) -> bool:
    return output is not None and output.suffix.lower() == NPZ


def check_inputs(examples: Path | None, query: Path | None) -> None:
    """Raise ConfigError if a class has no examples, or the query does not exist. Call this before loading the model."""
    if examples:
        for name in example_classes(examples):
            find_photos("-examples", examples / name, lambda line: None)
    if query and not query.is_file():
        raise ConfigError(f"-near: there is no image {query}; name an image file")


def check_output(output: Path | None, photos: Photos) -> None:
    """Raise ConfigError if the features cannot be written to -output. Call this before loading the model."""
    if is_npz(output):
        check_npz(output, len(photos))
    elif output and has_parquet(output):
        pyarrow_parquet()


class Command:
    """One call of the script, after its arguments were checked."""

    def __init__(self, arguments: Namespace, photos: Photos, embedder: Embedder, report: Report):
        self.arguments, self.photos, self.embedder, self.report = arguments, photos, embedder, report
        self.process, self.images = embedder.process, photos.images(embedder.rules)
        self.num_read = 0  # readable photos
        self._examples: Examples | None = None  # in the first process, with -examples
        self._query: np.ndarray | None = None  # float32 [D], in the first process, with -near

    def run(self) -> int:
        """Run the command in all processes. Return the exit code, which is 2 if some photos cannot be read."""
        if self.process.is_first:
            self.report(describe(self.embedder))
        self.process.first(self._read_inputs)  # before hours of computing
        output = self.arguments.output
        store = None
        if is_npz(output):
            self._write_npz(output)
        elif output:
            store = PartFolder(output, self.photos, self.embedder.facts(), self.arguments.part_size or PART_SIZE)
            self._write_parts(store)
        if self.arguments.examples or self.arguments.near:
            self.process.first(lambda: self._compare(store))
        num_unreadable = self.process.first(lambda: len(self.photos) - self.num_read)
        if num_unreadable and self.process.is_first:
            self.report(f"{num_unreadable} of {counted(len(self.photos), 'image')} could not be read")
        return 2 if num_unreadable else 0

    def _read_inputs(self) -> None:
        """Compute the features of the examples or of the query."""
        given = self.arguments
        if given.examples:
            self._examples = read_examples(given.examples, self.embedder)
            counts = np.bincount(self._examples.owners)
            each = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
            examples = counted(counts.sum(), "example")
            self.report(f"{given.examples}: {examples} of {len(counts)} classes ({each} per class)")
        elif given.near:
            self._query = embed_one(given.near, self.embedder)

    def _write_npz(self, path: Path) -> None:
        buffer = TableBuffer(len(self.photos), self.embedder.width)
        write_npz(path, self.photos, self.embedder.facts(), buffer.fill(self._embedded(), len(self.photos)))
        self.report(f"{path}: {counted(self.num_read, 'row')} of {self.embedder.width} features")

    def _write_parts(self, store: PartFolder) -> None:
        """Write the missing parts. Each process computes whole parts, so no part depends on the number of processes."""
        process = self.process
        with contextlib.ExitStack() as stack:
            missing, store.record = process.first(lambda: (stack.enter_context(store.prepared()), store.record))
            if process.is_first and 0 < len(missing) < store.num_parts:
                done = f"{store.num_parts - len(missing)} of {counted(store.num_parts, 'part')}"
                self.report(f"{store.folder}: has {done}; continues with {store.path(missing[0]).name}")
            mine = missing[process.rank :: process.world_size]
            ranges = [store.range(part) for part in mine]
            buffer = TableBuffer(min(store.part_size, len(self.photos)), self.embedder.width)
            with contextlib.closing(self._with_bar(self.embedder(self.images, ranges), ranges)) as batches:
                for turn in range(math.ceil(len(missing) / process.world_size)):
                    if turn < len(mine):
                        store.write(mine[turn], buffer.fill(batches, len(ranges[turn])))
                        release_freed_memory()
                    process.join([])  # after each part, so that no process waits for another until a timeout
        self.num_read = process.first(store.num_rows)
        if process.is_first:
            parts = counted(store.num_parts, "part")
            self.report(f"{store.folder}: {counted(self.num_read, 'row')} of {self.embedder.width} features in {parts}")

    def _embedded(self) -> Iterator[Embedded]:
        """Yield the features of all photos, and count the readable photos."""
        ranges = [range(len(self.photos))]
        for each in self._with_bar(self.embedder(self.images, ranges), ranges):
            self.num_read += len(each.indices)
            yield each

    def _with_bar(self, batches: Iterator[Embedded], ranges: list[range]) -> Iterator[Embedded]:
        disable = None if self.process.is_first else True
        total = sum(map(len, ranges))
        with contextlib.closing(batches), tqdm(total=total, unit="image", file=sys.stderr, disable=disable) as bar:
            for each in batches:
                yield each
                bar.update(each.num_images)

    def _compare(self, store: PartFolder | None) -> None:
        """Classify the photos, or find similar ones, with stored features or with features that are computed now."""
        rows = store.read() if store else (Rows(each.indices, each.features) for each in self._embedded())
        if self.arguments.examples:
            self._classify(rows)
        else:
            self._find_similar(rows)

    def _classify(self, rows: Iterator[Rows]) -> None:
        given, examples = self.arguments, self._examples
        mark = None if given.unsure is None else Mark(UNSURE, given.unsure)
        output = Output(self.photos, given, examples.classes, True, self.process.world_size == 1, mark)
        for indices, features in rows:
            for index, guesses in zip(indices.tolist(), examples.guesses(features, given.top or 1), strict=True):
                picture = thumbnail(self.images, index) if given.sheet else None
                output.add(Prediction(index, self.photos[index], guesses, picture))
        output.close(self._facts(examples))
        if given.sheet and (missing := describe_missing(examples.classes)):
            self.report(missing)

    def _facts(self, examples: Examples) -> dict[str, Any]:
        """Return the facts for the JSON file: the same as for scripts/predict.py, and the examples."""
        facts = self.embedder.trained.facts()
        facts["model"] |= {"classes": examples.classes, "temperature": None}
        counts = np.bincount(examples.owners).tolist()
        of_examples = {"folder": str(self.arguments.examples), "per_class": counts, "nearest": NEAREST}
        return facts | {"examples": of_examples | {"temperature": TEMPERATURE}}

    def _find_similar(self, rows: Iterator[Rows]) -> None:
        query, count = self.arguments.near, self.arguments.top or NUM_SIMILAR
        found = most_similar(self._query, rows, count + 1)
        others = [each for each in found if not is_same_file(self.photos[each.index], query)][:count]
        for each in others:
            print(f"{one_line(self.photos[each.index])}\t{each.similarity:.4f}")
        self._draw_similar(query, others)

    def _draw_similar(self, query: Path, found: list[Similar]) -> None:
        tiles = [
            Tile(thumbnail(FileImages(Path(), [str(query)], [0], [], self.embedder.rules), 0), ["query", str(query)])
        ]
        tiles[0] = tiles[0]._replace(frame="black")
        for index, similarity in found:
            tiles.append(Tile(thumbnail(self.images, index), [f"{similarity:.4f}", self.photos[index]]))
        write_picture(contact_sheet(tiles, NUM_COLUMNS, THUMBNAIL), self.arguments.sheet)
        self.report(f"look at {self.arguments.sheet}")
        if missing := describe_missing(" ".join(tile.caption) for tile in tiles):
            self.report(missing)


def describe(embedder: Embedder) -> str:
    """Return the line about the model that the script prints at its start."""
    trained, world_size = embedder.trained, embedder.process.world_size
    kind = f" ({trained.weights})" if trained.weights else ""
    epoch = f" after epoch {trained.epoch}" if trained.epoch else ""
    several = "" if world_size == 1 else f", {counted(world_size, 'process')}"
    return (
        f"{trained.source}{kind}: {trained.config.MODEL.NAME}{epoch}, {embedder.width} features, "
        f"on {embedder.process.device.type}{several}"
    )


def release_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc, so that fragments do not add up over the parts."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def thumbnail(images: FileImages, index: int) -> np.ndarray | None:
    """Return a small copy of an image, or None if it cannot be read."""
    try:
        return np.asarray(fitted(images.read(index), THUMBNAIL))
    except ImageReadError:
        return None


def is_same_file(path: str, other: Path) -> bool:
    return os.path.exists(path) and os.path.samefile(path, other)
