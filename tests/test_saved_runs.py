"""Runs that an earlier version saved in mid-epoch go on, with the files and settings that it wrote.

tests/data/saved_runs was written at commit 9bf52ab: tiny.yaml with -amp -amp_dtype float16 in one process, and with
DIST.CHECKPOINT=sharded DATA.BATCH_SIZE=4 in two. last.pth holds step 6 of 8; metrics.jsonl and steps.csv the whole run.
At commit 8073904: digits.yaml, and with TRAIN.MIXUP_ALPHA=0 TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1; step 21 of 24.
At commit b9907ef, in version 0.1.0 with the settings that have gone since: digits.yaml in a fold, with RAND_AUGMENT, EMA,
LAMB, float16 and a tag (step 15 of 18), and with the schedule plateau; tiny.yaml with fsdp2 in two processes (step 4 of 8).
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.runs import ROOT, epochs_of, rows_of, run

SAVED = ROOT / "tests" / "data" / "saved_runs"
FLAGS = {
    "single": ("tiny.yaml", 1, ["-amp", "-amp_dtype", "float16"]),
    "mixed": ("digits.yaml", 1, []),  # by one draw for all 320 images of an update
    "sharded": ("tiny.yaml", 2, ["-batch_size", "4"]),
}


def steps(folder: Path) -> dict[int, float]:
    return {int(row["step"]): float(row["loss"]) for row in rows_of(folder / "steps.csv")}


@pytest.mark.parametrize("kind", FLAGS)
def test_a_run_saved_by_an_earlier_version_ends_as_it_would_have(tmp_path, kind):
    shutil.copytree(SAVED / kind, tmp_path / "output")
    (folder,) = (tmp_path / "output").iterdir()
    before, expected = steps(folder), epochs_of(folder)[-1]
    file, processes, more = FLAGS[kind]
    flags = ["-cfg", str(SAVED / file), "-output", str(tmp_path / "output"), "-resume", "auto", *more]
    run("main_multi_gpu.py" if processes > 1 else "main_single_gpu.py", *flags, processes=processes).done()
    assert list((tmp_path / "output").iterdir()) == [folder]
    settings = (folder / "config.yaml").read_text()
    assert re.search(r"MIXUP_GROUP: null +# .*began", settings)
    assert kind == "mixed" or re.search(r"MODEL_EMA_WARMUP: false +# .*began", settings)
    # Processors round differently, so not to the last bit.
    assert steps(folder) == pytest.approx(before, rel=1e-3)
    loss = "eval_loss" if kind == "mixed" else "eval_loss_ema"
    assert epochs_of(folder)[-1][loss] == pytest.approx(expected[loss], rel=1e-3)


@pytest.mark.parametrize(("kind", "processes"), [("folds", 1), ("fsdp2", 2)])
def test_a_run_of_0_1_0_ends_as_it_would_have_whatever_its_settings_are_called_today(tmp_path, kind, processes):
    shutil.copytree(SAVED / kind, tmp_path / "output")
    (folder,) = (tmp_path / "output").iterdir()
    before, expected = steps(folder), epochs_of(folder)[-1]
    script = "main_multi_gpu.py" if processes > 1 else "main_single_gpu.py"
    run(script, "-resume", str(folder), "-output", str(tmp_path / "output"), processes=processes).done()
    assert steps(folder) == pytest.approx(before, rel=1e-3)
    assert epochs_of(folder)[-1]["eval_loss_ema"] == pytest.approx(expected["eval_loss_ema"], rel=1e-3)


def test_a_run_with_a_schedule_that_is_gone_is_refused_by_its_name(tmp_path):
    shutil.copytree(SAVED / "plateau", tmp_path / "output")
    (folder,) = (tmp_path / "output").iterdir()
    run("main_single_gpu.py", "-resume", str(folder)).refused("TRAIN.LR_SCHEDULER.NAME", "plateau", "removed")


def test_a_run_that_began_with_torchvisions_operations_goes_on_with_timms_if_asked_to(tmp_path):
    shutil.copytree(SAVED / "augmented", tmp_path / "output")
    policy = ["TRAIN.AUTO_AUGMENT=rand-m9-mstd0.5-inc1", "TRAIN.MIXUP_ALPHA=0"]
    flags = ["-cfg", str(SAVED / "digits.yaml"), "-output", str(tmp_path / "output"), "-resume", "auto"]
    refused = run("main_single_gpu.py", *flags, "-opts", *policy)
    refused.refused("AUGMENTATION: torchvision's operations -> timm's")
    (pasted,) = re.findall(r"-opts (RESUME\.ALLOW_CHANGED=\S+)", refused.stderr)
    assert pasted == "RESUME.ALLOW_CHANGED=[AUGMENTATION]"
    allowed = run("main_single_gpu.py", *flags, "-opts", *policy, pasted).done()
    assert "Step[0001/0004]" in allowed.stdout, allowed.stderr
    assert run("main_single_gpu.py", *flags, "-epochs", "7", "-opts", *policy).returncode == 0, "it is a new run's now"
