"""What scripts refuse, and what they count, as typed."""

from pathlib import Path

import pytest

from scripts import make_shards
from scripts.benchmarks import loader as benchmark_loader
from scripts.benchmarks import photos
from tests.support.refusals import assert_names
from tests.support.runs import ROOT, run
from utils.program import exit_code


def in_the_way(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "out"


PLACES = {"below a file": in_the_way, "where nobody may": lambda folder: Path("/proc/halfstep/out")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("script", ["make_shards", "photos"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, capsys, script, place):
    out = PLACES[place](tmp_path)
    code = {
        "make_shards": lambda: exit_code(make_shards.main, ["-dataset", "digits", "-out", str(out)]),
        "photos": lambda: exit_code(photos.main, ["-out", str(out), "-train", "1", "-val", "1"]),
    }[script]()
    said = capsys.readouterr().err
    assert_names(said, out)
    assert code == 2 and "Traceback" not in said


@pytest.mark.parametrize("flag", ["-output", "-o", "-out"])
@pytest.mark.parametrize("script", [make_shards, photos])
def test_the_names_that_the_output_flag_had_are_still_accepted(tmp_path, script, flag):
    words = {make_shards: ["-dataset", "digits"], photos: ["-train", "1", "-val", "1"]}[script]
    assert exit_code(script.main, [*words, flag, str(tmp_path / "out")]) == 0
    assert list((tmp_path / "out").iterdir())


SCRIPTS = [
    str(path.relative_to(ROOT))
    for folder in ("scripts", "scripts/benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name not in ("__init__.py", "command_line.py")  # what the scripts share
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_shows_its_examples_with_h_in_any_folder(script, tmp_path):
    result = run(script, "-h", cwd=tmp_path, faults={"forget_our_modules": []})
    assert result.returncode == 0 and f"python {script}" in " ".join(result.stdout.split()), result.stderr


def test_shards_that_are_there_already_are_counted(tmp_path, capsys):
    words = ["-dataset", "digits", "-out", str(tmp_path / "out"), "-samples_per_shard", "800"]
    for counts in (["shards: 2"], ["shards: 2", "2 of them"]):
        assert make_shards.main(words) == 0
        assert_names(capsys.readouterr().out, tmp_path / "out", "images: 1438", *counts)


def test_photos_are_made_from_the_command_line(tmp_path, capsys):
    assert photos.main(["-out", str(tmp_path), "-train", "2", "-val", "1"]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg")) == [
        "train/class0/00000.jpg", "train/class1/00001.jpg", "val/class0/00000.jpg"
    ]  # fmt: skip
    assert exit_code(photos.main, ["-out", str(tmp_path), "-train", "0"]) == 2
    assert_names(capsys.readouterr().err, "-train", 0, 1)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("timm -photos /nowhere", "/nowhere/train 0 64"),
        ("pixels -count 0", "-count 0 64"),
        ("timm -rounds 0", "-rounds 0 1"),
        ("memory -count 0", "-count 0 10"),
        ("memory -epochs x", "-epochs 'x'"),
        (f"timm -rounds {'9' * 30}", f"-rounds {'9' * 30}"),
    ],
)
def test_a_benchmark_that_cannot_be_is_told(words, names, capsys):
    assert exit_code(benchmark_loader.main, words.split()) == 2
    assert_names(capsys.readouterr().err, *names.split())
