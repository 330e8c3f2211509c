"""NaN and infinity in the images, the loss or a gradient, in one of two processes or both."""

import pytest
import torch

from engine.checkpoint.find import read_checkpoint
from tests.support.refusals import assert_names
from tests.support.runs import rows_of, run_folder

pytestmark = pytest.mark.slow

FLAGS = ["-batch_size", "4", "-opts", "SAVE_STEPS=1"]  # four updates per epoch, two epochs
RANKS = {"one": [1], "both": [0, 1]}


def check_files(folder) -> None:
    """Assert that no tensor in any checkpoint has non-finite values."""

    def check(value) -> None:
        if isinstance(value, torch.Tensor):
            assert torch.isfinite(value).all()
        elif isinstance(value, dict | list | tuple):
            for each in value.values() if isinstance(value, dict) else value:
                check(each)

    paths = [path for path in folder.glob("*.pth") if not path.name.startswith("overflow")]  # its last batch
    assert {"last.pth", "previous.pth"} <= {path.name for path in paths}
    for path in paths:
        state = read_checkpoint(path)
        check({name: state[name] for name in ("state_dict", "state_dict_ema", "optimizer", "amp_scaler")})


@pytest.mark.parametrize(("what", "ranks"), [("input", "one"), ("loss", "one"), ("gradient", "one"), ("loss", "both")])
def test_ranks_skip_nonfinite_update_together_and_stay_identical(tmp_path, start, what, ranks):
    weights = tmp_path / "weights"
    start(
        tmp_path / "o", *FLAGS, processes=2, poison=[what, RANKS[ranks], [1, 5, 6]], note_weights=[str(weights)]
    ).done()
    first, second = (weights.with_name(f"weights.{rank}").read_text() for rank in (0, 1))
    assert first == second
    folder = run_folder(tmp_path / "o")
    assert [int(row["skipped"]) for row in rows_of(folder / "metrics.csv")] == [1, 2]
    check_files(folder)


def test_repeated_nonfinite_gradients_on_one_rank_stop_both_ranks(tmp_path, start):
    options = ["PRECISION.MAX_CONSECUTIVE_SKIPS=3"]  # at first, the run rolls back
    poisoned = start(tmp_path / "o", *FLAGS, *options, processes=2, poison=["gradient", [1], list(range(2, 8))])
    assert poisoned.codes == [3, 3], poisoned.printed
    folder = run_folder(tmp_path / "o")
    assert_names((folder / "status.json").read_text(), "3 updates", "step 8")
    check_files(folder)
