"""Learning rate, disk, output, memory and shared memory, each compared with what the machine has."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch import nn

from configs.load import LoadedConfig, load
from configs.schema import Config
from datasets import build_order
from engine import quick_checks
from engine.batch_size import MemoryEstimate
from engine.check.memory import check_memory
from engine.plan import Inputs, TrainPlan
from engine.precision import Precision
from engine.quick_checks import (
    OK,
    WARN,
    WRONG,
    check_disk,
    check_fine_tuning,
    check_rate,
    check_shared_memory,
)
from tests.runs.engine.check.small_photos import sets_of
from tests.support.cases import cases_of, names_of
from tests.support.configs import CPU, replaced, small_config
from tests.support.refusals import assert_names
from tests.support.runs import command, rows, rows_of, run_folder, run_fresh
from utils.distributed import Process

MIB = 2**20


@pytest.mark.parametrize("case", cases_of("rates_of_trained_weights"))
def test_check_warning_of_high_fine_tuning_rate_suggests_options_that_fix_it(tmp_path, case):
    options, batch = case.removesuffix(" images").split(", ")

    def found(*more: str) -> list:
        words = ["MODEL.PRETRAINED=resnet50", *options.split(), *more]
        return list(check_fine_tuning(small_config(tmp_path, *words), int(batch)))

    told = "; ".join(f"{finding.verdict}: {finding.text}; {finding.remedy}" for finding in found())
    assert_names(told or "(nothing)", *names_of("rates_of_trained_weights", case))
    if told.startswith(WARN):
        _, advice = found()[0].remedy.split("-opts ")
        assert [finding.verdict for finding in found(*advice.split())] == [OK]


@pytest.mark.parametrize("name", ["finetune", "finetune_batchnorm", "finetune_numbers", "finetune_numbers_batchnorm"])
@pytest.mark.parametrize("batch", [8, 32, 256, 1024])
def test_fine_tuning_recipes_get_no_warning_about_their_own_rates(name, batch):
    config = load(["-cfg", f"configs/{name}.yaml", "-pretrained", "resnet50"]).config
    findings = [check_rate(config.TRAIN, batch), *check_fine_tuning(config, batch)]
    assert [finding.verdict for finding in findings] == [OK, OK]


@pytest.mark.parametrize(
    ("rate", "is_judged", "verdict", "has_range", "has_factor"),
    [
        (5e-4, False, OK, True, False),
        (4e-3, False, OK, True, True),
        (4e-3, True, OK, False, False),
        (4e-2, True, WARN, True, False),
    ],
)
def test_accepted_rate_outside_the_usual_range_does_not_contradict_it(rate, is_judged, verdict, has_range, has_factor):
    settings = replaced(Config(), TRAIN={"BASE_LR": rate, "LINEAR_SCALED_LR": 256}).TRAIN
    finding = check_rate(settings, 256, is_judged)
    assert (finding.verdict, "0.001" in finding.text, "10 times" in finding.text) == (verdict, has_range, has_factor)


@pytest.mark.parametrize("name", ["finetune", "finetune_numbers"])
def test_model_with_batchnorm_is_told_its_settings_file(name):
    other = f"configs/{name}_batchnorm.yaml"
    for file, network, told in (
        (f"configs/{name}.yaml", nn.BatchNorm2d(3), (WARN, f"use -cfg {other}")),
        (f"configs/{name}.yaml", nn.GroupNorm(1, 3), (OK, "")),
        (other, nn.BatchNorm2d(3), (OK, "")),
    ):
        config = load(["-cfg", file, "-pretrained", "resnet50"]).config
        assert [(each.verdict, each.remedy) for each in check_fine_tuning(config, 32, network)] == [told]


def test_too_little_disk_space_for_checkpoints_fails_or_warns(tmp_path, monkeypatch):
    config = small_config(tmp_path, "KEEP_CHECKPOINTS=3", "SAVE_FREQ=1", "TRAIN.NUM_EPOCHS=2")

    def verdict(free: int, path: Path) -> str:
        monkeypatch.setattr(quick_checks, "free_bytes", lambda folder: free + quick_checks.OTHER_FILES)
        return check_disk(config, path, 1000).verdict

    assert [verdict(free, tmp_path / "not/yet") for free in (5999, 6000, 2**20)] == [WRONG, WARN, OK]  # 2 kept, 4 more
    assert verdict(-1000, tmp_path) == WRONG, "logs and curves need space too"
    (tmp_path / "last.pth").write_bytes(bytes(1000))
    (tmp_path / "best.pth").hardlink_to(tmp_path / "last.pth")
    (tmp_path / "shards/step-1").mkdir(parents=True)
    (tmp_path / "shards/step-1/1-of-1.pth").write_bytes(bytes(500))
    assert [verdict(free, tmp_path) for free in (4499, 4500)] == [WRONG, WARN], "1500 bytes are already on the disk"


def test_too_little_shared_memory_for_loader_processes_of_all_local_ranks_warns(photos, tmp_path, monkeypatch):
    config, train, _ = sets_of(photos, "DATA.NUM_WORKERS=3", "DATA.BATCH_SIZE_EVAL=8")
    data, process, verdicts = config.DATA, Process(CPU, world_size=4, local_size=2), []
    need = 2 * 3 * 2 * (data.BATCH_SIZE + 8) * data.IMAGE_CHANNELS * data.IMAGE_SIZE**2
    monkeypatch.setattr(quick_checks, "SHARED_MEMORY", tmp_path)
    assert check_shared_memory(config, train, process).text == "not needed", "threads need none"
    for free in (need - 1, need, 2 * need):
        monkeypatch.setattr(quick_checks, "free_bytes", lambda folder, free=free: free)
        verdicts.append(check_shared_memory(replaced(config, DATA={"WORKERS": "processes"}), train, process).verdict)
    assert verdicts == [WRONG, WARN, OK]


@pytest.mark.parametrize("is_kept", [True, False])
def test_ema_decay_is_checked_only_if_ema_is_on(photos, is_kept):
    config, train, _ = sets_of(photos, "TRAIN.MODEL_EMA_WARMUP=false", f"TRAIN.MODEL_EMA={is_kept}")
    plan = TrainPlan(
        inputs=Inputs(LoadedConfig(config, {}, [], []), Process(CPU), Precision(config, CPU)),
        train_set=train,
        eval_set=train,
        order=build_order(config, train, world_size=1),
        class_weights=None,
        validation={},
        facts={},
    )
    findings = quick_checks.quick_checks(plan, None, None)
    assert ("EMA" in [finding.title for finding in findings]) is is_kept


@pytest.mark.parametrize(
    ("free", "processes", "verdict"),
    [(2000, 1, OK), (1400, 1, WARN), (600, 1, WRONG), (2000, 2, WARN), (1500, 2, WRONG)],
)
def test_memory_near_or_above_free_memory_warns_or_fails(tmp_path, free, processes, verdict):
    config, step = small_config(tmp_path, "DATA.BATCH_SIZE=4"), MemoryEstimate(fixed=256 * MIB, per_image=128 * MIB)
    found = check_memory(config, Process(CPU, local_size=processes), 500 * MIB, step, free * MIB)
    assert found.verdict == verdict
    assert_names(found.text, "500 MiB of the program", "4 images")


@pytest.mark.long
def test_estimated_host_memory_is_what_a_run_takes(tmp_path):
    settings = "DATA.SYNTHETIC_SIZE=128 DATA.IMAGE_SIZE=64 MODEL.PATCH_SIZE=8 MODEL.EMBED_DIM=192 MODEL.DEPTH=8".split()
    words = ["-cfg", "configs/vit_digits.yaml", "-dataset", "synthetic", "-epochs", "1", "-batch_size", "64"]
    words += ["-output", str(tmp_path / "output"), "-opts", *settings]
    checked = run_fresh("main_single_gpu.py", *words, "-opts", "CHECK=true").done()
    # The sum is rounded to a tenth of a GiB, its parts to a MiB.
    parts = r"\((\d+) MiB of the program, (\d+) MiB of weights, gradients and optimizer, (\d+) MiB for 64 images\)"
    estimate = sum(map(int, re.search(parts, rows(checked.stdout)["memory"][1]).groups()))
    # A process inherits the peak of the process that starts it, so a shell starts the run, not this large one.
    start = f"{shlex.join(command('main_single_gpu.py', *words))}; exit $?"
    subprocess.run(["sh", "-c", start], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, check=True)
    peak = float(rows_of(run_folder(tmp_path / "output") / "metrics.csv")[-1]["memory_mb"])
    assert 0.8 * peak < estimate < 1.2 * peak
