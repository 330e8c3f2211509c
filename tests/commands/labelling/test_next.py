"""halfstep labels -next: the photos that it chooses to label, its files, and the mistakes that it refuses."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.labelling.next import TABLE, in_order
from engine.predict.pictures import tiles_of
from models.weights.torch_files import read_torch
from tests.commands.embedding.conftest import make_hub, trained  # noqa: F401
from tests.support.cases import cases_of, names_of
from tests.support.configs import small_config
from tests.support.image_sets import draw_patches, draw_photos
from tests.support.opened import open_sets
from tests.support.refusals import assert_names
from tests.support.runs import rows_of, run, run_folder, typed

SCRIPT = "scripts/labels.py"


def chosen(folder: str = "next") -> list[str]:
    return [row["image"] for row in rows_of(f"{folder}/{TABLE}")]


@pytest.fixture
def photos(here):
    """Draw ten photos, and return their folder and the weights of a small ViT, which has no run."""
    make_hub(here / "hub")
    for number in range(10):
        draw_patches(here / "photos" / f"{number}.png", number)
    return "photos"


@pytest.fixture
def new_digits(here, trained):  # noqa: F811
    """Write 30 held-out digits, changed so that they are new, and 4 digits with labels. Return the run's folder."""
    (here / "photos").mkdir()
    train, val = open_sets(small_config(here))
    for number in range(30):
        pixels = np.rot90(val.read(number)[:, :, 0])  # unlike every other digit
        Image.fromarray(np.ascontiguousarray(pixels)).save(f"photos/{number}.png")
    for number, part in enumerate((train, train, val, val)):
        Image.fromarray(part.read(number)[:, :, 0]).save(f"photos/known{number}.bmp")
    return trained


@pytest.fixture
def run_on_few(here, trained) -> list[str]:  # noqa: F811
    """Return flags for a copy of the run with 60 of the digits.

    To look for copies among all digits takes 20 seconds.
    """
    for name, part in zip(("train", "val"), open_sets(small_config(here)), strict=True):
        for number in range(30):
            path = here / "labelled" / name / part.classes[part.targets[number]] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(part.read(number)[:, :, 0]).save(path)
    change_settings(trained, "DATASET: digits", "DATASET: imagefolder")
    return ["run", "-data_path", "labelled", "-next", "8", "photos", "-output", "out"]


# --- which photos ---


@pytest.mark.slow
def test_pretrained_weights_choose_photos_without_guesses(photos):
    ended = typed(SCRIPT, "hub", "-next", 4, photos).done()
    rows = rows_of("next/next.csv")
    assert [row["order"] for row in rows] == ["1", "2", "3", "4"] and len({*chosen()}) == 4
    assert all(row["guess"] == row["probability"] == "" and row["reason"] for row in rows)
    assert "next/next.png" in ended.stdout
    first = chosen()
    typed(SCRIPT, "hub", "-next", 4, photos).done()
    assert chosen() == first


@pytest.mark.long
def test_run_guesses_as_predict_does_and_leaves_out_labelled_photos(new_digits, run_on_few):
    ended = typed(SCRIPT, *run_on_few).done()
    rows = rows_of("out/next.csv")
    assert len(rows) == 8 and not any("known" in row["image"] for row in rows)
    assert_names(ended.stdout, "34 photos", "4 labelled already", "out/left_out.csv")
    left_out = rows_of("out/left_out.csv")
    assert {row["image"] for row in left_out} == {f"photos/known{number}.bmp" for number in range(4)}
    assert all(row["same_as"] and row["reason"] == "labelled already" for row in left_out)
    typed("scripts/predict.py", new_digits, *chosen("out"), "-csv", "theirs.csv").done()
    for ours, theirs in zip(rows, rows_of("theirs.csv"), strict=True):
        assert ours["guess"] == theirs["class"]
        assert float(ours["probability"]) == pytest.approx(float(theirs["probability"]), abs=1e-3)
    for number in range(30):
        os.remove(f"photos/{number}.png")
    typed(SCRIPT, *run_on_few).refused("-next", "photos")  # all remaining photos have labels


