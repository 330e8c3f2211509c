"""-batch_size auto: the largest batch that fits is logged and saved with the run, and reused when it is resumed."""

import re
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from engine.batch_size import (
    StepTrial,
    bisect,
    calculate,
    find_batch_size,
    max_images,
    measure_step,
    peaks_of_cpu_tensors,
    search,
    try_sizes,
)
from engine.precision import Precision
from tests.support.configs import CPU, SMALL, small_config
from tests.support.planted import run_out
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, rows, run, run_folder, typed
from utils.distributed import Process
from utils.errors import ConfigError, StoppedBySignal
from utils.program import StopSignal

MIB = 2**20
CHECK = ("-check", "-check_images", "10")  # the search for copies among all digits takes many seconds
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signal_handlers")]


@pytest.fixture
def program(tmp_path):
    """Return a function that runs main_single_gpu.py on the digits with -batch_size auto and limited free memory."""
    (tmp_path / "small.yaml").write_text(SMALL.replace("NUM_EPOCHS: 2", "NUM_EPOCHS: 1"))

    def start(*flags: str, free=4 * MIB, cfg=tmp_path / "small.yaml", size=("-batch_size", "auto"), **faults) -> Ended:
        given = ["-cfg", str(cfg), "-output", str(tmp_path / "output"), *size]
        run_program = run if "-check" in flags else typed  # -check measures the memory of its process
        return run_program("main_single_gpu.py", *given, *flags, faults={"limit_free_memory": [free]} | faults)

    return start


def test_automatic_batch_size_is_saved_and_reused(program, tmp_path):
    options = ("-opts", "TRAIN.LINEAR_SCALED_LR=8", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=1e-4")
    ended = program(*options).done()
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("batch size: ")]
    found = int(re.match(r"batch size: (\d+) images", line)[1])
    assert_names(line, "2 and 4 images", "20%", "4 MiB")
    assert 8 <= found < 1000 and found % 8 == 0
    assert_names(ended.stdout, f"updates of {found} images", f"Lr: {1e-4 * found / 8:.6f}")
    path = run_folder(tmp_path / "output")
    text = (path / "config.yaml").read_text()
    assert re.search(rf"BATCH_SIZE: {found} +# auto \(flag -batch_size\)", text)
    assert torch.load(path / "last.pth", weights_only=True)["config"]["DATA.BATCH_SIZE"] == found
    saved = tmp_path / "saved.yaml"
    saved.write_text(text)
    ended = program(cfg=saved, size=("-name", "again"), free=1).done()
    assert "batch size: " not in ended.stdout, ended.stderr
    other = tmp_path / "output" / "again"
    assert run_hash(other) == run_hash(path)
    ended = program("-resume", "auto", *options, free=1).done()
    assert "Epoch[" not in ended.stdout, ended.stderr
    assert_names(ended.stdout, f"batch size: {found}")
    (again,) = rows(program("-resume", "auto", *CHECK, *options, free=1).stdout)["batch size"][1:]
    assert_names(again, f"{found} images")


MODEL = "MODEL.EMBED_DIM=64"
SETTINGS = {
    "plain": "",
    "ema": "TRAIN.MODEL_EMA=true",
    "balanced": "DATA.SAMPLER=balanced TRAIN.CLASS_WEIGHTS=auto",
    "half": "AMP=true PRECISION.DTYPE=bfloat16",
    "naive": "AMP=true PRECISION.MODE=naive PRECISION.DTYPE=bfloat16",
    "frozen": "MODEL.FREEZE=[*,!head]",
    "checkpointing": "TRAIN.GRAD_CHECKPOINTING=true MODEL.DEPTH=6",
    "timm's optimizer": "TRAIN.OPTIMIZER.NAME=lamb",
    "accumulation": "TRAIN.ACCUM_ITER=2",
    "teacher": "TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=test_vit",
}


@pytest.mark.long
@pytest.mark.parametrize("case", SETTINGS)
def test_estimate_agrees_with_the_memory_of_larger_batches(tmp_path, case):
    config = small_config(tmp_path, MODEL, *SETTINGS[case].split())
    need, trial = measure_step(config, 10), StepTrial(config, 10, Process(CPU))
    ((peak, _),) = peaks_of_cpu_tensors(lambda: trial.update(64, times=2))
    assert peak <= need.fixed + 64 * need.per_image < 1.25 * peak


