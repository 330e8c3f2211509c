"""Reproducible random numbers, and kernels that give the same result each time."""

import torch

from utils.seed import make_deterministic


def test_deterministic_runs_spend_no_time_on_memory_that_is_written_anyway():
    filled = torch.utils.deterministic.fill_uninitialized_memory
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled
