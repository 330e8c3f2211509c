"""The benchmarks' tables: each prints in its smallest form, its figures agree, and parity's verdict is right."""

import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import timm
import torch

from configs.load import load
from configs.schema import Config
from datasets import load_image_sets
from engine.memory.largest_batch import bisect
from scripts.benchmarks import list_start, loader, loader_lock, parity, photos, shard_start
from scripts.benchmarks.parity import Run, judge
from scripts.benchmarks.parts.common import GIB, Refused
from scripts.benchmarks.parts.largest_batch import climb
from scripts.benchmarks.parts.speed import speed_table
from scripts.benchmarks.parts.turns import Measured, Turns, take_turns
from scripts.benchmarks.parts.whole_run import Setup, time_run
from scripts.benchmarks.parts.worker import LoaderWorker, TimmWorker
from tests.support.configs import SMALL, replaced
from tests.support.runs import run
from utils.errors import ConfigError

COMMANDS = {
    "seconds": ("-rounds", "2", "-iterations", "2"),
    "modes": (
        "-rounds",
        "1",
        "-steps",
        "2",
        "-seconds",
        "0",
        "-modes",
        "fp32",
        "bf16",
        "tf32",
        "float8",
        "-batch_size",
        "16",
    ),
    "linear": ("-rounds", "1", "-scale", "0.02", "-epochs", "1"),
    "largest": ("-modes", "fp32", "-most", "8", "-memory_gb", "100"),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict[str, subprocess.CompletedProcess]:
    """What each command printed, two of them at a time."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "small.yaml").write_text(SMALL)

    def start(name: str) -> subprocess.CompletedProcess:
        flags = ["-cfg", str(folder / "small.yaml"), "-png", str(folder / f"{name}.png"), *COMMANDS[name]]
        result = run(
            "scripts/benchmarks/amp.py", name, *flags, "-opts", "DEVICE=cpu", faults={"start_python_as_forks": []}
        )
        assert result.returncode == 0, result.stderr
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        return result

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(COMMANDS, pool.map(start, COMMANDS), strict=True))


def rows_of(result: subprocess.CompletedProcess) -> list[dict[str, str]]:
    """The table of a Markdown text, by its heads."""
    heads, _, *rows = (line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("|"))
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_seconds_average_their_turns_and_say_that_they_are_scaled(printed):
    result = printed["seconds"]
    assert "scaled up from 2" in result.stdout and "synthetic data" in result.stdout
    off, on = rows_of(result)
    for row in (off, on):
        turns = [float(each) for each in row["seconds per 100 iterations"].split()]
        assert len(turns) == 2
        assert float(row["average"]) == pytest.approx(sum(turns) / 2, abs=0.0101)
    assert off["speed-up"] == "1.000"
    assert float(on["speed-up"]) == pytest.approx(float(off["average"]) / float(on["average"]), rel=0.05)


def test_modes_show_one_speed_as_iterations_images_ratio_and_utilisation(printed):
    fp32, bf16, *others = rows_of(printed["modes"])
    rates = [float(row["images/s"].split()[0]) for row in (fp32, bf16)]
    for row, rate in zip((fp32, bf16), rates, strict=True):
        assert float(row["iterations/s"]) * 16 == pytest.approx(rate, rel=2e-3)
        assert float(row["memory, GiB"]) > 0.1
        assert 0 < float(row["FLOPs utilisation, %"]) < 100
    assert float(bf16["against fp32"].split()[0]) == pytest.approx(rates[1] / rates[0], abs=0.0051, rel=1e-3)
    told = [(row["mode"], row["memory, GiB"], row["images/s"]) for row in others]
    assert told == [("tf32", "only on cuda", "-"), ("float8", "only on cuda", "-")]


def test_utilisation_counts_three_forward_passes_of_the_model(printed):
    """By hand: 5 tokens of width 16, 2 blocks, 4 x 4 patches of a grey 8 x 8 image, 1000 classes; 2 FLOPs each."""
    tokens, width = 5, 16
    block = tokens * width * width * 12 + 2 * tokens * tokens * width
    forward = 2 * (4 * 16 * width + 2 * block + width * 1000)
    (note,) = [line for line in printed["modes"].stdout.splitlines() if line.startswith("Utilisation")]
    assert float(note.split()[1]) == pytest.approx(3 * forward / 1e9, rel=1e-3)
    peak = float(note.split("float32 ")[1].split(",")[0])
    fp32 = rows_of(printed["modes"])[0]
    expected = 100 * 3 * forward / 1e9 * float(fp32["images/s"].split()[0]) / peak
    assert float(fp32["FLOPs utilisation, %"]) == pytest.approx(expected, rel=0.01)


def test_the_linear_net_learns_the_same_in_every_case(printed):
    fp32, amp, accumulated = rows_of(printed["linear"])
    assert fp32["speed-up"] == "1.00"
    for row in (fp32, amp, accumulated):
        assert float(row["last loss"]) == pytest.approx(float(fp32["last loss"]), rel=0.01)
    slow, fast = (float(row["seconds, median (least to most)"].split()[0]) for row in (fp32, amp))
    half = 0.0005  # of the last digit printed
    assert (slow - half) / (fast + half) - 0.005 <= float(amp["speed-up"]) <= (slow + half) / (fast - half) + 0.005


def test_largest_prints_a_batch_that_was_run(printed):
    (fp32,) = rows_of(printed["largest"])
    assert (fp32["largest batch"], fp32["against fp32"], fp32["batch sizes run"]) == ("8", "1.00", "1")
    assert 0.1 < float(fp32["its peak, GiB"]) < 100


class FakeWorker:
    """Answers as a StepWorker does, on a machine that slows down with every question."""

    running: set = set()
    most_running = questions = 0

    def __init__(self, seconds=0.01, refuses=False):
        self.seconds, self.refuses, self.asked = seconds, refuses, []

    def start(self):
        FakeWorker.running.add(self)
        FakeWorker.most_running = max(FakeWorker.most_running, len(self.running))

    def hello(self):
        return {"images": 8, "device": "", "machine": ""}

    def iterate(self, steps):
        if self.refuses:
            raise Refused("it cannot")
        self.asked.append(steps)
        FakeWorker.questions += 1
        return self.seconds * (1 + FakeWorker.questions // 100)

    def peak_memory(self):
        return GIB

    def close(self):
        self.running.remove(self)


@pytest.fixture
def fakes():
    FakeWorker.running, FakeWorker.most_running, FakeWorker.questions = set(), 0, 0
    return {"fp32": FakeWorker(), "broken": FakeWorker(refuses=True)} | {f"mode {n}": FakeWorker() for n in range(6)}


def test_few_processes_wait_at_a_time_and_the_first_is_measured_beside_all_others(fakes):
    measured, reasons = take_turns(fakes, Turns(rounds=100, steps=2, at_once=3))
    assert FakeWorker.most_running == 3 and not FakeWorker.running
    assert reasons == {"broken": "it cannot"} and list(measured) == [name for name in fakes if name != "broken"]
    assert len(measured["fp32"].seconds) == 400  # of four groups
    for each in measured.values():
        assert sorted(each.ratios)[len(each.ratios) // 2] == 1  # although the machine became slower


def test_a_turn_has_as_many_steps_as_fill_its_time(fakes):
    fakes["slow"] = FakeWorker(seconds=1.0)
    take_turns(fakes, Turns(rounds=3, steps=5, min_seconds=2.0))
    assert fakes["fp32"].asked[1:] == [200] * 3 and fakes["slow"].asked[1:] == [5] * 3


@pytest.mark.parametrize(
    ("device", "kind", "share"),
    [
        ("NVIDIA H200", "bfloat16", "30.3"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", "96.2"),
        ("NVIDIA A100-SXM4-80GB", "float32", "1.54e+03"),
        ("NVIDIA H100 PCIe", "bfloat16", "-"),  # slower than the boards with NVLink, and not listed
        ("", "bfloat16", "-"),
    ],
)
def test_the_share_of_the_nominal_peak_is_of_this_device_and_type(device, kind, share):
    """1000 images/s at 3 x 100 GFLOP, on a device whose best matrix product ran at 600 TFLOP/s."""
    step = Measured({"images": 100, "device": device}, [0.1], [0.1], GIB, peak=600e12, forward_flops=10**11)
    (row,) = speed_table("", {"bf16": kind}, {"bf16": step}, {}).rows
    assert row[-2:] == ["50", share]


def test_the_loader_alone_reads_each_image_of_the_run_and_none_that_lay_ready_is_timed(tmp_path, monkeypatch):
    (tmp_path / "small.yaml").write_text(SMALL)
    flags = ["-cfg", str(tmp_path / "small.yaml"), "-num_workers", "1", "-opts", "DEVICE=cpu"]
    worker = LoaderWorker({"memory_gb": None}, flags)
    taken, windows = [], worker.windows
    worker.windows = (taken.append(window.step) or window for window in windows)
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: taken.append("clock") or next(clock))
    assert worker.answer({"steps": 2, "warm_up": 1}) == {"seconds": 1.0}
    assert taken == [0, 1, 2, 3, 4, "clock", 5, 6, "clock"] and worker.num_images == 32
    windows.close()


def test_an_update_that_is_larger_than_the_set_is_refused_instead_of_counted_as_whole(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match="2000"):
        LoaderWorker({"memory_gb": None}, ["-cfg", str(tmp_path / "small.yaml"), "-batch_size", "2000"])


def test_limits_measures_loader_step_and_both_with_the_settings_of_the_run(tmp_path, monkeypatch, capsys, fakes):
    flags_of = {}

    def step_worker(flags, role="step"):
        flags_of[role, "synthetic" in flags] = flags
        return FakeWorker({"loader": 0.01, "step": 0.1}[role])

    monkeypatch.setattr(loader, "StepWorker", step_worker)
    (tmp_path / "small.yaml").write_text(SMALL)
    assert loader.main(["limits", "-cfg", str(tmp_path / "small.yaml"), "-opts", "AMP=true"]) == 0
    printed = capsys.readouterr().out
    assert [line.split(" | ")[1][:5] for line in printed.splitlines() if "alone" in line or "both" in line] == [
        "800.0", "80.0 ", "80.0 "
    ]  # fmt: skip
    assert "the step limits" in printed
    assert flags_of["loader", False] == flags_of["step", False] and "AMP=true" in flags_of["step", True]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_step_of_timm_is_compiled_exactly_if_ours_is(monkeypatch, is_compiled):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 1000))
    monkeypatch.setattr(timm, "create_model", lambda name, num_classes: model)
    flags = [
        "-cfg",
        "configs/vit_tiny_patch16_224.yaml",
        "-image_size",
        "16",
        "-batch_size",
        "1",
        "-opts",
        "DEVICE=cpu",
    ]
    before = model[1].bias.clone()
    worker = TimmWorker({}, [*flags, f"COMPILE={is_compiled}"])
    assert worker.answer({"steps": 1, "warm_up": 1})["seconds"] > 0
    assert compiled == [model] * is_compiled and not torch.equal(model[1].bias, before)


@pytest.mark.parametrize(
    ("alone", "step", "both", "words"),
    [
        (1000, 100, 98, "the step limits"),
        (50, 100, 49, "the loader limits"),
        (100, 100, 95, "the loader limits"),  # as fast as each other: the loader is cheaper to speed up
        (150, 100, 60, "each slows the other"),
    ],
)
def test_the_limit_is_named_by_what_both_reach_together(alone, step, both, words):
    assert loader.name_limit(alone, step, both).startswith(words)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "resnet18"])
def test_a_whole_run_is_compared_on_this_device_with_the_same_workers_type_and_compiler(
    tmp_path, kind, is_compiled, model
):
    setup = Setup(model, kind, 16, 256, is_compiled)
    timm = " ".join(setup.timm(tmp_path, tmp_path, tmp_path))
    config = load(setup.halfstep(tmp_path, tmp_path)[2:]).config
    assert f"--device {kind}" in timm and "--workers 16" in timm and config.DATA.NUM_WORKERS == 16
    assert "-b 256" in timm and config.DATA.BATCH_SIZE == 256
    assert "--amp-dtype bfloat16" in timm and (config.AMP, config.PRECISION.DTYPE) == (True, "bfloat16")
    assert f"--log-interval {config.REPORT_FREQ} " in timm + " "
    assert ("--torchcompile" in timm) is config.COMPILE is is_compiled
    assert ("--channels-last" in timm) is (model == "resnet18")
    assert ("--pin-mem" in timm) is (kind == "cuda")
    assert f"--model {model}" in timm and config.MODEL.NAME == model and not config.TRAIN.MODEL_EMA


def test_photos_beyond_those_that_are_drawn_are_links_to_one_of_their_class(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "draw", lambda rng, target: None)
    monkeypatch.setattr(photos, "encode", lambda image: b"a JPEG")
    photos.make_photos(tmp_path, 12, 0, num_drawn=10)
    files = {path.relative_to(tmp_path).as_posix(): path.stat().st_ino for path in tmp_path.rglob("*.jpg")}
    assert len(files) == 12 and len(set(files.values())) == 10
    assert files["train/class1/00011.jpg"] == files["train/class1/00001.jpg"]


LINES = "Train: 0 [   0/40]|Train: 0 [  10/40]|Train: 0 [  39/40]|*** Best metric: 61.5 (epoch 0)"


def test_the_speed_of_a_run_is_that_between_the_lines_of_its_first_and_its_last_update(monkeypatch):
    script = f"import time\nfor line in {LINES!r}.split('|'): print(line)"
    clock = iter([0.0, 3.0, 4.0, 7.0, 9.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    run = time_run([sys.executable, "-c", script], r"Train: 0 \[ *(\d+)/", r"Best metric: ([0-9.]+)", batch_size=8)
    assert (run.first_step, run.images_per_second, run.seconds, run.top1) == (3.0, 8 * 39 / 4, 9.0, 61.5)


@pytest.mark.parametrize("fits", [0, 7, 8, 100, 1000, 1023, 5000])
@pytest.mark.parametrize("start", [8, 128, 4096])
def test_bisection_ends_just_below_the_first_batch_that_does_not_fit(fits, start):
    largest = bisect(lambda size: size * 1000 if size <= fits else None, start, 4096)
    best = min(fits, 4096) // 8 * 8
    assert best - max(8, 0.02 * best) < largest.batch_size <= best
    assert largest.memory == 1000 * largest.batch_size and largest.runs < 20


@pytest.mark.parametrize("per_image", [10**5, 10**6, 10**8])
@pytest.mark.parametrize("curve", [0.98, 1.0, 1.02])
def test_the_fit_ends_below_the_limit_and_near_it(per_image, curve):
    """Memory that bends a little, so that the first line is wrong."""
    measured = {}

    def peak(size):
        measured[size] = int(GIB / 2 + per_image * size**curve)
        return measured[size]

    largest = climb(peak, 4 * GIB, 10**9)
    assert largest.memory == measured[largest.batch_size] <= 4 * GIB
    assert largest.memory > 0.97 * 4 * GIB or peak(largest.batch_size + 8) > 4 * GIB
    assert max(measured) < 9 * largest.batch_size


def test_the_fit_says_when_nothing_fits():
    assert climb(lambda size: 2 * GIB, GIB, 1000).batch_size == 0


FP32 = [97.2, 97.5, 96.9, 97.2, 97.2]  # deviation 0.21: 0.27 allowed


@pytest.mark.parametrize(
    "values, worse",
    [
        (FP32, False),
        ([value - 0.26 for value in FP32], False),
        ([value - 0.28 for value in FP32], True),
        ([value + 5 for value in FP32], False),
        ([97.2, 97.5, 96.9, 97.2, 60.0], True),  # one collapsed seed: its own deviation must not excuse it
        ([97.2, 97.5, 96.9, 97.2, math.nan], True),
    ],
)
def test_parity_allows_two_standard_errors_of_the_difference(values, worse):
    verdict = judge(values, FP32)
    assert verdict.worse is worse
    assert verdict.text.startswith("WORSE" if worse else "no worse")


@pytest.mark.parametrize("lost, code", [(0.1, 0), (3.0, 1)])
def test_parity_ends_with_1_when_a_mode_is_worse_and_lists_what_is_refused(monkeypatch, capsys, lost, code):
    def train(arguments, name, seed):
        if name == "naive-bf16":
            raise ConfigError("PRECISION.MODE: not here")
        is_half = name == "bf16"
        return Run(FP32[seed] - lost * is_half, 0.5 * (1.02 + 0.01 * seed if is_half else 1.0), 2.0)

    monkeypatch.setattr(parity, "train", train)
    assert parity.main(["-modes", "bf16", "naive-bf16", "-seeds", "5"]) == code
    lines = capsys.readouterr().out.splitlines()
    (bf16,) = [line for line in lines if line.startswith("| bf16")]
    assert f"{97.2 - lost:.2f} | 0.21 | {'WORSE' if code else 'no worse'}: {-lost:+.2f}" in bf16
    assert bf16.endswith("| 0.52 (+4.0, +2.0 to +6.0) | 2 (+0.0, +0.0 to +0.0) |")
    assert "| naive-bf16 | PRECISION.MODE: not here | - | - | not judged | - | - |" in lines


def test_wrong_flags_are_told_with_the_right_ones():
    for script, *arguments in (
        ("scripts/benchmarks/amp.py", "modes", "-modes", "fp23"),
        ("scripts/benchmarks/parity.py", "-modes", "fp23"),
    ):
        result = run(script, *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert "fp23" in result.stderr and "fp32" in result.stderr and "Traceback" not in result.stderr


def test_the_fraction_with_pythons_lock_is_that_of_the_samples(tmp_path, monkeypatch):
    """A stand-in for py-spy writes 30 samples of two stacks, of 200 in its second."""
    sampler = tmp_path / "py-spy"
    sampler.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\nprintf "a;b 20\\na 10\\n" > "$2"\n')
    sampler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    digits = loader_lock.CASES["digits at 32, in memory"]
    milliseconds, fraction = loader_lock.measure(SimpleNamespace(photos=tmp_path, seconds=1), digits, tmp_path)
    assert fraction == 0.15 and 0 < milliseconds < 1000


def test_the_shards_that_starts_are_measured_with_can_be_read(tmp_path):
    shard_start.make_shards(tmp_path, 3, 100)
    train, val = load_image_sets(replaced(Config(), DATA={"DATASET": "shards", "DATA_PATH": str(tmp_path)}))
    assert (len(train), len(val), train.read(299).shape) == (300, 100, (16, 16, 3))
    assert 10 < shard_start.private_mb(os.getpid()) < 100_000 and shard_start.cpu_seconds(os.getpid()) > 0
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in shard_start.processes_of(os.getpid())
        child.kill()


def test_what_a_list_costs_at_the_start_is_measured_in_a_process_that_reads_all_of_it(tmp_path):
    list_start.make("csv", tmp_path, 3000)
    found = list_start.measure(list_start.ROOT, "csv", tmp_path, "DATA.VAL_FRACTION=0.5")
    assert sum(found["images"]) == 3000 and min(found["images"]) > 1000
    assert 0 < found["cpu"] <= found["seconds"] * 1.05 and found["held"] <= found["peak"]
