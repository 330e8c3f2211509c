"""The benchmarks: small tables with consistent values, the verdict of parity, and a GPU session over its time limit."""

import math
import os
import re
import shlex
from argparse import Namespace

import pytest
import torch

from configs.load import load
from configs.schema import Config
from scripts.benchmarks import gpu_session, loader, parity, step
from scripts.benchmarks.common import Refused, Turns, take_turns
from scripts.benchmarks.photos import make_photos
from tests.support.runs import alive, run
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def rows_of(printed: str) -> list[dict[str, str]]:
    """Return the rows of a Markdown table by column name."""
    lines = [line.strip("|").split("|") for line in printed.splitlines() if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in line] for line in lines]
    return [dict(zip(heads, row, strict=True)) for row in rows]


def test_step_benchmark_modes_report_consistent_speeds(small_yaml):
    words = "-rounds 1 -steps 2 -seconds 0 -batch_size 16 -modes fp32 bf16 tf32 -opts DEVICE=cpu".split()
    words = ["modes", "-cfg", str(small_yaml), *words]
    ended = run("scripts/benchmarks/step.py", *words, faults={"start_python_as_forks": []})
    tf32, fp32, bf16 = rows_of(ended.stdout)
    rates = [float(row["images/s"].split()[0]) for row in (fp32, bf16)]
    assert [float(row["iterations/s"]) * 16 for row in (fp32, bf16)] == pytest.approx(rates, rel=2e-3)
    assert tf32["memory, GiB"] == "only on cuda" and float(fp32["memory, GiB"]) > 0.1
    # Computed by hand: 5 tokens of width 16, 2 blocks, 4 x 4 patches of a grey 8 x 8 image, 1000 classes; 2 FLOPs each.
    block = 5 * 16 * 16 * 12 + 2 * 5 * 5 * 16
    image = 3 * 2 * (4 * 16 * 16 + 2 * block + 16 * 1000) / 1e9
    peak = float(re.search(r"float32 ([0-9.e+]+)", ended.stdout)[1])
    assert float(fp32["FLOPs utilisation, %"]) == pytest.approx(100 * image * rates[0] / peak, rel=0.01)


@pytest.mark.parametrize("accumulate", [1, 5])
def test_linear_benchmark_updates_as_often_as_it_says(accumulate):
    torch.set_num_threads(1)
    loss = step.train_linear(Config(), "cpu", (8, 4), 500, accumulate)[1]
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    batches = [torch.randn(2, 4, 8) for _ in range(10)]
    weights, gradients = [weight for layer in layers for weight in layer.parameters()], []
    for number in range(500):
        images, targets = batches[number % 10]
        output = layers[2](layers[1](layers[0](images).relu()).relu())
        last = (output - targets).square().mean()
        gradients += [torch.autograd.grad(last, weights)]
        if len(gradients) == accumulate:
            for weight, *each in zip(weights, *gradients, strict=True):
                weight.data -= 1e-4 * torch.stack(each).mean(0)
            gradients = []
    assert loss == pytest.approx(last.item(), abs=1e-6)


