"""The three uses of scripts/embed.py: write features to a file, classify with examples, find similar photos."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from datasets.sources.images import FileImages
from datasets.types import ImageReadError
from engine.predict.output import NUM_COLUMNS, THUMBNAIL, UNSURE, Mark, Output, write_picture
from engine.predict.pictures import Tile, contact_sheet, describe_missing, fitted
from engine.predict.predictor import Prediction
from extras.embeddings.embedder import Embedder
from extras.embeddings.files import Table, write_features
from extras.embeddings.nearest import NEAREST, TEMPERATURE, Examples, embed_one, most_similar, read_examples
from extras.embeddings.photos import Photos
from utils.text import counted, one_line

NUM_SIMILAR = 20  # photos that -near prints without -top


def embed(given: Namespace, photos: Photos, embedder: Embedder, report: Callable[[str], None]) -> int:
    """Run the command with checked arguments. Return the exit code, which is 2 if some photos cannot be read."""
    report(describe(embedder))
    examples = read_examples(given.examples, embedder) if given.examples else None  # before hours of computing
    if examples:
        of_classes = f"{counted(len(examples.owners), 'example')} of {counted(len(examples.classes), 'class')}"
        report(f"{given.examples}: {of_classes}")
    query = embed_one(given.near, embedder) if given.near else None
    table = features_of_all(photos, embedder)
    if given.output:
        write_features(given.output, photos, embedder.facts(), table)
        report(f"{given.output}: {counted(len(table.indices), 'row')} of {embedder.width} features")
    if examples:
        classify(given, photos, embedder, examples, table)
    names = examples.classes if examples and given.sheet else []  # texts on the sheet
    if query is not None:
        names = find_similar(given, photos, embedder, query, table)
    if missing := describe_missing(names):
        report(missing)
    if num_unreadable := len(photos) - len(table.indices):
        report(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


def describe(embedder: Embedder) -> str:
    """Return the line about the model that the script prints at its start."""
    trained = embedder.trained
    kind = f" ({trained.weights})" if trained.weights else ""
    epoch = f" after epoch {trained.epoch}" if trained.epoch else ""
    name, device = trained.config.MODEL.NAME, embedder.process.device.type
    return f"{trained.source}{kind}: {name}{epoch}, {embedder.width} features, on {device}"


def features_of_all(photos: Photos, embedder: Embedder) -> Table:
    """Return the features of all readable photos."""
    found = []
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(contextlib.closing(embedder(photos.images(embedder.rules))))
        bar = stack.enter_context(tqdm(total=len(photos), unit="image", file=sys.stderr, disable=None))
        for each in batches:
            found.append(Table(each.indices, each.sizes, each.features))
            bar.update(each.num_images)
    return Table(*map(np.concatenate, zip(*found, strict=True)))


def classify(given: Namespace, photos: Photos, embedder: Embedder, examples: Examples, table: Table) -> None:
    """Print the most similar classes of each photo, and write the tables and pictures."""
    images, mark = photos.images(embedder.rules), None if given.unsure is None else Mark(UNSURE, given.unsure)
    output = Output(photos, given, examples.classes, True, True, mark)
    guesses = examples.guesses(table.features, given.top or 1)
    for index, of_photo in zip(table.indices.tolist(), guesses, strict=True):
        picture = thumbnail(images, index) if given.sheet else None
        output.add(Prediction(index, photos[index], of_photo, picture))
    facts, per_class = embedder.trained.facts(), np.bincount(examples.owners).tolist()
    facts["model"] |= {"classes": examples.classes, "temperature": None}
    of_examples = {
        "folder": str(given.examples),
        "per_class": per_class,
        "nearest": NEAREST,
        "temperature": TEMPERATURE,
    }
    output.close(facts | {"examples": of_examples})


def find_similar(given: Namespace, photos: Photos, embedder: Embedder, query: np.ndarray, table: Table) -> list[str]:
    """Print and draw the photos that are most similar to the query, without the query itself. Return their names."""
    images, count = photos.images(embedder.rules), given.top or NUM_SIMILAR
    found = most_similar(query, table, count + 1)
    found = [each for each in found if not os.path.samefile(photos[each.index], given.near)][:count]
    of_query = FileImages(Path(), [str(given.near)], [0], [], embedder.rules)
    tiles = [Tile(thumbnail(of_query, 0), ["query", str(given.near)])._replace(frame="black")]
    for index, similarity in found:
        print(f"{one_line(photos[index])}\t{similarity:.4f}")
        tiles.append(Tile(thumbnail(images, index), [f"{similarity:.4f}", photos[index]]))
    write_picture(contact_sheet(tiles, NUM_COLUMNS, THUMBNAIL), given.sheet)
    return [each for tile in tiles for each in tile.caption]


def thumbnail(images: FileImages, index: int) -> np.ndarray | None:
    """Return a small copy of an image, or None if it cannot be read."""
    try:
        return np.asarray(fitted(images.read(index), THUMBNAIL))
    except ImageReadError:
        return None
