"""The training loss: timm's values for every kind of target, class weights, and the same sum for every split."""

import inspect
import math

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch.nn import functional

from configs.schema import Config
from configs.tables import LOSSES
from datasets import Mixed
from engine.train.loss import build_loss, hits
from tests.support.configs import replaced, small_config
from tests.support.trainers import make_trainer, update

B, C = 6, 5
WEIGHTS = [0.5, 1.0, 2.0, 4.0, 0.25]


@pytest.fixture
def fixed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits [B, C], class numbers [B] and multi-label targets [B, C]."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(B, C, generator=generator, dtype=torch.float64)
    labels = torch.rand(B, C, generator=generator).gt(0.4).float()
    return logits, torch.tensor([0, 3, 4, 1, 1, 2]), labels


def loss_of(logits, targets, weights=None, **train) -> torch.Tensor:
    return build_loss(replaced(Config(), TRAIN=train), weights)(logits, targets)


def mixed(targets: torch.Tensor, share: float) -> Mixed:
    """Mix targets as timm does: each image with the image at the same position from the end."""
    return Mixed(targets, targets.flip(0), torch.full((len(targets),), share))


def test_cross_entropy_matches_timm_with_smoothing_and_mixup(fixed):
    logits, targets, _ = fixed
    torch.testing.assert_close(
        loss_of(logits, targets, LOSS="cross_entropy", SMOOTHING=0.1), LabelSmoothingCrossEntropy(0.1)(logits, targets)
    )
    soft = mixup_target(targets, C, lam=0.3, smoothing=0.1).double()
    ours = loss_of(logits, mixed(targets, 0.3), SMOOTHING=0.1)
    torch.testing.assert_close(ours, SoftTargetCrossEntropy()(logits, soft), atol=1e-6, rtol=0)


@pytest.mark.skipif(
    "smooth_dense" not in inspect.signature(BinaryCrossEntropy).parameters,
    reason="older versions of timm have no multi-label loss",
)
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_binary_cross_entropy_matches_timm_for_all_targets(fixed, threshold):
    logits, targets, labels = fixed
    here = {"LOSS": "bce", "BCE_TARGET_THRESH": threshold, "SMOOTHING": 0.1}
    there = {"target_threshold": threshold}
    hard = BinaryCrossEntropy(smoothing=0.1, smooth_dense=True, **there)
    torch.testing.assert_close(loss_of(logits, targets, **here), hard(logits, targets))
    torch.testing.assert_close(loss_of(logits, labels, **here), hard(logits, labels.double()))
    soft = BinaryCrossEntropy(smoothing=0.1, **there)  # mixing already smooths
    for each, several in ((targets, False), (labels, True)):
        wanted = soft(logits, mixup_target(each, C, lam=0.3, smoothing=0.1, multi_label=several).double())
        torch.testing.assert_close(loss_of(logits, mixed(each, 0.3), **here), wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("train", [{}, {"SMOOTHING": 0.1}, {"LOSS": "bce"}])
def test_class_weighted_loss_is_averaged_over_images(fixed, train):
    logits, targets, _ = fixed
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    smoothing = train.get("SMOOTHING", 0.0)
    soft = torch.lerp(*(functional.one_hot(each, C).double() for each in (targets.flip(0), targets)), 0.25)
    soft = soft * (1 - smoothing) + smoothing / C
    if train.get("LOSS") == "bce":
        yes, no = (-functional.logsigmoid(side * logits) for side in (1, -1))
        wanted = (weights * soft * yes + (1 - soft) * no).sum() / (B * C)
    else:
        wanted = (weights * soft * -logits.log_softmax(1)).sum() / B
    torch.testing.assert_close(loss_of(logits, mixed(targets, 0.25), WEIGHTS, **train), wanted)
    split = sum(2 / B * loss_of(logits[start : start + 2], targets[start : start + 2], WEIGHTS) for start in (0, 2, 4))
    torch.testing.assert_close(split, loss_of(logits, targets, WEIGHTS))


def test_class_weighted_loss_stays_float32_and_unit_weights_do_not_change_it(fixed):
    logits, targets, labels = fixed
    for train, each in (({}, targets), ({"LOSS": "bce"}, targets), ({"LOSS": "bce"}, labels)):
        torch.testing.assert_close(loss_of(logits, each, [1.0] * C, **train), loss_of(logits, each, **train))
        half = loss_of(100 * logits.half(), each, WEIGHTS, **train)
        assert half.dtype == torch.float32 and math.isfinite(half)


def test_prediction_is_correct_if_it_matches_dominant_class_or_any_label(fixed):
    logits, targets, labels = fixed
    best = logits.argmax(1)
    assert hits(logits, targets).tolist() == best.eq(targets).tolist()
    wanted = [bool(labels[row, column]) for row, column in enumerate(best.tolist())]
    assert hits(logits, labels).tolist() == wanted and len(set(wanted)) == 2
    assert hits(logits, mixed(labels, 0.6)).tolist() == wanted
    assert hits(logits, mixed(labels.flip(0), 0.4)).tolist() == wanted


def test_training_uses_configured_loss_and_class_weights(tmp_path):
    (tmp_path / "weights.csv").write_text("".join(f"{number},3\n" for number in range(10)))
    weights = f"TRAIN.CLASS_WEIGHTS={tmp_path / 'weights.csv'}"
    loss, weighted, binary = (
        update(make_trainer(small_config(tmp_path, *options))).report().loss
        for options in ([], [weights], ["TRAIN.LOSS=bce"])
    )
    assert weighted == pytest.approx(3 * loss) and binary == pytest.approx(math.log(2), rel=0.1)


def take(targets: torch.Tensor | Mixed, part: slice) -> torch.Tensor | Mixed:
    if isinstance(targets, Mixed):
        return Mixed(targets.first[part], targets.second[part], targets.share[part])
    return targets[part]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_a_mean_over_images(fixed, name):
    logits, targets, labels = fixed
    for each in (targets, mixed(targets, 0.3), *([labels] if LOSSES[name].several_labels else [])):
        whole = loss_of(logits, each, WEIGHTS, LOSS=name)
        parts = [loss_of(logits[part], take(each, part), WEIGHTS, LOSS=name) for part in (slice(0, 2), slice(2, 6))]
        torch.testing.assert_close(parts[0] / 3 + parts[1] * 2 / 3, whole)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_converts_half_logits_to_float32(fixed, name):
    logits, targets, _ = fixed
    half = loss_of(1000 * logits.half(), targets, LOSS=name)
    assert half.dtype == torch.float32 and math.isfinite(half)
