"""Changes between a save and its resume: every setting, and the data."""

import shutil
import signal
from pathlib import Path

import pytest
import torch

from configs.schema import Config
from configs.values import SETTINGS
from datasets.order import Order, shuffled
from engine.checkpoint.compare import changes, refuse_changes
from engine.checkpoint.resume import comparable
from tests.support.image_sets import make_folders, noise
from tests.support.refusals import assert_names, refused
from tests.support.runs import run_folder
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

ORDER = Order(100, 32, 1, 1, True, 0, epoch_order=shuffled)
# Settings that a resumed run may change, listed here so that a new name is a deliberate choice. None of them affects
# the weights, except through the global batch, the number of images and the class names.
MAY_CHANGE = {
    "DATA": "DATA_PATH IMAGE_ROOT BATCH_SIZE BATCH_SIZE_EVAL NUM_WORKERS WORKERS CLASSES MAX_PIXELS MAX_BAD_FRACTION "
    "CACHE_PATH REMOTE_CACHE_GB",
    "MODEL": "PRETRAINED",
    "TRAIN": "NUM_EPOCHS BUDGET ACCUM_ITER GRAD_CHECKPOINTING EARLY_STOP BEST_EPOCH BEST_METRIC",
    "DIST": "TIMEOUT STRATEGY",
    "": "SAVE SAVE_FREQ SAVE_STEPS KEEP_CHECKPOINTS REPORT_FREQ VALIDATE_FREQ DEVICE REPORT CALIBRATE TRACK",
}
REMOVED_SOON = set()


def resume(key: str) -> None:
    """Resume with the defaults from a checkpoint in which this setting has another value."""
    split = {"rule": "folders"}
    state = {
        "epoch": 0,
        "step": 3,
        "progress": {},
        "split": split,
        "config": comparable(Config(), ORDER) | {key: "another"},
    }
    refuse_changes(Config(), ORDER, split, state, Path("last.pth"))


def test_settings_that_may_change_on_resume_match_the_expected_list():
    listed = {f"{section}.{name}".lstrip(".") for section, names in MAY_CHANGE.items() for name in names.split()}
    assert {key for key in SETTINGS if SETTINGS[key].may_change} - REMOVED_SOON == listed


@pytest.mark.parametrize("key", [*SETTINGS, "GLOBAL_BATCH", "NUM_IMAGES"])
def test_resume_refuses_change_affecting_weights_and_names_both_values(key):
    if key in SETTINGS and SETTINGS[key].may_change:
        resume(key)
    else:
        with refused(ConfigError, f"{key}: another"):
            resume(key)


def test_resume_allows_cache_changes_only_between_none_and_disk():
    for saved, now, differs in (
        ("none", "disk", False),
        ("disk", "none", False),
        (256, "disk", True),
        ("disk", 256, True),
    ):
        assert ("DATA.CACHE" in changes({"DATA.CACHE": saved}, {"DATA.CACHE": now})) is differs


def test_resume_after_adding_images_mid_epoch_restarts_that_epoch(tmp_path, start, photos):
    flags = ["-dataset", "imagefolder", "-data_path", str(photos), "-opts", "DATA.NUM_WORKERS=0"]
    stopped = start(tmp_path / "o", *flags, signal_at=[17, signal.SIGTERM, [0]])  # of 24 updates
    assert stopped.returncode == 128 + signal.SIGTERM
    for number in range(20):
        shutil.copy(photos / "train/ant/00.JPEG", photos / f"train/ant/more{number}.JPEG")
    more = start(tmp_path / "o", *flags, "RESUME.ALLOW_CHANGED=[NUM_IMAGES]").done()
    assert_names(more.stdout, "epoch 2", "step 13")
    assert "Epoch[002/002], Step[0000/0013]" in more.stdout
    state = torch.load(run_folder(tmp_path / "o") / "last.pth", weights_only=True)
    assert (state["epoch"], state["step"], state["config"]["NUM_IMAGES"]) == (1, 26, 220)


@pytest.fixture
def flat(tmp_path) -> Path:
    """Return class folders without train and val, so that a run holds out some images."""
    make_folders(tmp_path / "flat", {"ant": 40, "bee": 40})
    return tmp_path / "flat"


def flags_of(path: Path, *allowed: str) -> list[str]:
    words = [f"RESUME.ALLOW_CHANGED=[{','.join(allowed)}]"] * bool(allowed)
    return ["-dataset", "imagefolder", "-data_path", str(path), "-opts", "DATA.NUM_WORKERS=0", *words]


