"""-amp auto: the faster precision by the times of the model's own updates, saved with the run."""

import re

import pytest
import torch

import engine.batch_size
import engine.update_times
from configs.load import LoadedConfig
from engine.auto_values import choose_values
from engine.plan import Inputs
from engine.precision import Precision
from engine.update_times import (
    FIRST,
    MOST_ROUNDS,
    SECONDS,
    PrecisionTrial,
    Trials,
    UpdateTimes,
    choose_by_speed,
    time_precisions,
    time_updates,
)
from tests.support.configs import CPU, SMALL, small_config
from tests.support.planted import run_out
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, rows, typed
from utils.distributed import Process

MOST_SECONDS = 3.0


class Machine:
    """A machine with planted times, in seconds, and its own clock."""

    def __init__(self, per_image: tuple[float, float], per_update=0.01, first=0.3, fits=10**6, disturbed=()):
        """`first`: what the first update of a process takes longer; `disturbed`: numbers of slow half updates."""
        self.per_image, self.per_update, self.first, self.fits = per_image, per_update, first, fits
        self.disturbed, self.clock, self.sizes = disturbed, 0.0, []

    def time_both(self, size: int) -> tuple[float, float]:
        if size > self.fits:
            raise MemoryError
        in_float32, in_half = (self.per_update + size * seconds for seconds in self.per_image)
        in_half *= 5 if len(self.sizes) in self.disturbed else 1
        in_half += 0 if size in self.sizes else 0.1  # kernels of new shapes are prepared
        in_float32 += 0 if self.sizes else self.first
        self.sizes.append(size)
        self.clock += in_float32 + in_half
        return in_float32, in_half

    def elapsed(self) -> float:
        return self.clock


def times_on(machine: Machine, batch_size: int) -> UpdateTimes:
    rounds = time_updates(machine.time_both, batch_size, machine.elapsed)
    return UpdateTimes.of("bfloat16", rounds, batch_size, is_compiled=False)


@pytest.mark.parametrize(
    ("per_image", "is_used"),
    [((1e-3, 4e-4), True), ((1e-3, 9e-4), True), ((1e-3, 1.0e-3), False), ((1e-3, 5e-3), False), ((4e-4, 2e-2), False)],
)
@pytest.mark.parametrize("disturbed", [(), (6, 7), (1, 5, 8)])
def test_half_precision_is_chosen_only_where_updates_are_faster(per_image, is_used, disturbed):
    """On processors without bfloat16 units, half precision is 5 to 50 times slower."""
    machine = Machine(per_image, disturbed=disturbed)
    times = times_on(machine, 64)
    assert times.half_is_faster == is_used
    assert machine.clock <= MOST_SECONDS or disturbed


@pytest.mark.parametrize(("per_image", "is_used"), [((1e-3, 4e-4), True), ((1e-3, 5e-3), False)])
@pytest.mark.parametrize("first", [2.0, 2.4])
def test_loading_libraries_on_a_busy_machine_does_not_decide(per_image, is_used, first):
    machine = Machine(per_image, first=first)
    times = times_on(machine, 64)
    assert times.half_is_faster == is_used and times.sizes[-1] > FIRST
    assert machine.clock <= first + SECONDS


@pytest.mark.parametrize(
    ("seconds", "size", "num_rounds"),
    [(1e-4, 128, MOST_ROUNDS), (3e-3, 128, 1), (0.02, 24, 2), (0.2, 4, 1), (0.6, 2, 1), (10, 2, 1)],
)
def test_size_of_timed_updates_follows_from_their_time(seconds, size, num_rounds):
    machine = Machine((seconds, seconds / 2))
    times = times_on(machine, 128)
    assert times.sizes[-1] == size and times.num_rounds >= num_rounds and times.half_is_faster
    assert machine.clock <= MOST_SECONDS or machine.sizes == [FIRST] * (1 if seconds == 10 else 2)


def test_large_batch_follows_from_the_times_of_two_small_ones():
    """Half precision converts all weights in each update, which costs most with few images."""
    rounds = {2: [(0.06, 0.074), (0.061, 0.09)], 16: [(0.4, 0.242), (0.34, 0.25)]}
    times = UpdateTimes.of("bfloat16", rounds, 128, is_compiled=False)
    assert (times.in_float32, times.in_half) == (pytest.approx(2.58), pytest.approx(1.586))
    assert times.half_is_faster and (times.num_rounds, times.sizes) == (4, (2, 16))
    assert not UpdateTimes.of("bfloat16", {2: rounds[2]}, 128, is_compiled=False).half_is_faster
    whole = UpdateTimes.of("bfloat16", rounds | {128: [(1.0, 3.0), (2.0, 4.0)]}, 128, is_compiled=False)
    assert (whole.in_float32, whole.in_half, whole.num_rounds) == (1.0, 3.0, 2)


