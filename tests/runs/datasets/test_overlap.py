"""A run reports how many validation images are training images, by their content (TrainedOnAdvice)."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.overlap import Overlap
from scripts import make_shards
from tests.support.configs import CPU, SMALL
from tests.support.image_sets import load, make_folders
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, status_of, typed
from utils.distributed import Process

pytestmark = pytest.mark.slow

BY_CONTENT = "are also training images"


def draw_noise(folder: Path, *classes: str, count: int = 4, seed: int = 0, ending: str = "png") -> None:
    """Draw images that all differ. In some formats they have the same size."""
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.fromarray(rng.integers(256, size=(8, 9, 3)).astype(np.uint8)).save(
                folder / name / f"{number}.{ending}"
            )


def flags_for(folder: Path, data_set: str = "imagefolder") -> list[str]:
    (folder.parent / "small.yaml").write_text(SMALL.replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3"))
    flags = ["-cfg", folder.parent / "small.yaml", "-dataset", data_set, "-data_path", folder, "-batch_size", "2"]
    return [*map(str, flags), "-output", str(folder.parent / "o")]


def train(folder: Path, *words: str, data_set: str = "imagefolder", processes: int = 1) -> Ended:
    """Run two epochs on the data in this folder."""
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    words = (*flags_for(folder, data_set), *words)
    return typed(script, *words, processes=processes).done()


def told(ended: Ended, kind: str) -> list[str]:
    return [line for line in ended.stdout.splitlines() if kind in line]


@pytest.fixture
def photos(tmp_path) -> Path:
    """Return 8 training and 4 validation images. 2 of the 4 are also training images, renamed, one in another class."""
    draw_noise(tmp_path / "photos/train", "cat", "dog")
    draw_noise(tmp_path / "photos/val", "cat", count=2, seed=1)
    shutil.copy(tmp_path / "photos/train/cat/3.png", tmp_path / "photos/val/cat/copy.png")
    (tmp_path / "photos/val/dog").mkdir()
    Image.open(tmp_path / "photos/train/cat/1.png").save(tmp_path / "photos/val/dog/again.bmp")
    return tmp_path / "photos"


@pytest.mark.long
@pytest.mark.parametrize(
    ("processes", "words"),
    [
        (1, ["DATA.WORKERS=threads", "DATA.NUM_WORKERS=2"]),
        (1, ["DATA.WORKERS=processes", "DATA.NUM_WORKERS=2"]),
        (2, ["DATA.WORKERS=processes", "DATA.NUM_WORKERS=1", "VALIDATE_FREQ=2"]),
        (2, ["DATA.NUM_WORKERS=0", "DATA.CACHE=disk"]),
    ],
)
def test_overlapping_validation_images_are_counted_once_by_any_loader(photos, processes, words):
    options = ["-opts", "DATA.DROP_LAST=false", *words]
    ended = train(photos, *options, processes=processes)
    (line,) = told(ended, BY_CONTENT)
    assert_names(line, "2 of 4", "1 of these 2", "-check")
    (log,) = (photos.parent / "o").glob("train-*/log.txt")
    assert log.read_text().count(BY_CONTENT) == 1
    resumed = train(photos, "-resume", "auto", "-epochs", "3", *options, processes=processes)
    assert "Epoch[003/003]" in resumed.stdout and not told(resumed, BY_CONTENT), "already reported in the first epoch"


@pytest.mark.parametrize("data_set", ["csv", "shards"])
def test_listed_and_sharded_images_are_compared_by_content(photos, data_set):
    if data_set == "csv":
        for part in ("train", "val"):
            rows = [f"{path.relative_to(photos)},{path.parent.name}" for path in sorted((photos / part).rglob("*.*"))]
            (photos / f"{part}.csv").write_text("\n".join(["image_path,target", *rows, ""]))
        data = photos
    else:
        data = photos.parent / "shards"
        assert make_shards.main(["-dataset", "imagefolder", "-data_path", str(photos), "-output", str(data)]) == 0
    (line,) = told(train(data, "-opts", "DATA.DROP_LAST=false", data_set=data_set), BY_CONTENT)
    assert_names(line, "2 of 4", "1 of these 2")


@pytest.mark.parametrize("order", [1, -1])
def test_images_with_equal_fingerprints_are_compared_by_pixel(tmp_path, monkeypatch, order):
    """`order`: in which the results of several processes arrive."""
    monkeypatch.setattr(Process, "join", lambda process, rows: [each[::order] for each in rows])
    make_folders(tmp_path, {"train/cat": 1, "train/dog": 2, "val/cat": 1, "val/dog": 1})
    blank = np.zeros((400, 400, 3), np.uint8)
    for part in ("train", "val"):
        Image.fromarray(blank).save(tmp_path / part / "cat/00.JPEG", "PNG")
        blank[1, 1] = 1, 2, 3  # the fingerprint ignores this pixel
        for path in (tmp_path / part / "dog").iterdir():
            Image.fromarray(blank).save(path, "PNG")
    train_set, val_set = load("imagefolder", tmp_path)
    overlap = Overlap(train_set, val_set, Process(CPU))
    for each in (train_set, val_set):
        for index in range(len(each)):
            each.watch.note(index, each.read(index))
        assert len(set(each.watch.note.__self__.values.tolist())) == 1
    (line,) = overlap.compare()
    # In "train" only the first image is blank; the others have the pixel. Both validation images equal train/dog.
    assert_names(line, "2 of 2", tmp_path / "train/dog/00.JPEG", "1 of these 2")
    assert train_set.watch.note is val_set.watch.note is None, "later epochs record no fingerprints"


NUMBER = "validation_images_in_training"
SAVED = ["-epochs", "2", "-resume", "auto", "-name", "a", "-opts", "DATA.DROP_LAST=false", "REPORT=true"]


def numbers_of(photos: Path) -> tuple[int | None, int | None, bool]:
    """Return the number of overlapping images in status.json and results.json, and whether report.html mentions it."""
    folder = photos.parent / "o/a"
    page, record = (folder / "report.html").read_text(), json.loads((folder / "results.json").read_text())
    return status_of(folder)["about"].get(NUMBER), record.get("num_in_training"), BY_CONTENT in page


@pytest.mark.long
@pytest.mark.parametrize(
    "step, processes, option",
    [
        *((step, 1, "SAVE_STEPS=3") for step in (0, 3, 5)),
        (5, 1, "VALIDATE_FREQ=2"),
        *((step, 2, "DATA.NUM_WORKERS=1") for step in (1, 5)),
    ],
)
def test_resumed_run_counts_the_same_overlapping_images(photos, step, processes, option):
    """An epoch has four updates. Two processes stop an update later. The log says the number once."""
    words = ["-batch_size", str(2 // processes), *SAVED, option]
    script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    faults = {"signal_at": [step, signal.SIGTERM, [0]]}
    stopped = typed(script, *flags_for(photos), *words, processes=processes, faults=faults)
    assert stopped.returncode == 128 + signal.SIGTERM
    ended = train(photos, *words, processes=processes)
    (line,) = told(stopped, BY_CONTENT) + told(ended, BY_CONTENT)
    assert_names(line, "2 of 4", "1 of these 2")
    assert numbers_of(photos) == (2, 2, True)


def test_run_without_overlapping_images_says_none(tmp_path):
    draw_noise(tmp_path / "photos/train", "cat", "dog")
    draw_noise(tmp_path / "photos/val", "cat", "dog", count=2, seed=1)
    assert told(train(tmp_path / "photos", *SAVED), BY_CONTENT) == []
    assert numbers_of(tmp_path / "photos") == (0, 0, False)


@pytest.mark.long
@pytest.mark.parametrize("step", [2, 5])
def test_overlap_stays_unknown_without_the_state_of_all_images(photos, step):
    """Without the loader processes' fingerprints, there is no state. If images changed, it is about other images."""
    words, path = [*SAVED], photos.parent / "o/a/last.pth"
    typed("main_single_gpu.py", *flags_for(photos), *words, faults={"signal_at": [step, signal.SIGTERM, [0]]})
    state = torch.load(path, weights_only=True)
    if step == 2:
        del state["overlap"]
    else:
        (photos / "val/cat/copy.png").unlink()
        words.append("RESUME.ALLOW_CHANGED=[IMAGES,NUM_IMAGES]")
    torch.save(state, path)
    assert told(train(photos, *words), BY_CONTENT) == []
    assert numbers_of(photos) == (None, None, False)


def test_overlap_check_does_not_change_weights(photos, monkeypatch):
    hashes = []
    for number in range(2):
        ended = typed("main_single_gpu.py", *flags_for(photos), "-name", str(number)).done()
        assert bool(told(ended, BY_CONTENT)) == (number == 0)
        hashes.append(run_hash(photos.parent / "o" / str(number)))
        monkeypatch.setattr("engine.callback_list.watches", lambda *given: False)
    assert hashes[0] == hashes[1]
