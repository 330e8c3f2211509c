"""Files that programs write, read by other libraries and compared with other files or values computed from the photos.

The photos tell right from wrong: widths and heights differ, some are grey or transparent, one of each part is
unreadable, and names have commas, quotes, line breaks, other alphabets and an order unlike that of their numbers.
"""

import contextlib
import csv
import html
import json
import math
import re
import signal
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models import VisionTransformer, load_checkpoint
from torchvision.transforms.functional import InterpolationMode, center_crop, pil_to_tensor, resize

from tests.support import contracts
from tests.support.pages import table_of
from tests.support.runs import epochs_of, rows_of, status_of, typed
from utils.program import STOPPING

pytestmark = pytest.mark.slow

CLASSES = ['ant, "red"', "bee; wild", "Ü 猫"]
NAMES = ["10.png", "9.png", "=1+1.png", 'a, "b".png', "ü 猫\n.png", "x.png"]
SIZES = [(20, 12), (12, 20), (16, 24), (24, 16), (17, 13), (13, 29)]
MODES = ["RGB", "RGBA", "L", "P"]
MEAN, STD, SIDE, RESIZED, PATCH = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 12, 16, 4
RATE, NUM_EPOCHS = 0.02, 12
CLOSE = 3e-4  # single resized pixels may differ by 1
SETTINGS = f"""
DATA: {{DATASET: imagefolder, DATA_PATH: photos, IMAGE_SIZE: {SIDE}, CROP_PCT: 0.75, CROP_SCALE: [0.5, 1],
       BATCH_SIZE: 8,
       NUM_WORKERS: 0, DROP_LAST: false, IMAGENET_MEAN: {[*MEAN]}, IMAGENET_STD: {[*STD]}}}
MODEL: {{TYPE: vit, NAME: tiny, PATCH_SIZE: {PATCH}, EMBED_DIM: 16, DEPTH: 1, NUM_HEADS: 2}}
TRAIN: {{NUM_EPOCHS: {NUM_EPOCHS}, WARMUP_EPOCHS: 1, BASE_LR: {RATE}, MODEL_EMA: true, MODEL_EMA_DECAY: 0.8,
        CUTMIX_ALPHA: 1.0, MIXUP_PROB: 0.3, RANDOM_ERASE_PROB: 0.2, RANDOM_ERASE_COUNT: 2}}
SEED: 2
TRACK: []
"""
OF_LIST = "MODEL.NEW_CLASSIFIER=linear TRAIN.LOSS=bce DATA.VAL_FRACTION=0.3 DATA.IMAGE_ROOT=photos/train"


