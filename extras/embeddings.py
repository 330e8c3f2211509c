"""Writes the features of images to files, classifies photos with a few examples, and finds similar photos."""

import contextlib
import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datasets import BadImages, Normalize
from datasets.loading.readers import Buffers, EvalReader
from datasets.loading.workers import choose_workers, make_loader
from datasets.order import Piece
from datasets.sources.folder import FolderScan, describe_left_out, subfolders
from datasets.sources.images import FileImages
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageReadError
from engine.confidence.stored import watch
from engine.precision import Precision, set_matmul
from engine.predict.classifier import Classifier
from engine.predict.output import NUM_COLUMNS, THUMBNAIL, UNSURE, Mark, Output, write_picture
from engine.predict.pictures import Tile, contact_sheet, fitted
from engine.predict.predictor import FEW, Guess, Prediction
from extras.doctor.trace import refuse_not_finite
from models.features import features_of, widths_of
from models.transforms import choose_transforms
from utils import VERSION
from utils.distributed import Process
from utils.errors import ConfigError, DataError, cause_of
from utils.files import Kind, refuse_other_kind, replacing
from utils.log import shown
from utils.text import counted, natural, one_line

# --- photos ---


class Photos(Sequence):
    """The photos in a folder and its subfolders."""

    def __init__(self, folder: Path, paths: list[str]):
        """`paths` are relative to the folder."""
        self.folder, self.paths = folder, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        """Return the path of a photo as scripts/predict.py prints it."""
        return os.path.normpath(os.path.join(self.folder, self.paths[index]))

    def images(self, rules: PixelRules) -> FileImages:
        """Return the photos as an image set without classes."""
        return FileImages(self.folder, self.paths, np.zeros(len(self), np.uint8), [], rules)


def find_photos(flag: str, folder: Path, report: Callable[[str], None]) -> Photos:
    """Return all photos in a folder and its subfolders in natural order: 2.jpg before 10.jpg.

    `flag` names the argument in error messages. `report` prints which files were left out.
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"{flag}: {folder} {problem}; name a folder of images")
    scan = FolderScan(folder, [])
    photos = Photos(folder, sorted(scan.images_below(""), key=natural))
    for line in describe_left_out(folder, scan.left_out):
        report(line)
    return photos


# --- features of photos ---


class Table(NamedTuple):
    """The features of the readable images of a set, in the order of the images."""

    indices: np.ndarray  # int64 [n], indices of the images in their set
    sizes: np.ndarray  # int32 [n, 2], width and height of the images as they are displayed
    features: np.ndarray  # float32 [n, D]
    logits: np.ndarray  # float32 [n, classes], divided by the temperature of the classifier; [n, 0] if not asked for
    known: (
        np.ndarray
    )  # float32 [n], how well images fit the training images; NaN if not asked for or without statistics


class SizedReader(EvalReader):
    """A reader whose targets are the index, width and height of each image."""

    def allocate(self, piece: Piece, pinned: bool = False) -> Buffers:
        buffers = super().allocate(piece, pinned)
        return buffers._replace(targets=torch.zeros((len(piece.indices), 3), dtype=torch.int64, pin_memory=pinned))

    def fill(self, piece: Piece, positions: range, buffers: Buffers) -> list[int]:
        bad: list[int] = []
        for position in positions:
            index = int(piece.indices[position])
            try:
                image = self.image_set.read(index)
                self.transform(image, buffers.images[position])
                height, width = image.shape[:2]
                buffers.targets[position] = torch.tensor([index, width, height])
            except ImageReadError:
                bad.append(index)
        return bad


class Embedder:
    """A model that returns features, on the device of this process, in the precision in which its run was evaluated."""

    def __init__(self, trained: Classifier, process: Process, say: Callable[[str], None], with_logits: bool = False):
        """Move the model to the device. `say` logs messages about unreadable images."""
        self.num_logits = len(trained.classes) if with_logits else 0
        self.trained, self.process, self.say, self.config = trained, process, say, trained.config
        data = self.config.DATA
        if data.TOKENS:
            raise ConfigError(
                f"{trained.source}: a model with DATA.TOKENS ({data.TOKENS}) is not supported here; name a model that takes "
                "square images"
            )
        self.rules, self.batch_size = PixelRules.of(data), data.BATCH_SIZE_EVAL or data.BATCH_SIZE
        try:
            self.width = widths_of(trained.model, data.IMAGE_CHANNELS, data.IMAGE_SIZE).pooled
        except ConfigError as error:
            raise ConfigError(f"{trained.source}: {error}") from None
        self.precision = Precision(self.config, process.device)
        set_matmul(self.config.PRECISION.MATMUL)
        self.transforms = choose_transforms(self.config, process.device, self.precision.half)
        self.transforms.apply(trained.model)
        self.model = self.precision.computing(trained.model.to(process.device)).eval()
        self.normalize = Normalize(data).to(process.device)
        self._known = watch(self.model, trained.calibration, trained.source) if with_logits else None

    def facts(self) -> dict[str, Any]:
        """Return everything that the features depend on, apart from the images, as plain values for a JSON file."""
        known = self.trained.facts()
        model = {name: known["model"][name] for name in ("weights", "key", "architecture", "epoch")}
        return {
            "model": model | {"features": self.width},
            "preprocessing": known["preprocessing"],
            "precision": self.precision.name,
            "device": self.process.device.type,
            "batch_size": self.batch_size,
        }

    def __call__(self, images: FileImages) -> Table:
        """Return the features of the readable images."""
        config = self.config
        if len(images) <= FEW:
            config = replace(config, DATA=replace(config.DATA, NUM_WORKERS=0))
        bad_images = BadImages(images, max_fraction=1.0, say=self.say)
        workers = choose_workers(config, images, self.process)
        load = make_loader(SizedReader(images, config), workers, self.process.device)
        starts = range(self.batch_size, len(images), self.batch_size)
        pieces = [Piece(0, indices, len(indices)) for indices in np.split(np.arange(len(images)), starts)]
        found = []
        with contextlib.closing(load(iter(pieces))) as batches:
            pairs = zip(pieces, batches, strict=True)
            for _, batch in shown(pairs, "features", len(images), size=lambda pair: len(pair[0].indices)):
                bad_images.note(batch.bad)
                targets, features = batch.targets.cpu().numpy(), np.empty((0, self.width), np.float32)
                logits, known = np.empty((0, self.num_logits), np.float32), np.empty(0, np.float32)
                if batch.num_samples:
                    features, logits, known = self._features(batch.images.to(self.process.device))
                found.append((targets[:, 0], targets[:, 1:].astype(np.int32), features, logits, known))
        return Table(*map(np.concatenate, zip(*found, strict=True)))

    @torch.no_grad()
    def _features(self, pixels: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the features, the logits, and how well the images fit the training images."""
        images = self.normalize(pixels, self.precision.input_dtype(self.model))

        def forward() -> tuple[Tensor, Tensor]:
            with self.precision.autocast():
                found = features_of(self.model, images, self.num_logits > 0)
            return found.pooled, found.pooled[:, :0] if found.logits is None else found.logits

        features, logits = (each.float() for each in forward())
        if not (features.isfinite().all() and logits.isfinite().all()):
            refuse_not_finite(self.trained.source, self.model, self.transforms, forward)
        known = self._known() if self._known else features.new_full((len(features),), math.nan)
        if self.num_logits:
            logits = logits / (self.trained.temperature or 1)
        return features.cpu().numpy(), logits.cpu().numpy(), known.cpu().numpy()


