"""Which of several checkpoints, and of several runs, is the newest."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs.schema import Start
from engine.checkpoint.format import find_newest, newest_in, read_checkpoint, remove_old, save_checkpoint
from engine.checkpoint.resume import drop_tensors, find_checkpoint
from tests.support.configs import small_config
from tests.support.trainers import make_trainer, update
from utils.log import Log


def save(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        torch.save({"step": 1}, folder / name)
    return folder


def test_numbered_checkpoints_are_ordered_by_their_number(tmp_path):
    save(tmp_path, *(f"checkpoint-{number}.pth" for number in (8, 9, 10, 11)))
    assert newest_in(tmp_path, pytest.fail).name == "checkpoint-11.pth"
    remove_old(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10.pth", "checkpoint-11.pth"}


def test_resume_auto_takes_the_newest_run_by_its_name(tmp_path):
    """Clocks jump, so that dates of files say nothing. Runs of earlier versions have a tag behind their date."""
    newest, tagged = "train-20260103-00-00-00", "train-20260104-00-00-00-mine"
    for name in (newest, "train-20260102-23-59-59", "eval-20260105-00-00-00", "thesis"):
        save(tmp_path / name, "last.pth")
    for number in (2, 3, 10):  # as many runs as began in one second
        save(tmp_path / f"{newest}.{number}", "last.pth")
    assert find_newest(str(tmp_path), pytest.fail) == tmp_path / f"{newest}.10" / "last.pth"
    save(tmp_path / tagged, "last.pth")
    assert find_newest(str(tmp_path), pytest.fail) == tmp_path / tagged / "last.pth"
    assert find_newest(str(tmp_path / "nothing"), pytest.fail) is None


@pytest.mark.parametrize(("evaluates", "file"), [(False, "last.pth"), (True, "best.pth")])
def test_a_run_goes_on_from_its_newest_checkpoint_and_its_best_weights_are_evaluated(tmp_path, evaluates, file):
    dated, named = (save(tmp_path / name, "last.pth", "best.pth") for name in ("train-20260103-00-00-00", "mine"))
    for resume, name, folder in (("auto", "", dated), ("auto", "mine", named), (str(named), "", named)):
        start = Start(EVAL=evaluates, RESUME=resume, NAME=name)
        config = replace(small_config(tmp_path), SAVE=str(tmp_path), START=start)
        assert find_checkpoint(config, Log(1)) == folder / file


@pytest.mark.parametrize("name", ["AdamW", "SGD", "lamb"])
def test_of_a_checkpoint_that_is_loaded_nothing_stays_in_memory(tmp_path, name):
    trainer = make_trainer(small_config(tmp_path, "TRAIN.MODEL_EMA=true", f"TRAIN.OPTIMIZER.NAME={name}"))
    update(trainer, 2)
    save_checkpoint(tmp_path / "last.pth", trainer.state_dict())
    is_mapped = lambda: str(tmp_path / "last.pth") in Path("/proc/self/maps").read_text()  # noqa: E731
    state = read_checkpoint(tmp_path / "last.pth", lazily=True)
    assert is_mapped(), "processes of a machine share its pages"
    trainer.load_state_dict(state)
    drop_tensors(state)
    assert not is_mapped()
