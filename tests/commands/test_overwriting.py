"""No script overwrites a file that it did not write: a checkpoint, a photo, a user's table."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.support.graphs import share_graph
from tests.support.runs import Ended, run, run_folder, typed

pytestmark = pytest.mark.slow

EXPORT = ["scripts/export.py", "{run}", "-output", "{target}", "-to"]
PREDICT = ["scripts/predict.py", "{run}", "{photo}"]
WRITERS = {
    "report": ["scripts/report.py", "{run}", "-output", "{target}"],
    "csv": [*PREDICT, "-csv", "{target}"],
    "json": [*PREDICT, "-json", "{target}"],
    "sheet": [*PREDICT, "-sheet", "{target}"],
    "doctor": ["scripts/doctor.py", "{target.parent}", "-amp_dtype", "float16"],
    "checkpoint": EXPORT[:-1],
    **{to: [*EXPORT, to] for to in ("safetensors", "onnx", "torch")},
}
OWN = {
    "report": ["x.html"],
    "csv": ["x.csv"],
    "json": ["x.json"],
    "sheet": ["x.png", "x.jpg"],
    "safetensors": ["x.safetensors", "x"],
    "onnx": ["x.onnx"],
    "torch": ["x.pt2"],
    "checkpoint": ["x.pth"],
}
OTHERS = {
    "report": ["last.pth", "photo.png", "metrics.csv", "page.html"],
    "csv": ["last.pth", "metrics.csv", "predictions.csv", "config.yaml", "theirs.safetensors"],
    "json": ["last.pth", "status.json", "results.json", "metrics.jsonl"],
    "sheet": ["loss.png", "photo.png", "photo.jpg"],
    "doctor": ["doctor.yaml"],
    "safetensors": ["last.pth", "photo.png", "theirs.safetensors"],
    "onnx": ["text.onnx"],
    "torch": ["text.pt2"],
    "checkpoint": ["text.pth", "last.pth", "best.pth", "checkpoint-1.pth"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml) -> Path:
    output = tmp_path_factory.mktemp("trained")
    run("main_single_gpu.py", "-cfg", str(small_yaml), "-output", str(output), "-epochs", "1").done()
    return run_folder(output)


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """Return a folder with files of a run and files of a user."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name in ("photo.png", "photo.jpg"):
        Image.new("RGB", (300, 200), "green").save(tmp_path / name)
    (tmp_path / "doctor.yaml").write_text("SEED: 5\n")
    (tmp_path / "page.html").write_text("<!doctype html>\n<html><body>my page</body></html>\n")
    header = b'{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "theirs.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    for ending in ("onnx", "pt2", "pdparams", "pth"):
        (tmp_path / f"text.{ending}").write_text("a text of the user's")
    return tmp_path


def write(kind: str, run: Path, target: Path, photos: Path) -> Ended:
    """Run the script that writes this kind of file."""
    photo = photos / "digit.bmp"
    Image.new("L", (8, 8), 200).save(photo)
    script, *words = (word.format(run=run, target=target, photo=photo) for word in WRITERS[kind])
    return typed(script, *words)


def contents(folder: Path) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def pairs(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, name) for kind, names in table.items() for name in names]


@pytest.mark.parametrize(
    ("kind", "name"),
    pairs(OTHERS),
)
def test_script_refuses_to_overwrite_other_files(trained, folder, tmp_path_factory, kind, name):
    before = contents(folder)
    target = folder / name
    write(kind, trained, target, tmp_path_factory.mktemp("photos")).refused(folder / name)
    assert contents(folder) == before


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), pairs(OWN))
def test_script_overwrites_its_own_files_and_empty_files(trained, tmp_path, tmp_path_factory, monkeypatch, kind, name):
    photos = tmp_path_factory.mktemp("photos")
    if kind == "onnx":
        pytest.importorskip("onnxscript")
        share_graph(monkeypatch, photos / "graph.onnx")
    (tmp_path / name).touch()
    for _ in range(2):
        os.utime(tmp_path / name, ns=(0, 0))
        write(kind, trained, tmp_path / name, photos).done()
        assert (tmp_path / name).stat().st_size and (tmp_path / name).stat().st_mtime_ns


@pytest.mark.parametrize(
    "words",
    [
        ["scripts/compare.py", "{run}", ""],
        ["scripts/report.py", ""],
        ["scripts/report.py", "{run}", "-output", " "],
        ["scripts/doctor.py", ""],
        ["scripts/export.py", "", "-output", "x.safetensors"],
        ["scripts/predict.py", "", "photo.png"],
    ],
)
def test_empty_path_argument_does_not_mean_the_current_folder(trained, tmp_path, monkeypatch, words):
    monkeypatch.chdir(shutil.copytree(trained, tmp_path / "here"))
    Image.new("RGB", (30, 20), "green").save("photo.png")
    before = contents(Path.cwd())
    typed(*(word.format(run=trained) for word in words)).refused("empty", "shell variable")
    assert contents(Path.cwd()) == before
