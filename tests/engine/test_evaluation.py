"""Scores match counts in plain Python, image by image; multi-label scores match scikit-learn, for any number of processes."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from datasets import BadImages, Normalize, build_eval_data, load_image_sets
from datasets.sources.arrays import ArrayImages
from datasets.transforms.pixel_rules import PixelRules
from datasets.types import ImageReadError
from engine.evaluate_weights import evaluate_both
from engine.evaluation import all_scores as module
from engine.evaluation.all_scores import rank_class
from engine.evaluation.evaluate import evaluate
from engine.evaluation.tally import Tally
from engine.precision import Precision
from engine.predict.classifier import load_classifier
from engine.predict.predictor import Predictor
from tests.support.configs import CPU, small_config
from tests.support.refusals import assert_names
from tests.support.runs import ROOT, epochs_of, run, run_folder, run_fresh, status_of
from tests.support.several_labels import write_digits
from tests.support.threads import Threads
from tests.support.trainers import make_trainer, train
from utils.distributed import Process

pytestmark = pytest.mark.slow


class MeanColourModel(torch.nn.Module):
    """Logits that depend only on the image: how close its mean is to each class's shade."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.shades = torch.linspace(-1, 1, num_classes)

    def forward(self, images):
        return -10 * (images.mean((1, 2, 3))[:, None] - self.shades).abs()


class HalfLogits(MeanColourModel):
    """The same logits in bfloat16, as models return them under autocast."""

    def forward(self, images):
        return super().forward(images).bfloat16()


def score(tmp_path, num_classes, unreadable=(), kind=MeanColourModel, count=37):
    """Return our scores, and top-1, top-5 and loss counted by hand."""
    rng = np.random.default_rng(0)
    pixels = np.broadcast_to(rng.integers(256, size=(count, 1, 1), dtype=np.uint8), (count, 8, 8)).copy()
    targets = rng.integers(num_classes, size=count)
    images = ArrayImages(pixels, targets, [str(n) for n in range(num_classes)], PixelRules(1), "made up")
    read = images.read

    def read_or_fail(index):
        if index in unreadable:
            raise ImageReadError("broken")
        return read(index)

    images.read = read_or_fail
    config = small_config(tmp_path, "DATA.BATCH_SIZE=8")
    model = kind(num_classes)
    data = build_eval_data(config, images, Process(CPU))
    normalize, precision = Normalize(config.DATA), Precision(config, CPU)
    ((scores, _),) = evaluate(
        [model], data, normalize, precision, Process(CPU), BadImages(images, 1.0, lambda line: None)
    )
    top1 = top5 = loss = 0
    kept = [index for index in range(count) if index not in unreadable]
    for index in kept:
        logits = model(torch.full((1, 1, 8, 8), pixels[index, 0, 0] / 255 * 2 - 1.0))[0]
        ranked = sorted(range(num_classes), key=lambda number: -logits[number])
        top1 += ranked[0] == targets[index]
        top5 += targets[index] in ranked[:5]
        loss -= torch.log_softmax(logits.double(), 0)[targets[index]].item()
    return scores, 100 * top1 / len(kept), 100 * top5 / len(kept), loss / len(kept)


@pytest.mark.parametrize(
    ("num_classes", "unreadable", "kind"),
    [(10, (), MeanColourModel), (5, (), MeanColourModel), (3, (), MeanColourModel), (10, (0, 5, 36), HalfLogits)],
)
def test_loss_and_accuracy_match_a_manual_count(tmp_path, num_classes, unreadable, kind):
    scores, top1, top5, loss = score(tmp_path, num_classes, unreadable, kind)
    assert (scores.top1, scores.top5, scores.loss) == pytest.approx((top1, top5, loss), rel=1e-5)
    assert (scores.num_images, scores.num_excluded) == (37 - len(unreadable), len(unreadable))
    assert top1 < top5 and (top5 < 100 or num_classes <= 5)


# A program that loses the first image of each batch in evaluations.
LOSES_IMAGES = """
import sys
from engine.evaluation.tally import Tally
from main_single_gpu import main
from utils.program import exit_code

add = Tally.add
Tally.add = lambda tally, logits, targets, *more: add(tally, logits[1:], targets[1:], *more)
sys.exit(exit_code(main, sys.argv[1:]))
"""


def test_lost_image_ends_an_evaluation_even_with_asserts_disabled(tmp_path, small_yaml):
    (tmp_path / "loses.py").write_text(LOSES_IMAGES)
    words = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-epochs", "1"]
    environment = {"PYTHONOPTIMIZE": "1", "PYTHONPATH": str(ROOT)}
    ended = run_fresh(str(tmp_path / "loses.py"), *words, environment=environment)
    assert ended.returncode == 1, ended
    assert_names(ended.stderr, "AssertionError", "of 359 images")


