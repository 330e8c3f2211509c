"""Runs with unreadable images: in several processes, across a resume, and in validation (BadImageLimit, BadImages)."""

import pytest
import torch

from tests.support.image_sets import make_folders
from tests.support.refusals import assert_names
from tests.support.runs import run_folder

pytestmark = pytest.mark.slow


def flags(photos, *options: str) -> list[str]:
    return ["-dataset", "imagefolder", "-data_path", str(photos), "-opts", "DATA.NUM_WORKERS=0", *options]


def cut(photos, *names: str) -> None:
    for name in names:
        (photos / name).write_bytes(b"no picture")


@pytest.mark.long
def test_too_many_bad_images_across_ranks_end_run(tmp_path, start, photos):
    """Three bad images are allowed, and no process alone meets more."""
    cut(photos, "train/bee/50.JPEG", "train/ant/51.JPEG")
    # Without its last update, an epoch lacks eight images.
    options = ("DATA.MAX_BAD_FRACTION=0.015", "DATA.DROP_LAST=false")
    stopped = start(tmp_path / "o", *flags(photos, *options), processes=2)
    assert stopped.codes == [2, 2] and "Traceback" not in stopped.printed
    (error,) = [line for line in stopped.printed.splitlines() if line.startswith("error: ")]
    assert "4 of 200" in error and "DATA.MAX_BAD_FRACTION (0.015)" in error
    assert all(name in error for name in ("ant/07.JPEG", "bee/42.JPEG", "bee/50.JPEG", "ant/51.JPEG"))
    assert "----- Validation" not in stopped.printed


@pytest.mark.long
def test_bad_image_counts_once_across_resume_until_repaired(tmp_path, start, photos):
    options = flags(photos, "DATA.DROP_LAST=false", "VALIDATE_FREQ=9")

    def train(epochs: int, warned: int, **more):
        ended = start(tmp_path / "o", *options, "-epochs", str(epochs), **more)
        assert ended.printed.count("warning: cannot read") == warned, ended.printed
        return ended

    def saved() -> int:
        return len(torch.load(run_folder(tmp_path / "o") / "last.pth", weights_only=True)["bad_images"])

    whole = (photos / "train/bee/00.JPEG").read_bytes()
    cut(photos, "train/bee/50.JPEG")
    assert train(1, 3).returncode == 0 and saved() == 3
    cut(photos, "train/bee/51.JPEG")
    ended = train(2, 1)
    assert ended.returncode == 2
    assert_names(ended.printed, "bee/51.JPEG", "4 of 200")
    for name in ("50", "51"):
        (photos / f"train/bee/{name}.JPEG").write_bytes(whole)
    assert train(2, 0, processes=2).codes == [0, 0] and saved() == 2


def test_many_bad_validation_images_stop_run_before_first_step(tmp_path, start, photos):
    make_folders(photos / "val", {"ant": 4, "bee": 4})
    cut(photos, "val/bee/00.JPEG")
    done = start(tmp_path / "few", *flags(photos)).done()
    assert done.printed.count(f"warning: cannot read {photos / 'val/bee/00.JPEG'}") == 1
    cut(photos, *(f"val/bee/0{number}.JPEG" for number in range(4)))
    start(tmp_path / "o", *flags(photos)).refused()
    assert not list((tmp_path / "o").glob("train-*"))
