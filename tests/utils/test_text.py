"""Quantities in messages."""

import pytest

from utils.text import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1437, "image", "1,437 images"),
        (2, "loader process", "2 loader processes"),
        (2, "micro-batch", "2 micro-batches"),
        (2, "epoch", "2 epochs"),
    ],
)
def test_one_is_singular_and_the_rest_plural(number, noun, text):
    assert counted(number, noun) == text
