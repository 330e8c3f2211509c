"""Files that someone else made, or made to do harm: none is removed, executed, waited for without end, or believed."""

import re
from pathlib import Path

import pytest

from datasets.transforms.decode import FORMATS, PixelRules, decode
from datasets.types import ImageReadError
from engine.checkpoint.format import remove_unused_parts
from tests.test_size import ROOMS, files

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(touched) (w) file closefile\nshowpage\n%%EOF\n"


@pytest.fixture
def theirs(tmp_path) -> Path:
    """A folder with someone's file."""
    (tmp_path / "theirs/step-3").mkdir(parents=True)
    (tmp_path / "theirs/step-3/precious.txt").touch()
    return tmp_path / "theirs"


@pytest.mark.parametrize("link", ["shards", "shards/step-7", "shards/notes", None])
def test_only_folders_that_a_save_made_are_removed_and_nothing_behind_a_link(tmp_path, theirs, link):
    run = tmp_path / "run"
    if link != "shards":
        (run / "shards/step-5.2").mkdir(parents=True)
        (run / "shards/notes-of-mine").mkdir()
    if link:
        (run / link).parent.mkdir(parents=True, exist_ok=True)
        (run / link).symlink_to(theirs)
    remove_unused_parts(run)
    assert (theirs / "step-3/precious.txt").exists()
    assert link == "shards" or (run / "shards/notes-of-mine").exists() and not (run / "shards/step-5.2").exists()
    assert link is None or (run / link).is_symlink()


def test_a_program_in_an_image_is_not_started(tmp_path, monkeypatch):
    def start(*arguments, **options):
        raise AssertionError("Pillow starts Ghostscript")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    with pytest.raises(ImageReadError, match="not an image"):
        decode(EPS, PixelRules(3))
    assert not {"EPS", "PSD", "FITS", "WMF"} & {*FORMATS}


def test_every_image_is_opened_with_the_formats_that_may_be_in_it():
    for path in files(*ROOMS):
        for call in re.findall(r"Image\.open\(.*", path.read_text(encoding="utf-8")):
            assert "formats=" in call, (path, call)