@pytest.mark.parametrize(("fits", "size"), [(200, 128), (100, 64), (2, 2), (1, 0)])
def test_timed_updates_fit_into_memory(fits, size):
    machine = Machine((1e-4, 1e-4), fits=fits)
    rounds = time_updates(machine.time_both, 128, machine.elapsed)
    assert max(rounds, default=0) == size == max(machine.sizes, default=0)


def test_comparison_names_types_updates_and_conditions():
    faster = UpdateTimes("bfloat16", 1.7, 1.0, 3, (2, 8), 64, is_compiled=True)
    assert faster.describe().startswith("bfloat16 is 1.7 times as fast as float32 for this model (3 updates each")
    assert_names(faster.describe(), "with 2 and 8 of 64 images", "without torch.compile")
    slower = UpdateTimes("float16", 1.0, 12.0, 1, (64,), 64, is_compiled=False)
    assert slower.describe() == "float32 is 12.0 times as fast as float16 for this model (1 update each)"
    assert_names(UpdateTimes("bfloat16", 1.0, 0.99, 2, (4,), 4, False).describe(), "no faster")


SETTINGS = {
    "plain": "",
    "naive": "PRECISION.MODE=naive PRECISION.DTYPE=bfloat16",
    "accumulation, mixup, ema": "TRAIN.ACCUM_ITER=3 TRAIN.MIXUP_ALPHA=0.8 TRAIN.MODEL_EMA=true TRAIN.REPEATED_AUG=3",
    "frozen": "MODEL.FREEZE=[*,!head] COMPILE=true",
    "sizes": "TRAIN.SIZE_SCHEDULE=0:4,1:8",
    "several labels": "DATA.DATASET=csv DATA.LABEL_SEPARATOR=; DATA.COLUMNS=[path,label]",
    "numbers": "DATA.DATASET=csv TRAIN.OBJECTIVE=numbers DATA.COLUMNS=[path,age]",
    "teacher": "TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL=test_vit",
}


@pytest.mark.long
@pytest.mark.parametrize("case", SETTINGS)
def test_updates_of_both_precisions_are_timed_with_all_settings(tmp_path, monkeypatch, case):
    monkeypatch.setattr(engine.update_times, "SECONDS", 0.5)
    config, before = small_config(tmp_path, "AMP=auto", *SETTINGS[case].split()), torch.get_rng_state()
    times = time_precisions(config, 1 if case == "numbers" else 10, Process(CPU), 6)
    assert times.sizes[-1] <= 6 and min(times.in_float32, times.in_half) > 0 and times.half == "bfloat16"
    assert times.is_compiled == bool(config.COMPILE) and torch.equal(torch.get_rng_state(), before)


def test_trials_make_the_same_updates_in_two_precisions(tmp_path):
    trials = Trials(small_config(tmp_path, "AMP=auto", "TRAIN.ACCUM_ITER=3"), 10, Process(CPU))
    trials.time_both(4)
    trials.time_both(6)
    whole, half = (trial.trainer for trial in trials.trials)
    assert (whole.step, half.step) == (2, 2) and trials.window.num_samples == 12
    assert (whole.precision.half, half.precision.half) == (None, torch.bfloat16)
    reports = [trainer.report() for trainer in (whole, half)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=0.02) and reports[0].loss != reports[1].loss


@pytest.mark.parametrize(("fits", "size"), [(5, 2), (100, 8), (1, None)])
def test_out_of_memory_ends_the_growth_of_timed_updates(tmp_path, monkeypatch, fits, size):
    begin = PrecisionTrial.begin

    def limited(trial, *arguments) -> None:
        begin(trial, *arguments)
        run_out(trial.trainer, fits, step=0)

    monkeypatch.setattr(PrecisionTrial, "begin", limited)
    monkeypatch.setattr(engine.update_times, "SECONDS", 60.0)
    monkeypatch.setattr(engine.update_times, "MOST_ROUNDS", 2)
    config = small_config(tmp_path, "AMP=auto")
    times = time_precisions(config, 10, Process(CPU), 8)
    assert (times and times.sizes[-1]) == size
    if not size:
        is_used, how = choose_by_speed(config, 10, Process(CPU), 8)
        assert is_used and "memory" in how


