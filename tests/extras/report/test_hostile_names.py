"""Names of classes and images that a spreadsheet would run as formulas."""

import csv

import numpy as np
import pytest

from datasets.sources.arrays import ArrayImages
from datasets.transforms.pixel_rules import PixelRules
from engine.evaluation.tally import ImageResults
from extras.report.image_results import write_tables

pytestmark = pytest.mark.slow


def test_run_tables_contain_no_spreadsheet_formulas(tmp_path):
    images = ArrayImages(np.zeros((2, 8, 8), np.uint8), np.array([0, 1]), ["=a()", "@b"], PixelRules(1), "-2+3 of")
    numbers = np.array([0, 1])
    shares = np.full(2, 0.5, np.float32)
    write_tables(tmp_path, ImageResults(numbers, numbers, numbers[::-1], shares, shares, np.ones((3, 2), int)), images)
    tables = list(tmp_path.glob("*.csv"))
    assert len(tables) == 3
    for table in tables:
        with open(table, newline="") as file:
            assert not [cell for row in csv.reader(file) for cell in row if cell[:1] in ("=", "+", "-", "@")], table
