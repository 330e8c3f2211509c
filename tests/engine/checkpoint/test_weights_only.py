"""SAVE_WEIGHTS_ONLY and KEEP_CHECKPOINTS: what a run leaves, and what can be done with it."""

import shutil

import pytest
import torch

from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder

WORDS = ("SAVE_WEIGHTS_ONLY=true", "SAVE_FREQ=1", "TRAIN.MODEL_EMA=true")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml):
    """Its words and the folder of its run."""
    output = tmp_path_factory.mktemp("weights_only")
    flags = ["-cfg", str(small_yaml), "-output", str(output)]
    ended = run("main_single_gpu.py", *flags, "-opts", *WORDS)
    assert ended.returncode == 0, ended.stderr
    return flags, run_folder(output)


def test_best_and_numbered_checkpoints_have_the_weights_and_no_optimizer_and_last_has_all(trained):
    _, folder = trained
    states = {path.name: torch.load(path, weights_only=True) for path in folder.glob("*.pth")}
    assert set(states) == {"last.pth", "previous.pth", "best.pth", "checkpoint-1.pth", "checkpoint-2.pth"}
    assert {name for name, state in states.items() if "optimizer" in state} == {"last.pth", "previous.pth"}
    for key in ("state_dict", "state_dict_ema"):
        assert all(map(torch.equal, states["checkpoint-2.pth"][key].values(), states["last.pth"][key].values()))
    assert (folder / "best.pth").stat().st_size < 0.6 * (folder / "last.pth").stat().st_size


def test_resume_refuses_weights_alone_and_takes_last_or_previous(trained, tmp_path, small_yaml):
    flags, folder = trained
    refused = run("main_single_gpu.py", *flags, "-resume", str(folder / "best.pth"), "-opts", *WORDS)
    assert refused.returncode == 2
    assert_names(refused.stderr, folder / "best.pth", "last.pth", "-pretrained")
    checked = run("main_single_gpu.py", *flags, "-resume", str(folder / "best.pth"), "-check", "-opts", *WORDS)
    assert checked.returncode == 2 and "last.pth" in checked.stdout
    copy = tmp_path / "o" / folder.name
    shutil.copytree(folder, copy)
    (copy / "last.pth").unlink()
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-resume", "auto"]
    resumed = run("main_single_gpu.py", *flags, "-opts", *WORDS)
    assert resumed.returncode == 0 and str(copy / "previous.pth") in resumed.stdout, resumed.stderr
    assert torch.load(copy / "last.pth", weights_only=True)["epoch"] == 1
    shutil.copy(folder / "best.pth", copy / "checkpoint-9.pth")
    (copy / "last.pth").unlink()
    (copy / "previous.pth").unlink()
    anew = run("main_single_gpu.py", *flags, "-opts", *WORDS)
    assert anew.returncode == 0 and "checkpoint-9.pth" in anew.stdout and len(list((tmp_path / "o").iterdir())) == 2


def test_evaluation_scores_both_sets_of_weights_of_such_a_file(trained):
    flags, folder = trained
    scored = run("main_single_gpu.py", *flags, "-eval", "-resume", str(folder / "best.pth"))
    assert scored.returncode == 0 and scored.stdout.count("top-1") == 2, scored.stderr


def test_keep_checkpoints_0_leaves_no_numbered_checkpoint(tmp_path, small_yaml):
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path), "-epochs", "1", "-opts", "KEEP_CHECKPOINTS=0"]
    assert run("main_single_gpu.py", *flags).returncode == 0
    assert {path.name for path in run_folder(tmp_path).glob("*.pth")} == {"last.pth", "best.pth"}


def test_weights_alone_are_refused_for_sharded_checkpoints(tmp_path, small_yaml):
    words = ["SAVE_WEIGHTS_ONLY=true", "DIST.STRATEGY=fsdp2"]
    refused = run("main_single_gpu.py", "-cfg", str(small_yaml), "-output", str(tmp_path), "-opts", *words)
    assert refused.returncode == 2
    assert_names(refused.stderr, "SAVE_WEIGHTS_ONLY", "DIST.STRATEGY")
