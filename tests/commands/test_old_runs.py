"""Runs of halfstep 1.x and 2.x are refused in one sentence. Their weights can still start a run and predict."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.weights.files import read_state_dict
from tests.support.forks import ROOT
from tests.support.refusals import assert_names
from tests.support.runs import run_folder, typed
from tests.support.weight_files import write_run_weights

pytestmark = pytest.mark.slow

WEIGHTS = ROOT / "tests/data/strangers/2.1.0.pth"  # the best.pth of a run of 2.1.0 on the digits


@pytest.fixture
def old(here) -> Path:
    """Return the folder of a run of 2.1.0, in the folder `runs`."""
    folder = Path("runs/train-20260102-03-04-05")
    folder.mkdir(parents=True)
    for name in ("best.pth", "last.pth"):
        shutil.copy(WEIGHTS, folder / name)
    (folder / "config.yaml").write_text("DATA: {DATASET: digits}\nOLD: 1\n")
    (folder / "metrics.jsonl").write_text('{"epoch": 0, "eval_top1": 37.3}\n')
    (folder / "status.json").write_text(json.dumps({"about": {"halfstep": "2.1.0, commit 467349ef"}}))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "main_single_gpu.py -resume RUN",
        "main_single_gpu.py -resume RUN -check",
        "main_single_gpu.py -resume RUN/best.pth",
        "main_single_gpu.py -resume auto -output runs",
        "main_single_gpu.py -resume auto -output runs -cfg vit_digits",
        "main_single_gpu.py -eval -resume RUN",
        "scripts/compare.py RUN RUN",
        "scripts/labels.py RUN",
        "scripts/report.py RUN",
        "scripts/doctor.py RUN",
    ],
)
def test_run_of_an_old_version_is_refused_with_the_last_version_that_reads_it(old, words):
    program, *flags = words.replace("RUN", str(old)).split()
    ended = typed(program, *flags).refused(old, "halfstep 2.1.0", "2.3.0 is the last version", "-pretrained")
    assert ended.stderr.count("2.3.0") == 1 and len(ended.stderr.strip().splitlines()) == 1


def test_compare_leaves_out_runs_of_old_versions_in_a_folder(old):
    typed("scripts/compare.py", "runs").refused("no run", "left out", old, "2.3.0")


def test_run_starts_from_the_weights_of_an_old_version(old, tmp_path):
    words = ["-pretrained", old, "-epochs", 1, "-output", tmp_path / "new", "-batch_size", 320]
    words += ["-opts", "TRAIN.BASE_LR=1e-9", "TRAIN.WARMUP_EPOCHS=0", "TRAIN.WEIGHT_DECAY=0"]
    typed("main_single_gpu.py", *words).done()
    weights = read_state_dict(run_folder(tmp_path / "new") / "last.pth")
    for name, tensor in read_state_dict(WEIGHTS).items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)


def test_weights_of_an_old_version_predict_without_its_statistics(old, tmp_path):
    Image.new("L", (8, 8), 100).save(tmp_path / "x.png")
    ended = typed("scripts/predict.py", old, tmp_path / "x.png", "-unknown", 0.3, "-json", tmp_path / "x.json").done()
    assert_names(ended.stderr, "no statistics", "halfstep 2.1", "2.3.0", "only the confidence")
    (row,) = json.loads((tmp_path / "x.json").read_text())["images"]
    assert row["predictions"][0]["probability"] > 0 and "known" not in row


@pytest.mark.parametrize(
    "words", ["predict PHOTO", "embed photos/a -output x.npz", "export -output x.onnx", "evaluate -data_path photos"]
)
def test_model_that_saw_other_images_than_today_is_refused_with_the_last_version_that_prepares_them(here, words):
    """On squares, a model that was trained at the aspect ratio of its photos would silently answer worse."""
    weights = write_run_weights(Path("old.safetensors"), more={"DATA.TOKENS": 64})
    Path("photos/a").mkdir(parents=True)
    Image.new("RGB", (40, 32)).save("photos/a/1.png")
    command, *flags = words.replace("PHOTO", "photos/a/1.png").split()
    program = "main_single_gpu.py" if command == "evaluate" else f"scripts/{command}.py"
    first = ["-eval", "-pretrained", weights] if command == "evaluate" else [weights]
    typed(program, *first, *flags).refused("DATA.TOKENS", weights, "2.3.0", "-pretrained")


@pytest.mark.long
def test_run_on_squares_starts_from_a_model_that_saw_other_images(here):
    weights = write_run_weights(Path("old.safetensors"), more={"DATA.TOKENS": 64})
    words = ["-pretrained", weights, "-dataset", "digits", "-epochs", 1, "-output", "new", "-batch_size", 320]
    assert typed("main_single_gpu.py", *words).returncode == 0
