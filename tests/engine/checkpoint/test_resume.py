"""A run that is killed and resumed ends as one that never stopped."""

import functools
import json
import os
import re
import signal
from collections.abc import Callable

import pytest
import torch

from configs.load import load
from models import build_model
from tests.support.configs import SMALL
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import Run, run, run_folder, stat, wait_until

# With everything that draws random numbers or remembers something.
OPTIONS = (
    "TRAIN.SMOOTHING=0.1 MODEL.DROPPATH=0.2 MODEL.DROPOUT=0.1 TRAIN.MODEL_EMA=true TRAIN.MODEL_EMA_DECAY=0.9 "
    "TRAIN.MIXUP_ALPHA=0.8 TRAIN.CUTMIX_ALPHA=1 TRAIN.RANDOM_ERASE_PROB=0.25 TRAIN.REPEATED_AUG=3 "
    "TRAIN.MIXUP_GROUP=8 DATA.TRAIN_CROP=rkrr DATA.VFLIP=0.5 "
    "TRAIN.ACCUM_ITER=2 SAVE_STEPS=10 TRAIN.NUM_EPOCHS=3"
).split()
OTHERS = ("PRECISION.MODE=naive", "TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1", "DATA.AUGMENT_ON=device")


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(SMALL)
    return path


def arguments(settings, output, world_size, *more):
    script = "main_single_gpu.py" if world_size == 1 else "main_multi_gpu.py"
    flags = ["-cfg", str(settings), "-output", str(output), "-amp", *more]
    batch = ["-batch_size", str(16 // world_size)]  # so that an epoch has 44 updates either way
    return script, [*flags, *batch, "-opts", *OPTIONS]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Callable[..., str]:
    """The hash of a run that nothing stopped, by the number of processes and further settings."""

    @functools.cache
    def train(world_size: int, *others: str) -> str:
        folder = tmp_path_factory.mktemp("unbroken")
        (folder / "settings.yaml").write_text(SMALL)
        script, flags = arguments(folder / "settings.yaml", folder / "o", world_size)
        assert run(script, *flags, *others, processes=world_size).returncode == 0
        return run_hash(run_folder(folder / "o"))

    return train


@pytest.mark.parametrize(("world_size", "others"), [(1, ()), (2, ()), (1, OTHERS), (2, ("DIST.STRATEGY=fsdp2",))])
def test_kill_in_mid_epoch_and_resume_auto_gives_the_same_hash(tmp_path, settings, unbroken, world_size, others):
    script, flags = arguments(settings, tmp_path / "killed", world_size, "-resume", "auto")
    flags += others
    faults = {"signal_at": [67, signal.SIGKILL, [0, 1]]}  # in the second of three epochs of 44
    killed = run(script, *flags, processes=world_size, faults=faults)
    assert -signal.SIGKILL in killed.codes, killed.stderr
    state = torch.load(run_folder(tmp_path / "killed") / "last.pth", weights_only=True)
    assert 44 < state["step"] <= 67
    again = run(script, *flags, processes=world_size)
    assert again.returncode == 0, again.stderr
    assert_names(again.stdout, "resume", f"epoch {state['step'] // 44}", f"step {state['step']}")
    assert run_hash(run_folder(tmp_path / "killed")) == unbroken(world_size, *others)


def test_resuming_a_finished_run_says_so_and_ends_with_0(tmp_path, settings):
    flags = ["-cfg", str(settings), "-output", str(tmp_path / "o"), "-epochs", "1"]
    assert run("main_single_gpu.py", *flags).returncode == 0
    folder = run_folder(tmp_path / "o")

    def left() -> tuple[str, dict]:
        """The hash of the run, and what its status.json says but for which start wrote it and when."""
        status = json.loads((folder / "status.json").read_text())
        return run_hash(folder), {
            key: status[key] for key in status.keys() - {"pid", "started", "time", "heartbeat", "about"}
        }

    before = left()
    again = run("main_single_gpu.py", *flags, "-resume", "auto")
    assert again.returncode == 0 and "Epoch[" not in again.stdout and str(folder) in again.stdout
    assert left() == before


def test_resume_auto_with_nothing_there_starts_anew_and_says_so(tmp_path, settings):
    flags = ["-cfg", str(settings), "-output", str(tmp_path / "o"), "-epochs", "1"]
    result = run("main_single_gpu.py", *flags, "-resume", "auto")
    assert result.returncode == 0
    assert_names(result.stdout, "resume", tmp_path / "o")
    # Whoever starts again from its settings wants a new run.
    assert load(["-cfg", str(run_folder(tmp_path / "o") / "config.yaml")]).config.START.RESUME is None


def test_resume_auto_takes_the_checkpoint_before_a_damaged_one(tmp_path, settings):
    flags = ["-cfg", str(settings), "-output", str(tmp_path / "o"), "-epochs", "2", "-opts", "SAVE_FREQ=1"]
    assert run("main_single_gpu.py", *flags).returncode == 0
    last = run_folder(tmp_path / "o") / "last.pth"
    before = run_hash(last.parent)
    whole = last.read_bytes()
    middle = len(whole) // 2
    last.unlink()  # not written over: other names of the file would be damaged with it
    last.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    again = run("main_single_gpu.py", "-resume", "auto", *flags)
    assert again.returncode == 0
    assert_names(again.stdout, last, "previous.pth", "epoch 1")
    assert run_hash(last.parent) == before


def test_a_file_of_weights_alone_as_version_0_1_0_wrote_is_scored_but_not_continued(tmp_path, settings):
    flags = ["-cfg", str(settings), "-output", str(tmp_path / "o"), "-epochs", "1", "-opts", "KEEP_CHECKPOINTS=0"]
    assert run("main_single_gpu.py", *flags).returncode == 0
    folder = run_folder(tmp_path / "o")
    assert {path.name for path in folder.glob("*.pth")} == {"last.pth", "best.pth"}
    state = torch.load(folder / "best.pth", weights_only=True)
    del state["optimizer"]
    torch.save(state | {"weights_only": True}, weights := tmp_path / "best.pth")
    refused = run("main_single_gpu.py", "-resume", str(weights), *flags)
    assert refused.returncode == 2
    assert_names(refused.stderr, weights, "last.pth", "-pretrained")
    assert run("main_single_gpu.py", "-eval", "-resume", str(weights), *flags).returncode == 0
    (folder / "last.pth").unlink()
    weights.rename(folder / "best.pth")
    anew = run("main_single_gpu.py", "-resume", "auto", *flags)
    assert anew.returncode == 0 and len(list((tmp_path / "o").iterdir())) == 3  # that of the evaluation too
    assert_names(anew.stdout, folder / "best.pth")


def test_changed_settings_are_refused_with_a_diff_unless_allowed(tmp_path, settings):
    flags = ["-cfg", str(settings), "-output", str(tmp_path / "o")]
    assert run("main_single_gpu.py", *flags, "-epochs", "1").returncode == 0
    folder = run_folder(tmp_path / "o")
    before = {name: (folder / name).read_text() for name in ("config.yaml", "status.json", "metrics.csv")}
    flags += ["-epochs", "2", "-resume", "auto", "-opts", "TRAIN.BASE_LR=1e-4", "TRAIN.SMOOTHING=0.1"]
    for allowed in ([], ["RESUME.ALLOW_CHANGED=[TRAIN.BASE_LR]"]):
        refused = run("main_single_gpu.py", *flags, *allowed)
        assert refused.returncode == 2
        assert_names(refused.stderr, "TRAIN.SMOOTHING: 0.0 -> 0.1")
        assert ("TRAIN.BASE_LR: 0.001 -> 0.0001" in refused.stderr) == (not allowed)
    assert {name: (folder / name).read_text() for name in before} == before, "the run it refused was touched"
    (pasted,) = re.findall(r"-opts (RESUME\.ALLOW_CHANGED=\S+)", refused.stderr)
    allowed = run("main_single_gpu.py", *flags, pasted)
    assert allowed.returncode == 0 and "Epoch[001/002]" not in allowed.stdout and "Epoch[002/002]" in allowed.stdout
    assert_names(allowed.stdout, "TRAIN.BASE_LR: 0.001 -> 0.0001", "TRAIN.SMOOTHING: 0.0 -> 0.1")


def test_weights_of_another_system_are_taken_up_after_their_last_epoch(tmp_path, settings):
    """As PaddleViT's -resume weights -last_epoch N, here with a file that holds weights alone."""
    from safetensors.torch import save_file

    flags = ["-cfg", str(settings), "-epochs", "3"]
    assert run("main_single_gpu.py", *flags, "-output", str(tmp_path / "first")).returncode == 0
    trained = torch.load(run_folder(tmp_path / "first") / "last.pth", weights_only=True)["state_dict"]
    save_file(trained, tmp_path / "weights.safetensors")
    more = ["-resume", str(tmp_path / "weights"), "-last_epoch", "2", "-output", str(tmp_path / "second")]
    result = run("main_single_gpu.py", *flags, *more)
    assert result.returncode == 0, result.stderr
    assert "Epoch[003/003]" in result.stdout and "Epoch[002/003]" not in result.stdout
    assert_names(result.stdout, "epoch 3", "optimizer")


def test_a_timm_checkpoint_says_itself_which_epoch_was_its_last(tmp_path, settings):
    """timm counts them from 0."""
    weights = build_model(load(["-cfg", str(settings)]).config, 10).state_dict()
    torch.save({"epoch": 1, "arch": "vit", "state_dict": weights}, tmp_path / "timm.pth.tar")
    flags = [
        "-cfg",
        str(settings),
        "-epochs",
        "3",
        "-resume",
        str(tmp_path / "timm.pth.tar"),
        "-output",
        str(tmp_path / "o"),
    ]
    result = run("main_single_gpu.py", *flags)
    assert result.returncode == 0, result.stderr
    assert "Epoch[003/003]" in result.stdout and "Epoch[002/003]" not in result.stdout


def test_two_runs_never_share_a_folder(tmp_path, settings, unbroken):
    """The second is refused, and the first ends as if there had been none."""
    script, flags = arguments(settings, tmp_path / "o", 1, "-resume", "auto")
    first = Run(script, *flags, faults={"signal_at": [20, signal.SIGSTOP, [0]]})
    wait_until(lambda: stat(first.processes[0].pid)[0] == "T")
    second = run(script, *flags)
    os.kill(first.processes[0].pid, signal.SIGCONT)
    assert second.returncode == 2
    assert_names(second.stderr, run_folder(tmp_path / "o"))
    assert first.wait().returncode == 0
    assert run_hash(run_folder(tmp_path / "o")) == unbroken(1)


def test_a_resumed_run_needs_its_pretrained_file_no_more_and_an_evaluation_no_setting_of_training(tmp_path, settings):
    flags = ["-cfg", str(settings), "-epochs", "1"]
    assert run("main_single_gpu.py", *flags, "-output", str(tmp_path / "first")).returncode == 0
    weights = run_folder(tmp_path / "first") / "best.pth"
    flags[-1] = "2"
    second = ["-output", str(tmp_path / "second"), "-pretrained", str(weights)]
    begun = run("main_single_gpu.py", *flags, *second, faults={"signal_at": [30, signal.SIGTERM, [0]]})
    assert begun.returncode == 128 + signal.SIGTERM, begun.stderr
    weights.unlink()
    again = run("main_single_gpu.py", *flags, *second, "-resume", "auto")
    assert again.returncode == 0, again.stderr
    training_only = ["-opts", "DIST.STRATEGY=fsdp2", "PRECISION.MODE=naive"]
    checkpoint = run_folder(tmp_path / "second") / "last.pth"
    scored = run("main_single_gpu.py", *flags, "-amp", "-eval", "-resume", str(checkpoint), *training_only)
    assert scored.returncode == 0, scored.stderr
