"""Classifies photos by the features of a few examples of each class."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.sources.folder import subfolders
from datasets.sources.images import unlabelled_files
from engine.features.embedder import Embedder, find_photos, normalized
from engine.predict.guesses import Guess
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
        scores = np.empty((len(photos), len(self.classes)), np.float32)
        for number in range(len(self.classes)):
            of_class = self.features[self.owners == number]
            similarities, count = photos @ of_class.T, min(NEAREST, len(of_class))
            nearest = np.partition(similarities, -count)[:, -count:].mean(1)
            centre = normalized(of_class.mean(0, keepdims=True))[0]
            scores[:, number] = (nearest + photos @ centre) / 2
        return scores

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
        count = f"has {counted(len(classes), 'class folder')}"
        raise ConfigError(f"-examples: {folder} {count}; it must have a folder for each of at least two classes")
    return classes


def read_examples(folder: Path, embedder: Embedder) -> Examples:
    """Compute the features of the images in a folder with a folder for each class."""
    classes = example_classes(folder)
    features = []
    for name in classes:
        photos = find_photos("-examples", folder / name, embedder.say).for_model(embedder.pixels, embedder.say)
        table = embedder(photos.images(embedder.pixels))
        if not len(table.features):
            raise DataError(f"-examples: no image in {folder / name} can be read; add another, or remove the folder")
        features.append(table.features)
    return Examples(
        classes, normalized(np.concatenate(features)), np.repeat(range(len(classes)), [*map(len, features)])
    )


def embed_one(path: Path, embedder: Embedder) -> np.ndarray:
    """Return the features [D] of one image, scaled to length 1."""
    table = embedder(unlabelled_files([str(path)], embedder.pixels))
    if not len(table.features):
        raise DataError(f"-near: {path} cannot be read; name another image")
    return normalized(table.features)[0]
