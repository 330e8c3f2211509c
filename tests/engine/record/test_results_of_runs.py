"""What whole runs leave: of which weights it is, after a kill too, and what wrong labels look like."""

import json
import signal

import pytest
from PIL import Image

from tests.support.run_hash import run_hash
from tests.support.runs import epochs_of, rows_of, run, run_folder, status_of

WRONG_LABELS = (3, 58, 120, 211, 350)
TABLES = ("predictions.csv", "per_class.csv", "confusion.csv")
PICTURES = ("confusion.png", "mistakes.png", "train_batch.png")
# It gets 9 of 10 digits right after one epoch.
CONVOLUTIONS = """
DATA: {DATASET: digits, IMAGE_SIZE: 16, IMAGE_CHANNELS: 1, HFLIP: 0, CROP_SCALE: [0.8, 1], BATCH_SIZE: 32, NUM_WORKERS: 0}
MODEL: {TYPE: timm, NAME: test_resnet}
TRAIN: {NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-2, SMOOTHING: 0, MODEL_EMA: true, MODEL_EMA_DECAY: 0.9}
TRACK: []
REPORT: false
"""


def start(yaml, output, *options, **faults):
    words = ["-cfg", str(yaml), "-output", str(output), *options]
    return run("main_single_gpu.py", *words, faults={"draw_no_curves": []} | faults)


def tables(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


@pytest.fixture(scope="module")
def mislabelled(tmp_path_factory):
    """The folder of a run whose validation images have five wrong labels."""
    folder = tmp_path_factory.mktemp("mislabelled")
    (folder / "conv.yaml").write_text(CONVOLUTIONS)
    start(folder / "conv.yaml", folder / "o", "-opts", "REPORT=true", mislabel=WRONG_LABELS).done()
    return run_folder(folder / "o")


def test_planted_wrong_labels_are_among_the_mistakes_that_are_shown(mislabelled):
    rows = rows_of(mislabelled / "predictions.csv")
    wrong = [row for row in rows if row["label"] != row["prediction"]]
    shown = sorted(wrong, key=lambda row: -float(row["probability"]))[:36]
    assert {f"digits image {index}" for index in WRONG_LABELS} <= {row["image"] for row in shown}
    with Image.open(mislabelled / "mistakes.png") as sheet:
        assert sheet.width > 900 and sheet.height > 150


def test_tables_and_record_are_of_the_weights_that_best_pth_is_of(mislabelled):
    record, status = json.loads((mislabelled / "results.json").read_text()), status_of(mislabelled)
    rows = rows_of(mislabelled / "predictions.csv")
    right = sum(row["label"] == row["prediction"] for row in rows)
    assert len(rows) == 359 and status["best_top1"] == pytest.approx(100 * right / 359)
    assert (record["epoch"], record["value"]) == (status["best_epoch"], status["best_top1"])
    last = epochs_of(mislabelled)[record["epoch"] - 1]
    suffix = "_ema" if record["weights"] == "ema" else ""
    assert last[f"eval_top1{suffix}"] == max(last["eval_top1"], last["eval_top1_ema"])
    assert last[f"eval_top1{suffix}"] == pytest.approx(record["value"], abs=1e-4)
    assert all((mislabelled / name).exists() for name in PICTURES)


def test_an_evaluation_of_best_pth_leaves_the_same_tables(mislabelled, tmp_path):
    flags = ["-eval", "-pretrained", str(mislabelled / "best.pth"), "-output", str(tmp_path / "o")]
    run("main_single_gpu.py", *flags, faults={"mislabel": list(WRONG_LABELS)}).done()
    assert tables(run_folder(tmp_path / "o")) == tables(mislabelled)


def test_a_run_killed_before_its_tables_ends_with_those_of_its_best_pth_and_pictures_change_no_weight(
    tmp_path, small_yaml
):
    mixed = ["-epochs", "1", "-opts", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.RANDOM_ERASE_PROB=0.5", "TRAIN.MODEL_EMA=true"]
    assert start(small_yaml, tmp_path / "whole", *mixed).returncode == 0
    whole = run_folder(tmp_path / "whole")
    assert not any((whole / name).exists() for name in PICTURES), "REPORT is false"
    with_pictures = [*mixed, "REPORT=true"]
    killed = start(small_yaml, tmp_path / "o", *with_pictures, kill_before_results=[])
    assert killed.returncode == -signal.SIGKILL
    folder = run_folder(tmp_path / "o")
    assert (folder / "train_batch.png").exists() and not (folder / "predictions.csv").exists()
    start(small_yaml, tmp_path / "o", "-resume", "auto", *with_pictures).done()
    assert run_hash(folder) == run_hash(whole)
    assert tables(folder) == tables(whole) and (folder / "mistakes.png").exists()