def test_precision_is_chosen_before_the_largest_batch(tmp_path, monkeypatch):
    """The batch depends on the precision. Updates are timed with the default batch, or less of a small data set."""
    sizes, tried = [], []

    def choose(config, num_classes, process, batch_size) -> tuple[bool, str]:
        sizes.append(batch_size)
        return True, "faster"

    def find(inputs, *numbers) -> tuple[int, str]:
        tried.append((inputs.config.AMP, inputs.precision.half))
        return 24, "tried"

    monkeypatch.setattr(engine.update_times, "choose_by_speed", choose)
    monkeypatch.setattr(engine.batch_size, "find_batch_size", find)
    config = small_config(tmp_path, "AMP=auto", "DATA.BATCH_SIZE=auto")
    loaded = LoadedConfig(config, {"AMP": "flag -amp", "DATA.BATCH_SIZE": "-opts"}, [], [])
    inputs = Inputs(loaded, Process(CPU), Precision(config, CPU))
    for num_images in (10**6, 800):
        chosen = choose_values(inputs, num_images, 10)
        assert (chosen.config.AMP, chosen.config.DATA.BATCH_SIZE) == (True, 24)
        assert chosen.precision.half is torch.bfloat16 and chosen.loaded.origins["AMP"] == "auto (flag -amp): faster"
    assert sizes == [256, 80] and tried == [(True, torch.bfloat16)] * 2


# --- runs ---

pytestmark = pytest.mark.usefixtures("signal_handlers")
HALF = ("-amp_dtype", "float16")  # every CPU has it
BUSY = ("MODEL.DROPOUT=0.1", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.MODEL_EMA=true")


@pytest.fixture
def program(tmp_path):
    """Return a function that trains on the digits in a folder, with planted speedups of half precision."""
    (tmp_path / "small.yaml").write_text(SMALL)

    def start(name: str, *flags: str, speedups=(2.0,), processes=1, more=()) -> Ended:
        words = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path), "-name", name, *flags]
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        options = ["-opts", *BUSY, *more]
        return typed(script, *words, *options, processes=processes, faults={"time_updates_as": speedups})

    return start


def printed_choice(ended: Ended) -> str:
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("-amp auto: "))
    return line


@pytest.mark.long
@pytest.mark.parametrize(("speedup", "amp"), [(2.0, "true"), (0.5, "false")])
def test_run_with_chosen_precision_equals_one_with_explicit_precision(program, tmp_path, speedup, amp):
    dtype = HALF if amp == "true" else ()
    explicit = program("explicit", "-amp", amp, *dtype).done()
    assert "-amp auto: " not in explicit.stdout
    chosen = program("chosen", "-amp", "auto", *HALF, speedups=(speedup,)).done()
    assert_names(printed_choice(chosen), "2.0 times", "float16", "used")
    assert run_hash(tmp_path / "chosen") == run_hash(tmp_path / "explicit")
    text = (tmp_path / "chosen/config.yaml").read_text()
    assert re.search(rf"^AMP: {amp} +# auto \(flag -amp\): float", text, re.M)
    saved = torch.load(tmp_path / "chosen/last.pth", weights_only=True)["config"]
    assert saved["AMP"] is (amp == "true")


@pytest.mark.slow
def test_resumed_run_keeps_the_precision_of_its_start(program, tmp_path):
    program("a", "-amp", "auto", *HALF, "-epochs", "1").done()
    ended = program("a", "-amp", "auto", *HALF, "-resume", "auto", "-epochs", "2", speedups=()).done()  # cannot time
    assert_names(printed_choice(ended), "float16", "as at the start")
    assert torch.load(tmp_path / "a/last.pth", weights_only=True)["config"]["AMP"] is True
    ended = typed("main_single_gpu.py", "-resume", str(tmp_path / "a"), "-epochs", "3").done()
    assert "-amp auto: " not in ended.stdout and "autocast float16" in ended.stdout


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_use_the_precision_that_the_first_one_chooses(program, tmp_path, strategy):
    more = (f"DIST.STRATEGY={strategy}",)
    explicit = program("explicit", "-amp", *HALF, processes=2, more=more).done()
    assert "-amp auto: " not in explicit.stdout
    chosen = program("chosen", "-amp", "auto", *HALF, speedups=(2.0, 0.5), processes=2, more=more).done()
    assert_names(printed_choice(chosen), "2.0 times", "float16")
    assert run_hash(tmp_path / "chosen") == run_hash(tmp_path / "explicit")


@pytest.mark.long
def test_check_compares_both_precisions_for_the_model(program, tmp_path):
    for speedup, amp, advice in ((2.0, "false", "use -amp"), (0.5, "true", "leave -amp out"), (2.0, "true", "fast")):
        table = rows(program("a", "-check", "-check_images", "10", "-amp", amp, speedups=(speedup,)).stdout)
        verdict, text = table["half precision"]
        assert verdict == "ok" and "2.0 times" in text and advice in text
        assert ("-amp auto" in table["precision"][1]) == (amp == "false")
    table = rows(program("a", "-check", "-check_images", "10", "-amp", "auto").stdout)
    assert "half precision" not in table and "2.0 times" in table["-amp auto"][1]
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_evaluation_replaces_auto_precision_with_float32(program, tmp_path):
    program("a", "-epochs", "1").done()
    ended = program("b", "-amp", "auto", "-eval", "-pretrained", str(tmp_path / "a/best.pth")).done()
    assert_names(ended.stdout, "AMP auto", "precision: float32")
