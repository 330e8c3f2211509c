import pytest
import torch
from torch import nn

from utils.errors import ConfigError
from utils.without_values import build_without_values


def test_model_has_shapes_and_no_values():
    assert {each.device.type for each in build_without_values(lambda: nn.Linear(2, 3)).parameters()} == {"meta"}


@pytest.mark.parametrize("error", [RuntimeError, ConfigError])
def test_model_that_reads_values_is_built_on_the_cpu_without_drawing_random_numbers(error):
    def build() -> nn.Module:
        layer = nn.Linear(2, 3)
        try:
            layer.bias.sum().item()
        except RuntimeError as unreadable:
            raise error from unreadable
        return layer

    before = torch.get_rng_state()
    assert {each.device.type for each in build_without_values(build).parameters()} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), before)


def raise_error() -> nn.Module:
    raise ConfigError("no such model")


def test_error_of_a_model_that_cannot_be_built_is_its_own():
    with pytest.raises(ConfigError, match="no such model"):
        build_without_values(raise_error)