@pytest.mark.slow
def test_near_copies_are_chosen_once(photos):
    Image.open("photos/3.png").save("photos/copy.jpg", quality=90)
    shutil.copy("photos/4.png", "photos/twin.png")
    Path("photos/00.png").write_bytes(b"no image")  # its number counts in the list of photos
    ended = typed(SCRIPT, "hub", "-next", 12, photos)
    assert ended.returncode == 2, ended.printed  # because one image cannot be read
    assert len(chosen()) == 10 and "photos/twin.png" not in chosen() and "photos/3.png" in chosen()
    twins = {row["image"]: row["same_as"] for row in rows_of("next/left_out.csv")}
    assert twins == {"photos/copy.jpg": "photos/3.png", "photos/twin.png": "photos/4.png"}
    assert "10 photos" in ended.stdout and "12" in ended.stdout


@pytest.mark.slow
def test_photos_like_labelled_ones_with_another_detail_are_chosen(here, run_on_few):
    """A digit with a dark corner is another photo. Half of the photos are digits of the run, saved again."""
    (here / "photos").mkdir()
    train, _ = open_sets(small_config(here))
    for number in range(8):
        pixels = train.read(number)[:, :, 0].repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(f"photos/same{number}.png")
        pixels[:12, :12] = 255 - pixels[:12, :12]
        Image.fromarray(pixels).save(f"photos/other{number}.png")
    typed(SCRIPT, *run_on_few).done()
    assert sorted(chosen("out")) == [f"photos/other{number}.png" for number in range(8)]


def in_given_order(rows: np.ndarray, count: int) -> np.ndarray:
    return np.arange(count)


@pytest.mark.parametrize(("takes_strangers", "expected"), [(False, [1, 3, 4, 0]), (True, [0, 1, 2, 3])])
def test_strangers_are_chosen_last_unless_they_are_wanted(takes_strangers, expected):
    is_stranger = np.array([True, False, True, False, False])
    assert in_order(in_given_order, 4, is_stranger, takes_strangers) == expected
    assert in_order(in_given_order, 9, is_stranger, takes_strangers)[:4] == expected


@pytest.mark.long
def test_photos_that_do_not_fit_the_training_images_come_last(new_digits):
    _, val = open_sets(small_config(Path()))
    for number in range(10):  # new digits that look like the others: the mean of two of the same class
        one, other = np.flatnonzero(val.targets == number)[:2].tolist()
        pixels = (val.read(one).astype(int) + val.read(other)) // 2
        Image.fromarray(pixels[:, :, 0].astype(np.uint8)).save(f"photos/mean{number}.png")
    typed("scripts/predict.py", new_digits, "photos", "-json", "found.json").done()
    found = {each["image_path"]: each["known"] for each in json.loads(Path("found.json").read_text())["images"]}
    # Choose all, so that only their order can differ. Looking for copies would take many seconds.
    words = (SCRIPT, new_digits, "-next", 44, "photos", "-output", "out", "-no_copies")
    typed(*words).done()
    are_strangers = [found[path] < 0 for path in chosen("out")]
    assert are_strangers == sorted(are_strangers) and 5 < sum(are_strangers) < 38
    reasons = [row["reason"] for row in rows_of("out/next.csv")]
    assert ["none of the classes" in each for each in reasons] == are_strangers
    typed(*words, "-strangers").done()
    again = [found[path] < 0 for path in chosen("out")]
    assert sum(again) == sum(are_strangers) and again != are_strangers


@pytest.mark.slow
def test_weights_without_statistics_say_that_strangers_are_not_recognized(new_digits):
    shutil.copytree(new_digits, "run")
    state = read_torch(Path("run/best.pth"))
    del state["calibration"]["known"]
    os.remove("run/best.pth")
    torch.save(state, "run/best.pth")
    ended = typed(SCRIPT, "run", "-next", 2, "photos", "-no_copies").done()
    assert_names(ended.stdout, "strangers are not recognized", "best.pth")