@pytest.mark.long
def test_resume_refuses_and_names_images_moved_between_classes(tmp_path, start, flat):
    (flat / "ant/day").mkdir()
    for number in range(3):
        (flat / f"ant/{number:02d}.JPEG").rename(flat / f"ant/day/x{number}.JPEG")
    start(tmp_path / "o", *flags_of(flat), "-epochs", "1").done()
    before = {path: path.read_bytes() for path in run_folder(tmp_path / "o").glob("*.pth")}
    (flat / "ant/day").rename(flat / "bee/day")
    start(tmp_path / "o", *flags_of(flat)).refused("3 images moved from ant to bee", "day/x0.JPEG")
    start(tmp_path / "o", *flags_of(flat, "NUM_IMAGES")).refused("IMAGES: 3 images moved from ant to bee")
    assert before == {path: path.read_bytes() for path in before}
    allowed = start(tmp_path / "o", *flags_of(flat, "IMAGES")).done()
    assert_names(allowed.stdout, "RESUME.ALLOW_CHANGED allows IMAGES: 3 images moved", "Epoch[002/002]")


def test_resume_with_added_images_needs_permission_only_for_image_count(tmp_path, start, flat):
    start(tmp_path / "o", *flags_of(flat), "-epochs", "1").done()

    def files() -> dict[str, bytes]:
        """Return all files except the logs, which also record the refusal."""
        found = run_folder(tmp_path / "o").iterdir()
        return {path.name: path.read_bytes() for path in found if not path.name.startswith("log")}

    before = files()
    for number in range(10):
        shutil.copy(flat / "ant/00.JPEG", flat / f"ant/more{number}.JPEG")
    start(tmp_path / "o", *flags_of(flat)).refused("NUM_IMAGES: 10 images new", "RESUME.ALLOW_CHANGED=[NUM_IMAGES]")
    assert files() == before
    allowed = start(tmp_path / "o", *flags_of(flat, "NUM_IMAGES"), "-epochs", "1").done()
    assert "Epoch[" not in allowed.printed, "its only epoch is already trained"


@pytest.mark.long
def test_resume_refuses_different_images_with_the_same_names(tmp_path, start, photos):
    start(tmp_path / "o", *flags_of(photos), "-epochs", "1").done()
    shutil.copytree(photos, tmp_path / "copy")
    start(tmp_path / "o", *flags_of(tmp_path / "copy"), "-epochs", "1").done()
    (tmp_path / "copy/train/ant/00.JPEG").write_bytes(b"a single file that was replaced is no other data")
    start(tmp_path / "o", *flags_of(tmp_path / "copy"), "-epochs", "1").done()
    for path in (tmp_path / "copy").rglob("*.JPEG"):
        noise(30, 30).save(path, format="PNG")
    start(tmp_path / "o", *flags_of(tmp_path / "copy")).refused("IMAGES: sizes of the training files: 64 of 64 differ")


def test_resume_refuses_changed_labels_of_listed_training_or_validation_images(tmp_path, start, photos):
    for part in ("train", "val"):
        names = [path.relative_to(photos).as_posix() for path in sorted((photos / part).rglob("*.JPEG"))]
        lines = [f"{name},{name.split('/')[1]}" for name in names]
        (photos / f"{part}.csv").write_text("\n".join(["image_path,target", *lines, ""]))
    flags = ["-dataset", "csv", "-data_path", str(photos), "-opts", "DATA.NUM_WORKERS=0"]
    start(tmp_path / "o", *flags, "-epochs", "1").done()
    for part in ("val", "train"):
        text = (photos / f"{part}.csv").read_text()
        (photos / f"{part}.csv").write_text(text.replace("00.JPEG,ant", "00.JPEG,bee"))
        assert text != (photos / f"{part}.csv").read_text()
        names = {"val": "labels of the validation images", "train": "labels of the training images"}
        start(tmp_path / "o", *flags).refused("IMAGES", names[part])


@pytest.mark.long
def test_best_epoch_of_other_validation_images_is_ignored(tmp_path, start, photos):
    start(tmp_path / "o", *flags_of(photos), "-epochs", "1").done()
    for path in (photos / "val").rglob("*.JPEG"):  # different images with the same names and labels
        noise(40, 20).save(path, format="PNG")
    again = start(tmp_path / "o", *flags_of(photos, "IMAGES")).done()
    assert_names(again.stdout, "other validation images", "does not count")
