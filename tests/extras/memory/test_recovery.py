"""An update that runs out of memory is repeated with smaller micro-batches and the same result; so are prefetched batches."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from configs.load import load
from extras.memory import guard, probe
from extras.memory.guard import shortage
from models.weights.torch_files import read_torch
from tests.support.configs import CPU, SMALL, small_config
from tests.support.planted import run_out
from tests.support.pretend_device import DEVICE, NAME, on_pretend_device
from tests.support.refusals import assert_names, refused
from tests.support.run_hash import state_hash
from tests.support.runs import Ended, fp64_weights, run, run_folder
from tests.support.trainers import make_trainer, update
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log
from utils.torch_internals import TorchDispatchMode

pytestmark = pytest.mark.slow

IMAGES = "149,false,pair"  # with mixup, and a remainder
# {case: (processes, images and micro-batches per process, images that fit at once, first step with this limit)}
SPLITS = {
    "at the first step": (1, "32,1,9,0"),
    "later": (1, "32,1,9,7"),
    "where gradients accumulate": (1, "16,2,5,3"),
    "on one of two processes": (2, "16,1,5,0"),
    "on one of two processes at the second step": (2, "16,1,5,1"),
    "on one of two processes that accumulate": (2, "8,2,4,1"),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Return {split: weights after 12 updates}. None is a run with enough memory."""
    splits = {None: (1, "32,1")} | SPLITS
    cases = {name: (world_size, f"{IMAGES},{split}") for name, (world_size, split) in splits.items()}
    return fp64_weights(tmp_path_factory.mktemp("fp64"), cases)


@pytest.mark.parametrize("split", SPLITS)
def test_run_that_splits_batches_ends_with_weights_of_unsplit_run(weights, split):
    for name, weight in weights[None].items():
        difference = (weight - weights[split][name]).abs().max().item()
        assert difference < 1e-10, f"{name} differs by {difference}"


def sizes_seen(trainer):
    """Return a list that receives the number of images of each forward."""
    sizes = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    return sizes


def test_batch_size_stays_halved_until_restart_after_a_single_warning(tmp_path, capsys):
    config = small_config(tmp_path)
    trainer = make_trainer(config)
    sizes = sizes_seen(trainer)
    run_out(trainer, fits=16, step=1)
    update(trainer, 4)
    assert sizes == [32, 32, 16, 16, 16, 16, 16, 16]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert line.startswith("warning: ")
    assert_names(line, "step 1", 32, 16, "-batch_size 16 -accum_iter 2")
    again = make_trainer(config)
    sizes = sizes_seen(again)
    update(again)
    assert sizes == [32]


def test_halved_batch_matches_smaller_batch_bitwise_with_dropout(tmp_path):
    options = ("MODEL.DROPOUT=0.2", "MODEL.DROPPATH=0.2", "TRAIN.MODEL_EMA=true", "TRAIN.WARMUP_EPOCHS=0")
    short = make_trainer(small_config(tmp_path, *options))
    run_out(short, fits=16, step=0)
    small = make_trainer(small_config(tmp_path, *options, "DATA.BATCH_SIZE=16", "TRAIN.ACCUM_ITER=2"))
    assert state_hash(update(short, 3).state_dict()) == state_hash(update(small, 3).state_dict())


def test_run_without_memory_for_one_image_exits_with_2(tmp_path, small_yaml):
    words = ["-cfg", str(small_yaml), "-output", str(tmp_path / "output")]
    ended = run("main_single_gpu.py", *words, faults={"run_out_of_memory": [0, 0, 0]}).refused()
    assert ended.stdout.count("warning: out of memory") == 5  # 32, 16, 8, 4, 2
    assert_names(ended.stderr, "error", "DATA.IMAGE_SIZE", 8, "step 0", "1 image", "-amp")
    assert "as arranged" in (run_folder(tmp_path / "output") / "log.txt").read_text()


