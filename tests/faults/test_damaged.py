"""Checkpoints that are truncated, changed by a bit, or contain code: they never load wrong values."""

import random
import shutil

import pytest
import torch

from engine.checkpoint.find import find_newest, read_checkpoint
from engine.checkpoint.format import save_checkpoint
from tests.support.refusals import refused
from tests.support.run_hash import state_hash
from tests.support.weight_files import PAYLOADS, payloads, pickled
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """Return a run's folder with two checkpoints."""
    folder = tmp_path / "train-20260102-03-04-05"
    folder.mkdir()
    for step in (1, 2):
        torch.manual_seed(step)
        weights = {f"layer{number}": torch.randn(40, number + 1) for number in range(10)}
        save_checkpoint(folder / "last.pth", {"step": step, "state_dict": weights})
    return folder


def take_up(run) -> tuple[int, list[str]]:
    """Return the step that -resume auto loads, after checking the state, and the warnings."""
    right = {1: state_hash(read_checkpoint(run / "previous.pth"))}
    right[2] = state_hash(read_checkpoint(run / "whole.pth"))
    warned = []
    state = read_checkpoint(find_newest(str(run.parent), warned.append))
    assert state_hash(state) == right[state["step"]]
    return state["step"], warned


def damage(run, content: bytes) -> None:
    (run / "last.pth").unlink()  # not overwritten, because it has a hard link
    (run / "last.pth").write_bytes(content)


def test_fifty_truncated_checkpoints_are_rejected_with_a_warning(run):
    shutil.copy(run / "last.pth", run / "whole.pth")
    whole = (run / "whole.pth").read_bytes()
    for place in [*random.Random(0).sample(range(len(whole)), 47), 0, 1, len(whole) - 1]:
        damage(run, whole[:place])
        step, warned = take_up(run)
        assert step == 1 and len(warned) == 1 and "last.pth" in warned[0], place


def test_flipped_bit_in_checkpoint_never_loads_wrong_values(run):
    """A bit of the padding between tensors may change nothing; then all values are right."""
    shutil.copy(run / "last.pth", run / "whole.pth")
    whole = (run / "whole.pth").read_bytes()
    found = []
    for place in random.Random(0).sample(range(8 * len(whole)), 50):
        changed = bytearray(whole)
        changed[place // 8] ^= 1 << place % 8
        damage(run, changed)
        step, warned = take_up(run)
        assert len(warned) == (step == 1), place
        found.append(step)
    assert found.count(1) > 20


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("as_torch", [True, False], ids=["torch", "pickle"])
def test_malicious_checkpoint_runs_no_code_and_resume_takes_previous(run, kind, as_torch):
    marker = run / "marker"
    state = {"state_dict": {"head.weight": payloads(marker)[kind]}}
    (run / "last.pth").unlink()
    torch.save(state, run / "last.pth") if as_torch else pickled(state, run / "last.pth", protocol=2)
    with refused(ConfigError, "-resume", run / "last.pth"):
        read_checkpoint(run / "last.pth")
    warned = []
    assert find_newest(str(run.parent), warned.append) == run / "previous.pth" and len(warned) == 1
    assert not marker.exists()
