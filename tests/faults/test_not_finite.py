"""NaN and infinity in the images, the loss or a gradient, in one of two processes or both."""

import math
import signal

import pytest
import torch

from configs.load import load
from engine.checkpoint.find import read_checkpoint
from models import build_model
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import rows_of, run_folder

pytestmark = pytest.mark.long

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


@pytest.mark.parametrize("processes", [1, 2])
def test_infinite_loss_with_finite_gradients_is_counted_apart_and_resumes(tmp_path, tiny, start, processes):
    """In float16, the logit of class 0 is -inf, so only the loss of its images is infinite."""
    options = [
        "-dataset",
        "digits",
        "-epochs",
        "1",
        "-amp",
        "-amp_dtype",
        "float16",
        "-batch_size",
        str(8 // processes),
    ]
    options += ["-opts", "DATA.IMAGE_CHANNELS=1", "DATA.VAL_FRACTION=0.8", "MODEL.NUM_CLASSES=10", "TRAIN.ACCUM_ITER=1"]
    weights = build_model(load(["-cfg", str(tiny), *options]).config, 10).state_dict()
    weights["head.bias"][0] = -7e4
    torch.save(weights, tmp_path / "weights.pth")
    flags = ["-pretrained", str(tmp_path / "weights.pth"), *options]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    said = start(whole, *flags, processes=processes).done().stdout
    assert_names(said, "warning", "infinite", "-amp_dtype bfloat16")
    for row in rows_of(run_folder(whole) / "metrics.csv"):
        assert math.isfinite(float(row["train_loss"])), row
    ended = start(stopped, *flags, processes=processes, signal_at=[5, signal.SIGTERM, [0]])
    assert set(ended.codes) == {128 + signal.SIGTERM}, ended.printed
    progress = read_checkpoint(run_folder(stopped) / "last.pth")["progress"]
    assert progress["totals"].isfinite().all() and progress["infinite"] > 0
    start(stopped, *flags, processes=processes).done()
    assert run_hash(run_folder(stopped)) == run_hash(run_folder(whole))