# --- files of features ---


FORMAT = 1  # version of the files
KEY = "halfstep"  # the array of an .npz file, and the entry in the metadata of a parquet file, that has the record
NPZ, PARQUET = ".npz", ".parquet"
KINDS = {
    NPZ: Kind("an .npz file of scripts/embed.py", (b"PK\x03\x04",), f"{KEY}.npy".encode()),
    PARQUET: Kind("a parquet file of scripts/embed.py", (b"PAR1",), KEY.encode()),
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
                f"-output: a parquet file needs pyarrow ({error}); pip install pyarrow, or name a file that ends in {NPZ}"
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


def normalized(features: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1. A row of zeros stays zero, so its similarity to everything is 0."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths == 0, 1, lengths)


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
        found = embedder(find_photos("-examples", folder / name, embedder.say).images(embedder.rules))
        if not len(found.features):
            raise DataError(f"-examples: no image in {folder / name} can be read; add another, or remove the folder")
        features.append(found.features)
    return Examples(
        classes, normalized(np.concatenate(features)), np.repeat(range(len(classes)), [*map(len, features)])
    )


def embed_one(path: Path, embedder: Embedder) -> np.ndarray:
    """Return the features [D] of one image, scaled to length 1."""
    found = embedder(FileImages(Path(), [str(path)], [0], [], embedder.rules))
    if not len(found.features):
        raise DataError(f"-near: {path} cannot be read; name another image")
    return normalized(found.features)[0]


# --- the command ---


NUM_SIMILAR = 20  # photos that -near prints without -top


def embed(given: Namespace, photos: Photos, embedder: Embedder, report: Callable[[str], None]) -> int:
    """Run the command with checked arguments. Return the exit code, which is 2 if some photos cannot be read."""
    trained, width = embedder.trained, embedder.width
    kind = f" ({trained.weights})" if trained.weights else ""
    epoch = f" after epoch {trained.epoch}" if trained.epoch else ""
    place = embedder.process.device.type
    report(f"{trained.source}{kind}: {trained.config.MODEL.NAME}{epoch}, {width} features, on {place}")
    examples = read_examples(given.examples, embedder) if given.examples else None  # before hours of computing
    if examples:
        of_classes = f"{counted(len(examples.owners), 'example')} of {counted(len(examples.classes), 'class')}"
        report(f"{given.examples}: {of_classes}")
    query = embed_one(given.near, embedder) if given.near else None
    table = embedder(photos.images(embedder.rules))
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
    images, mark = photos.images(embedder.rules), None if given.unsure is None else Mark(UNSURE, given.unsure)
    output = Output(photos, given, examples.classes, True, True, mark)
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
    images, similarities = photos.images(embedder.rules), normalized(table.features) @ query
    rows = np.argsort(-similarities, kind="stable")[: (given.top or NUM_SIMILAR) + 1].tolist()
    found = [(int(table.indices[row]), float(similarities[row])) for row in rows]
    found = [each for each in found if not os.path.samefile(photos[each[0]], given.near)][: given.top or NUM_SIMILAR]
    of_query = FileImages(Path(), [str(given.near)], [0], [], embedder.rules)
    tiles = [Tile(thumbnail(of_query, 0), ["query", str(given.near)])._replace(frame="black")]
    for index, similarity in found:
        print(f"{one_line(photos[index])}\t{similarity:.4f}")
        tiles.append(Tile(thumbnail(images, index), [f"{similarity:.4f}", photos[index]]))
    write_picture(contact_sheet(tiles, NUM_COLUMNS, THUMBNAIL), given.sheet)


def thumbnail(images: FileImages, index: int) -> np.ndarray | None:
    """Return a small copy of an image, or None if it cannot be read."""
    try:
        return np.asarray(fitted(images.read(index), THUMBNAIL))
    except ImageReadError:
        return None
