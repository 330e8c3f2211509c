"""Runs on images of which some cannot be read: in several processes, over a resume, and in validation."""

import torch

from tests.support.image_sets import make_folders
from tests.support.runs import run_folder


def flags(photos, *options: str) -> list[str]:
    return ["-dataset", "imagefolder", "-data_path", str(photos), "-opts", "DATA.NUM_WORKERS=0", *options]


def cut(photos, *names: str) -> None:
    for name in names:
        (photos / name).write_bytes(b"no picture")


def test_with_too_many_unreadable_over_all_processes_the_run_ends_and_names_them(tmp_path, start, photos):
    """Three are allowed, and no process alone meets more."""
    cut(photos, "train/bee/50.JPEG", "train/ant/51.JPEG")
    # Without its last update an epoch lacks eight images.
    options = ("DATA.MAX_BAD_FRACTION=0.015", "DATA.DROP_LAST=false")
    stopped = start(tmp_path / "o", *flags(photos, *options), processes=2)
    assert stopped.codes == [2, 2] and "Traceback" not in stopped.printed
    (error,) = [line for line in stopped.printed.splitlines() if line.startswith("error: ")]
    assert "4 of 200" in error and "DATA.MAX_BAD_FRACTION (0.015)" in error
    assert all(name in error for name in ("ant/07.JPEG", "bee/42.JPEG", "bee/50.JPEG", "ant/51.JPEG"))
    assert "----- Validation" not in stopped.printed


def test_a_bad_image_counts_once_also_over_a_resume(tmp_path, start, photos):
    cut(photos, "train/bee/50.JPEG")
    options = flags(photos, "DATA.DROP_LAST=false", "VALIDATE_FREQ=9")
    first = start(tmp_path / "o", *options, "-epochs", "1")
    assert first.returncode == 0 and first.printed.count("warning: cannot read") == 3
    state = torch.load(run_folder(tmp_path / "o") / "last.pth", weights_only=True)
    assert len(state["bad_images"]) == 3
    cut(photos, "train/bee/51.JPEG")
    second = start(tmp_path / "o", *options, "-epochs", "2")
    assert second.returncode == 2 and second.printed.count("warning: cannot read") == 1
    assert "bee/51.JPEG" in second.printed and "4 of 200" in second.printed


def test_images_repaired_before_a_resume_no_longer_count(tmp_path, start, photos):
    cut(photos, "train/bee/50.JPEG", "train/bee/51.JPEG")
    options = flags(photos, "DATA.DROP_LAST=false", "VALIDATE_FREQ=9")
    first = start(tmp_path / "o", *options, "DATA.MAX_BAD_FRACTION=0.1", "-epochs", "1")
    assert first.returncode == 0 and first.printed.count("warning: cannot read") == 4
    assert start(tmp_path / "o", *options, "-epochs", "2").returncode == 2
    whole = (photos / "train/bee/00.JPEG").read_bytes()
    for name in ("50", "51"):
        (photos / f"train/bee/{name}.JPEG").write_bytes(whole)
    assert start(tmp_path / "o", *options, "-epochs", "2", processes=2).codes == [0, 0]
    state = torch.load(run_folder(tmp_path / "o") / "last.pth", weights_only=True)
    assert len(state["bad_images"]) == 2


def test_two_bad_images_of_a_small_set_and_one_of_its_validation_images_end_no_run(tmp_path, start):
    make_folders(tmp_path / "photos/train", {"ant": 20, "bee": 20})
    make_folders(tmp_path / "photos/val", {"ant": 5, "bee": 5})
    cut(tmp_path / "photos", "train/ant/03.JPEG", "train/bee/04.JPEG", "val/bee/01.JPEG")
    done = start(tmp_path / "o", *flags(tmp_path / "photos"))
    assert done.returncode == 0, done.printed
    assert done.printed.count(f"warning: cannot read {tmp_path / 'photos/val/bee/01.JPEG'}") == 1


def test_too_many_bad_validation_images_are_refused_before_the_first_step(tmp_path, start, photos):
    make_folders(photos / "val", {"ant": 4, "bee": 4})
    cut(photos, *(f"val/bee/0{number}.JPEG" for number in range(4)))
    stopped = start(tmp_path / "o", *flags(photos))
    assert (
        stopped.returncode == 2 and "DATA.MAX_BAD_FRACTION" in stopped.printed and "val/bee/00.JPEG" in stopped.printed
    )
    assert not list((tmp_path / "o").glob("train-*"))
