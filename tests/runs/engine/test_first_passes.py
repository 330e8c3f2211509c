"""Before the first update, micro-batches shrink until they fit; a later lack of memory ends the run with a command."""

import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from configs.load import load
from datasets import Normalize, invent_images
from datasets.order import Piece
from engine import first_passes
from engine.first_passes import fit_micro_batches, try_largest
from engine.memory import out_of_memory, shortage
from models.weights.torch_files import read_torch
from tests.support.configs import CPU, SMALL, small_config
from tests.support.planted import run_out
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash, state_hash
from tests.support.runs import Ended, run, run_folder, typed
from tests.support.several_labels import write_digits
from tests.support.trainers import Lines, make_trainer, update
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


@pytest.fixture
def fit(monkeypatch):
    """Return fit(trainer, fits), which lets micro-batches shrink to those that fit, and returns the warnings."""
    monkeypatch.setattr(first_passes, "raises_when_full", lambda device: True)

    def fit(trainer, fits: int, step: int = 0) -> list[str]:
        run_out(trainer, fits, step)
        fit_micro_batches(trainer, lines := Lines())
        return lines.said

    return fit


def sizes_seen(trainer):
    """Return a list that receives the number of images of each forward."""
    sizes = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    return sizes


DROPPING = ("MODEL.DROPOUT=0.2", "MODEL.DROPPATH=0.2", "TRAIN.MODEL_EMA=true", "TRAIN.WARMUP_EPOCHS=0")


@pytest.mark.parametrize(("batch", "fits", "size"), [(32, 16, 16), (32, 9, 8), (27, 14, 9)])
def test_warning_names_flags_of_a_run_with_equal_bits(tmp_path, fit, batch, fits, size):
    short = make_trainer(small_config(tmp_path, *DROPPING, f"DATA.BATCH_SIZE={batch}"))
    *_, line = fit(short, fits)
    assert_names(line, flags := f"-batch_size {size} -accum_iter {batch // size}")
    small = make_trainer(load(["-cfg", str(tmp_path / "small.yaml"), *flags.split(), "-opts", *DROPPING]).config)
    assert state_hash(update(short, 3).state_dict()) == state_hash(update(small, 3).state_dict())


@pytest.mark.parametrize(
    "options",
    [
        "TRAIN.SIZE_SCHEDULE=[0:4,1:8] TRAIN.MIXUP_ALPHA=0.8 TRAIN.RANDOM_ERASE_PROB=0.5",
        "TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=test_vit",
        "AMP=true PRECISION.MODE=naive PRECISION.DTYPE=bfloat16",
        "MODEL.FREEZE=[*,!head] TRAIN.ACCUM_ITER=2",
        "DATA.SAMPLER=balanced TRAIN.REPEATED_AUG=2 TRAIN.GRAD_CHECKPOINTING=true MODEL.DROPPATH=0.3",
    ],
)
def test_trying_the_largest_batch_changes_nothing(tmp_path, options):
    trainer = make_trainer(small_config(tmp_path, *options.split()), callbacks=[Mock()])
    update(trainer, 1)
    notified, before = len(trainer.callbacks[0].mock_calls), state_hash(trainer.state_dict())
    random_state, sizes = torch.get_rng_state(), []
    trainer.model.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape[-2:])))
    assert try_largest(trainer) is None
    assert state_hash(trainer.state_dict()) == before and torch.equal(torch.get_rng_state(), random_state)
    assert all(each.grad is None for each in trainer.computing.model.parameters())
    assert len(trainer.callbacks[0].mock_calls) == notified and ("naive" in options or set(sizes) == {(8, 8)})


def test_invented_labels_have_a_place_for_each_output_of_the_model(tmp_path):
    file, _ = write_digits(tmp_path, 20)  # with four labels, fewer than the ten outputs of the model
    words = "DATA.DATASET=csv", f"DATA.DATA_PATH={file}", "DATA.LABEL_SEPARATOR=|", "DATA.VAL_FRACTION=0.3"
    trainer = make_trainer(small_config(tmp_path, *words, "MODEL.NUM_CLASSES=10"))
    assert try_largest(trainer) is None


@pytest.mark.parametrize(
    ("options", "sizes", "names"), [("", [22, 11, 2, 1], "1 image"), ("TRAIN.MIXUP_ALPHA=0.8", [22, 2], "2 images")]
)
def test_shortage_for_the_smallest_batch_is_refused(tmp_path, fit, options, sizes, names):
    trainer = make_trainer(small_config(tmp_path, *options.split(), "DATA.BATCH_SIZE=22"))
    seen = sizes_seen(trainer)
    with pytest.raises(ConfigError) as caught:
        fit(trainer, fits=0)
    assert_names(str(caught.value), "DATA.IMAGE_SIZE", names)
    assert seen == sizes


def test_memory_of_the_optimizer_is_counted_before_the_first_update(tmp_path, monkeypatch):
    reserved, empty = [], torch.empty

    def noting_bytes(*size, **options):
        if options.get("dtype") is torch.uint8:
            reserved.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noting_bytes)
    trainer = make_trainer(small_config(tmp_path))
    weights = sum(each.nbytes for each in trainer.parameters)
    for expected in (2 * weights, 0):  # two states of AdamW, until they are allocated
        reserved.clear()
        try_largest(trainer)
        assert reserved[0] == expected
        update(trainer)


def test_other_errors_end_the_run(tmp_path, fit):
    trainer = make_trainer(small_config(tmp_path))
    trainer.model.register_forward_pre_hook(Mock(side_effect=RuntimeError("shapes do not fit")))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fit(trainer, fits=32)


