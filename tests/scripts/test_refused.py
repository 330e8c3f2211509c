"""What scripts refuse, and what they count, as typed."""

from pathlib import Path

import pytest

from scripts.command_line import check_no_input
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, run, typed
from utils.errors import ConfigError

PHOTOS = "scripts/benchmarks/photos.py"
WRITERS = {"scripts/make_shards.py": ["-dataset", "digits"], PHOTOS: ["-train", "2", "-val", "1", "-drawn", "10"]}


@pytest.mark.parametrize("script", WRITERS)
def test_a_place_that_cannot_be_written_is_named(tmp_path, script):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/halfstep/out")):
        typed(script, *WRITERS[script], "-out", out).refused(out)


@pytest.mark.parametrize("name", ["link.pth", "../x/best.pth"])
def test_no_output_is_written_over_an_input_under_another_of_its_names(tmp_path, monkeypatch, name):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    Path("best.pth").touch()
    Path("link.pth").symlink_to("best.pth")
    with refused(ConfigError, "-output", name):
        check_no_input("-output", Path(name), [Path("best.pth")])


def test_photos_lie_in_folders_of_classes(tmp_path):
    typed(PHOTOS, *WRITERS[PHOTOS], "-output", tmp_path).done()
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg"))
    assert files == ["train/class0/00000.jpg", "train/class1/00001.jpg", "val/class0/00000.jpg"]


SCRIPTS = [
    str(path.relative_to(ROOT))
    for folder in ("scripts", "scripts/benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name not in ("__init__.py", "command_line.py", "common.py", "worker.py")  # what the scripts share
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_shows_its_examples_with_h_in_any_folder(script, tmp_path):
    result = run(script, "-h", cwd=tmp_path, faults={"forget_our_modules": []}).done()
    assert f"python {script}" in " ".join(result.stdout.split()), result.stderr


def test_shards_that_are_there_already_are_counted(tmp_path):
    words = ["-dataset", "digits", "-out", tmp_path / "out", "-samples_per_shard", "800"]
    for counts in (["shards: 2"], ["shards: 2", "2 of them"]):
        assert_names(typed("scripts/make_shards.py", *words).done().stdout, tmp_path / "out", "images: 1438", *counts)


@pytest.mark.parametrize("rounds", ["0", "9" * 30])
def test_a_benchmark_that_cannot_be_is_refused(rounds):
    typed("scripts/benchmarks/loader.py", "run", "-rounds", rounds).refused("-rounds", rounds)
