"""The benchmark of whole runs gives halfstep and timm the same number of patches."""

import pytest

from scripts.benchmarks.loader import Setup

pytestmark = pytest.mark.slow


def test_both_programs_get_the_same_number_of_patches(tmp_path):
    setup = Setup("vit_tiny_patch16_224", "cpu", 2, 8, False, tokens=196)
    assert "DATA.TOKENS=196" in setup.halfstep(tmp_path, tmp_path)
    theirs = " ".join(setup.timm(tmp_path, tmp_path, tmp_path))
    assert "--naflex-train-seq-lens 196 --naflex-max-seq-len 196 --model-kwargs use_naflex=True" in theirs