def test_out_of_memory_is_distinguished_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "allocate memory" in shortage(caught.value)
    assert shortage(torch.OutOfMemoryError()) == "OutOfMemoryError"
    assert shortage(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling\nmore")).endswith("calling")
    assert shortage(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert shortage(RuntimeError("shapes do not fit")) is None


def test_remedy_for_cuda_graphs_turns_them_off(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    trainer.config = small_config(tmp_path, "COMPILE=reduce-overhead")
    flags = "-batch_size 16 -accum_iter 2 -compile -opts RESUME.ALLOW_CHANGED=[COMPILE]"
    assert str(out_of_memory(trainer, None, "as arranged")).endswith(flags)
    load(["-cfg", str(tmp_path / "small.yaml"), "-compile", *flags.split()])


def train(folder: Path, processes: int, *words: str, **faults) -> Ended:
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    faults = {"compute_in_float64": []} | faults
    return typed(script, *words, processes=processes, cwd=folder, faults=faults)


def new_run(folder: Path, size: int, *options: str) -> list[str]:
    """Return the flags of a run. `size`: the images per micro-batch and process."""
    (folder / "small.yaml").write_text(SMALL)
    options = ("DATA.DROP_LAST=false", "TRAIN.REPEATED_AUG=3", "TRAIN.MIXUP_ALPHA=0.8", "SAVE_STEPS=4", *options)
    flags = ["-cfg", "small.yaml", "-output", "output", "-epochs", "1", "-batch_size", f"{size}"]
    return [*flags, "-opts", "TRAIN.WARMUP_EPOCHS=0", *options]


@pytest.fixture(scope="module")
def enough(tmp_path_factory) -> dict:
    """Return the last checkpoint of a run with enough memory."""
    folder = tmp_path_factory.mktemp("enough")
    train(folder, 1, *new_run(folder, 32)).done()
    return read_torch(run_folder(folder / "output") / "last.pth")


def assert_same_training(folder: Path, expected: dict) -> None:
    state = read_torch(run_folder(folder / "output") / "last.pth")
    assert state["step"] == expected["step"] == 12
    for name, weight in expected["state_dict"].items():
        assert (weight - state["state_dict"][name]).abs().max() < 1e-10, name


@pytest.mark.long
@pytest.mark.parametrize(("processes", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")])
def test_command_after_late_shortage_ends_with_the_same_weights(tmp_path, enough, processes, strategy):
    size, rank = 32 // processes, processes - 1
    words = new_run(tmp_path, size, f"DIST.STRATEGY={strategy}")
    ended = train(tmp_path, processes, *words, run_out_of_memory=[size // 2, 5, rank], save_at_once=[])
    assert ended.codes[rank] == 2 and "Traceback" not in ended.stderr
    line = next(line for line in ended.stderr.splitlines() if "at step 5" in line)
    assert_names(line, "DATA.BATCH_SIZE", "out of memory, as arranged")
    flags = re.search(r"halfstep resume (.*)", line)[1].replace("-ngpus 2 ", "")
    went_on = train(tmp_path, processes, "-resume", *shlex.split(flags), run_out_of_memory=[size // 2, 5, rank]).done()
    assert_names(went_on.stdout, "epoch 0", "step 4")
    assert_same_training(tmp_path, enough)


# {case: (processes, images per micro-batch, micro-batches per update, images that fit at once)}
SPLITS = {
    "where gradients accumulate": (1, 16, 2, 5),
    "on one of two processes": (2, 16, 1, 5),
    "on one of two processes that accumulate": (2, 8, 2, 4),
}


@pytest.mark.long
@pytest.mark.parametrize("case", SPLITS)
def test_run_with_too_large_a_batch_ends_with_the_weights_of_that_batch(tmp_path, enough, case):
    processes, size, num_micro_batches, fits = SPLITS[case]
    words = new_run(tmp_path, size, f"TRAIN.ACCUM_ITER={num_micro_batches}")
    ended = train(tmp_path, processes, *words, run_out_of_memory=[fits, 0, processes - 1]).done()
    warnings = re.findall(r"out of memory with micro-batches of .*", ended.printed)
    assert warnings and len({*warnings}) == len(warnings), "only the first process says it"
    assert_same_training(tmp_path, enough)


@pytest.mark.long
def test_three_processes_resume_after_kill_to_equal_bits(tmp_path):
    """DDP rearranges its buckets after two passes, which changes the order of sums of three gradients."""
    hashes = []
    for name in ("straight", "killed"):
        (folder := tmp_path / name).mkdir()
        (folder / "small.yaml").write_text(SMALL)
        words = ["-cfg", "small.yaml", "-output", "output", "-resume", "auto", "-opts", "DATA.BATCH_SIZE=20"]
        words += ["SAVE_STEPS=1", "TRAIN.NUM_EPOCHS=1", "TRAIN.WARMUP_EPOCHS=0", "MODEL.DROPOUT=0.1"]
        if name == "killed":
            faults = {"signal_at": [4, 9, [0, 1, 2]]}
            assert run("main_multi_gpu.py", *words, processes=3, cwd=folder, faults=faults).returncode
        ended = run("main_multi_gpu.py", *words, processes=3, cwd=folder).done()
        assert ("after epoch 0 and step" in ended.stdout) == (name == "killed")
        hashes.append(run_hash(run_folder(folder / "output")))
    assert hashes[0] == hashes[1]


def test_invented_native_images_have_the_type_and_scale_of_real_ones(tmp_path):
    config = small_config(tmp_path, "DATA.DATASET=imagefolder", "DATA.PIXELS=native", "DATA.RANGE=[0,4095]")
    (batch,) = invent_images(config).batches(config, 4, 0, CPU)([Piece(0, np.arange(4), 4)])
    assert batch.images.dtype == torch.float32 and 0 <= batch.images.min() and 0.9 < batch.images.max() <= 1
    assert Normalize(config.DATA)(batch.images).abs().max() < 10
