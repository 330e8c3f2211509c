"""Runs on real photos learn: a short one, and the commands of README.md.

The photos come from a package of Debian.
"""

import hashlib
import re
import shlex
import shutil
from pathlib import Path

import pytest

from models.weights.metadata import SHIPPED_FILE
from scripts.benchmarks import accuracy
from tests.support.forks import ROOT
from tests.support.pages import script_of
from tests.support.real_sets import make
from tests.support.runs import epochs_of, run, run_folder, status_of, typed
from utils.errors import ConfigError

MODEL = SHIPPED_FILE.stem
# A digest of the names of the photos of stamps20, seed 0, for which BENCHMARKS.md has figures.
DRAWN = "65d3800451568930"


@pytest.fixture(scope="module")
def stamps(tmp_path_factory) -> Path:
    try:
        return make(tmp_path_factory.mktemp("real"), "stamps")
    except ConfigError as error:
        pytest.skip(f"the packages of stamps are not available here: {error}")


def test_three_epochs_on_160_stamps_classify_most_of_the_others(stamps, tmp_path):
    """35% of the 220 validation images belong to the largest class."""
    photos = accuracy.draw(stamps.parent, tmp_path, "stamps20", seed=0)
    names = sorted(path.name for path in (photos / "train").rglob("*.jpg"))
    assert len(names) == 160 and hashlib.sha256("\n".join(names).encode()).hexdigest()[:16] == DRAWN
    words = ("-pretrained", MODEL, "-data_path", photos, "-epochs", "3", "-output", tmp_path / "runs")
    ended = typed("main_single_gpu.py", *words, "-image_size", 96, "-opts", "VALIDATE_FREQ=3").done()
    before, first, *_, last = epochs_of(run_folder(tmp_path / "runs"))
    assert "configs/finetune_batchnorm.yaml" in ended.stdout
    assert before["eval_top1"] > 70 and last["eval_top1"] > 68


def test_commands_of_readme_learn_469_stamps_and_recognise_220_others(stamps, tmp_path):
    """README.md has 88% of 43 held-out photos, and 84.5% (95%: 79.2 to 88.7) of the 220 others."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Three commands")[1].split("## ")[0]
    lines = re.findall(r"^halfstep (?:train|predict) .*?(?=\s*(?:#|$))", text, re.M)
    assert len(lines) == 2 and lines[0] == "halfstep train photos", lines
    (tmp_path / "photos").symlink_to(stamps / "train")
    shutil.copytree(stamps / "val", tmp_path / "new_photos")
    for line in lines:
        program, words = script_of(shlex.split(line))
        ended = run(program, *words, cwd=tmp_path).done()
    folder = run_folder(tmp_path / "output")
    assert status_of(folder)["best"]["top1"] > 72, "the linear classifier before the training has 81.4%"
    rows = [line.split("\t") for line in ended.stdout.splitlines() if line.count("\t") == 2]
    right = sum(Path(path).parts[-2] == label for path, label, _ in rows)
    assert len(rows) == 220 and right > 0.76 * 220, f"{right} of 220"
