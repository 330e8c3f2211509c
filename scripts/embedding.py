"""Writes the features of photos to files, classifies photos with a few examples, and finds similar photos."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from datasets.sources.files import refuse_copies, unlabelled_files
from datasets.sources.folder import subfolders
from engine.features.embedder import Embedder, Photos, Table, find_photos, normalized, thumbnail
from engine.predict.guesses import Guess
from engine.predict.output import NUM_COLUMNS, THUMBNAIL, UNSURE, Mark, Output, write_picture
from engine.predict.output_paths import Outputs
from engine.predict.pictures import Tile, contact_sheet
from engine.predict.predictor import Prediction
from utils import VERSION
from utils.commands import pip
from utils.errors import ConfigError, DataError, cause_of
from utils.files import Kind, refuse_other_kind, replacing
from utils.text import counted, one_line

# --- files of features ---


FORMAT = 1  # version of the files
KEY = "halfstep"  # the array of an .npz file, and the entry in the metadata of a parquet file, that has the record
NPZ, PARQUET = ".npz", ".parquet"
KINDS = {
    NPZ: Kind("an .npz file of halfstep embed", (b"PK\x03\x04",), f"{KEY}.npy".encode()),
    PARQUET: Kind("a parquet file of halfstep embed", (b"PAR1",), KEY.encode()),
}


def check_output(path: Path) -> None:
    """Raise ConfigError if this is not the name of a file of features. Call this before hours of computing."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"-output: {path} must be a file whose name ends in {NPZ} or {PARQUET}")
    if kind is KINDS[PARQUET]:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"-output: a parquet file needs pyarrow ({error}); {pip('install')} pyarrow, or name a file that "
                f"ends in {NPZ}"
            ) from None
    refuse_other_kind("-output", path, kind)


def write_features(path: Path, photos: Photos, facts: dict[str, Any], table: Table) -> None:
    """Write the paths, sizes and features. The file gets its name when it is completely on disk."""
    record = json.dumps({"format": FORMAT, KEY: VERSION} | facts | {"images": {"count": len(photos)}})
    try:
        with replacing(path) as file:
            (_write_parquet if path.suffix.lower() == PARQUET else _write_npz)(file, photos, record, table)
    except OSError as error:
        raise DataError(f"-output: {path} cannot be written ({cause_of(error)}); choose another place") from None


def _paths_of(photos: Photos, table: Table) -> list[str]:
    """Return the paths as text. Bytes that are not UTF-8 become escapes such as \\xff."""
    paths = (os.fsencode(photos.paths[index]) for index in table.indices.tolist())
    return [path.decode("utf-8", errors="backslashreplace") for path in paths]


def _write_npz(file: IO[bytes], photos: Photos, record: str, table: Table) -> None:
    paths = np.array(_paths_of(photos, table), np.str_)
    np.savez(file, **{KEY: np.array(record), "paths": paths, "sizes": table.sizes, "features": table.features})


def _write_parquet(file: IO[bytes], photos: Photos, record: str, table: Table) -> None:
    import pyarrow
    import pyarrow.parquet

    features = pyarrow.array(table.features.reshape(-1))
    columns = {
        "path": pyarrow.array(_paths_of(photos, table), pyarrow.string()),
        "width": pyarrow.array(table.sizes[:, 0]),
        "height": pyarrow.array(table.sizes[:, 1]),
        "features": pyarrow.FixedSizeListArray.from_arrays(features, table.features.shape[1]),
    }
    rows = pyarrow.table(columns).replace_schema_metadata({KEY: record})
    pyarrow.parquet.write_table(rows, file, use_dictionary=False)


# --- examples and similar photos ---


# With 5 examples of each of 8 drawn classes, the nearest examples and the centre of the class together are about as
# good as a linear probe (measured in release 1.1.0); either alone was up to 2 percentage points worse.
NEAREST = 3  # examples of a class that are compared, at most
TEMPERATURE = 0.1  # of the softmax over similarities; chosen for the best log-likelihood on the same photos


class Examples(NamedTuple):
    """The features of the examples of each class."""

    classes: list[str]
    features: np.ndarray  # float32 [E, D], each row of length 1
    owners: np.ndarray  # int64 [E], the class number of each example

    def scores(self, features: np.ndarray) -> np.ndarray:
        """Return the similarity [n, classes] of photos to each class.

        It is the mean of two numbers: the average similarity to the NEAREST most similar examples of the class, and the
        similarity to the centre of all its examples.
        """
        photos = normalized(features)
        found = np.empty((len(photos), len(self.classes)), np.float32)
        for number in range(len(self.classes)):
            of_class = self.features[self.owners == number]
            similarities, count = photos @ of_class.T, min(NEAREST, len(of_class))
            nearest = np.partition(similarities, -count)[:, -count:].mean(1)
            centre = normalized(of_class.mean(0, keepdims=True))[0]
            found[:, number] = (nearest + photos @ centre) / 2
        return found

    def guesses(self, features: np.ndarray, top: int) -> list[list[Guess]]:
        """Return the `top` most similar classes of each photo with their probabilities. The first class wins a tie."""
        scores = self.scores(features).astype(np.float64) / TEMPERATURE
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        probabilities = exponentials / exponentials.sum(1, keepdims=True)
        order = np.argsort(-probabilities, axis=1, kind="stable")[:, :top].tolist()
        return [
            [Guess(number, self.classes[number], float(of_photo[number])) for number in numbers]
            for numbers, of_photo in zip(order, probabilities, strict=True)
        ]