def test_calculated_batch_size_leaves_the_required_memory_margin(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.memory.free_host_memory", lambda: 40 * MIB)
    config = small_config(tmp_path, MODEL)
    counts = [calculate(config, 10, Process(CPU, world_size=size, local_size=size), 10**6)[0] for size in (1, 2)]
    need = measure_step(config, 10)
    for count, size in zip(counts, (1, 2), strict=True):
        free = 0.8 * 40 * MIB / size
        assert (
            count % 8 == 0 and need.fixed + count * need.per_image <= free < need.fixed + (count + 8) * need.per_image
        )


class Limited(StepTrial):
    """A trial on a device that fits this many images at once."""

    def __init__(self, config, fitting: int, process=None):
        super().__init__(config, 10, process or Process(CPU), StopSignal())
        self.fitting, self.forwards = fitting, []

    def begin(self, config, train_data) -> None:
        super().begin(config, train_data)
        run_out(self.trainer, self.fitting, step=0)
        self.trainer.model.register_forward_pre_hook(lambda model, images: self.forwards.append(len(images[0])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fits", "found"), [(300, 200), (190, 184), (24, 24), (23, 16), (8, 8), (7, 4), (3, 2), (1, 1), (0, 0)]
)
def test_batch_size_search_finds_largest_fitting_multiple_of_eight(tmp_path, fits, found):
    trial = Limited(small_config(tmp_path, "TRAIN.ACCUM_ITER=3"), fits)
    assert search(trial, withheld=100, limit=200) == found
    assert not trial.trainer or trial.trainer.data.order.num_accumulated == 2, "the second one adds to gradients"


def test_batch_size_search_frees_the_trainer_of_each_trial(tmp_path, monkeypatch):
    called = []
    for name in ("get_device_name", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cpu, name, lambda *_, name=name: called.append(name) or "pretended", raising=False)
    trial, trainers = Limited(small_config(tmp_path), 16, Process(CPU, world_size=2)), []
    trial.begin = lambda *given: (Limited.begin(trial, *given), trainers.append(weakref.ref(trial.trainer)))
    assert try_sizes(trial, 32)[0] == 16
    assert trainers and not any(each() for each in trainers) and "reset_peak_memory_stats" in called


@pytest.mark.parametrize(("fits", "found"), [(17, 16), (7, 4), (2, 2), (1, 0)])
def test_batch_size_search_with_mixup_finds_even_sizes(tmp_path, fits, found):
    repeats = "TRAIN.REPEATED_AUG=3"  # it refuses batches of fewer images
    config = small_config(tmp_path, "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.MODEL_EMA=true", "AMP=true", repeats)
    trial = Limited(config, fits, Process(CPU, world_size=2))
    assert search(trial, withheld=0, limit=100) == found
    if found > 2:
        trial.forwards.clear()
        trial.update(found, times=2)
        assert trial.forwards == [found] * 2
        gradients = sum(parameter.nbytes for parameter in trial.trainer.parameters)
        assert sum(each.nbytes for each in trial.ddp_buckets) == gradients


def test_unrelated_error_ends_the_batch_size_search(tmp_path):
    trial = StepTrial(small_config(tmp_path), 10, Process(CPU), StopSignal())
    trial.begin = Mock(side_effect=RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        search(trial, withheld=0, limit=100)
    trial.stop.number = 15  # a signal has arrived
    assert search(trial, withheld=0, limit=100) == 0


@pytest.mark.parametrize(
    ("others", "signal", "found"),
    [(10**6, 0, 64), (8, 0, 8), (0, 0, ConfigError), (8, 15, StoppedBySignal), (-2, 0, StoppedBySignal)],
)
def test_batch_size_search_uses_smallest_process_result_or_ends_on_signal(tmp_path, monkeypatch, others, signal, found):
    """`others`: the largest fit in another process, or minus its signal."""
    process, config, stop = Process(CPU, world_size=2), small_config(tmp_path, "COMPILE=true"), StopSignal()
    monkeypatch.setattr(process, "host_min", lambda number: min(number, others))
    monkeypatch.setattr(process, "first", lambda task: task())
    begun, stop.number = SimpleNamespace(config=config, process=process, precision=Precision(config, CPU)), signal
    if isinstance(found, int):
        agreed, how = find_batch_size(begun, 64 * 20, 10, stop)
        assert agreed == found and ("10 updates" in how) == (found == 64)
        assert_names(how, "2 processes", "without torch.compile")
    else:
        with pytest.raises(found):
            find_batch_size(begun, 64 * 20, 10, stop)


@pytest.mark.parametrize(
    ("num_images", "world_size", "options", "most"),
    [
        (10_000, 1, "", 1000),
        (10_010, 2, "", 496),
        (10**9, 2, "", 10**6),
        (10_000, 1, "TRAIN.ACCUM_ITER=4", 248),
        (70, 1, "", 7),
        (70, 1, "TRAIN.CUTMIX_ALPHA=1", 6),
        (1, 2, "TRAIN.CUTMIX_ALPHA=1", 2),
    ],
)
def test_largest_auto_batch_size_leaves_ten_updates_per_epoch(tmp_path, num_images, world_size, options, most):
    assert max_images(small_config(tmp_path, *options.split()), num_images, world_size) == most


def test_evaluation_replaces_auto_batch_size_with_the_default(program):
    ended = program("-eval")
    assert ended.returncode == 2
    assert_names(ended.printed, "-eval", "-pretrained", "DATA.BATCH_SIZE auto", 256)


@pytest.mark.long
def test_check_estimates_auto_batch_size_or_refuses_it(program):
    found = rows(program(*CHECK).stdout)
    verdict, told = found["batch size"]
    count = int(re.match(r"(\d+) images", told)[1])
    assert verdict == "ok" and count % 8 == 0 and f"for {count} images" in found["memory"][1]
    assert found["memory"][0] == "ok" and f"for {count} images per update" in found["learning rate"][1]
    assert rows(program(*CHECK, free=1000).stdout)["plan"][0] == "WRONG"
    ended = program("-amp", free=1000)
    assert ended.returncode == 2
    assert_names(ended.stderr, "DATA.BATCH_SIZE is auto", "DATA.IMAGE_SIZE is 8")


def test_stop_signal_during_batch_size_search_prevents_training(program, tmp_path):
    ended = program(tell=[0, "batch size", 15])
    assert ended.returncode == 128 + 15 and ended.stderr.startswith("error: ")
    assert not (tmp_path / "output").exists()
    program("-resume", "auto").done()
    stopped = run_folder(tmp_path / "output").rename(tmp_path / "stopped")
    program().done()
    assert run_hash(stopped) == run_hash(run_folder(tmp_path / "output"))


@pytest.mark.parametrize("fits", [0, 7, 8, 100, 1000, 5000])
def test_batch_size_bisection_ends_just_below_the_memory_limit(fits):
    tried, largest = [], min(fits, 4096)
    found = bisect(lambda size: tried.append(size) or size <= fits, max_size=4096)
    assert found % 8 == 0 and 0.98 * (largest - 8) <= found <= largest and len(tried) < 20
