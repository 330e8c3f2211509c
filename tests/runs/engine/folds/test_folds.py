"""-folds: one run on all images, and the further runs that measure it."""

import re
import signal

import pytest
import torch

from tests.support import number_rows, several_labels
from tests.support.image_sets import png, write_tar
from tests.support.parquet_files import write_parquet
from tests.support.runs import epochs_of, last_sentence, rows, rows_of, status_of, typed
from utils.errors import AFTER_SIGNAL
from utils.text import csv_text

pytestmark = pytest.mark.slow

COUNT, FOLDS = 60, 3  # images of each data set


def write_folders(folder):
    for number in range(COUNT):
        path = folder / f"class {number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(number))
    return "-dataset", "imagefolder", "-data_path", folder, "-opts"


def write_numbers(folder):
    table, _ = number_rows.write_digits(folder, COUNT)
    return "-data_path", table, "-opts", "DATA.COLUMNS=[path,digit,ink]", "TRAIN.OBJECTIVE=numbers"


def write_labels(folder):
    table, _ = several_labels.write_digits(folder, COUNT)
    return "-data_path", table, "-opts", "DATA.LABEL_SEPARATOR=|"


def write_groups(folder):
    rows = [f"{number}.png,class {number % 3},person {number // 7}" for number in range(COUNT)]
    (folder / "list.csv").write_text("\n".join(["image_path,target,person", *rows]) + "\n")
    for number in range(COUNT):
        (folder / f"{number}.png").write_bytes(png(number))
    return "-data_path", folder / "list.csv", "-opts", "DATA.GROUP_BY=person"


def write_table(folder):
    images = [{"bytes": png(number), "path": f"{number}.png"} for number in range(COUNT)]
    classes = ["a", "b", "c"]
    labels = [number % 3 for number in range(COUNT)]
    path = write_parquet(folder / "photos.parquet", {"image": images, "label": labels}, {"label": classes})
    return "-data_path", path, "-opts"


def write_shards(folder):
    for part in range(3):
        numbers = range(20 * part, 20 * part + 20)
        files = {f"{number}.cls": b"%d" % (number % 3) for number in numbers}
        write_tar(folder / f"train-{part}.tar", files | {f"{number}.png": png(number) for number in numbers})
    return "-dataset", "shards", "-data_path", folder, "-opts", "DATA.SHUFFLE_BUFFER=8"


# Settings of the small ViT that other models do not have
OF_TIMM = "MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12".split()
SMALL = ("DATA.IMAGE_CHANNELS=3", "DATA.BATCH_SIZE=8")


@pytest.fixture
def train(tmp_path, small_yaml):
    """Train on all of the images that a function writes, and return the end of the run and its folder."""
    folders = {}

    def start(write, *words, name="run", processes=1, done=True, **options):
        if write not in folders:
            (tmp_path / write.__name__).mkdir()
            folders[write] = write(tmp_path / write.__name__)
        script = "main_multi_gpu.py" if processes > 1 else "main_single_gpu.py"
        flags = ["-cfg", small_yaml, "-output", tmp_path / "output", "-name", name, "-resume", "auto"]
        words = [*flags, *folders[write], *SMALL, *words]
        ended = typed(script, *map(str, words), processes=processes, **options)
        return (ended.done() if done else ended), tmp_path / "output" / name

    return start


def weights_of(folder, key="state_dict"):
    return torch.load(folder / "best.pth", weights_only=True)[key]


