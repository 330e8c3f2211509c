"""The first lines of a log name the origin of each value."""

import pytest

from engine.plan_lines import with_origins


@pytest.mark.parametrize("name", ["checkpoints/vit.yaml", "checkpoint.yaml", "weights.yaml", "flag.yaml"])
def test_value_of_a_settings_file_is_shown_with_the_name_of_the_file(name):
    assert with_origins({"SEED": "seed 3"}, {"SEED": name}) == f"seed 3 ({name})"
    assert with_origins({"SEED": "seed 3"}, {"SEED": "checkpoint runs/last.pth"}) == "seed 3 (checkpoint)"
