"""What scripts refuse, and what they count, as typed."""

from pathlib import Path

import pytest

from scripts import make_shards
from scripts.benchmarks import loader, photos
from scripts.command_line import check_no_input
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, run
from utils.errors import ConfigError
from utils.program import exit_code

WRITERS = {make_shards: ["-dataset", "digits"], photos: ["-train", "2", "-val", "1", "-drawn", "10"]}


@pytest.mark.parametrize("script", WRITERS)
def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys, script):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/halfstep/out")):
        assert exit_code(script.main, [*WRITERS[script], "-out", str(out)]) == 2
        printed = capsys.readouterr().err
        assert_names(printed, out)
        assert "Traceback" not in printed


@pytest.mark.parametrize("name", ["link.pth", "../x/best.pth"])
def test_no_output_is_written_over_an_input_under_another_of_its_names(tmp_path, monkeypatch, name):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    Path("best.pth").touch()
    Path("link.pth").symlink_to("best.pth")
    with refused(ConfigError, "-output", name):
        check_no_input("-output", Path(name), [Path("best.pth")])


def test_photos_lie_in_folders_of_classes(tmp_path):
    assert photos.main([*WRITERS[photos], "-output", str(tmp_path)]) == 0
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


def test_shards_that_are_there_already_are_counted(tmp_path, capsys):
    words = ["-dataset", "digits", "-out", str(tmp_path / "out"), "-samples_per_shard", "800"]
    for counts in (["shards: 2"], ["shards: 2", "2 of them"]):
        assert make_shards.main(words) == 0
        assert_names(capsys.readouterr().out, tmp_path / "out", "images: 1438", *counts)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("run -rounds 0", "-rounds 0"),
        (f"run -rounds {'9' * 30}", f"-rounds {'9' * 30}"),
    ],
)
def test_a_benchmark_that_cannot_be_is_refused(words, names, capsys):
    assert exit_code(loader.main, words.split()) == 2
    assert_names(capsys.readouterr().err, *names.split())