def assert_equal_weights(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def in_run(folder, name="predictions.csv"):
    return {row["image"]: row for row in rows_of(folder / name)}


@pytest.mark.long
@pytest.mark.parametrize("write", [write_folders, write_numbers, write_labels, write_groups, write_table, write_shards])
def test_each_image_is_predicted_by_the_run_that_held_it_out(train, write, tmp_path):
    _, folder = train(write, f"DATA.FOLDS={FOLDS}")
    found = in_run(folder)
    assert len(found) == COUNT
    by_runs = {}
    for fold in range(FOLDS):
        further = folder / "folds" / f"fold-{fold + 1}"
        words = ["-eval", "-resume", further / "last.pth", "-output", tmp_path / f"eval-{fold}"]
        typed("main_single_gpu.py", *words).done()
        (evaluated,) = (tmp_path / f"eval-{fold}").iterdir()
        of_fold = in_run(evaluated)
        assert not by_runs.keys() & of_fold.keys()
        by_runs |= of_fold
    assert_same_rows(found, by_runs)


def assert_same_rows(one, other):
    """Assert that the cells are equal, but for the last digits of numbers, and for how each set numbers its groups."""
    assert one.keys() == other.keys()
    for name, row in one.items():
        for column, text in row.items():
            if column != "group_number" and text != other[name][column]:
                assert float(text) == pytest.approx(float(other[name][column]), rel=1e-4), (name, column)


@pytest.mark.long
def test_best_weights_are_those_of_a_run_on_all_images(train):
    _, by_folds = train(write_folders, f"DATA.FOLDS={FOLDS}", name="by_folds")
    _, on_all = train(write_folders, "DATA.VAL_FRACTION=0", name="on_all")
    assert_equal_weights(weights_of(by_folds), weights_of(on_all))


@pytest.mark.long
def test_two_processes_predict_as_one(train):
    _, one = train(write_folders, f"DATA.FOLDS={FOLDS}", name="one")
    _, two = train(write_folders, f"DATA.FOLDS={FOLDS}", "DATA.BATCH_SIZE=4", name="two", processes=2)
    of_one, of_two = in_run(one), in_run(two)
    assert of_one.keys() == of_two.keys()
    for name, row in of_one.items():
        assert float(row["label_probability"]) == pytest.approx(float(of_two[name]["label_probability"]), abs=2e-5)


def test_groups_stay_in_one_fold(train):
    ended, folder = train(write_groups, f"DATA.FOLDS={FOLDS}")
    assert f"{COUNT} images in 9 groups" in last_sentence(ended.stdout).facts[0]
    folds = {}
    for row in rows_of(folder / "split.csv"):
        folds.setdefault(int(row["image"].removesuffix(".png")) // 7, set()).add(row["fold"])
        assert row["part"] == "train"
    assert len(folds) == 9 and {len(found) for found in folds.values()} == {1}


@pytest.mark.long
def test_run_stopped_in_a_further_run_continues_with_the_same_bits(train):
    _, whole = train(write_folders, f"DATA.FOLDS={FOLDS}", name="whole")
    in_second_fold = {"signal_at": [2, signal.SIGTERM, [0], 3]}
    stopped, folder = train(write_folders, f"DATA.FOLDS={FOLDS}", name="stopped", done=False, faults=in_second_fold)
    assert stopped.returncode == AFTER_SIGNAL + signal.SIGTERM, stopped.printed
    assert not (folder / "results.json").exists()
    train(write_folders, f"DATA.FOLDS={FOLDS}", name="stopped")
    assert_equal_weights(weights_of(whole), weights_of(folder))
    assert in_run(whole) == in_run(folder)


@pytest.mark.long
def test_accuracy_of_folds_counts_all_images(train):
    ended, folder = train(write_folders, f"DATA.FOLDS={FOLDS}")
    right = sum(row["label"] == row["prediction"] for row in rows_of(folder / "predictions.csv"))
    sentence = last_sentence(ended.stdout)
    assert sentence.score == f"top-1 {100 * right / COUNT:.2f}%" and f"{COUNT} images" in sentence.facts[0]
    assert f"{FOLDS} further runs" in sentence.rest
    assert status_of(folder)["best"]["top1"] == pytest.approx(100 * right / COUNT)
    assert [row.get("eval_top1") is not None for row in epochs_of(folder)] == [False, True]


def test_report_and_labels_use_the_predictions_of_all_images(train):
    _, folder = train(write_folders, f"DATA.FOLDS={FOLDS}", "REPORT=true")
    page = re.sub(r"\s+", " ", (folder / "report.html").read_text())
    assert f"all {COUNT} images, each predicted by one of {FOLDS} further runs that had not learned it" in page
    found = typed("scripts/labels.py", folder).done().stdout
    assert f"predictions for {COUNT} of {COUNT} images by 1 run" in found and "not judged" not in found


def write_a_contradiction(folder):
    flags = write_folders(folder)
    (folder / "class 1" / "copy.png").write_bytes(png(0))  # class 0/0.png
    return flags


@pytest.mark.long
def test_corrected_labels_of_a_run_by_folds_are_one_list(train, tmp_path):
    _, folder = train(write_a_contradiction, f"DATA.FOLDS={FOLDS}")
    typed("scripts/labels.py", folder).done()
    table = folder / "labels" / "labels.csv"
    rows = rows_of(table)
    doubted = next(row for row in rows if row["image"] == "class 1/copy.png")
    confirmed = [row | {"confirmed": "yes" if row is doubted else "", "suggestion": "class 0"} for row in rows]
    table.write_text(csv_text([list(rows[0]), *(row.values() for row in confirmed)]), encoding="utf-8")
    applied = typed("scripts/labels.py", folder, "-apply", table, "-output", tmp_path / "lists").done()
    assert "train.csv lists all images" in applied.stdout and f"{tmp_path}/lists/train.csv" in applied.stdout
    listed = {row["image_path"]: row["target"] for row in rows_of(tmp_path / "lists" / "train.csv")}
    assert len(listed) == COUNT + 1 and listed["class 1/copy.png"] == "class 0"
    assert not (tmp_path / "lists" / "val.csv").exists()


def test_run_on_all_images_says_that_nothing_was_measured(train):
    ended, folder = train(write_folders, "DATA.VAL_FRACTION=0", "REPORT=true", "CALIBRATE=true")
    sentence = last_sentence(ended.stdout)
    assert sentence.score == "" and "DATA.VAL_FRACTION is 0" in sentence.rest
    assert "Nothing was measured" in (folder / "report.html").read_text()
    assert status_of(folder)["about"]["validation_images"] == 0 and status_of(folder)["best"]["top1"] is None
    assert not (folder / "predictions.csv").exists() and "calibration" not in weights_of(folder, "progress")
    typed("scripts/labels.py", folder).refused("VAL_FRACTION", "-folds 5")


@pytest.mark.long
def test_model_card_says_that_further_models_were_measured(train, tmp_path):
    _, folder = train(write_folders, f"DATA.FOLDS={FOLDS}", "MODEL.TYPE=timm", "MODEL.NAME=test_resnet", *OF_TIMM)
    typed("scripts/export.py", folder, "-to", "hf", "-output", tmp_path / "hub").done()
    card = (tmp_path / "hub" / "README.md").read_text()
    assert f"on all {COUNT} images, each predicted by one of {FOLDS} further models" in card
    assert f"{COUNT} images for training, 3 classes" in card and "for validation" not in card


def test_evaluation_of_learned_images_is_warned_of(train):
    _, folder = train(write_folders, f"DATA.FOLDS={FOLDS}")
    ended = typed("main_single_gpu.py", "-eval", "-resume", folder, "-output", folder / "eval").done()
    assert "so its scores are too good" in ended.stdout


def test_check_reads_each_image_once_and_estimates_all_runs(train):
    words = ("DATA.NUM_WORKERS=0", "CHECK=true")
    alone, _ = train(write_folders, "DATA.VAL_FRACTION=0", *words)
    checked, _ = train(write_folders, f"DATA.FOLDS={FOLDS}", *words)
    found = rows(checked.stdout)
    assert found["data"] == ("ok", f"all {COUNT} images for training") and "validation images" not in found
    assert "time" in found and "time" in rows(alone.stdout)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("TRAIN.EARLY_STOP=1", "TRAIN.EARLY_STOP"),
        ("TRAIN.BUDGET=1h", "TRAIN.BUDGET"),
        ("DIST.STRATEGY=fsdp2", "DIST.STRATEGY"),
    ],
)
def test_settings_that_folds_do_not_support_are_refused(train, word, name):
    refused, _ = train(write_folders, f"DATA.FOLDS={FOLDS}", word, done=False)
    refused.refused(name, "DATA.FOLDS is 3")


def test_more_folds_than_groups_are_refused_before_training(train):
    refused, _ = train(write_groups, "DATA.FOLDS=10", done=False)
    refused.refused("DATA.FOLDS is 10", "9 folds")


def test_folds_of_data_with_own_validation_images_are_refused(train, tmp_path):
    def write_parts(folder):
        write_folders(folder / "train")
        return write_folders(folder / "val")[:3] + (folder, "-opts")

    refused, _ = train(write_parts, f"DATA.FOLDS={FOLDS}", done=False)
    refused.refused("DATA.FOLDS", "own validation images")
