"""Memory that runs out late on one of several processes: all start again with smaller micro-batches, to the same weights."""

import json
import sys
from pathlib import Path

import pytest
import torch

import main_single_gpu
from engine.checkpoint.restart import NAME, find_start, leave, read_smaller, take_up
from engine.memory.recovery import RanOut
from engine.session import Session
from engine.train.trainer import Trainer
from tests.support.configs import CPU, SMALL, small_config
from tests.support.processes import TORCHRUN, start
from tests.support.runs import ROOT, run_folder
from tests.support.trainers import make_trainer
from utils.distributed import Process
from utils.errors import ToldError, exit_code
from utils.launch import torchrun as launch
from utils.launch.launch_env import Place
from utils.launch.rendezvous import Meeting

PROGRAM = str(ROOT / "tests/support/programs/short_of_memory.py")
OPTIONS = "TRAIN.NUM_EPOCHS=1 TRAIN.WARMUP_EPOCHS=0 TRAIN.MIXUP_ALPHA=0.8 TRAIN.RANDOM_ERASE_PROB=0.5".split()


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory) -> dict:
    """The last checkpoint of a run in float64 of one process, for which memory suffices."""
    folder = tmp_path_factory.mktemp("unsplit")
    ordinary = Trainer.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Trainer,
            "__init__",
            lambda trainer, config, model, *rest: ordinary(trainer, config, model.double(), *rest),
        )
        assert exit_code(main_single_gpu.main, arguments(folder)) == 0
    return torch.load(run_folder(folder / "output") / "last.pth", weights_only=True)


def arguments(folder: Path, *flags: str, options: tuple[str, ...] = ()) -> list[str]:
    (folder / "small.yaml").write_text(SMALL)
    given = ["-cfg", str(folder / "small.yaml"), "-output", str(folder / "output")]
    return [*given, *flags, "-opts", *OPTIONS, *options]


def hold_that_it_went_on(process, folder: Path, unsplit: dict) -> str:
    """What the run said, and whether its weights are those of the run that did not run out."""
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "error: " not in said and "Traceback" not in said
    assert said.count("ran out of memory at step 5") == 1
    path = run_folder(folder / "output")
    assert json.loads((path / NAME).read_text()) == {"images": 8, "step": 5, "batch_size": 16}
    state = torch.load(path / "last.pth", weights_only=True)
    assert state["step"] == unsplit["step"] == 44
    for name, weight in unsplit["state_dict"].items():
        assert weight.dtype is torch.float64
        assert (weight - state["state_dict"][name]).abs().max() < 1e-10, name
    assert "BATCH_SIZE: 16 " in (path / "config.yaml").read_text()
    return said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_launcher_starts_a_run_again_from_its_last_save(tmp_path, unsplit, strategy):
    flags = arguments(tmp_path, "-batch_size", "16", options=("SAVE_STEPS=2", f"DIST.STRATEGY={strategy}"))
    said = hold_that_it_went_on(start([sys.executable, PROGRAM, "8", *flags]), tmp_path, unsplit)
    assert said.count("resume: ") == 1 and "after epoch 0 and step 4" in said
    assert "with micro-batches of 8 images; the images of an update stay the same." in said
    assert "micro-batches of at most 8 images, as memory ran out at step 5 of an earlier start;" in said


def test_torchrun_starts_a_run_again_that_saved_nothing_with_the_batch_that_was_found_for_it(tmp_path, unsplit):
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    process = start([*launcher, PROGRAM, "8", *arguments(tmp_path, "-batch_size", "auto")])
    said = hold_that_it_went_on(process, tmp_path, unsplit)
    assert "batch size: 16 images, in the one of 2 processes where the fewest fit (as arranged; " in said
    assert "from the first update: nothing was saved yet" in said
    assert "batch size: 16, as this run was begun with" in said


@pytest.fixture
def session(tmp_path, monkeypatch) -> Session:
    """Of process 1 of 2, in a folder."""
    (tmp_path / "small.yaml").write_text(SMALL)
    loaded = main_single_gpu.load(["-cfg", str(tmp_path / "small.yaml")])
    session = Session(loaded, Process(CPU, rank=1, world_size=2))
    session.path = tmp_path
    return session


