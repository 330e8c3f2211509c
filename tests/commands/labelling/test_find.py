"""halfstep labels on runs and sweeps: the images that it lists, its files, and the runs that it refuses."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from datasets import SavedData
from datasets.sources.arrays import DIGITS
from datasets.sources.images import FileStorage
from engine.labelling.data import cell_of
from engine.record.saved_files import read_table, write_table
from tests.commands.labelling.made_runs import draw_image, make_photos, make_run, make_sweep, settings_of
from tests.support.file_names import names
from tests.support.image_sets import load
from tests.support.modules import ROOT
from tests.support.opened import open_sets
from tests.support.properties import examples
from tests.support.runs import rows_of, typed
from tests.support.small_sources import MAKERS

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/labels.py"
COUNTS = {"bird": 20, "cat": 20, "dog": 20}
HALF = "DATA.VAL_FRACTION=0.5"


def held_out(run: Path) -> list[str]:
    return [row["image"] for row in rows_of(run / "predictions.csv")]


def doubt(run: Path, image: str, prediction: str, probability: float = 0.8, of_label: float = 1e-4) -> None:
    """Change the prediction of a run for an image."""
    path = run / "predictions.csv"
    lines = path.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(f"{image},"))
    lines[place] = f"{image},{image.partition('/')[0]},{prediction},{probability},{of_label}"
    path.write_text("\n".join(lines) + "\n")


def test_run_of_a_fold_keeps_its_images_after_photos_were_added(here):
    make_photos(here / "photos", {"9": 8, "10": 8})
    fold = "DATA.FOLD=0/2"
    before = make_run(here / "run", here / "photos", None, fold)
    _, val = open_sets(settings_of(here / "run", here / "photos", fold))
    make_photos(here / "photos", {"8": 5, "9": 10, "10": 12})  # a new draw would hold out others
    shutil.rmtree(here / "photos/8")
    resumed = SavedData(val.classes, val.split, file=before / "last.pth")
    make_run(here / "run", here / "photos", None, fold, saved=resumed)
    fresh = [
        val.key(index) for _, val in [load("imagefolder", here / "photos", FOLD="0/2")] for index in range(len(val))
    ]
    assert {val.key(index) for index in range(len(val))} <= {*held_out(here / "run")} != {*fresh}
    typed(SCRIPT, "run").done()
    assert (here / "run/labels/labels.csv").exists()


@pytest.mark.long
def test_sweep_judges_every_image_and_averages_its_seeds(here):
    make_photos(here / "photos", COUNTS)
    make_sweep(here / "sweep", here / "photos", {"cat/25.png": ("dog", 0.9, 1e-4)}, folds=2, seeds=(3, 4))
    (first,) = [each for each in here.glob("sweep/trial-*") if "cat/25.png" in held_out(each)][:1]
    ended = typed(SCRIPT, "sweep").done()
    (row,) = rows_of("sweep/labels/labels.csv")
    assert (row["image"], row["suggestion"]) == ("cat/25.png", "dog")
    doubt(first, "cat/25.png", "cat", 0.9, 0.9)  # now the seeds disagree
    typed(SCRIPT, "sweep").done()
    assert rows_of("sweep/labels/labels.csv") == []
    assert "predictions for 60 of 60 images by 4 runs" in ended.stdout


def test_unfinished_folds_are_reported_with_their_images(here):
    make_photos(here / "photos", COUNTS)
    make_sweep(here / "sweep", here / "photos", {}, folds=2, left_out=(1,))
    judged = len(held_out(here / "sweep/trial-000"))
    ended = typed(SCRIPT, "sweep").done()
    assert f"predictions for {judged} of 60 images by 1 run" in ended.stdout
    assert f"{60 - judged} images were not judged, because 1 trial" in ended.stdout
    assert "halfstep sweep -output sweep" in ended.stdout


def test_run_that_still_trains_is_not_finished(here, monkeypatch):
    make_photos(here / "photos", COUNTS)
    run = make_run(here / "run", here / "photos", None, "REPORT=true")
    (run / "results.json").unlink()
    monkeypatch.setattr("engine.record.saved_run.SavedRun.state", "running")
    typed(SCRIPT, "run").refused("run", "not finished")


def test_class_without_held_out_images_is_named(here):
    make_photos(here / "photos", {"bird": 20, "cat": 20, "zebra": 1})
    make_run(here / "run", here / "photos")
    assert "labels are not checked: zebra" in typed(SCRIPT, "run").done().stdout


@pytest.mark.parametrize("kind", [*(name for name in MAKERS if name != "images"), "digits"])
def test_labels_script_reads_runs_of_every_source(here, kind):
    dataset, path = kind.replace("NAME", "OxfordIIITPet"), None
    if kind in MAKERS:
        path = here / "data"
        MAKERS[kind](path)
    make_run(here / "run", path, None, dataset=dataset)
    train, val = parts = open_sets(settings_of(here / "run", path, dataset=dataset))
    names = [part.table_name(index) for part in parts for index in range(len(part))]
    assert len(set(names)) == len(names)
    assert all((path / name).is_file() for name in names if isinstance(val.storage, FileStorage))
    ended = typed(SCRIPT, "run", "-no_copies").done()
    assert f"predictions for {len(val)} of {len(train) + len(val):,} images" in ended.stdout


def test_doubtful_digit_is_listed_with_its_number_in_the_whole_set(here):
    with np.load(DIGITS) as content:
        labels = content["targets"].tolist()
    make_run(here / "run", None, dataset="digits")
    name, label = ((row := rows_of("run/predictions.csv")[5])["image"], row["label"])
    assert labels[int(name.removeprefix("digits image #"))] == int(label)
    make_run(here / "run", None, {name: (str(9 - int(label)), 0.9, 1e-4)}, dataset="digits")
    ended = typed(SCRIPT, "run", "-no_copies").done()
    assert [(row["image"], row["label"]) for row in rows_of("run/labels/labels.csv")] == [(name, label)]
    assert "cannot be corrected" in ended.stdout
    typed(SCRIPT, "run", "-apply", "run/labels/labels.csv").refused("DATA.DATASET", "-apply")
    table = Path("run/predictions.csv")
    table.write_text(table.read_text().replace(f"{name},{label},", f"{name},{9 - int(label)},"))
    typed(SCRIPT, "run").refused(name, "the data set digits")


def test_moved_data_is_found_with_data_path(here):
    make_photos(here / "photos", COUNTS)
    make_run(here / "run", here / "photos", None, HALF)
    shutil.move("photos", "elsewhere")
    typed(SCRIPT, "run").refused("DATA.DATA_PATH")
    typed(SCRIPT, "run", "-data_path", "elsewhere").done()


# Copies


def run_documented(start: str) -> None:
    """Run the command in the section on equal images of docs/data.md that starts with this text."""
    section = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("### Equal images")[2].partition("###")[0]
    (command,) = re.findall(rf"^{re.escape(start)}[^\n]*(?:\n  [^\n]*)*", section, re.M)
    subprocess.run(["bash", "-e", "-o", "pipefail", "-c", command], check=True)


def test_documented_list_keeps_equal_images_of_a_large_set_in_one_part(here, monkeypatch):
    monkeypatch.setattr("datasets.opening.MOST_SEARCHED", 10)
    make_photos(here / "photos", {"cat": 20, "dog": 20})
    for file in [*here.glob("photos/*/*.png")]:
        shutil.copy(file, file.with_name(f"copy of {file.name}"))
    run_documented("(cd photos")
    for dataset, path, group in (("imagefolder", "photos", None), ("csv", "photos/all.csv", "content")):
        parts = load(dataset, path, GROUP_BY=group, VAL_FRACTION=0.3)
        contents = [{part.read(index).tobytes() for index in range(len(part))} for part in parts]
        assert sum(map(len, parts)) == 80 and parts[0].classes == ["cat", "dog"]
        assert bool(contents[0] & contents[1]) == (dataset == "imagefolder")


def test_documented_command_deletes_validation_images_equal_to_training_images(here):
    make_photos(here / "photos/train", {"cat": 6, "dog": 6})
    for number, name in ((20, "cat"), (21, "dog")):
        draw_image(here / f"photos/val/{name}/{number}.png", number)
    shutil.copy("photos/train/cat/3.png", "photos/val/cat/again and again.png")
    Image.open("photos/train/dog/7.png").resize((40, 30)).save("photos/val/dog/near.png")
    Image.open("photos/train/dog/8.png").resize((40, 30)).save("photos/train/cat/other.png")
    make_run(here / "run", here / "photos")
    typed(SCRIPT, "run", "-output", "labels").done()
    assert {row["image"]: row["reason"] for row in rows_of("labels/labels.csv")} == {
        "val/cat/again and again.png": "equal to train/cat/3.png in training",
        "val/dog/near.png": "nearly equal to train/dog/7.png in training",
        "train/cat/other.png": "nearly equal to train/dog/8.png, labelled dog",
        "train/dog/8.png": "nearly equal to train/cat/other.png, labelled cat",
    }
    run_documented("grep")
    assert sorted(path.name for path in here.glob("photos/val/*/*")) == ["20.png", "21.png", "near.png"]


def test_copy_in_another_fold_of_a_large_set_is_listed(here, monkeypatch):
    monkeypatch.setattr("datasets.opening.MOST_SEARCHED", 10)
    make_photos(here / "photos", COUNTS)
    make_sweep(here / "sweep", here / "photos", {})
    fold = [set(held_out(here / f"sweep/trial-00{number}")) for number in (0, 1)]
    first, second = (next(name for name in sorted(names) if name.startswith("cat")) for names in fold)
    shutil.copy(here / "photos" / first, here / "photos" / second)
    make_sweep(here / "sweep", here / "photos", {})
    typed(SCRIPT, "sweep").done()
    (row,) = rows_of("sweep/labels/labels.csv")
    assert {row["image"], row["reason"].split()[2]} == {first, second} and row["reason"].endswith("in another fold")


def test_unreadable_images_are_counted_and_named(here):
    make_photos(here / "photos", COUNTS)
    Path("photos/cat/25.png").write_bytes(b"not an image")
    make_run(here / "run", here / "photos")
    said = typed(SCRIPT, "run").done().stdout
    assert f"cannot read {here}/photos/cat/25.png (UnidentifiedImageError" in said and "; 1 of " in said


# Refusals


@pytest.fixture
def run(here) -> Path:
    make_photos(here / "photos", COUNTS)
    return make_run(here / "run", here / "photos", None, HALF)


def test_run_on_other_data_is_refused_with_the_difference(run):
    draw_image(Path("photos/cat/new.png"), 99)
    typed(SCRIPT, "run").refused("cat/new.png", "-data_path")


def lose_record(run: Path) -> None:
    (run / "results.json").unlink()


def interrupt(run: Path) -> None:
    (run / "results.json").unlink()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("REPORT: (true|false)", "REPORT: true", text))
    (run / "status.json").write_text((run / "status.json").read_text().replace('"done"', '"training"'))


def lose_facts(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    del status["about"]["data"]
    (run / "status.json").write_text(json.dumps(status))


def allow_several_labels(run: Path) -> None:
    text = (run / "config.yaml").read_text().replace("DATASET: imagefolder", "DATASET: csv")
    (run / "config.yaml").write_text(text.replace("LABEL_SEPARATOR: null", "LABEL_SEPARATOR: '|'"))


def lose_probabilities(run: Path) -> None:
    text = (run / "predictions.csv").read_text().replace("label_probability", "other")
    (run / "predictions.csv").write_text(text)


def rename_image(run: Path) -> None:
    text = (run / "predictions.csv").read_text()
    (run / "predictions.csv").write_text(text.replace("cat/", "cats/", 1))


def lose_classes(run: Path) -> None:
    shutil.rmtree("photos/cat")
    shutil.rmtree("photos/dog")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lose_record, ["predictions.csv", "REPORT"]),
        (interrupt, ["predictions.csv", "not finished", "-resume"]),
        (lose_facts, ["status.json"]),
        (allow_several_labels, ["several labels"]),
        (lose_probabilities, ["label_probability"]),
        (rename_image, ["cats/20.png", "-data_path"]),
        (lose_classes, ["bird"]),
    ],
)
def test_run_that_does_not_judge_its_data_is_refused(run, damage, named):
    damage(run)
    typed(SCRIPT, "run").refused(*named)


@pytest.mark.parametrize(("folds", "named"), [(None, "-folds"), (2, "halfstep sweep")])
def test_sweep_without_folds_or_finished_trial_is_refused(here, folds, named):
    make_photos(here / "photos", COUNTS)
    make_sweep(here / "sweep", here / "photos", {}, folds=folds, seeds=() if folds else (1, 2), left_out=(0, 1))
    typed(SCRIPT, "sweep").refused(named)


@pytest.mark.long
def test_folder_with_confirmed_rows_is_not_overwritten(run):
    doubt(run, next(name for name in held_out(run) if name.startswith("cat")), "dog")
    typed(SCRIPT, "run").done()
    table = Path("run/labels/labels.csv")
    typed(SCRIPT, "run").done()  # nothing is confirmed yet
    table.write_bytes(table.read_bytes().rstrip() + b"yes\n")
    before = table.read_bytes()
    typed(SCRIPT, "run").refused("run/labels/labels.csv", "-output")
    assert table.read_bytes() == before
    typed(SCRIPT, "run", "-output", "other").done()


@pytest.mark.parametrize("name", ["labels-2.png", "labels.csv"])
def test_file_of_another_program_is_not_overwritten(run, name):
    Path("mine").mkdir()
    Path("mine", name).write_text("image,label\n1,2\n")
    typed(SCRIPT, "run", "-no_copies", "-output", "mine").refused(f"mine/{name}")
    assert os.listdir("mine") == [name]


def test_no_copies_with_apply_is_refused(here):
    typed(SCRIPT, "run", "-apply", "x.csv", "-no_copies").refused("-no_copies")


@given(st.binary(max_size=5).map(os.fsdecode), names())
@examples(60)
def test_cells_of_predictions_csv_are_the_cells_that_are_looked_up(tmp_path_factory, name, label):
    file = Path(tmp_path_factory.getbasetemp(), "predictions.csv")
    write_table(file, ("image", "label"), [(name, label)])
    assert read_table(file) == [{"image": cell_of(name), "label": cell_of(label)}]
