"""docs/photos.md and docs/numbers.md: every command runs as printed, in order, on a small folder of photos."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from configs.load import load as read_settings
from models import build_model
from tests.runs.engine.check.small_photos import CLEAN
from tests.support.configs import write
from tests.support.image_sets import draw_photos
from tests.support.pages import script_of
from tests.support.runs import ROOT, last_sentence, rows_of, run, run_folder, typed

pytestmark = pytest.mark.slow

RUN = r"output/train-\d{8}-\d\d-\d\d-\d\d"


def commands(section: str, name: str = "photos.md") -> list[str]:
    """Return the commands of a section of a page, changed to use a tiny model and few epochs."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found = re.findall(r"```bash\n(.*?)```", page.split(f"\n## {section}\n")[1].split("\n## ")[0], re.S)
    text = "".join(found).replace("vit_small_patch16_224 ", "tiny.pth -cfg tiny.yaml ")
    return re.sub(r"-epochs (\d+)0", r"-epochs \1", text).replace("-folds 5", "-folds 2").splitlines()


def parts(folder: Path) -> dict[str, str]:
    """Return {image: its part} of a run."""
    return {row["image"]: row["part"] for row in rows_of(folder / "split.csv")}


def choose_photos(follow) -> None:
    """Follow the section that chooses photos to label. The run knows one of the four photos, the weights do not."""
    draw_photos(Path("unlabelled"), "zebra", count=3)
    shutil.copy("photos/cat/0.png", "unlabelled/labelled.png")
    follow("Which photos to label next", part=slice(0, 1))
    assert len(os.listdir("to_label")) == 4
    shutil.rmtree("to_label")
    assert "1 labelled already" in follow("Which photos to label next", part=slice(1, 2))
    assert sorted(os.listdir("to_label")) == ["0.png", "1.png", "2.png"]


def look_at_the_result(follow) -> None:
    """Evaluate the held-out photos, and then the photos of a new folder test/."""
    follow("Look at the result")
    draw_photos(Path("photos/test"), "cat", "dog", count=2)
    assert "4 validation images" in follow("Test photos")
    shutil.rmtree("photos/test")


@pytest.mark.long
@pytest.mark.usefixtures("signal_handlers")
def test_photos_page_commands_produce_predictions(here):
    for folder, classes, options in (
        ("photos", ("cat", "dog"), {"count": 24}),
        ("new_photos", ("cat", "dog"), {"count": 2}),
        ("their_photos", ("dog",), {}),
    ):
        draw_photos(here / folder, *classes, **options)
    config = read_settings(["-cfg", write(CLEAN, "tiny.yaml")]).config
    torch.save(build_model(config, 2).state_dict(), "tiny.pth")
    folders: dict[str, str] = {}  # {a run's folder on the page: its folder in this test}

    def follow(section: str, made: str = "", checks: bool = False, part: slice = slice(None)) -> str:
        given, said = commands(section)[part], []
        for command in [f"{given[0]} -check"] if checks else given:
            program, words = script_of(shlex.split(re.sub(RUN, lambda name: folders[name[0]], command)))
            if program == "scripts/sweep.py":
                said.append(run(program, *words, cwd=here, faults={"start_python_as_forks": []}).done().stdout)
            else:
                said.append(typed(program, *words).done().stdout)
        if made:
            folders[made] = str(max(Path("output").glob("train-*"), key=lambda path: path.stat().st_mtime_ns))
        return "".join(said)

    follow("Train another model", checks=True)
    assert not Path("output").exists()
    follow("Train another model", made="output/train-20260102-03-04-05")
    first = parts(Path(folders["output/train-20260102-03-04-05"]))
    assert set(first.values()) == {"train", "val"}
    look_at_the_result(follow)
    follow("Predict")
    assert len(rows_of("classes.csv")) == 4
    draw_photos(here / "photos", "cat", "dog", count=8)
    follow("More photos next week", made="output/train-20260109-10-11-12")
    more = parts(Path(folders["output/train-20260109-10-11-12"]))
    assert len(more) == 64 and {image: more[image] for image in first} == first
    choose_photos(follow)
    draw_photos(here / "photos", "zebra", count=12)
    shutil.copy("photos/dog/0.png", "photos/cat/IMG_0042.jpg")
    assert "2 of 3" in follow("A new class", made="output/train-20260116-10-11-12")
    before = parts(Path(folders["output/train-20260116-10-11-12"]))
    follow("A wrong label", part=slice(0, 2), made="output/train-20260119-10-11-12")
    assert "predictions for 77 of 77 images by 1 run" in follow("A wrong label", part=slice(2, 3))
    table = Path(folders["output/train-20260119-10-11-12"], "labels/labels.csv")
    (row,) = [each for each in rows_of(table) if each["image"] == "cat/IMG_0042.jpg"]
    assert "equal to dog/0.png, labelled dog" in row["reason"]
    table.write_text(f"image,label,suggestion,confirmed\n{row['image']},cat,dog,yes\n", encoding="utf-8")
    said = follow("A wrong label", part=slice(3, 4))
    (line,) = [line for line in said.splitlines() if "halfstep train " in line]
    script, words = script_of(shlex.split(line))
    typed(script, *words).done()
    new = max(Path("output").glob("train-*"), key=lambda path: path.stat().st_mtime_ns)
    folders["output/train-20260123-10-11-12"] = str(new)
    labels = {row["image"]: row["label"] for row in rows_of(new / "predictions.csv")}
    assert labels.get("cat/IMG_0042.jpg", "dog") == "dog" and labels.keys() <= before.keys()
    assert "that all have scored" in follow("A wrong label", part=slice(4, 5))
    follow("Train longer")
    state = torch.load(Path(folders["output/train-20260123-10-11-12"]) / "last.pth", weights_only=True)
    assert (state["epoch"], state["class_names"]) == (2, ["cat", "dog", "zebra"])
    assert "top-1" in follow("On a colleague's computer")


@pytest.mark.usefixtures("signal_handlers")
def test_numbers_page_trains_predicts_and_lists_doubtful_numbers(here):
    draw_photos(here / "more", "cat", "dog", count=12)
    draw_photos(here / "new_photos", "cat", count=2)
    rows = [
        f"{path.relative_to(here)},{30 + number % 7}.5" for number, path in enumerate(sorted(here.glob("more/*/*")))
    ]
    write("\n".join(["path,age", *rows]), "photos.csv")
    torch.save(build_model(read_settings(["-cfg", write(CLEAN, "tiny.yaml")]).config, 2).state_dict(), "tiny.pth")
    settings = CLEAN.replace("MODEL: {", "MODEL: {NEW_CLASSIFIER: zeros, ").replace("REPORT: false", "REPORT: true")
    write(settings, "tiny.yaml")

    def follow(section: str) -> str:
        found = [
            re.sub(RUN, lambda _: str(run_folder(Path("output"))), each) for each in commands(section, "numbers.md")
        ]
        programs = [script_of(shlex.split(command)) for command in found]
        return "".join(typed(script, *words).done().stdout for script, words in programs)

    assert last_sentence(follow("Train")).score.startswith("MAE ")
    follow("Predict")
    assert follow("Doubtful numbers").count("with the largest errors are listed") == 2
    (report,) = Path("output").glob("train-*/report.html")
    assert "predicted against true numbers" in report.read_text(encoding="utf-8")
    found = rows_of("ages.csv")
    assert len(found) == 2 and all(20 < float(row["age"]) < 50 for row in found)