def draw_photos(folder: Path) -> None:
    """Draw photos whose brightness and direction depend on the class, so that a model soon tells some of them apart."""
    rng = np.random.default_rng(0)
    for number, (part, name) in enumerate((part, name) for part in ("train", "val") for name in CLASSES):
        (folder / part / name).mkdir(parents=True)
        for index, (file, (width, height)) in enumerate(zip(NAMES, SIZES, strict=True)):
            slope = np.arange(height)[:, None, None] * 6 if number % 3 == 1 else np.arange(width)[:, None] * 6
            pixels = rng.integers(80, size=(height, width, 4)) + slope + 50 * (number % 3 == 2)
            pixels[:, :, 3] = np.where(np.arange(width) < width // 3, 0, 255)
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            mode = MODES[(number + index) % len(MODES)]
            (image if mode == "RGBA" else image.convert("RGB").convert(mode)).save(folder / part / name / file)
        (folder / part / CLASSES[0] / "broken.png").write_bytes(b"no picture")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run the programs in a folder of their own, and go there."""
    handlers = {each: signal.getsignal(each) for each in STOPPING}
    train = ("main_single_gpu.py", "-cfg", "tiny.yaml", "-output", "o", "-name")
    drawn = ("-dataset", "csv", "-data_path", "photos", "-pretrained", "body.pth", "-epochs", "1", "-opts")
    shards = ("-dataset", "imagefolder", "-data_path", "photos", "-output", "shards")
    with contextlib.chdir(tmp_path_factory.mktemp("made")):
        draw_photos(Path("photos"))
        Path("tiny.yaml").write_text(SETTINGS)
        typed(*train, "first").done()
        files = ("-csv", "p.csv", "-json", "p.json", "-sheet", "p.png", "-top", 3)
        assert typed("scripts/predict.py", "o/first", "photos/val", *files).returncode == 2  # a photo is unreadable
        for path in Path("photos").rglob("broken.png"):
            path.unlink()
        typed("scripts/make_shards.py", *shards).done()
        with open("photos/train.csv", "w", newline="") as file:
            rows = ([f"{name}/{photo}", name] for name in reversed(CLASSES) for photo in NAMES)
            csv.writer(file).writerows([("image_path", "target"), *rows])
        state = torch.load("o/first/best.pth", weights_only=True)["state_dict"]
        torch.save({name: weight for name, weight in state.items() if "head." not in name}, "body.pth")
        typed(*train, "second", *drawn, *OF_LIST.split()).done()
        yield
    for each, handler in handlers.items():
        signal.signal(each, handler)


# --- values computed from the photos without halfstep ---


class Computed(NamedTuple):
    """The readable validation photos in the order of the run, and what its best weights make of them."""

    paths: list[str]
    labels: list[int]
    images: torch.Tensor  # normalized
    model: torch.nn.Module  # timm's, with the best weights
    logits: torch.Tensor
    results: dict  # results.json


def crop_of(path: Path) -> torch.Tensor:
    """Return the centre of a photo on the mean colour, uint8 [3, H, W], with torchvision's transforms."""
    with Image.open(path) as photo:
        canvas = Image.new("RGB", photo.size, tuple(round(255 * each) for each in MEAN))
        canvas.paste(photo.convert("RGBA"), mask=photo.convert("RGBA"))
    return center_crop(resize(pil_to_tensor(canvas), RESIZED, InterpolationMode.BICUBIC, antialias=True), SIDE)


@pytest.fixture(scope="module")
def computed(made) -> Computed:
    paths, labels = zip(
        *((f"val/{name}/{file}", CLASSES.index(name)) for name in CLASSES for file in sorted(NAMES)), strict=True
    )
    pixels = torch.stack([crop_of(Path("photos", path)) for path in paths])
    images = (pixels / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    results = json.loads(Path("o/first/results.json").read_text())
    arguments = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = VisionTransformer(**arguments).eval()
    load_checkpoint(model, "o/first/best.pth", use_ema=results["weights"] == "ema")
    with torch.no_grad():
        logits = model(images)
    return Computed([*paths], [*labels], images, model, logits, results)


# --- one test for each kind of file ---


@pytest.mark.long
def test_tables_of_an_evaluation_hold_the_answers_of_the_best_weights(computed):
    shares = computed.logits.softmax(1).numpy()
    rows = rows_of("o/first/predictions.csv")
    assert [row["image"] for row in rows] == computed.paths
    assert [row["label"] for row in rows] == [CLASSES[label] for label in computed.labels]
    assert [row["prediction"] for row in rows] == [CLASSES[number] for number in shares.argmax(1)]
    assert [float(row["probability"]) for row in rows] == pytest.approx(shares.max(1), abs=CLOSE)
    of_labels = shares[range(len(rows)), computed.labels]
    assert [float(row["label_probability"]) for row in rows] == pytest.approx(of_labels, abs=CLOSE)


def test_files_of_a_run_name_the_same_best_epoch(computed):
    """Metrics, status.json, results.json and best.pth, whose figures follow from predictions.csv."""
    rows, best, status = rows_of("o/first/predictions.csv"), computed.results, status_of(Path("o/first"))
    value = 100 * np.mean([row["label"] == row["prediction"] for row in rows])
    loss = -np.mean([math.log(float(row["label_probability"])) for row in rows])
    suffix, epochs = "_ema" if best["weights"] == "ema" else "", epochs_of(Path("o/first"))
    row, state = epochs[best["epoch"] - 1], torch.load("o/first/best.pth", weights_only=True)
    found = [best["value"], row[f"eval_top1{suffix}"], status["best"]["top1"], status["best_top1"], state["metric"]]
    assert found == pytest.approx([value] * 5, abs=1e-3)
    assert [best["loss"], row[f"eval_loss{suffix}"]] == pytest.approx([loss] * 2, abs=1e-4)
    assert (state["epoch"] + 1, status["best_epoch"], status["best"]["epoch"]) == (best["epoch"],) * 3
    assert (state["preferred"], state["class_names"]) == (f"state_dict{suffix}", CLASSES)
    assert (status["total_epochs"], status["total_steps"], status["epoch"]) == (NUM_EPOCHS, 3 * NUM_EPOCHS, NUM_EPOCHS)
    about = status["about"]
    assert [about[f"{part}_images"] for part in ("training", "validation")] == [19, 19] and about["classes"] == 3
    # The highest evaluation is kept, or named beside the last one, which is not clearly worse.
    highest = status["best"].get("highest", {"value": value})["value"]
    assert max(row["eval_top1"] for row in epochs) <= highest + 1e-3 and len(epochs) == NUM_EPOCHS
    table = [{name: float(text) for name, text in row.items()} for row in rows_of("o/first/metrics.csv")]
    assert table == epochs and [*table[0]][:6] == ["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr"]


def test_files_of_predictions_have_calibrated_probabilities_of_each_class(computed):
    shares = (computed.logits / computed.results["calibration"]["temperature"]).softmax(1)
    expected = dict(zip(computed.paths, shares.tolist(), strict=True))
    rows, document = rows_of("p.csv"), json.loads(Path("p.json").read_text())
    assert document["unreadable"] == [f"photos/val/{CLASSES[0]}/broken.png"] and len(rows) == len(expected)
    with Image.open("p.png") as sheet:
        captions = [caption for *_, caption in json.loads(sheet.text["halfstep tiles"])]
    for row, image, caption in zip(rows, document["images"], captions, strict=True):
        path, *cells = row.values()
        of_classes = expected[path.removeprefix("photos/")]
        ranked = sorted(range(3), key=lambda number: -of_classes[number])
        assert image["image_path"] == path and caption[1] == Path(path).name
        assert [CLASSES[each] for each in ranked] == cells[::2] == [each["class"] for each in image["predictions"]]
        assert [each["number"] for each in image["predictions"]] == ranked
        found = [float(each) for each in cells[1::2]]
        assert found == pytest.approx([of_classes[each] for each in ranked], abs=3 * CLOSE)
        assert found == pytest.approx([each["probability"] for each in image["predictions"]])
        assert caption[0] == f"{cells[0]} {found[0]:.2f}"


def test_sheets_of_a_run_show_calibrated_probabilities_and_the_crop(computed):
    shares = (computed.logits / computed.results["calibration"]["temperature"]).softmax(1).numpy()
    rows = {path: (share, label) for share, label, path in zip(shares, computed.labels, computed.paths, strict=True)}
    is_right = {path: share.argmax() == label for path, (share, label) in rows.items()}
    with Image.open("o/first/mistakes.png") as sheet:
        tiles = json.loads(sheet.text["halfstep tiles"])
        orange = (np.asarray(sheet.convert("RGB")) == (255, 128, 0)).all(2)
    with Image.open("o/first/correct.png") as sheet:
        correct = [caption for *_, caption in json.loads(sheet.text["halfstep tiles"])]
    mistakes = [caption for *_, caption in tiles]
    assert {path for *_, path in mistakes} == {path for path in rows if not is_right[path]}
    assert len(correct) == min(12, sum(is_right.values())) > 5 and all(is_right[path] for *_, path in correct)
    certain = []
    for *lines, path in [*mistakes, *correct]:
        share, label = rows[path]
        numbers = [label, share.argmax()] if len(lines) == 2 else [label]
        found = [re.fullmatch(r"(?:label: |model: )?(.*) [(]([0-9.]+)%[)]", line) for line in lines]
        assert [each[1] for each in found] == [CLASSES[number] for number in numbers]
        assert [float(each[2]) / 100 for each in found] == pytest.approx([*share[numbers]], abs=1e-3)
        certain += [share.max()] * (len(lines) == 2)
    assert certain == pytest.approx(sorted(certain, reverse=True), abs=CLOSE)
    for left, top, right, bottom, _ in tiles:
        width, height = right - left, bottom - top
        sides = [np.flatnonzero(orange[top:bottom, left:right].any(axis)) for axis in (0, 1)]
        assert [side[-1] + 1 - side[0] for side in sides] == pytest.approx([0.75 * min(width, height)] * 2, abs=5)
        assert [side[-1] + 1 + side[0] for side in sides] == pytest.approx([width, height], abs=4), "in the middle"


def test_report_repeats_the_tables(computed):
    page = Path("o/first/report.html").read_text()
    lines = [re.findall("<td[^>]*>(.*?)</td>", line, re.S) for line in re.findall("<tr>(.*?)</tr>", page, re.S)]
    cells = {html.unescape(line[0]): line[1:7] for line in lines if len(line) == 8}
    for row in rows_of("o/first/per_class.csv"):
        rates = [
            f"{float(row[name]):.1%}" if row[name] else "-"
            for name in ("f1", "recall", "precision", "specificity", "auc")
        ]
        assert cells.pop(row["class"]) == [*rates, row["count"]]
    errors = [f"{computed.results['calibration'][f'ece_{name}']:.1%}" for name in ("before", "after")]
    assert not cells and re.search(".*".join(map(re.escape, errors)), page)


def test_picture_of_the_confusion_matrix_has_labels_as_rows(made):
    with open("o/first/confusion.csv", newline="") as file:
        counts = np.array([row[1:] for row in csv.reader(file)][1:], int)
    assert (counts != counts.T).any()
    with Image.open("o/first/confusion.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    grey = (pixels == 128).all(2)  # the frame
    down, right = (np.flatnonzero(grey.sum(axis) > 80) for axis in (1, 0))
    places = [lines[0] + 4 + (lines[-1] - lines[0]) * np.arange(3) // 3 for lines in (down, right)]
    reddish = np.array([[np.sign(pixels[y, x, 0] - pixels[y, x, 2]) for x in places[1]] for y in places[0]])
    assert np.array_equal(reddish, np.where(counts == 0, 0, np.where(np.eye(3) == 1, -1, 1)))


def test_shards_hold_every_photo_with_its_class_number(made):
    assert Path("shards/classes.txt").read_text().splitlines() == CLASSES
    for part in ("train", "val"):
        files = {}
        for path in sorted(Path("shards").glob(f"{part}-*.tar")):
            with tarfile.open(path) as tar:
                files |= {member.name: tar.extractfile(member).read() for member in tar}
        found = [(files[name], files[f"{name[:8]}.cls"]) for name in sorted(files) if not name.endswith(".cls")]
        photos = [Path("photos", part, name, file) for name in CLASSES for file in sorted(NAMES)]
        expected = [(path.read_bytes(), b"%d" % CLASSES.index(path.parent.name)) for path in photos]
        assert (found if part == "val" else sorted(found)) == (expected if part == "val" else sorted(expected))


def test_split_csv_lists_each_photo_once_in_the_part_that_is_scored(made):
    rows = [(row["image"], row["part"]) for row in rows_of("o/second/split.csv")]
    assert sorted(image for image, _ in rows) == sorted(f"{name}/{file}" for name in CLASSES for file in NAMES)
    scored = [row["image"] for row in rows_of("o/second/predictions.csv")]
    assert [image for image, part in rows if part == "val"] == scored and 0 < len(scored) < len(rows) / 2


# {run: its further words}; the others are those of `made`
KINDS = {
    "numbers": "-dataset csv -data_path numbers.csv -opts TRAIN.OBJECTIVE=numbers DATA.COLUMNS=[image_path,age] "
    "TRAIN.CUTMIX_ALPHA=0 MODEL.NEW_CLASSIFIER=random",
    "labels": "-dataset csv -data_path labels.csv -profile 1 -opts DATA.LABEL_SEPARATOR=;",
    "evaluation": "-eval -pretrained o/first/best.pth",
}


def test_files_of_each_kind_of_run_have_a_row_on_the_page(made):
    photos = [f"photos/train/{name}/{photo}" for name in CLASSES for photo in NAMES]
    for file, column, cells in (("numbers", "age", range(99)), ("labels", "target", 9 * ["a;b", "a", ""])):
        with open(f"{file}.csv", "w", newline="") as table:
            csv.writer(table).writerows([("image_path", column), *zip(photos, cells, strict=False)])
    for name, words in KINDS.items():
        typed(
            "main_single_gpu.py", "-cfg", "tiny.yaml", "-output", "o", "-name", name, "-epochs", 1, *words.split()
        ).done()
    named = re.findall("`(.+?)`", " ".join(" ".join(row) for row in table_of("file | written")))
    patterns = [re.escape(each.rstrip("/")).replace("N", r"\d+") for each in named] + [r"log_\d+\.txt"]
    written = {path.name for path in Path("o").glob("*/*")}
    assert len(written) > 25 and not {each for each in written if not any(re.fullmatch(one, each) for one in patterns)}
    keys = re.findall("`(.+?)`", " ".join(row[0] for row in table_of("key | value")))
    assert not {key for path in Path("o").iterdir() for key in status_of(path)} - {*keys}


# --- the contracts of tests/support/contracts.py ---


def test_every_contract_is_checked_in_these_runs(made):
    """A missing interface is noticed earlier, by `install`."""
    assert contracts.CONTRACTS.keys() <= contracts.CALLED


def test_broken_contract_names_interface_and_result():
    halved = contracts.checked("here.halved", lambda number: number // 2, lambda it, result: 2 * result == it.number)
    assert halved(6) == 3 and not contracts.BROKEN
    with pytest.raises(AssertionError, match=r"here\.halved.* 3"):
        halved(number=7)
    assert len(contracts.BROKEN) == 1, "the program may have caught the error"
    contracts.BROKEN.clear()