def example_classes(folder: Path) -> list[str]:
    """Return the names of the class folders. Raise ConfigError if there are fewer than two."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"-examples: {folder} {problem}; name a folder that has a folder for each class")
    classes = subfolders(folder)
    if len(classes) < 2:
        found = f"has {counted(len(classes), 'class folder')}"
        raise ConfigError(f"-examples: {folder} {found}; it must have a folder for each of at least two classes")
    return classes


def read_examples(folder: Path, embedder: Embedder) -> Examples:
    """Compute the features of the images in a folder with a folder for each class."""
    classes = example_classes(folder)
    features = []
    for name in classes:
        photos = find_photos("-examples", folder / name, embedder.say).for_model(embedder.pixels, embedder.say)
        found = embedder(photos.images(embedder.pixels))
        if not len(found.features):
            raise DataError(f"-examples: no image in {folder / name} can be read; add another, or remove the folder")
        features.append(found.features)
    return Examples(
        classes, normalized(np.concatenate(features)), np.repeat(range(len(classes)), [*map(len, features)])
    )


def embed_one(path: Path, embedder: Embedder) -> np.ndarray:
    """Return the features [D] of one image, scaled to length 1."""
    found = embedder(unlabelled_files([str(path)], embedder.pixels))
    if not len(found.features):
        raise DataError(f"-near: {path} cannot be read; name another image")
    return normalized(found.features)[0]


# --- the command ---


NUM_SIMILAR = 20  # photos that -near prints without -top


def embed(given: Namespace, photos: Photos, embedder: Embedder, report: Callable[[str], None]) -> int:
    """Run the command with checked arguments. Return the exit code, which is 2 if some photos cannot be read."""
    trained, width = embedder.trained, embedder.width
    photos = photos.for_model(embedder.pixels, report)
    if given.into:
        refuse_copies(embedder.pixels)
    kind = f" ({trained.weights})" if trained.weights else ""
    epoch = f" after epoch {trained.epoch}" if trained.epoch else ""
    place = embedder.process.device.type
    report(f"{trained.source}{kind}: {trained.config.MODEL.NAME}{epoch}, {width} features, on {place}")
    examples = read_examples(given.examples, embedder) if given.examples else None  # before hours of computing
    if examples:
        of_classes = f"{counted(len(examples.owners), 'example')} of {counted(len(examples.classes), 'class')}"
        report(f"{given.examples}: {of_classes}")
    query = embed_one(given.near, embedder) if given.near else None
    table = embedder(photos.images(embedder.pixels))
    if given.output:
        write_features(given.output, photos, embedder.facts(), table)
        report(f"{given.output}: {counted(len(table.indices), 'row')} of {width} features")
    if examples:
        classify(given, photos, embedder, examples, table)
    if query is not None:
        find_similar(given, photos, embedder, query, table)
    if num_unreadable := len(photos) - len(table.indices):
        report(f"{num_unreadable} of {counted(len(photos), 'image')} could not be read")
    return 2 if num_unreadable else 0


def classify(given: Namespace, photos: Photos, embedder: Embedder, examples: Examples, table: Table) -> None:
    """Print the most similar classes of each photo, and write the tables and pictures."""
    images, mark = photos.images(embedder.pixels), None if given.unsure is None else Mark(UNSURE, given.unsure)
    outputs = Outputs(given.csv, given.json, given.sheet, given.into)
    output = Output(photos, outputs, examples.classes, True, True, mark)
    guesses = examples.guesses(table.features, given.top or 1)
    for index, of_photo in zip(table.indices.tolist(), guesses, strict=True):
        picture = thumbnail(images, index) if given.sheet else None
        output.add(Prediction(index, photos[index], of_photo, picture))
    facts, per_class = embedder.trained.facts(), np.bincount(examples.owners).tolist()
    facts["model"] |= {"classes": examples.classes, "temperature": None}
    of_examples = {"folder": str(given.examples), "per_class": per_class}
    output.close(facts | {"examples": of_examples | {"nearest": NEAREST, "temperature": TEMPERATURE}})


def find_similar(given: Namespace, photos: Photos, embedder: Embedder, query: np.ndarray, table: Table) -> None:
    """Print and draw the photos that are most similar to the query, without the query itself."""
    images, similarities = photos.images(embedder.pixels), normalized(table.features) @ query
    rows = np.argsort(-similarities, kind="stable")[: (given.top or NUM_SIMILAR) + 1].tolist()
    found = [(int(table.indices[row]), float(similarities[row])) for row in rows]
    found = [each for each in found if not os.path.samefile(photos[each[0]], given.near)][: given.top or NUM_SIMILAR]
    of_query = unlabelled_files([str(given.near)], embedder.pixels)
    tiles = [Tile(thumbnail(of_query, 0), ["query", str(given.near)])._replace(frame="black")]
    for index, similarity in found:
        print(f"{one_line(photos[index])}\t{similarity:.4f}")
        tiles.append(Tile(thumbnail(images, index), [f"{similarity:.4f}", photos[index]]))
    write_picture(contact_sheet(tiles, NUM_COLUMNS, THUMBNAIL), given.sheet)