class FakeWorker:
    """Simulates a StepWorker on a machine that becomes slower with every request."""

    questions = 0

    def __init__(self, seconds=0.01, refuses=False):
        self.seconds, self.refuses, self.steps = seconds, refuses, []

    def start(self):
        pass

    close = start

    def ask(self, method, *arguments):
        if method != "time_updates":
            return 8
        if self.refuses:
            raise Refused("it cannot")
        self.steps.append(arguments[1])
        FakeWorker.questions += 1
        return arguments[1] * self.seconds * (1 + FakeWorker.questions // 100)


def test_alternating_benchmark_cases_keep_their_ratios_during_slowdowns():
    workers = {"fp32": FakeWorker(), "broken": FakeWorker(refuses=True), "slow": FakeWorker(1.0)}
    measured, reasons = take_turns(workers, Turns(rounds=100, steps=5, min_seconds=2.0))
    assert reasons == {"broken": "it cannot"} and list(measured) == ["fp32", "slow"]
    assert workers["fp32"].steps[1:] == [200] * 100 and workers["slow"].steps[1:] == [5] * 100
    assert sorted(measured["slow"].ratios)[50] == pytest.approx(0.01)


@pytest.mark.parametrize(("kind", "is_compiled"), [("cpu", False), ("cuda", True)])
def test_run_benchmark_gives_halfstep_and_timm_same_options(tmp_path, kind, is_compiled):
    values = {"timm": tmp_path, "model": "vit_tiny_patch16_224", "kind": kind, "num_workers": 16, "batch_size": 256}
    arguments = Namespace(**values, compile=is_compiled, report_every=10)
    timm = " ".join(loader.timm_command(arguments, tmp_path, tmp_path)) + " "
    config = load(loader.halfstep_command(arguments, tmp_path, tmp_path)[2:]).config
    assert f"--device {kind} --workers 16 --log-interval {config.REPORT_FREQ} " in timm and "-b 256 " in timm
    assert (config.DATA.NUM_WORKERS, config.DATA.BATCH_SIZE, config.TRAIN.MODEL_EMA) == (16, 256, False)
    assert "--amp-dtype bfloat16" in timm and (config.AMP, config.PRECISION.DTYPE) == (True, "bfloat16")
    assert ("--torchcompile" in timm) is bool(config.COMPILE) is is_compiled


FP32 = [97.2, 97.5, 96.9, 97.2, 97.2]  # deviation 0.21: 0.27 allowed


@pytest.mark.parametrize(
    "values, worse",
    [
        (FP32, False),
        ([value - 0.26 for value in FP32], False),
        ([value - 0.28 for value in FP32], True),
        ([97.2, 97.5, 96.9, 97.2, 60.0], True),  # one collapsed seed, whose own deviation must not excuse it
        ([97.2, 97.5, 96.9, 97.2, math.nan], True),
    ],
)
def test_parity_benchmark_allows_two_standard_errors_of_difference(monkeypatch, capsys, values, worse):
    def train(arguments, name, seed):
        if name == "naive-bf16":
            raise ConfigError("PRECISION.MODE: not here")
        return parity.Run((values if name == "bf16" else FP32)[seed], 0.5, 2.0)

    monkeypatch.setattr(parity, "train", train)
    assert parity.main(["-modes", "bf16", "naive-bf16", "-seeds", "5"]) == worse
    _, bf16, refused = rows_of(capsys.readouterr().out)
    assert bf16["against fp32"].startswith("WORSE" if worse else "no worse") and refused["against fp32"] == "not judged"


@pytest.mark.long
def test_gpu_session_part_over_its_limit_is_killed(tmp_path):
    # In its own session, as some tests start their programs: killing the part's process group is not enough.
    hidden = f"sh -c 'setsid sleep 1000 & echo $! > {tmp_path}/hidden; echo early; sleep 1000'"
    parts = {"slow": (1.0, [hidden]), "failed": (60, ["sh -c 'echo late; exit 3'"])}
    if (child := os.fork()) == 0:
        os._exit(gpu_session.run_session(tmp_path / "session.md", parts, "dry"))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not alive(int((tmp_path / "hidden").read_text()))
    text = (tmp_path / "session.md").read_text()
    assert re.search("early.*slow: killed at the time limit.*late.*failed: failed with exit code 3", text, re.S)


def test_gpu_session_parts_have_valid_commands_and_fit_the_time_limit(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(gpu_session, "run_session", lambda path, parts, kind: ran.append(parts) or 0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(step, "measure_cases", lambda arguments, workers, *rest: " ".join(workers))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # otherwise main sets it for all tests
    calls = re.findall(r"-output FOLDER (-parts.*)", gpu_session.__doc__)
    for call in calls:
        assert gpu_session.main(["-output", str(tmp_path), *call.split()]) == 0
    assert sorted(name for parts in ran for name in parts) == sorted(gpu_session.PARTS)
    assert max(sum(limit for limit, _ in parts.values()) for parts in ran) <= 590
    for command in (each for parts in ran for _, commands in parts.values() for each in commands):
        words = shlex.split(command.removeprefix("timeout -s KILL 25 "))
        if "main_single_gpu.py" in command:
            load(words[2:])
        elif "step.py" in command:
            step.main(words[2:])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (["-dry", "-parts", "machine,testz"], ["-parts", "machine"]):
        with pytest.raises(ConfigError):
            gpu_session.main(["-output", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_loader_benchmark_uses_synthetic_images_only_to_time_updates(monkeypatch, tmp_path):
    make_photos(tmp_path, 10, 10)
    asked = []
    monkeypatch.setattr(
        loader, "StepWorker", lambda words, role="step": asked.append(load(words).config.DATA) or FakeWorker()
    )
    words = (
        "limits -seconds 0 -cfg configs/vit_tiny_patch16_224.yaml -dataset imagefolder "
        f"-data_path {tmp_path} -batch_size 2"
    )
    assert loader.main(words.split()) == 0
    assert [each.DATASET for each in asked] == ["imagefolder", "synthetic", "imagefolder"]