@pytest.mark.parametrize("training", [True, False])
def test_scoring_uses_eval_mode_and_restores_training_mode(tmp_path, training):
    model, modes = MeanColourModel(10).train(training), []
    model.register_forward_pre_hook(lambda module, inputs: modes.append(module.training))
    score(tmp_path, 10, kind=lambda num_classes: model)
    assert set(modes[:5]) == {False} and model.training is training


def test_raw_and_ema_weights_are_scored_in_one_pass(tmp_path, monkeypatch):
    trainer, passes = make_trainer(small_config(tmp_path, "TRAIN.MODEL_EMA=true")), []
    eval_set = load_image_sets(trainer.config)[1]
    data, bad_images = build_eval_data(trainer.config, eval_set, Process(CPU)), BadImages(eval_set, 0.0, print)
    train(trainer)
    read = type(data).__iter__
    monkeypatch.setattr(type(data), "__iter__", lambda self: (passes.append(1), read(self))[1])
    both = evaluate_both(trainer, data, bad_images)
    assert len(passes) == 1
    for model, found in zip((trainer.model, trainer.ema.model), both.values(), strict=True):
        (alone,) = evaluate([model], data, trainer.prepare.normalize, trainer.precision, Process(CPU), bad_images)
        assert alone.scores.loss == found.scores.loss
    assert both[""].scores.loss != both["_ema"].scores.loss


def test_macro_recall_and_f1_match_scikit_learn():
    from sklearn.metrics import balanced_accuracy_score, f1_score

    rng = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(300, 20, generator=rng), torch.randint(3, 15, (300,), generator=rng)
    logits[torch.arange(300), targets] += 1.5
    tally = Tally(CPU, torch.float64, num_images=300)
    for part in (slice(0, 256), slice(256, 300), slice(300, 300)):  # the last part is that of a process without images
        tally.add(logits[part], targets[part], num_excluded=0)
    scores, predicted, present = tally.result(Process(CPU)), logits.argmax(1), targets.unique()
    assert len(present) == 12 and len(predicted.unique()) > 12, "classes without images must be predicted too"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns of these classes
        assert scores.macro_recall == pytest.approx(100 * balanced_accuracy_score(targets, predicted), abs=1e-6)
    f1 = f1_score(targets, predicted, labels=present, average="macro")
    assert scores.macro_f1 == pytest.approx(100 * f1, abs=1e-6)
    assert scores.num_images == 300


def test_non_finite_logits_count_as_wrong():
    logits = torch.tensor([[0, float("inf"), 0], [0, float("nan"), 0], [0, 1, 0]])
    tally = Tally(CPU, torch.float64, num_images=300)
    tally.add(logits, torch.ones(3, dtype=torch.int64), num_excluded=0)
    scores = tally.result(Process(CPU))
    assert (scores.top1, scores.top5) == pytest.approx((100 / 3, 100 / 3))


def test_evaluation_uses_batch_norm_statistics_of_rank_0(tmp_path):
    class Second(Process):
        """A process of a rank other than 0, whose statistics are not saved."""

        def broadcast(self, tensors):
            for tensor in tensors:
                tensor.fill_(1.0)

    config = small_config(tmp_path)
    rng = np.random.default_rng(0)
    images = ArrayImages(
        rng.integers(256, size=(9, 8, 8), dtype=np.uint8), rng.integers(2, size=9), ["a", "b"], PixelRules(1), "made up"
    )

    def loss(process: Process, mean: float) -> float:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2))
        torch.manual_seed(0)
        model[2].reset_parameters()
        model[1].running_mean.fill_(mean)
        data, normalize = build_eval_data(config, images, process), Normalize(config.DATA)
        precision = Precision(config, CPU)
        (found,) = evaluate([model], data, normalize, precision, process, BadImages(images, 1.0, pytest.fail))
        return found.scores.loss

    assert loss(Second(CPU), 5.0) == loss(Process(CPU), 1.0) != loss(Process(CPU), 5.0)


NUM_IMAGES, NUM_CLASSES = 403, 9


@pytest.fixture(scope="module")
def scored():
    """Return logits with many ties, and labels. The last class has no image, but is predicted."""
    rng = torch.Generator().manual_seed(0)
    targets = (torch.rand(NUM_IMAGES, NUM_CLASSES, generator=rng) < torch.linspace(0.02, 0.6, NUM_CLASSES)).float()
    targets[:, -1] = 0
    logits = torch.randn(NUM_IMAGES, NUM_CLASSES, generator=rng) + 1.5 * targets - 0.5
    return (logits * 4).round() / 4, targets


