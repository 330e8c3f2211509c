"""The metrics of images with several labels, against scikit-learn's and for any number of processes."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, recall_score

from engine.evaluation import tally as module
from engine.evaluation.tally import Tally
from engine.predict.classifier import load_classifier
from engine.predict.predictor import Predictor
from tests.support.configs import CPU
from tests.support.runs import epochs_of, run, run_folder, status_of
from tests.support.several_labels import write_digits
from tests.support.threads import Threads
from utils.distributed import Process

NUM_IMAGES, NUM_CLASSES = 403, 9


@pytest.fixture(scope="module")
def scored():
    """Logits with many equal values, and labels; the last class has no image, and is predicted all the same."""
    rng = torch.Generator().manual_seed(0)
    targets = (torch.rand(NUM_IMAGES, NUM_CLASSES, generator=rng) < torch.linspace(0.02, 0.6, NUM_CLASSES)).float()
    targets[:, -1] = 0
    logits = torch.randn(NUM_IMAGES, NUM_CLASSES, generator=rng) + 1.5 * targets - 0.5
    return (logits * 4).round() / 4, targets


def tally(process, logits, targets):
    """Scores as an evaluation counts them: each process has every so many images, in batches, at last perhaps an empty one."""
    found, share = Tally(CPU, torch.float64), torch.arange(process.rank, len(logits), process.world_size)
    for start in range(0, max(1, -(-len(logits) // process.world_size)), 67):
        part = share[start : start + 67]
        found.add(logits[part], targets[part], num_excluded=0)
    return found.result(process)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_map_recall_and_f1_are_scikit_learns(scored, monkeypatch, world_size):
    monkeypatch.setattr(module, "BYTES_ON_DEVICE", 5000)  # several moves to the host
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 5 * NUM_IMAGES * 2)  # two classes at once
    logits, targets = scored
    results = Threads(world_size).run(lambda process: tally(process, logits, targets))
    predicted, labels = (logits > 0).numpy(), np.flatnonzero(targets.any(0))
    assert len(labels) == NUM_CLASSES - 1 and predicted[:, -1].any()
    expected = {
        "map": average_precision_score(targets[:, labels], logits[:, labels], average="macro"),
        "macro_recall": recall_score(targets, predicted, labels=labels, average="macro"),
        "macro_f1": f1_score(targets, predicted, labels=labels, average="macro"),
        "micro_f1": f1_score(targets, predicted, average="micro"),
    }
    for scores in results:
        for name, value in expected.items():
            assert getattr(scores, name) == pytest.approx(100 * value, abs=1e-6), name
        assert scores.num_images == NUM_IMAGES
    assert len({each.map for each in results}) == 1


def test_top1_counts_images_whose_highest_score_is_one_of_their_labels(scored):
    logits, targets = scored
    scores = tally(Process(CPU), logits, targets)
    right = [bool(labels[row.topk(1).indices[0]]) for row, labels in zip(logits, targets, strict=True)]
    assert scores.top1 == pytest.approx(100 * np.mean(right))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), targets.double())
    assert scores.loss == pytest.approx(losses.item(), rel=1e-6)


def test_a_run_is_best_by_map_and_predict_prints_the_labels_above_one_half(tmp_path, small_yaml):
    file, _ = write_digits(tmp_path, 120)
    words = ["DATA.LABEL_SEPARATOR=|", "DATA.VAL_FRACTION=0.3", "TRAIN.NUM_EPOCHS=1", "TRAIN.BASE_LR=0.01"]
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-dataset", "csv", "-data_path", str(file)]
    run("main_single_gpu.py", *flags, "-opts", *words).done()
    folder = run_folder(tmp_path / "o")
    (row,), status = epochs_of(folder), status_of(folder)
    assert status["best"]["map"] == pytest.approx(row["eval_map"], abs=1e-3)
    assert row["eval_micro_f1"] is not None and row["eval_macro_f1"] is not None
    paths = [str(tmp_path / f"{number}.png") for number in range(40)]
    predictor = Predictor(load_classifier(folder / "best.pth"), Process(CPU))
    some, above = list(predictor(paths, top=4)), list(predictor(paths))
    assert [each.path for each in some] == paths and {len(each.guesses) for each in some} == {4}
    assert any(sum(guess.probability for guess in each.guesses) > 1.01 for each in some), "not of one class each"
    expected = [[guess for guess in each.guesses if guess.probability > 0.5] for each in some]
    assert [each.guesses for each in above] == expected


def test_without_labels_or_images_the_metrics_are_zero():
    for logits in (torch.zeros(3, 2), torch.zeros(0, 2)):
        scores = tally(Process(CPU), logits, torch.zeros_like(logits))
        assert (scores.map, scores.macro_recall, scores.macro_f1, scores.micro_f1) == (0, 0, 0, 0)
    scores = tally(Process(CPU), logits, torch.zeros(0, dtype=torch.int64))  # of one class an image
    assert (scores.top1, scores.loss, scores.macro_recall, scores.macro_f1, scores.num_images) == (0, 0, 0, 0, 0)
