"""halfstep labels with weights or the features of a run: which labels it lists, and what it writes."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.labelling.predictions import UNKNOWN, Predictions, probabilities_of
from tests.commands.embedding.conftest import make_hub
from tests.commands.labelling.made_runs import make_run, settings_of
from tests.support.opened import open_sets
from tests.support.runs import rows_of, typed

pytestmark = pytest.mark.slow  # it loads models

SCRIPT = "scripts/labels.py"
COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 50, 40)}
WRONG = "blue/red7.png"


def draw(path: Path, colour: str, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(-35, 36, size=(32, 32, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)).save(path)


@pytest.fixture
def photos(here) -> Path:
    """Weights, and coloured photos of which one has a wrong label and one cannot be read."""
    make_hub(here / "hub")
    for number in range(60):
        colour = [*COLOURS][number % 3]
        draw(here / f"photos/{colour}/{colour}{number}.png", colour, number)
    draw(here / "photos" / WRONG, "red", 99)
    (here / "photos/green/broken.png").write_bytes(b"no image")
    return here / "photos"


def listed(folder: str = "labels") -> list[tuple[str, str]]:
    return [(row["image"], row["suggestion"]) for row in rows_of(f"{folder}/labels.csv")]


@pytest.mark.long
def test_weights_list_a_wrong_label_without_a_run(photos):
    ended = typed(SCRIPT, "hub", "-data_path", "photos", "-no_copies", "-image_size", "32").done()
    assert listed() == [(WRONG, "red")]
    assert "62" in ended.stdout and "61" in ended.stdout and "broken.png" in ended.stdout
    table = Path("labels/labels.csv")
    table.write_bytes(table.read_bytes().rstrip() + b"yes\n")
    command = shlex.split(next(line for line in ended.stdout.splitlines() if line.startswith("  halfstep labels")))
    applied = typed(SCRIPT, *command[2:]).done()
    rows = {
        row["image_path"]: row["target"] for name in ("train", "val") for row in rows_of(f"labels/corrected/{name}.csv")
    }
    assert rows[WRONG] == "red" and len(rows) == 62
    words = shlex.split(applied.stdout.splitlines()[-1])
    assert words[words.index("-image_size") + 1] == "32"
    assert words[:3] == ["halfstep", "train", "-pretrained"] and words[3].startswith("hub")


@pytest.mark.long
def test_unreadable_photo_is_named_once(photos):
    assert typed(SCRIPT, "hub", "-data_path", "photos").done().printed.count("broken.png") == 1


def test_weights_judge_a_csv_list(photos):
    names = [path.relative_to(photos).as_posix() for path in sorted(photos.rglob("*.png")) if path.stem != "broken"]
    lines = ["image_path,target", *(f"{name},{name.partition('/')[0]}" for name in names)]
    (photos / "train.csv").write_text("\n".join(lines) + "\n")
    ended = typed(SCRIPT, "hub", "-data_path", "photos", "-dataset", "csv", "-no_copies", "-output", "found").done()
    assert listed("found") == [(WRONG, "red")]
    assert "-dataset csv" in ended.stdout


@pytest.mark.long
def test_features_of_a_run_judge_its_training_images(photos):
    run = make_run(photos.parent / "run", photos)
    parts = open_sets(settings_of(run, photos))
    arrays = {}
    for title, part in zip(("training", "validation"), parts, strict=True):
        names = [part.table_name(index) for index in range(len(part))]
        rng = np.random.default_rng(0)
        rows = [[colour in Path(name).stem for colour in COLOURS] for name in names]
        arrays |= {
            f"{title}_indices": np.arange(len(part)),
            f"{title}_names": names,
            f"{title}_targets": part.targets,
            f"{title}_features": (np.array(rows) + 0.1 * rng.normal(size=(len(part), 3))).astype(np.float32),
        }
    is_wrong = [WRONG in [part.table_name(index) for index in range(len(part))] for part in parts]
    assert is_wrong == [True, False]  # the predictions do not judge it
    typed(SCRIPT, run, "-no_copies").done()
    assert listed("run/labels") == []
    np.savez(run / "features.npz", **arrays)
    said = typed(SCRIPT, run, "-no_copies").done().stdout
    assert (WRONG, "red") in listed("run/labels")
    assert f"predictions for {len(parts[1])} of " in said  # the features judge all images


def test_mistakes_with_weights_are_refused(photos):
    typed(SCRIPT, "hub", "-data_path", "photos", "-output", "photos/found").refused("-output", "photos/found")
    typed(SCRIPT, "hub", "-data_path", "nowhere").refused("nowhere")
    typed(SCRIPT, "hub", "-dataset", "csv").refused("-dataset", "-data_path")
    options = ("-opts", "DATA.LABEL_SEPARATOR=,")
    typed(SCRIPT, "hub", "-data_path", "photos", "-dataset", "csv", *options).refused("photos")
    shutil.rmtree("hub")
    typed(SCRIPT, "hub", "-data_path", "photos").refused("hub")


def test_probabilities_of_tables_are_averaged_and_the_rest_is_shared():
    labels = np.array([0, 1, 2])
    first = Predictions(np.array([0, 1]), np.array([3, 1]), np.array([0.6, 0.7]), np.array([0.1, 0.7]))
    second = Predictions(np.array([0]), np.array([UNKNOWN]), np.array([0.9]), np.array([0.1]))
    found = probabilities_of([first, second], labels, 4)
    np.testing.assert_allclose(found[0], np.mean([[0.1, 0.15, 0.15, 0.6], [0.1, 0.3, 0.3, 0.3]], axis=0))
    np.testing.assert_allclose(found[1], [0.1, 0.7, 0.1, 0.1])
    assert np.isnan(found[2]).all()


@pytest.mark.long
def test_weights_judge_native_pixels_with_the_measured_range(here):
    make_hub(here / "hub")
    for number in range(60):
        values = np.random.default_rng(number).integers(0, 1000, size=(32, 32)) + 3000 * (number % 2)
        (here / f"photos/{number % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint16)).save(here / f"photos/{number % 2}/{number}.png")
    native = ["-opts", "DATA.PIXELS=native", "DATA.IMAGE_CHANNELS=1"]
    ended = typed(SCRIPT, "hub", "-data_path", "photos", "-no_copies", *native).done()
    assert "100.0% of 60 images" in ended.stdout
