"""Runs that an earlier version saved in mid-epoch go on, with the files and settings that it wrote.

tests/data/saved_runs was written at commit 9bf52ab: tiny.yaml with -amp -amp_dtype float16 in one process, and with
DIST.CHECKPOINT=sharded DATA.BATCH_SIZE=4 in two. last.pth holds step 6 of 8; metrics.jsonl and steps.csv the whole run.
"""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.runs import ROOT, run

SAVED = ROOT / "tests" / "data" / "saved_runs"
FLAGS = {
    "single": ("main_single_gpu.py", 1, ["-amp", "-amp_dtype", "float16"]),
    "sharded": ("main_multi_gpu.py", 2, ["-opts", "DIST.CHECKPOINT=sharded", "DATA.BATCH_SIZE=4"]),
}


def steps(folder: Path) -> dict[int, float]:
    with open(folder / "steps.csv") as file:
        return {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}


def last_epoch(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("kind", FLAGS)
def test_a_run_saved_by_an_earlier_version_ends_as_it_would_have(tmp_path, kind):
    shutil.copytree(SAVED / kind, tmp_path / "output")
    (folder,) = (tmp_path / "output").iterdir()
    before, expected = steps(folder), last_epoch(folder)
    script, processes, more = FLAGS[kind]
    flags = ["-cfg", str(SAVED / "tiny.yaml"), "-output", str(tmp_path / "output"), "-resume", "auto", *more]
    done = run(script, *flags, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "output").iterdir()) == [folder]
    assert re.search(r"MODEL_EMA_WARMUP: false +# .*began", (folder / "config.yaml").read_text())
    # Processors round differently, so not to the last bit.
    assert steps(folder) == pytest.approx(before, rel=1e-3)
    assert last_epoch(folder)["eval_loss_ema"] == pytest.approx(expected["eval_loss_ema"], rel=1e-3)
