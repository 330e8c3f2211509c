"""`halfstep train photos`: own photos without -cfg and -pretrained, and the sentences for wrong paths."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

import engine.own_photos
from engine.settings import load_settings
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import draw_photos, make_set
from tests.support.parquet_files import make_parquet
from tests.support.runs import rows_of, run_folder, typed
from tests.support.small_sources import write_csv, write_lists
from utils.torch_internals import import_timm
from utils.without_values import build_without_values

WEIGHTS = "tf_efficientnet_lite0"


@pytest.fixture
def places(here) -> Path:
    """Make folders and files that a newcomer may name."""
    draw_photos(here / "photos", "cat", "dog", count=3)
    draw_photos(here / "one", "cat", count=3)
    for folder in ("new", "old"):
        draw_photos(here / "above" / folder, "cat", "dog", count=2)
    draw_photos(here / "no_image", "cat")
    for folder in ("empty", "flat", "more", "no_image/dog"):
        Path(folder).mkdir()
    Path("no_image/dog/notes.txt").write_text("no image")
    for number in range(2):
        shutil.copy("photos/cat/0.png", f"flat/{number}.png")
    shutil.copy("photos/cat/0.png", "photo.png")
    Path("notes.txt").write_text("no image")
    Path("photos.zip").write_bytes(b"PK\3\4")
    return here


def chosen(*words: str) -> dict[str, object]:
    """Return the settings that own photos decide, for a command line."""
    config = load_settings([*words]).config
    return {
        "weights": config.MODEL.PRETRAINED,
        "data": config.DATA.DATASET,
        "path": config.DATA.DATA_PATH,
        "size": config.DATA.IMAGE_SIZE,
        "epochs": config.TRAIN.NUM_EPOCHS,
    }


@pytest.mark.parametrize("words", cases_of("mistakes-of_own_photos"))
def test_each_mistake_with_own_photos_gets_one_sentence(places, words):
    typed_words = [] if words == "(nothing)" else shlex.split(words)
    ended = typed("scripts/train.py", *typed_words, cwd=places)
    ended.refused(*names_of("mistakes-of_own_photos", words))
    assert len([line for line in ended.stderr.splitlines() if line.startswith("error: ")]) == 1
    assert not Path("output").exists()


def test_folder_that_may_not_be_read_is_refused_with_chmod(places, monkeypatch):
    scandir = os.scandir

    def guarded(path="."):
        if str(path).endswith("photos/dog"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    typed("scripts/train.py", "photos", cwd=places).refused("DATA.DATA_PATH", "chmod -R u+rX photos/dog")


@pytest.mark.usefixtures("signal_handlers")
def test_one_word_trains_and_latest_predicts(places):
    words = ("photos", "-epochs", 1, "-image_size", 32, "-opts", "DATA.NUM_WORKERS=0")
    ended = typed("scripts/train.py", *words, cwd=places).done()
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("own photos")]
    assert f"-pretrained {WEIGHTS}" in line and "-dataset imagefolder" in line
    assert "-epochs" not in line and "-image_size" not in line, "the user chose these"
    assert len(rows_of(run_folder(Path("output")) / "metrics.csv")) == 2, "the linear classifier, and one epoch"
    predicted = typed("scripts/predict.py", "latest", "-top", 2, "flat", cwd=places).done()
    assert [line.split("\t")[0] for line in predicted.stdout.splitlines()] == ["flat/0.png", "flat/1.png"]
    evaluated = typed("scripts/train.py", "-eval", "-pretrained", "latest", "above/new", cwd=places).done()
    assert "4 validation images" in evaluated.stdout


@pytest.mark.long
def test_word_means_the_same_as_data_path_and_flags_win(places):
    on_a_cpu = {"weights": WEIGHTS, "data": "imagefolder", "path": "photos", "size": 128, "epochs": 10}
    for words in (["photos"], ["-data_path", "photos"], ["-amp", "photos"], ["photos", "-amp"], ["-check", "photos"]):
        assert chosen(*words) == on_a_cpu
    assert chosen("-opts", "SEED=1", "REPORT=false", "photos") == on_a_cpu
    assert chosen("photos", "-epochs", "3", "-opts", "DATA.IMAGE_SIZE=64") == on_a_cpu | {"epochs": 3, "size": 64}
    other = chosen("photos", "-cfg", "vit_digits", "-dataset", "imagefolder")
    assert other["weights"] is None and other["epochs"] != 10, "-cfg decides alone"


@pytest.mark.long
@pytest.mark.usefixtures("signal_handlers")
def test_resume_auto_starts_own_photos_and_later_continues_them(places):
    words = ("photos", "-image_size", 32, "-resume", "auto", "-name", "mine", "-opts", "DATA.NUM_WORKERS=0")
    first = typed("scripts/train.py", *words, "-epochs", 1, cwd=places).done()
    second = typed("scripts/train.py", *words, "-epochs", 2, cwd=places).done()
    assert "own photos" in first.stdout and "own photos" not in second.stdout
    assert len(rows_of(Path("output/mine/metrics.csv"))) == 3, "the linear classifier, and two epochs"


def test_amp_before_photos_is_on_and_after_false_is_off(places):
    assert load_settings(["-amp", "photos"]).config.AMP
    assert not load_settings(["-amp", "false", "photos"]).config.AMP


@pytest.mark.parametrize(
    ("write", "path", "data"),
    [
        (write_csv, "set", "csv"),
        (write_csv, "set/train.csv", "csv"),
        (write_lists, "set", "imagenet2012"),
        (make_set, "set", "shards"),
        (make_parquet, "set", "parquet"),
        (lambda root: draw_photos(root / "train", "cat", "dog"), "set", "imagefolder"),
    ],
    ids=["folder of tables", "table", "lists", "tars", "parquet", "folders of parts"],
)
def test_kind_of_data_follows_from_the_path(here, write, path, data):
    (here / "set").mkdir()
    write(here / "set")
    assert chosen(path)["data"] == data


def test_tar_beside_class_folders_does_not_hide_them(places):
    Path("photos/all.tar").write_bytes(b"")
    assert chosen("photos")["data"] == "imagefolder"


def test_gpu_keeps_the_size_of_the_weights_and_names_a_larger_model(places, monkeypatch):
    monkeypatch.setattr(engine.own_photos, "find_devices", lambda setting: ("cuda", 1))
    loaded = load_settings(["photos"])
    assert (loaded.config.DATA.IMAGE_SIZE, loaded.config.TRAIN.NUM_EPOCHS) == (224, 30)
    (line,) = [line for line in loaded.notes if "larger model" in line]
    assert re.search(r"-pretrained (\w+) .*88 MB", line) and "halfstep models" in line


def test_size_of_the_named_larger_model_is_true(places):
    model = build_without_values(lambda: import_timm().create_model(engine.own_photos.LARGER))
    num_weights = sum(weight.numel() for weight in model.parameters())
    assert (num_weights // 10**6, round(num_weights * 4 / 1e6)) == (22, 88)