def test_where_nothing_starts_it_again_the_run_ends_as_an_error_with_the_flags(session):
    short = RanOut(1, 5, "out of memory", 8, "-batch_size 8 -accum_iter 2")
    assert leave(session, short) is short and str(short).endswith("-resume auto -batch_size 8 -accum_iter 2")
    assert read_smaller(session.path)["images"] == 8, "who resumes it need not type them"


def test_where_it_is_started_again_the_others_and_the_launcher_are_told(session, monkeypatch, capsys):
    words = []
    monkeypatch.setattr(Process, "ask_for_restart", lambda process, word: words.append(word) or True)
    told = leave(session, RanOut(1, 5, "out of memory", 8, "-batch_size 8 -accum_iter 2"))
    assert isinstance(told, ToldError) and words == [str(session.path / NAME)]
    assert "all start again from the last save, with micro-batches of 8 images" in capsys.readouterr().err
    assert [path.name for path in session.path.glob("*.json")] == [NAME]


def test_a_start_goes_on_from_the_newest_checkpoint_that_is_not_beyond_where_memory_ran_out(session, monkeypatch):
    """A later one is of a start before: -resume named an older one."""
    for name, step in (("last.pth", 30), ("checkpoint-2.pth", 20), ("checkpoint-1.pth", 10)):
        torch.save({"step": step}, session.path / name)
    (session.path / NAME).write_text('{"images": 8, "step": 25, "batch_size": 32}')
    monkeypatch.setattr(Process, "take_word", lambda process: str(session.path / NAME))
    assert find_start(session) == (session.path, session.path / "checkpoint-2.pth")
    (session.path / NAME).write_text('{"images": 8, "step": 5, "batch_size": 32}')
    assert find_start(session) == (session.path, None)


def test_what_one_start_leaves_is_for_the_next_one_alone(tmp_path, monkeypatch):
    store = torch.distributed.HashStore()  # torchrun's, which lives longer than its processes
    monkeypatch.setattr(Meeting, "_connect", lambda meeting: store)

    def meet(attempt: int, **launcher) -> Meeting:
        return Meeting(Place("torchrun", 0, 1, 0, attempt=attempt, **launcher), timeout=5.0)

    assert not meet(0, restarts_left=0).ask_for_restart("word")
    assert not meet(0, restarts_left=1, host="a").ask_for_restart("word"), "in a store that ends with the processes"
    assert meet(0, restarts_left=2).ask_for_restart("word")
    assert [meet(1, restarts_left=1).take_word(), meet(2).take_word()] == ["word", ""]
    note = str(tmp_path / "note")
    assert meet(3, note=note).take_word() == ""
    assert meet(3, note=note).ask_for_restart("our launcher's")
    assert [meet(3, note=note).take_word() for _ in range(2)] == ["our launcher's", ""]


def test_a_size_that_settings_are_below_changes_nothing(session, tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    take_up(session, trainer, {"images": 32, "step": 5})
    assert trainer.micro_batches.size is None
    take_up(session, trainer, {"images": 8, "step": 5})
    assert trainer.micro_batches.size == 8


@pytest.mark.parametrize(
    ("ends", "code", "starts"),
    [
        ([(2, 16), (2, 8), (0, None)], 0, 3),
        ([(2, 16), (2, 16)], 2, 2),  # no smaller than before
        ([(2, 16), (2, None)], 2, 2),  # another error
        ([(1, None)], 1, 1),
        ([(1, 16)], 1, 1),  # the one that took the others with it was another
    ],
)
def test_the_launcher_starts_again_only_with_smaller_micro_batches(tmp_path, monkeypatch, ends, code, starts):
    left = iter(ends)
    counted = []

    def end(script, arguments, num_processes):
        ended, size = next(left)
        counted.append(ended)
        if size:
            (tmp_path / NAME).write_text(json.dumps({"images": size}))
            Path(launch.os.environ[launch.NOTE]).write_text(str(tmp_path / NAME))
        return ended

    monkeypatch.setenv(launch.NOTE, "")  # put back what the launcher sets
    monkeypatch.setattr(launch, "start", end)
    assert launch.launch("x.py", [], 1) == code and len(counted) == starts