def tally(process, logits, targets):
    """Score like an evaluation: each process gets every world_size-th image, in batches; the last batch may be empty."""
    found, share = (
        Tally(CPU, torch.float64, num_images=300),
        torch.arange(process.rank, len(logits), process.world_size),
    )
    for start in range(0, max(1, -(-len(logits) // process.world_size)), 67):
        part = share[start : start + 67]
        found.add(logits[part], targets[part], num_excluded=0)
    return found.result(process)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_map_recall_and_f1_match_scikit_learn(scored, monkeypatch, world_size):
    from sklearn.metrics import average_precision_score, f1_score, recall_score

    monkeypatch.setattr(module, "BYTES_ON_DEVICE", 1000)
    moves, move = [], module.AllScores._move
    monkeypatch.setattr(module.AllScores, "_move", lambda scores: moves.append(scores) or move(scores))
    monkeypatch.setattr(module, "BYTES_AT_ONCE", 9 * NUM_IMAGES * 2)  # two classes at once
    logits, targets = scored
    results = Threads(world_size).run(lambda process: tally(process, logits, targets))
    assert len(moves) > 2 * world_size, "the device must not keep all scores until the end"
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


def test_large_evaluations_keep_no_scores(monkeypatch):
    monkeypatch.setattr("engine.evaluation.tally.MOST_SCORES", 299 * 4)
    found = Tally(CPU, torch.float64, num_images=300)
    found.add(torch.randn(300, 4), torch.zeros(300, dtype=torch.int64), num_excluded=0)
    assert found.per_image.scores is None


@pytest.mark.parametrize(
    ("scores", "positives", "expected"),
    [
        ([0.5, 0.2], [1, 1], (1.0, np.nan)),  # no image is outside the class
        ([np.nan, -1, -2], [0, 1, 1], (1.0, 1.0)),  # NaN ranks below any score
        ([3e38, np.inf, -np.inf, -3e38], [1, 0, 0, 1], ((1 / 2 + 2 / 3) / 2, 1 / 2)),
        *[([score] * 6, [1, 1, 0, 1, 0, 0], (0.5, 0.5)) for score in (0.0, np.inf, -np.inf, np.nan)],
    ],
)
def test_ranking_of_a_class_with_unusual_scores(scores, positives, expected):
    found = rank_class(np.array(scores), np.array(positives, dtype=bool))
    assert found == pytest.approx(expected, nan_ok=True)


def test_image_results_keep_only_top_100_and_true_labels():
    logits, targets = (torch.arange(300.0).roll(7).view(2, 150) - 50) / 60, torch.zeros(2, 150)
    targets[:, :10] = 1
    found = Tally(CPU, torch.float64, num_images=300)
    found.add(logits, targets, num_excluded=0)
    found.result(Process(CPU))
    found.per_image.indices = np.arange(2)
    results = found.per_image.gather(Process(CPU))
    for index, row in enumerate(logits.tolist()):
        best = sorted(range(150), key=lambda number: -row[number])[:100]
        kept = results.classes[results.images == index].tolist()
        assert set(kept) == {*range(10), *(number for number in best if row[number] > 0)}
        assert kept == sorted(kept, key=lambda number: -row[number])


def test_multi_label_top1_accepts_any_true_label(scored):
    logits, targets = scored
    scores = tally(Process(CPU), logits, targets)
    right = [bool(labels[row.topk(1).indices[0]]) for row, labels in zip(logits, targets, strict=True)]
    assert scores.top1 == pytest.approx(100 * np.mean(right))
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), targets.double())
    assert scores.loss == pytest.approx(losses.item(), rel=1e-6)


def test_multi_label_run_selects_by_map_and_predicts_labels_above_one_half(tmp_path, small_yaml):
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
    assert any(sum(guess.probability for guess in each.guesses) > 1.01 for each in some), (
        "an image may have several likely labels"
    )
    expected = [[guess for guess in each.guesses if guess.probability > 0.5] for each in some]
    assert [each.guesses for each in above] == expected


def test_scores_are_zero_without_labels_or_images():
    for logits in (torch.zeros(3, 2), torch.zeros(0, 2)):
        scores = tally(Process(CPU), logits, torch.zeros_like(logits))
        assert (scores.map, scores.macro_recall, scores.macro_f1, scores.micro_f1) == (0, 0, 0, 0)
    scores = tally(Process(CPU), logits, torch.zeros(0, dtype=torch.int64))  # one class per image
    assert (scores.top1, scores.loss, scores.macro_recall, scores.macro_f1, scores.num_images) == (0, 0, 0, 0, 0)
