"""DATA.LABELLED_PATH: images with classes, on which evaluations measure the k-NN accuracy."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from configs.schema import Config
from datasets import ImageSet
from datasets.sources.folder import read_image_folder
from utils.errors import DataError

KEY = "DATA.LABELLED_PATH"
NEIGHBOURS = 5  # the nearest images that vote for the class of an image
TEMPERATURE = 0.07  # of the votes' weights, exp(cosine / TEMPERATURE), as in DINO (arXiv:2104.14294)
ROWS_AT_ONCE = 1024  # images whose similarities to all others are in memory at once


def read_labelled(config: Config, say: Callable[[str], None]) -> ImageSet:
    """Return the images of DATA.LABELLED_PATH: from its class folders, or from train/ if it has train/ and val/."""
    path = config.DATA.LABELLED_PATH
    if not Path(path).expanduser().is_dir():
        raise DataError(f"{KEY}: {path} is not a folder; name a folder with a folder of images for each class")
    data = replace(config.DATA, DATASET="imagefolder", DATA_PATH=path, CLASSES=None)
    start = replace(config.START, EVAL=False)
    try:
        train, _ = read_image_folder(replace(config, DATA=data, START=start), say)
    except DataError as error:
        raise DataError(f"{KEY}: {str(error).removeprefix('DATA.DATA_PATH: ')}") from None
    except OSError as error:
        raise DataError(f"{KEY}: {path} cannot be read ({error})") from error
    counts = train.count_classes()
    if (counts > 0).sum() < 2 or counts.max() < 2:
        raise DataError(
            f"{KEY}: {path} must have images of at least 2 classes, and at least 2 images of one class, because each "
            "image is compared with the others; add images"
        )
    return train


def knn_accuracy(features: np.ndarray, targets: np.ndarray) -> float:
    """Return the percentage of images whose class wins the vote of their nearest other images.

    `features` [N, D], `targets` [N]. The NEIGHBOURS images with the largest cosine vote, and nearer images have more
    weight. The result does not depend on the order of the images, unless cosines are equal.
    """
    features = features.astype(np.float64)
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    num_images, num_right = len(features), 0
    k = min(NEIGHBOURS, num_images - 1)
    for start in range(0, num_images, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, num_images))
        cosines = features[rows] @ features.T
        cosines[rows - start, rows] = -np.inf
        nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
        weights = np.exp(np.take_along_axis(cosines, nearest, 1) / TEMPERATURE)
        votes = np.zeros((len(rows), int(targets.max()) + 1))
        np.add.at(votes, (np.repeat(rows - start, k), targets[nearest].ravel()), weights.ravel())
        num_right += int((votes.argmax(1) == targets[rows]).sum())
    return 100 * num_right / max(num_images, 1)
