"""Fixtures for tests of models."""

import pytest
import torch

from tests.support.weight_files import random_weights


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights()
