"""Both ways to move the average of the weights give it, and leave it alone where the update was skipped."""

import pytest
import torch

from engine.train.ema import ForeachLerp, FusedLerp


@pytest.mark.parametrize("move", [FusedLerp, ForeachLerp])
def test_the_average_follows_the_values_by_the_fraction_unless_the_update_was_skipped(move):
    torch.manual_seed(0)
    means = [torch.randn(size) for size in ((), (3,), (5, 7), (2, 3, 4, 4))]
    means.append(torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
    values = [torch.randn_like(mean) for mean in means]
    exact = [mean.double() for mean in means]
    follow = move(means, values)
    for fraction in (1.0, 0.3, 4e-5, 0.0):
        for value in values:
            value.normal_()
        given, before = [value.clone() for value in values], [mean.clone() for mean in means]
        follow(fraction, torch.ones(()))
        assert all(map(torch.equal, means, before))
        follow(fraction, torch.zeros(()))
        exact = [mean.lerp(value.double(), fraction) for mean, value in zip(exact, values, strict=True)]
        for mean, expected in zip(means, exact, strict=True):
            torch.testing.assert_close(mean.double(), expected, rtol=1e-6, atol=1e-6)
        assert all(map(torch.equal, values, given))