@pytest.mark.slow
def test_copies_go_to_no_folder_of_the_training_images(here):
    small_config(here)
    table = draw_photos(here / "labelled", "cat", "dog", count=20)
    flags = ["-dataset", "imagefolder", "-data_path", str(table), "-output", str(here / "runs"), "-epochs", "1"]
    colour = ["DATA.IMAGE_CHANNELS=3", "DATA.IMAGENET_MEAN=[0.5,0.5,0.5]", "DATA.IMAGENET_STD=[0.5,0.5,0.5]"]
    run("main_single_gpu.py", "-cfg", str(here / "small.yaml"), *flags, "-opts", *colour).done()
    folder = run_folder(here / "runs")
    draw_patches(here / "photos/1.png", 1)
    typed(SCRIPT, folder, "-next", 1, "photos", "-into", table / "new").refused("-into", "new")
    assert not (table / "new").exists()


# --- files ---


@pytest.mark.long
def test_sheets_beyond_100_photos_are_numbered_and_replaced(photos):
    for number in range(10, 103):
        draw_patches(Path(f"photos/{number}.png"), number)
    typed(SCRIPT, "hub", "-next", 103, photos).done()
    with Image.open("next/next-2.png") as sheet:
        assert [caption[1] for _, caption in tiles_of(sheet)] == chosen()[100:]
    typed(SCRIPT, "hub", "-next", 2, photos).done()
    assert sorted(os.listdir("next")) == ["left_out.csv", "next.csv", "next.png"]


@pytest.mark.slow
def test_into_copies_chosen_photos_and_replaces_no_file(photos):
    draw_patches(Path("photos/more/0.png"), 50)
    Path("picked").mkdir()
    Path("picked/1.png").write_bytes(b"mine")
    typed(SCRIPT, "hub", "-next", 11, photos, "-into", "picked").done()
    assert Path("picked/1.png").read_bytes() == b"mine"
    found = {Path("picked", name).read_bytes() for name in os.listdir("picked")} - {b"mine"}
    assert found == {Path(name).read_bytes() for name in chosen()} and len(found) == 11


# --- runs without classes, and mistakes ---


def change_settings(folder: Path, before: str, after: str) -> None:
    """Make a copy of a run, called `run`, with another line in its config.yaml."""
    shutil.copytree(folder, "run")
    text = Path("run/config.yaml").read_text()
    assert before in text
    Path("run/config.yaml").write_text(text.replace(before, after))


@pytest.mark.slow
def test_run_on_computed_images_chooses_like_pretrained_weights(new_digits):
    change_settings(new_digits, "DATASET: digits", "DATASET: synthetic")
    typed(SCRIPT, "run", "-next", 3, "photos").done()
    assert [row["guess"] for row in rows_of("run/next/next.csv")] == ["", "", ""]


@pytest.mark.slow
def test_run_with_several_labels_is_refused(new_digits):
    change_settings(new_digits, "LABEL_SEPARATOR: null", "LABEL_SEPARATOR: '|'")
    typed(SCRIPT, "run", "-next", 3, "photos").refused("run", "labels")


@pytest.mark.slow
@pytest.mark.parametrize("words", cases_of("labels-mistakes_of_next"))
def test_mistakes_with_next_are_refused(photos, words):
    """Each case is a command line. Nothing is written."""
    Path("empty").mkdir()
    Path("theirs").mkdir()
    Path("theirs/next.csv").write_text("image,date\n")
    Path("left").mkdir()
    Path("left/left_out.csv").write_text("image,date\n")
    Path("pictures").mkdir()
    Path("pictures/next-2.png").write_bytes(b"a picture")
    Path("x.onnx").write_bytes(b"a graph")
    before = sorted(str(path) for path in Path().rglob("*"))
    ended = typed(SCRIPT, *words.split())
    assert ended.returncode == 2 and "Traceback" not in ended.printed, ended.printed
    assert_names(ended.stderr[ended.stderr.index("error: ") :].strip(), *names_of("labels-mistakes_of_next", words))
    assert sorted(str(path) for path in Path().rglob("*")) == before
