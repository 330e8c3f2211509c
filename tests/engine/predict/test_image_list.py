"""Which images a command line means, and in which order."""

import io

import pytest

from engine.predict.image_list import find_images
from tests.support.refusals import assert_names
from utils.errors import UserError


@pytest.fixture
def photos(here):
    for name in ("b.jpg", "a.png", "in/c.jpg", "in/deep/a.jpg", "in/notes.txt", "[1].jpg"):
        (here / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "photos" / name).touch()
    return here


def found(*given, lists=()):
    return find_images(given, lists, lambda line: None)


def test_patterns_folders_and_files_keep_the_order_in_which_they_are_given(photos):
    assert found("photos/*.jpg") == ["photos/[1].jpg", "photos/b.jpg"]
    assert found("photos/in", "photos/a.png", "photos/in") == [
        *("photos/in/c.jpg", "photos/in/deep/a.jpg", "photos/a.png"),
        *("photos/in/c.jpg", "photos/in/deep/a.jpg"),
    ]
    assert found("photos/**/*.jpg") == ["photos/[1].jpg", "photos/b.jpg", "photos/in/c.jpg", "photos/in/deep/a.jpg"]
    assert found("photos/[1].jpg") == ["photos/[1].jpg"], "a file of that name is meant"
    assert found("photos/i*") == ["photos/in/c.jpg", "photos/in/deep/a.jpg"]


def test_a_list_has_paths_folders_and_patterns(photos, monkeypatch):
    (photos / "files.txt").write_text("photos/b.jpg\n\n  photos/in\r\nphotos/b.jpg\nphotos/*.png\n")
    expected = ["photos/b.jpg", "photos/in/c.jpg", "photos/in/deep/a.jpg", "photos/b.jpg", "photos/a.png"]
    assert found("@files.txt") == found(lists=["files.txt"]) == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("photos/a.png\n"))
    assert found("@files.txt", lists=["-"]) == [*expected, "photos/a.png"]
    (photos / "@odd.jpg").touch()
    assert found("@odd.jpg") == ["@odd.jpg"]


@pytest.mark.parametrize(
    ("given", "lists", "names"),
    [
        ([], [], "-list"),
        (["photos/x.jpg"], [], "photos/x.jpg"),
        (["photos/*.gif"], [], "photos/*.gif"),
        (["empty"], [], "empty"),
        (["@none.txt"], [], "-list none.txt"),
        ([], ["two.txt"], "-list 2 3 two.txt gone.jpg"),
        ([], ["blank.txt"], "-list blank.txt"),
        ([], ["binary.txt"], "-list binary.txt"),
    ],
)
def test_what_is_not_there_is_named(photos, given, lists, names):
    (photos / "empty").mkdir()
    (photos / "two.txt").write_text("gone.jpg\nphotos/a.png\nlost.jpg\n")
    (photos / "blank.txt").write_text("\n\n")
    (photos / "binary.txt").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(UserError) as caught:
        found(*given, lists=lists)
    assert_names(str(caught.value), *names.split())
