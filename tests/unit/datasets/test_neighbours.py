"""The candidates of near copies, and the nearest neighbours of points, are those of a comparison of all pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datasets import neighbours
from datasets.identity import ImageContents
from datasets.neighbours import nearest
from datasets.pixels import Pixels
from tests.support.properties import examples


class Pictures:
    """Tiny pictures as an image set."""

    pixels = Pixels(3)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(neighbours, "PART", 4)
    monkeypatch.setattr(neighbours, "BLOCK", 3)


def all_neighbours(points: np.ndarray, limits: np.ndarray, count: int) -> list[tuple[int, int, np.float32]]:
    """Compare all pairs. Return (row, neighbour, squared distance), sorted."""
    pairs = []
    for row, point in enumerate(points.astype(np.float64)):
        squares = ((points - point) ** 2).sum(1).astype(np.float32)
        nearest_first = np.argsort(squares, kind="stable")[:count].tolist()
        pairs += [(row, other, squares[other]) for other in nearest_first if squares[other] <= limits[row] ** 2]
    return pairs


def describe(picture: np.ndarray) -> tuple[list[float], np.float32]:
    """Return the low frequencies of the inner 14 x 14 pixels, and the distance from a plain picture."""
    inner = picture[1:15, 1:15].astype(np.float32)
    waves = np.cos(np.arange(4)[:, None] * np.pi * (np.arange(14) + 0.5) / 14) * np.sqrt([[1 / 14]] + 3 * [[2 / 14]])
    red, green, blue = inner.transpose(2, 0, 1)
    grey, *colours = (waves @ plane @ waves.T for plane in (inner.mean(2), red - green, blue - green))
    features = [grey[down, right] for down in range(4) for right in range(4 - down)]
    features += [plane[wave] for plane in colours for wave in ((0, 0), (0, 1), (1, 0))]
    return features, np.sqrt(((inner - inner.mean((0, 1))) ** 2).sum() / 3)


# Low frequencies are up to 14 x 255 large. float32 rounds the difference of two of them by less than this.
ROUNDING = 2 * 14 * 255 * np.finfo(np.float32).eps


def all_candidates(pictures: np.ndarray) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the candidates by the definition: 4 for each clear picture, at distances of up to 35% of its contrast.

    Each has its squared distance, relative to the limit, and how much the rounding of features changes it at most.
    """
    described = [describe(picture) for picture in pictures]
    features = np.array([row for row, _ in described], np.float32)
    contrasts = np.array([contrast for _, contrast in described], np.float32)
    numbers = np.argsort(features[:, features.var(0).argmax()], kind="stable")
    numbers = numbers[contrasts[numbers] >= 32]
    limits = np.float32(0.35) * contrasts[numbers]
    candidates = {}
    for row, other, square in all_neighbours(features[numbers], limits, 5):
        if row != other:
            value = float(square / limits[row] ** 2)
            error = 1e-9 + 1e-5 * value + 2 * np.sqrt(value) * ROUNDING / limits[row]
            candidates[tuple(sorted((int(numbers[row]), int(numbers[other]))))] = value, error
    return candidates


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([0, 1, 4, 30]), st.integers(1, 4))
@examples(60)
def test_candidates_equal_those_of_all_pairs(small_parts, seed, count, noise, num_scenes):
    """The pictures are noisy copies of a few scenes. Without noise, or with little, many are equal."""
    rng = np.random.default_rng(seed)
    scenes = rng.integers(256, size=(num_scenes, 16, 16, 3)) * rng.choice([0.02, 0.5, 1], size=(num_scenes, 1, 1, 1))
    changes = rng.integers(-noise, noise + 1, size=(count, 16, 16, 3)) * (rng.random((count, 16, 16, 1)) < 0.01 * noise)
    pictures = (scenes[rng.integers(num_scenes, size=count)] + changes).clip(0, 255).astype(np.uint8)
    contents = ImageContents(count, lambda number: (Pictures(), number))
    for number, picture in enumerate(pictures):
        contents.add(number, picture)
    candidates, expected = contents.candidates(np.arange(count)), all_candidates(pictures)
    assert candidates.keys() == expected.keys()
    for pair, (value, error) in expected.items():
        assert candidates[pair] == pytest.approx(value, rel=0, abs=error)


@pytest.mark.slow
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 120), st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 9, 300])
)
@examples(100)
def test_neighbours_equal_those_of_all_pairs(small_parts, seed, num_points, num_axes, count, num_values):
    """Points with few different coordinates have many equal distances, and many of them are equal."""
    rng = np.random.default_rng(seed)
    points = (rng.integers(num_values, size=(num_points, num_axes)) + rng.choice([0, 1000])).astype(np.float32)
    limits = (rng.choice([0, 1, 5, 1000], size=num_points)).astype(np.float32)
    assert [*zip(*nearest(points, limits, count, "comparing"), strict=True)] == all_neighbours(points, limits, count)


@pytest.mark.long
def test_neighbours_in_many_large_parts_equal_those_of_all_pairs():
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 500, (40, 16))
    points = (centres[rng.integers(40, size=3000)] + rng.normal(0, 1, (3000, 16))).astype(np.float32)
    limits = rng.choice([3, 400, 2000], size=3000).astype(np.float32)
    assert [*zip(*nearest(points, limits, 5, "comparing"), strict=True)] == all_neighbours(points, limits, 5)
