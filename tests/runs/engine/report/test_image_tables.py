"""Tables per image and per class, compared with scikit-learn for any number of processes.

The files of whole runs, also of killed ones, are tested too.
"""

import csv
import json
import math
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import engine.report.image_results
from datasets import BadImages, Normalize, build_eval_data
from datasets.image_set import ImageSet
from datasets.pixels import Pixels
from engine.evaluation.all_scores import Ranking
from engine.evaluation.best import Best
from engine.evaluation.evaluate import Inference, evaluate
from engine.precision import Precision
from engine.predict.pictures import tiles_of
from engine.record.saved_files import write_table
from engine.report.image_results import BestResults, ResultFiles, record_of, to_json
from engine.report.image_sheets import calibrated, draw_confusion, draw_mistakes
from engine.tasks import class_tables
from engine.tasks.class_tables import ClassResults
from engine.tasks.classes import ClassTally, ImageResults
from engine.tasks.labels import LabelTally
from engine.train.counters import EpochResult
from tests.support.configs import CONVOLUTIONS, CPU, small_config
from tests.support.image_sets import arrays_with, break_images
from tests.support.properties import examples
from tests.support.run_hash import run_hash
from tests.support.runs import epochs_of, rows_of, run_folder, status_of, typed
from tests.support.threads import Threads
from tests.support.trainers import Lines
from utils.distributed import Process

pytestmark = pytest.mark.slow

CLASSES = ["ant\r", 'b"e,e', "猫\n", "dog|wolf", "empty", "never predicted"]
NUM_IMAGES, UNREADABLE = 61, (0, 17, 60)


class Shades(torch.nn.Module):
    """Logits from an image's mean, with one more output than classes. Half of the images are classified correctly."""

    def forward(self, images):
        shades = torch.linspace(-1, 1, len(CLASSES))[[0, 1, 2, 3, 5, 4]]
        logits = -9 * (images.mean((1, 2, 3))[:, None] - shades).abs()
        logits[:, 5] -= 99
        return torch.cat((logits, logits.amax(1, keepdim=True) - 0.05 + 2 * images[:, :, 0, 0]), 1)


def make_images() -> ImageSet:
    rng = np.random.default_rng(0)
    targets = rng.integers(4, size=NUM_IMAGES)
    targets[-5:] = 5
    pixels = (targets * 51 + rng.integers(-60, 60, size=NUM_IMAGES)).clip(0, 255)
    pixels = np.broadcast_to(pixels[:, None, None], (NUM_IMAGES, 8, 8)).astype(np.uint8)
    images = arrays_with(pixels.copy(), targets, CLASSES, Pixels(1), "made up")
    images.storage.images[:, 0, 0] = rng.integers(160, size=NUM_IMAGES)  # sometimes the seventh output is the largest
    break_images(images, UNREADABLE)
    return images


