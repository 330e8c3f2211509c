"""The benchmarks: the padding table, and the commands for halfstep and timm."""

import pytest

from scripts.benchmarks.loader import Setup
from tests.support.runs import typed

pytestmark = pytest.mark.slow


def test_padding_is_below_15_percent_from_196_patches():
    printed = typed("scripts/benchmarks/native_aspect.py", "padding").done().stdout
    rows = {
        cells[1]: cells[2:5]
        for cells in ([cell.strip() for cell in line.split("|")] for line in printed.splitlines() if "%" in line)
    }
    for tokens in ("196", "256", "576", "784", "1024"):
        assert all(float(share.removesuffix("%")) < 15 for share in rows[tokens]), tokens


def test_both_programs_get_the_same_number_of_patches(tmp_path):
    setup = Setup("vit_tiny_patch16_224", "cpu", 2, 8, False, tokens=196)
    assert "DATA.TOKENS=196" in setup.halfstep(tmp_path, tmp_path)
    theirs = " ".join(setup.timm(tmp_path, tmp_path, tmp_path))
    assert "--naflex-train-seq-lens 196 --naflex-max-seq-len 196 --model-kwargs use_naflex=True" in theirs
