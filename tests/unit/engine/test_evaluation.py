"""Scores match per-image counts in plain Python; multi-label scores match scikit-learn, for any number of processes."""

import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, recall_score, roc_auc_score
from torch import nn

from datasets import BadImages, Normalize, build_eval_data
from datasets.pixels import Pixels
from engine.evaluate_weights import evaluate_both
from engine.evaluation import all_scores as module
from engine.evaluation.all_scores import rank_class
from engine.evaluation.evaluate import Inference, evaluate
from engine.precision import Precision
from engine.predict.classifier import load_classifier
from engine.predict.predictor import Predictor
from engine.tasks.classes import ClassTally
from engine.tasks.labels import LabelTally
from tests.support.configs import CPU, small_config
from tests.support.image_sets import arrays_with, break_images
from tests.support.opened import open_sets
from tests.support.properties import examples
from tests.support.refusals import assert_names
from tests.support.runs import ROOT, epochs_of, run, run_folder, status_of, typed
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
    images = arrays_with(pixels, targets, [str(n) for n in range(num_classes)], Pixels(1), "made up")
    break_images(images, unreadable)
    config = small_config(tmp_path, "DATA.BATCH_SIZE=8")
    model = kind(num_classes)
    data = build_eval_data(config, images, Process(CPU))
    normalize, precision = Normalize(config.DATA), Precision(config, CPU)
    ((scores, _),) = evaluate(
        [model],
        data,
        Inference(normalize, precision, Process(CPU)),
        BadImages(images, 1.0, lambda line: None),
        ClassTally,
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
from engine.tasks.classes import ClassTally
from main_single_gpu import main
from utils.program import exit_code
from tests.support.image_sets import arrays_with, break_images

add = ClassTally.add
ClassTally.add = lambda tally, logits, targets, *more: add(tally, logits[1:], targets[1:], *more)
sys.exit(exit_code(main, sys.argv[1:]))
"""


def test_lost_image_ends_an_evaluation_even_with_asserts_disabled(tmp_path, small_yaml):
    (tmp_path / "loses.py").write_text(LOSES_IMAGES)
    words = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-epochs", "1", "-batch_size", "160"]
    environment = {"PYTHONPATH": str(ROOT)}
    ended = run(str(tmp_path / "loses.py"), *words, environment=environment, faults={"disable_asserts": []})
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
    eval_set = open_sets(trainer.config)[1]
    data, bad_images = build_eval_data(trainer.config, eval_set, Process(CPU)), BadImages(eval_set, 0.0, print)
    train(trainer)
    read = type(data).__iter__
    monkeypatch.setattr(type(data), "__iter__", lambda self: (passes.append(1), read(self))[1])
    both = evaluate_both(trainer, data, bad_images)
    assert len(passes) == 1
    for model, found in zip((trainer.model, trainer.ema.model), both.values(), strict=True):
        (alone,) = evaluate(
            [model],
            data,
            Inference(trainer.prepare.normalize, trainer.precision, Process(CPU)),
            bad_images,
            ClassTally,
        )
        assert alone.scores.loss == found.scores.loss
    assert both[""].scores.loss != both["_ema"].scores.loss


def test_non_finite_logits_count_as_wrong():
    logits = torch.tensor([[0, float("inf"), 0], [0, float("nan"), 0], [0, 1, 0]])
    tally = ClassTally(CPU, torch.float64, num_images=300)
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
    images = arrays_with(
        rng.integers(256, size=(9, 8, 8), dtype=np.uint8), rng.integers(2, size=9), ["a", "b"], Pixels(1), "made up"
    )

    def loss(process: Process, mean: float) -> float:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2))
        torch.manual_seed(0)
        model[2].reset_parameters()
        model[1].running_mean.fill_(mean)
        data, normalize = build_eval_data(config, images, process), Normalize(config.DATA)
        precision = Precision(config, CPU)
        (found,) = evaluate(
            [model],
            data,
            Inference(normalize, precision, process),
            BadImages(images, 1.0, pytest.fail),
            ClassTally,
        )
        return found.scores.loss

    assert loss(Second(CPU), 5.0) == loss(Process(CPU), 1.0) != loss(Process(CPU), 5.0)


@st.composite
def evaluations(draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw logits [N, C] and class numbers [N], or logits that tie and labels [N, C]. Some classes have no images."""
    count, classes = draw(st.integers(0, 40)), draw(st.integers(2, 8))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(count, classes, generator=rng)
    if draw(st.booleans()):
        targets = torch.randint(draw(st.integers(1, classes)), (count,), generator=rng)
        return logits + nn.functional.one_hot(targets, classes), targets
    labels = (torch.rand(count, classes, generator=rng) < torch.linspace(0, draw(st.floats(0, 1)), classes)).float()
    return (2 * logits + labels).round() / 2 + torch.arange(classes) / 1000, labels  # no ties within an image


def by_scikit_learn(logits: torch.Tensor, targets: torch.Tensor) -> tuple[dict[str, float], np.ndarray]:
    """Return the scores in percent, and the average precision and AUC of each class."""
    (count, classes), is_multi = logits.shape, targets.ndim == 2
    actual = (targets if is_multi else nn.functional.one_hot(targets, classes)).numpy() > 0
    best = np.argsort(-logits.numpy(), axis=1)
    predicted = logits.numpy() > 0 if is_multi else np.eye(classes)[best[:, 0]] > 0
    right, present = np.take_along_axis(actual, best, 1), np.flatnonzero(actual.any(0))
    loss = nn.functional.binary_cross_entropy_with_logits if is_multi else nn.functional.cross_entropy
    how = {"labels": present, "average": "macro", "zero_division": 0}
    confidences = (logits if is_multi else logits.double().log_softmax(1)).numpy()
    ranking = np.full((2, classes), np.nan)
    for number in present:
        ranking[0, number] = average_precision_score(actual[:, number], confidences[:, number])
        if not actual[:, number].all():
            ranking[1, number] = roc_auc_score(actual[:, number], confidences[:, number])
    scores = {
        "loss": loss(logits.double(), targets.double() if is_multi else targets).item() if count else 0,
        "top1": 100 * right[:, 0].mean() if count else 0,
        "top5": 100 * right[:, :5].any(1).mean() if count else 0,
        "macro_recall": 100 * recall_score(actual, predicted, **how) if len(present) else 0,
        "macro_f1": 100 * f1_score(actual, predicted, **how) if len(present) else 0,
    }
    if is_multi:
        scores["micro_f1"] = 100 * f1_score(actual, predicted, average="micro", zero_division=0) if count else 0
        scores["map"] = 100 * ranking[0, present].mean() if len(present) else 0
    return scores, ranking


@pytest.mark.long
@given(evaluations(), st.integers(1, 3), st.integers(1, 20), st.sampled_from([100, 2**26]))
@examples(80)
def test_scores_and_rankings_match_scikit_learn_for_any_number_of_processes(drawn, world_size, size, num_bytes):
    """Each process gets every world_size-th image, in batches. The last batch is that of a process without images."""
    logits, targets = drawn

    def score(process: Process) -> tuple:
        found, share = (
            (ClassTally if targets.ndim == 1 else LabelTally)(CPU, torch.float64, len(logits)),
            torch.arange(len(logits))[process.rank :: process.world_size],
        )
        for part in [*share.split(size), share[:0]]:
            found.add(logits[part], targets[part], num_excluded=1)
        return found.result(process), found.per_image.scores.ranking(process)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BYTES_ON_DEVICE", num_bytes)
        patched.setattr(module, "BYTES_AT_ONCE", num_bytes)
        results = Threads(world_size).run(score)
    expected, ranking = by_scikit_learn(logits, targets)
    for scores, of_classes in results:
        assert {name: getattr(scores, name) for name in expected} == pytest.approx(expected, abs=1e-4)
        assert scores.num_images == len(logits) and scores.num_excluded >= world_size
        np.testing.assert_allclose(np.array(of_classes), ranking, atol=1e-9)
    assert len({scores for scores, _ in results}) == 1


def test_scores_leave_the_device_before_they_fill_it(monkeypatch):
    monkeypatch.setattr(module, "BYTES_ON_DEVICE", 1000)
    found, on_device = module.AllScores(), weakref.WeakSet()
    for _ in range(10):
        scores = torch.randn(20, 9)  # 720 bytes
        on_device.add(scores)
        found.add(scores, torch.zeros(20, dtype=torch.int64))
        del scores
        assert len(on_device) < 2
    assert found.on_host()[0].shape == (200, 9)


def test_large_evaluations_keep_no_scores(monkeypatch):
    monkeypatch.setattr("engine.tasks.classes.MOST_SCORES", 299 * 4)
    found = ClassTally(CPU, torch.float64, num_images=300)
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
    found = LabelTally(CPU, torch.float64, num_images=300)
    found.add(logits, targets, num_excluded=0)
    found.result(Process(CPU))
    found.per_image.indices = np.arange(2)
    results = found.per_image.gather(Process(CPU))
    for index, row in enumerate(logits.tolist()):
        best = sorted(range(150), key=lambda number: -row[number])[:100]
        kept = results.classes[results.images == index].tolist()
        assert set(kept) == {*range(10), *(number for number in best if row[number] > 0)}
        assert kept == sorted(kept, key=lambda number: -row[number])


def test_multi_label_run_selects_by_map_and_predicts_labels_above_one_half(tmp_path, small_yaml):
    file, _ = write_digits(tmp_path, 120)
    words = ["DATA.LABEL_SEPARATOR=|", "DATA.VAL_FRACTION=0.3", "TRAIN.NUM_EPOCHS=1", "TRAIN.BASE_LR=0.01"]
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "o"), "-dataset", "csv", "-data_path", str(file)]
    typed("main_single_gpu.py", *flags, "-opts", *words).done()
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