def table(path) -> list[list[str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_tables_match_scikit_learn_for_any_world_size(tmp_path, world_size):
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    config, images = small_config(tmp_path, "DATA.BATCH_SIZE=8", "DATA.CROP_PCT=1"), make_images()

    def results_of(process):
        data, bad = build_eval_data(config, images, process), BadImages(images, 1.0, str)
        (found,) = evaluate(
            [Shades()],
            data,
            Inference(Normalize(config.DATA), Precision(config, CPU), process),
            bad,
            ClassTally,
        )
        results = found.images.gather(process).complete(process, Lines())
        return results, calibrated(results, 2.0, process)

    results, scaled = zip(*Threads(world_size).run(results_of), strict=True)
    write_tables(tmp_path, results[-1], images)
    kept = [index for index in range(NUM_IMAGES) if index not in UNREADABLE]
    pixels = Normalize(config.DATA)(torch.from_numpy(images.storage.images[kept])[:, None])
    shares = Shades()(pixels).double().softmax(1).numpy()
    labels, predicted = images.targets[kept], shares.argmax(1)
    names = [*CLASSES, "class 6"]
    rows = table(tmp_path / "predictions.csv")[1:]
    assert [row[:3] for row in rows] == [
        [f"made up image #{index}", names[label], names[number]]
        for index, label, number in zip(kept, labels, predicted, strict=True)
    ]
    halved = (Shades()(pixels).double() / 2).softmax(1).numpy()
    assert scaled[0].probabilities == pytest.approx(halved.max(1), abs=2e-6)
    assert scaled[0].label_probabilities == pytest.approx(halved[range(len(kept)), labels], abs=2e-6)
    of_prediction, of_label = ([float(row[column]) for row in rows] for column in (3, 4))
    assert of_prediction == pytest.approx(shares.max(1), abs=2e-6)
    assert of_label == pytest.approx(shares[range(len(kept)), labels], abs=2e-6)

    matrix = confusion_matrix(labels, predicted, labels=range(7))
    assert matrix[:, 6].any() and matrix[:4, :4].trace() not in (0, len(kept))
    assert table(tmp_path / "confusion.csv") == [
        ["label \\ prediction", *names],
        *([name, *map(str, row)] for name, row in zip(names, matrix.tolist(), strict=True)),
    ]
    expected = precision_recall_fscore_support(labels, predicted, labels=range(7), zero_division=np.nan)
    for number, row in enumerate(table(tmp_path / "per_class.csv")[1:]):
        for text, column in zip(row[1:5], expected, strict=True):
            value = float(column[number])
            assert (text == "") == math.isnan(value) and (not text or float(text) == pytest.approx(value, abs=1e-6))
        off = matrix[number] * (np.arange(7) != number)
        taken_for = [names[off.argmax()], str(off.max())] if off.any() else ["", ""]
        assert (row[0], row[5], row[6:8]) == (names[number], str(matrix[:, number].sum()), taken_for)
    is_class = labels[:, None] == range(7)
    for each in results:
        check_rates(each.figures(images)["per_class"], is_class, predicted[:, None] == range(7), np.log(shares), names)


def check_rates(records, is_class, is_predicted, scores, names):
    """Compare sensitivity, specificity, AUC and average precision of each class with scikit-learn's."""
    from sklearn.metrics import average_precision_score, recall_score, roc_auc_score

    assert [*records] == names
    for number, row in enumerate(records.values()):
        actual, found = is_class[:, number], is_predicted[:, number]
        expected = {
            "sensitivity": recall_score(actual, found) if actual.any() else None,
            "specificity": recall_score(~actual, ~found),
            "auc": roc_auc_score(actual, scores[:, number]) if actual.any() else None,
            "average_precision": average_precision_score(actual, scores[:, number]) if actual.any() else None,
        }
        assert row == pytest.approx(expected, abs=1e-9), names[number]


@given(readable=st.sets(st.integers(0, 30), min_size=1), seed=st.integers(0, 99))
@examples(30)
def test_mistakes_have_the_number_of_their_image_though_others_are_unreadable(readable, seed):
    indices, rng = np.array(sorted(readable)), np.random.default_rng(seed)
    labels, predictions = indices % 3, rng.integers(0, 3, len(indices))  # the label follows from the image
    shares = rng.random(len(indices))
    results = ImageResults(indices, np.zeros((3, 3)), None, None, labels, predictions, shares, 1 - shares)
    number, errors = results.errors(["0", "1", "2"], 36)
    assert number == len(errors) == np.count_nonzero(labels != predictions)
    for index, (label, _) in errors:
        assert index in readable and label.startswith(f"label: {index % 3} ")


def test_multi_label_tables_match_scikit_learn(tmp_path):
    from sklearn.metrics import precision_recall_fscore_support

    rng, names = torch.Generator().manual_seed(0), ["a", "b", "c", "d"]
    targets = (torch.rand(50, 4, generator=rng) < 0.4).float()
    logits = torch.randn(50, 4, generator=rng) + 2 * targets - 1

    def results_of(process):
        tally = LabelTally(CPU, torch.float64, num_images=300)
        share = torch.arange(process.rank, 50, process.world_size)
        tally.add(logits[share], targets[share], 0)
        tally.result(process)
        tally.per_image.indices = share.numpy()
        return tally.per_image.gather(process).complete(process, Lines())

    images = replace(make_images(), classes=names)
    write_tables(tmp_path, (results := Threads(2).run(results_of)[1]), images)
    shares = logits.sigmoid()
    number, errors = results.errors(names, 20)
    is_wrong = (shares > 0.5) != targets.bool()
    certainty = torch.where(is_wrong, (shares - 0.5).abs(), -1.0).flatten().sort(descending=True).indices[:20].tolist()
    assert number == is_wrong.sum() > 20
    for place, (index, caption) in zip(certainty, errors, strict=True):
        label = "a label" if targets.flatten()[place] else "not a label"
        assert index == place // 4
        assert caption == [f"{label}: {names[place % 4]}", f"model: {shares.flatten()[place]:.1%}"]
    right = [index for index in range(50) if not is_wrong[index].any()]
    captions = {index: ", ".join(names[each] for each in np.flatnonzero(targets[index])) for index in right}
    found = results.right(names, 100)
    assert [index for index, _ in found] == right and len(results.right(names, 3)) == 3 < len(right)
    assert all({*caption[0].split(", ")} == {*(captions[index] or "no label").split(", ")} for index, caption in found)
    each = torch.tensor([0.5, 1.0, 2.0, 4.0])
    scaled = Threads(2).run(lambda process: calibrated(results_of(process), each.tolist(), process))[0]
    (row,) = np.flatnonzero((scaled.images == 7) & (scaled.classes == int(logits[7].argmax())))
    assert scaled.probabilities[row] == pytest.approx(float((logits[7] / each).sigmoid()[logits[7].argmax()]), abs=1e-6)
    for index, (name, label, prediction, certain, of_label) in enumerate(table(tmp_path / "predictions.csv")[1:]):
        assert name == images.table_name(index)
        order = shares[index].argsort(descending=True).tolist()
        of_image, above = ([n for n in order if each[index, n] > 0.5] for each in (targets, shares))
        for told, told_shares, numbers in ((label, of_label, of_image), (prediction, certain, above)):
            assert told == "|".join(names[number] for number in numbers)
            told_shares = [float(each) for each in told_shares.split("|") if each]
            assert told_shares == pytest.approx(shares[index, numbers].tolist(), abs=2e-6)
    expected = precision_recall_fscore_support(targets, logits > 0)
    for number, row in enumerate(table(tmp_path / "per_class.csv")[1:]):
        assert [float(text) for text in row[1:5]] == pytest.approx([each[number] for each in expected], abs=1e-6)
    assert not (tmp_path / "confusion.csv").exists()
    check_rates(results.figures(images)["per_class"], targets.bool().numpy(), (logits > 0).numpy(), logits, names)


def test_class_shared_by_all_images_has_no_specificity(tmp_path):
    results = made_up(np.zeros(5, int), np.zeros(5, int), 1)
    images = SimpleNamespace(classes=["only"], table_name=str, is_grouped=False)
    write_tables(tmp_path, results, images)
    assert results.figures(images)["per_class"]["only"]["specificity"] is None
    assert table(tmp_path / "per_class.csv")[1][-4:] == ["1.000000", "", "", ""]


def write_tables(folder: Path, results: ClassResults, images) -> None:
    for name, header, rows in results.tables(images):
        write_table(folder / name, header, rows)


def made_up(labels, predictions, num_classes, probabilities=None) -> ImageResults:
    counts = [np.bincount(each, minlength=num_classes) for each in (labels, predictions, labels[labels == predictions])]
    shares = np.full(len(labels), 0.5, np.float32) if probabilities is None else probabilities
    unranked = Ranking(*np.full((2, num_classes), np.nan))
    return ImageResults(
        np.arange(len(labels)), np.stack(counts), None, unranked, labels, predictions, shares, 1 - shares
    )


def test_huge_confusion_matrix_is_written_as_list_and_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(class_tables, "MOST_CLASSES", 5)
    labels = np.repeat(np.arange(3000), 2)
    predictions = labels.copy()
    predictions[::7] = 2999
    results, images = made_up(labels, predictions, 3000), make_images()
    images = replace(images, classes=[f"class number {number}" for number in range(3000)])
    images.storage.key = str
    write_tables(tmp_path, results, images)
    header, *rows = table(tmp_path / "confusion.csv")
    assert header == ["label", "prediction", "count"] and sum(int(row[2]) for row in rows) == len(labels)
    assert ["class number 0", "class number 2999", "1"] in rows
    picture = draw_confusion(results, images.classes)
    assert 800 < picture.width < 1000 and 800 < picture.height < 1000
    some = made_up(labels % 9, predictions % 9, 9)
    assert draw_confusion(some, CLASSES).size < picture.size
    monkeypatch.setattr(class_tables, "MOST_CLASSES", 9)
    images = replace(images, classes=images.classes[:9])
    write_tables(tmp_path, some, images)
    assert table(tmp_path / "confusion.csv")[0][1:] == images.classes, "a matrix for the most classes"


def test_sheets_show_equal_pictures_once_with_their_number(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(9, 8, 8), dtype=np.uint8)
    pixels[[2, 5]] = pixels[1]
    images = arrays_with(pixels, np.zeros(9, np.int64), ["a", "b"], Pixels(1), "made up")
    results = made_up(np.zeros(9, int), np.array([1, 1, 1, 1, 1, 1, 0, 0, 0]), 2)
    data = small_config(tmp_path, "DATA.CROP_PCT=1").DATA
    captions = [caption for _, caption in tiles_of(draw_mistakes(results, images, data))]
    names = [f"made up image #{number}" for number in (0, 1, 3, 4)]
    texts = [["label: a (50.0%)", "model: b (50.0%)", name] for name in names]
    assert captions == [texts[0], [*texts[1], "3 equal images"], *texts[2:]]


@pytest.mark.parametrize("name", ["abcd", "a long name"])
def test_names_below_the_confusion_matrix_are_upright_if_they_fit(name):
    results = made_up(np.array([0, 1, 1]), np.array([0, 1, 0]), 2)
    heights = [draw_confusion(results, [*names]).height for names in ((name, "1"), ("x", "1"))]
    assert (heights[0] == heights[1]) == (name == "abcd")


def test_processes_without_images_gather_empty_results():
    def empty(process: Process) -> ImageResults:
        tally = ClassTally(CPU, torch.float64, num_images=300)
        tally.add(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 0)
        tally.result(process)
        return tally.per_image.gather(process)

    assert all(len(each.indices) == 0 and each.counts.shape == (3, 4) for each in Threads(3).run(empty))


def test_result_tables_are_valid_only_if_complete_and_for_the_same_weights(tmp_path, monkeypatch):
    images = arrays_with(np.zeros((2, 8, 8), np.uint8), np.array([0, 1]), ["a", "b"], Pixels(1), "made up")
    numbers, shares = np.array([0, 1]), np.full(2, 0.5, np.float32)
    results = ImageResults(numbers, np.ones((3, 2), int), None, None, numbers, numbers, shares, shares)
    files = ResultFiles(tmp_path, images, Lines(), small_config(tmp_path).DATA)
    files.write(results, Best(50.0, 1), with_pictures=False)
    assert files.belong_to(Best(50.0, 1), with_pictures=False)
    for other in (Best(50.0, 2), Best(50.0, 1, 0.5), Best(50.0, 1, 0.0, "_ema"), Best(50.0, 1, 0.0, "", 9)):
        assert not files.belong_to(other, with_pictures=False)
    assert not files.belong_to(Best(50.0, 1), with_pictures=True)
    files.write(results, Best(50.0, 1), with_pictures=True)
    assert files.belong_to(Best(50.0, 1), with_pictures=True)
    trainer = SimpleNamespace(process=Process(CPU), best=Best(60.0, 2), parts={})
    best = BestResults(small_config(tmp_path), tmp_path, images, Lines(), trainer)
    for trainer.best in (Best(60.0, 2), Best(70.0, 3)):
        best.on_epoch_end(trainer, SimpleNamespace(images=results))
    trainer.best = Best(60.0, 2)  # saving best.pth of the third epoch failed
    best.close()
    assert files.belong_to(Best(60.0, 2), with_pictures=False)
    monkeypatch.setattr(engine.report.image_results, "write_table", Mock(side_effect=OSError("no room")))
    files.write(results, Best(60.0, 2), with_pictures=False)
    assert not files.belong_to(Best(50.0, 1), with_pictures=False)


class Unranked(str):
    """Stands in for the results of an epoch, which have a name here, and whose ranking is not computed yet."""

    is_complete = False


def test_best_results_are_written_at_most_once_a_minute(tmp_path, monkeypatch):
    now, written, trainer = [0.0], [], SimpleNamespace(best=Best(), process=Process(CPU), parts={})
    monkeypatch.setattr("engine.report.image_results.time.monotonic", lambda: now[0])

    def write(files, images, best, with_pictures, calibration, calibrated) -> None:
        written.append((now[0], images, best.epoch, with_pictures))
        now[0] += 2.0

    monkeypatch.setattr(ResultFiles, "write", write)
    results = BestResults(small_config(tmp_path, "REPORT=true"), tmp_path, make_images(), log := Lines(), trainer)
    for epoch, (now[0], is_best) in enumerate(((59, True), (61, False), (261, True), (264, True), (463.5, False)), 1):
        trainer.best = Best(50.0 + epoch, epoch) if is_best else trainer.best
        results.on_epoch_end(trainer, EpochResult(None, {}, 0, 0.0, 0.0, Unranked(f"of {epoch}") if is_best else None))
    assert written == [(61, "of 1", 1, False), (264, "of 4", 4, False)]
    trainer.best = Best(53.0, 3)  # saving best.pth of a later epoch failed
    results.close()
    assert written[2:] == [(463.5, "of 3", 3, True)]
    trainer.best = Best(99.0, 9)
    results.complete(pytest.fail, pytest.fail)
    assert len(log.warned) == 1 and str(tmp_path / "best.pth") in log.warned[0], "best.pth is missing"
    torch.save({}, tmp_path / "best.pth")
    results.complete(pytest.fail, pytest.fail)
    assert len(log.warned) == 2, "best.pth is of another program"


WRONG_LABELS = (3, 18, 40, 61, 85)
TABLES = ("predictions.csv", "per_class.csv", "confusion.csv")
SHORT = ("-epochs", "1", "-batch_size", "160")
PICTURES = ("confusion.png", "mistakes.png", "train_batch.png")


def start(yaml, output, *options, **faults):
    words = ["-cfg", str(yaml), "-output", str(output), *options]
    return typed("main_single_gpu.py", *words, faults=faults)


def tables(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_record_of_a_loss_that_is_not_finite_is_json_and_equals_itself(value):
    record = record_of(Best(50.0, 3, value, "", 40))
    assert "loss" not in json.loads(to_json(record)) and record == record_of(Best(50.0, 3, value, "", 40))


@pytest.fixture(scope="module")
def mislabelled(tmp_path_factory):
    """Return the folder of a run whose validation set has five wrong labels."""
    folder = tmp_path_factory.mktemp("mislabelled")
    (folder / "conv.yaml").write_text(CONVOLUTIONS.replace("IMAGE_SIZE: 8", "IMAGE_SIZE: 16"))
    start(folder / "conv.yaml", folder / "o", "-epochs", "6", "-opts", "REPORT=true", mislabel=WRONG_LABELS).done()
    return run_folder(folder / "o")


@pytest.mark.long
def test_planted_wrong_labels_are_among_the_most_certain_mistakes(mislabelled):
    rows = rows_of(mislabelled / "predictions.csv")
    planted = {rows[index]["image"] for index in WRONG_LABELS}
    wrong = [row for row in rows if row["label"] != row["prediction"]]
    with Image.open(mislabelled / "mistakes.png") as sheet:
        assert sheet.width > 900 and sheet.height > 150
        shown = {caption[-1] for _, caption in tiles_of(sheet)}
    assert planted <= shown <= {row["image"] for row in wrong} and len(shown) == min(36, len(wrong))
    record, status = json.loads((mislabelled / "results.json").read_text()), status_of(mislabelled)
    assert len(rows) == 90 and status["best_top1"] == pytest.approx(100 * (90 - len(wrong)) / 90)
    assert (record["epoch"], record["value"]) == (status["best_epoch"], status["best_top1"])
    assert set(record["per_class"]) == {str(digit) for digit in range(10)}, "the end of the run ranks the images"
    last = epochs_of(mislabelled)[record["epoch"] - 1]
    suffix = "_ema" if record["weights"] == "ema" else ""
    assert last[f"eval_top1{suffix}"] == max(last["eval_top1"], last["eval_top1_ema"])
    assert last[f"eval_top1{suffix}"] == pytest.approx(record["value"], abs=1e-4)
    assert all((mislabelled / name).exists() for name in PICTURES)


def test_evaluating_best_pth_writes_the_same_tables(mislabelled, tmp_path):
    flags = ["-eval", "-pretrained", str(mislabelled / "best.pth"), "-output", str(tmp_path / "o")]
    typed("main_single_gpu.py", *flags, faults={"mislabel": list(WRONG_LABELS)}).done()
    assert tables(run_folder(tmp_path / "o")) == tables(mislabelled)


@pytest.mark.long
def test_resumed_run_writes_the_result_tables_missing_after_a_kill(tmp_path, small_yaml):
    mixed = [*SHORT, "-opts", "TRAIN.MIXUP_ALPHA=0.8", "TRAIN.RANDOM_ERASE_PROB=0.5", "TRAIN.MODEL_EMA=true"]
    assert start(small_yaml, tmp_path / "whole", *mixed).returncode == 0
    whole = run_folder(tmp_path / "whole")
    assert not any((whole / name).exists() for name in PICTURES), "REPORT is false"
    with_pictures = [*mixed, "REPORT=true"]
    killed = start(small_yaml, tmp_path / "o", *with_pictures, kill_before_results=[])
    assert killed.returncode == -signal.SIGKILL
    folder = run_folder(tmp_path / "o")
    assert (folder / "train_batch.png").exists() and not (folder / "predictions.csv").exists()
    start(small_yaml, tmp_path / "o", "-resume", "auto", *with_pictures).done()
    assert run_hash(folder) == run_hash(whole)
    assert tables(folder) == tables(whole) and (folder / "mistakes.png").exists()


@pytest.mark.long
def test_signal_at_the_end_of_a_run_leaves_out_rankings_until_it_is_resumed(tmp_path, small_yaml):
    words = [*SHORT, "-opts", "REPORT=true"]
    ended = start(small_yaml, tmp_path / "o", *words, signal_at_ranking=[int(signal.SIGTERM)])
    assert ended.returncode == 0, "all epochs are trained and saved"
    folder = run_folder(tmp_path / "o")
    assert status_of(folder)["state"] == "done" and "per_class" not in json.loads((folder / "results.json").read_text())
    assert not (folder / "mistakes.png").exists() and not (folder / "report.html").exists()
    start(small_yaml, tmp_path / "o", "-resume", "auto", *words).done()
    assert len(json.loads((folder / "results.json").read_text())["per_class"]) == 10
    assert (folder / "mistakes.png").exists() and (folder / "report.html").exists()


@pytest.mark.long
@pytest.mark.parametrize(("calibrates", "num_opened"), [("true", 0), ("false", 2)])
def test_run_reads_best_pth_at_most_once(tmp_path, small_yaml, calibrates, num_opened):
    reads = tmp_path / "reads.txt"
    reads.touch()
    words = [*SHORT, "-opts", "REPORT=true", f"CALIBRATE={calibrates}"]
    start(small_yaml, tmp_path / "o", *words, list_reads=["best.pth", str(reads)]).done()
    assert len(reads.read_text().splitlines()) == num_opened  # a read opens the file twice, to check it first
    folder = run_folder(tmp_path / "o")
    assert (folder / "best.pth").samefile(folder / "last.pth"), "the end of the run does not write it again"