def test_mixup_pairs_are_never_split_when_memory_runs_out(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "TRAIN.MIXUP_ALPHA=0.8", "DATA.BATCH_SIZE=22"))
    sizes = sizes_seen(trainer)
    run_out(trainer, fits=1, step=0)
    with refused(ConfigError, "2 images", "mixup", "cutmix"):
        update(trainer)
    assert sizes == [22, 12, 6, 4, 2]


@pytest.mark.parametrize("message", ["DefaultCPUAllocator: can't allocate memory", "something else"])
def test_errors_while_reading_a_batch_are_not_retried(tmp_path, message):
    trainer = make_trainer(small_config(tmp_path))
    windows = trainer.data.windows(0, 1)
    window = next(windows)

    def broken():
        raise RuntimeError(message)
        yield

    with pytest.raises(RuntimeError, match=message):
        trainer.update(window._replace(batches=broken()))
    assert trainer.guard.max_images is None and trainer.step == 0


def test_unrelated_forward_errors_end_the_run(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    trainer.model.register_forward_pre_hook(Mock(side_effect=RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        update(trainer)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        probe.probe_memory(trainer.model, lambda: trainer.model(torch.ones(1, 1, 8, 8)).sum(), passes=1)


def test_out_of_memory_is_distinguished_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "allocate memory" in shortage(caught.value)
    assert shortage(torch.OutOfMemoryError()) == "OutOfMemoryError"
    assert shortage(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling\nmore")).endswith("calling")
    assert shortage(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert shortage(RuntimeError("shapes do not fit")) is None


def test_releasing_memory_empties_only_the_cuda_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied := Mock())
    for device, count in (("cpu", 0), ("cuda", 1)):
        guard.release(torch.device(device))
        assert emptied.call_count == count


def train_late(folder: Path, fits: int, *flags: str, strategy: str = "ddp") -> Ended:
    """Run two processes. From step 5 on, the second fits at most `fits` images."""
    (folder / "small.yaml").write_text(SMALL)
    return run(
        *("main_multi_gpu.py", "-cfg", str(folder / "small.yaml"), "-output", str(folder / "output")),
        *("-batch_size", "16", *flags, "-opts", f"DIST.STRATEGY={strategy}", "TRAIN.NUM_EPOCHS=1"),
        *("TRAIN.WARMUP_EPOCHS=0", "TRAIN.MIXUP_ALPHA=0.8", "SAVE_STEPS=4"),
        processes=2,
        faults={"compute_in_float64": [], "run_out_of_memory": [fits, 5, 1]},
    )


@pytest.fixture(scope="module")
def enough(tmp_path_factory) -> dict:
    """Return the last checkpoint of two processes with enough memory."""
    folder = tmp_path_factory.mktemp("enough")
    ended = train_late(folder, 16)
    assert ended.codes == [0, 0], ended.printed
    return torch.load(run_folder(folder / "output") / "last.pth", weights_only=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_out_of_memory_error_after_first_updates_suggests_a_remedy(tmp_path, enough, strategy):
    """The suggested command must give the weights of processes with enough memory."""
    ended = train_late(tmp_path, 8, strategy=strategy)
    assert ended.codes == [1, 2] and "Traceback" not in ended.stderr  # the launcher returns the 2
    (flags,) = re.findall("error: .* at step 5 .*(-resume auto -batch_size 8 -accum_iter 2)", ended.stderr)
    assert_names(ended.stderr, "DATA.BATCH_SIZE", "process 1", "out of memory, as arranged")
    went_on = train_late(tmp_path, 8, *flags.split(), strategy=strategy)
    assert went_on.codes == [0, 0], went_on.stderr
    assert_names(went_on.stdout, "epoch 0", "step 4")
    state = read_torch(run_folder(tmp_path / "output") / "last.pth")
    assert state["step"] == enough["step"] == 44
    for name, weight in enough["state_dict"].items():
        assert weight.dtype is torch.float64
        assert (weight - state["state_dict"][name]).abs().max() < 1e-10, name


def test_proposed_batch_flags_keep_the_images_per_update(tmp_path, capsys):
    trainer = make_trainer(small_config(tmp_path, "DATA.BATCH_SIZE=27"))
    run_out(trainer, fits=14, step=0)
    update(trainer)
    assert_names(capsys.readouterr().out, 14, "-batch_size 9 -accum_iter 3")


@pytest.mark.parametrize(("accumulated", "passes"), [(1, 1), (2, 2)])
def test_first_two_updates_are_probed_for_memory(tmp_path, monkeypatch, accumulated, passes):
    seen, config = [], small_config(tmp_path, f"TRAIN.ACCUM_ITER={accumulated}")
    monkeypatch.setattr(probe, "probe_memory", lambda model, compute, passes: seen.append(passes))
    trainer = make_trainer(config)
    trainer.process = Process(CPU, world_size=2)
    monkeypatch.setattr(trainer.process, "all_true", lambda flag: flag)
    probing = guard.MemoryGuard(config, trainer, Log(1))
    for window in trainer.data.windows(0, 3):
        next(probing.attempts(window))
    assert seen == [passes] * 2
    probing.max_images = 1  # the other processes wait, so this one cannot halve its batch
    with refused(ConfigError, "DATA.IMAGE_SIZE", "1 image"):
        probing.cannot_repeat(0, "no room")


def test_error_for_cuda_graphs_out_of_memory_suggests_allowed_resume_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    options = ("COMPILE=reduce-overhead",)
    trainer = make_trainer(small_config(tmp_path, *options))
    run_out(trainer, fits=16, step=1)
    with refused(ConfigError, "COMPILE", "reduce-overhead", "step 1", "-resume auto") as caught:
        update(trainer, 2)
    flags = "-batch_size 16 -accum_iter 2 -compile -opts RESUME.ALLOW_CHANGED=[COMPILE]"
    assert str(caught.value).endswith(flags)
    load(["-cfg", str(tmp_path / "small.yaml"), "-compile", *flags.split()])


UPDATES = 3
SPLIT = "DATA.BATCH_SIZE=16", "TRAIN.ACCUM_ITER=2", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.WARMUP_EPOCHS=0"


class NoRoom(TorchDispatchMode):
    """Fails copies to the device by their number, and copies of more than `fits` images."""

    def __init__(self, *numbers: int, fits: int = 10**6):
        super().__init__()
        self.numbers, self.fits, self.sizes = numbers, fits, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        to_device = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "cpu").type == NAME
        if to_device and args[0].dtype is torch.uint8:
            self.sizes.append(len(args[0]))
            if len(self.sizes) in self.numbers or len(args[0]) > self.fits:
                raise torch.OutOfMemoryError("out of memory, as arranged")
        return func(*args, **kwargs)


def trained(config, no_room: NoRoom) -> tuple:
    """Return the trainer after the updates in float64, and the number of images of each forward."""
    trainer = make_trainer(config, double=True, device=torch.device(DEVICE))
    forwards = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: forwards.append(len(inputs[0])))
    with no_room:
        update(trainer, UPDATES)
    return trainer, forwards


def assert_same_weights(one, other) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert (mine - theirs).abs().max().item() < 1e-12


@on_pretend_device
def test_copying_batches_ahead_recovers_from_one_memory_failure(tmp_path):
    config = small_config(tmp_path, *SPLIT)
    undisturbed, forwards = trained(config, NoRoom())
    for number in (1, len(forwards) // 2, len(forwards)):
        trainer, seen = trained(config, no_room := NoRoom(number))
        assert seen == forwards and trainer.guard.max_images is None
        assert len(no_room.sizes) == len(forwards) + 1  # one copy was repeated
        assert_same_weights(trainer, undisturbed)


@on_pretend_device
def test_updates_continue_with_half_batches_if_whole_batches_never_fit(tmp_path):
    config = small_config(tmp_path, *SPLIT)
    undisturbed, forwards = trained(config, NoRoom())
    half = forwards[0] // 2
    trainer, seen = trained(config, NoRoom(fits=half))
    assert seen == [half] * 2 * len(forwards) and trainer.guard.max_images == half
    assert_same_weights(trainer, undisturbed)
