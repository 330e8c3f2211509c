"""Compares features by cosine similarity: classes from a few examples, and the photos most similar to one image."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.sources.folder import subfolders
from datasets.sources.images import FileImages
from engine.predict.predictor import Guess
from extras.embeddings.embedder import Embedder
from extras.embeddings.files import Table
from extras.embeddings.photos import find_photos
from utils.errors import ConfigError, DataError
from utils.text import counted

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
    features, owners = [], []
    for number, name in enumerate(classes):
        photos = find_photos("-examples", folder / name, embedder.say)
        found = [each.features for each in embedder(photos.images(embedder.rules))]
        features += found
        owners += [np.full(len(each), number) for each in found]
        if not sum(map(len, found)):
            raise DataError(f"-examples: no image in {folder / name} can be read; add another, or remove the folder")
    return Examples(classes, normalized(np.concatenate(features)), np.concatenate(owners))


def embed_one(path: Path, embedder: Embedder) -> np.ndarray:
    """Return the features [D] of one image, scaled to length 1."""
    images = FileImages(Path(), [str(path)], [0], [], embedder.rules)
    (found,) = embedder(images)
    if not len(found.features):
        raise DataError(f"-near: {path} cannot be read; name another image")
    return normalized(found.features)[0]


class Similar(NamedTuple):
    """A photo and its similarity to the query."""

    index: int
    similarity: float


def most_similar(query: np.ndarray, table: Table, count: int) -> list[Similar]:
    """Return the photos most similar to the query, the most similar first. Equally similar photos keep their order."""
    similarities = normalized(table.features) @ query
    order = np.argsort(-similarities, kind="stable")[:count]
    return [Similar(int(table.indices[row]), float(similarities[row])) for row in order]
