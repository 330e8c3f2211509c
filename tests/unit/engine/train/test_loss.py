"""The training loss: timm's values for every kind of target, class weights, and the same sum for every split."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy

from configs.schema import Config
from configs.tables import LOSSES, TASKS
from datasets import Mixed
from engine.tasks.classes import ClassTask
from engine.tasks.labels import LabelTask
from engine.train.loss import build_loss
from tests.support.configs import replaced, small_config
from tests.support.properties import examples
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


@st.composite
def batches(draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[float] | None]:
    """Draw logits of any type, class numbers or labels, the share of each mixed image, and class weights."""
    count, classes, generator = draw(st.integers(1, 7)), draw(st.integers(2, 9)), torch.Generator()
    generator.manual_seed(draw(st.integers(0, 1000)))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    logits = (4 * torch.randn(count, classes, generator=generator)).to(dtype)
    labels = torch.rand(count, classes, generator=generator).gt(0.5).float()
    targets = draw(st.sampled_from([labels, torch.randint(classes, (count,), generator=generator)]))
    shares = draw(st.sampled_from([None, torch.rand(count, generator=generator)]))
    weights = draw(st.none() | st.lists(st.floats(0.1, 8), min_size=classes, max_size=classes))
    return logits, targets, shares, weights


@pytest.mark.slow
@given(batches(), st.floats(0, 0.5), st.none() | st.floats(0.1, 0.9))
@examples(100)
def test_losses_match_timm_for_all_targets_and_class_weights(batch, smoothing, threshold):
    logits, targets, shares, weights = batch
    share = torch.ones(len(logits)) if shares is None else shares
    if targets.ndim == 1:
        soft = mixup_target(targets, logits.shape[1], lam=share[:, None], smoothing=smoothing)
    else:  # as in timm, but older versions do not mix labels
        soft = torch.lerp(targets.flip(0), targets, share[:, None]) * (1 - smoothing) + 0.5 * smoothing
    given_targets = targets if shares is None else Mixed(targets, targets.flip(0), shares)
    factors = torch.ones(logits.shape[1]) if weights is None else torch.tensor(weights)
    pairs = []
    if targets.ndim == 1:
        wanted = SoftTargetCrossEntropy()(logits.double(), factors * soft)
        pairs.append((loss_of(logits, given_targets, weights, LOSS="cross_entropy", SMOOTHING=smoothing), wanted))
    if threshold is None or (soft - threshold).abs().min() > 1e-5:  # else, rounding decides
        train = {"LOSS": "bce", "SMOOTHING": smoothing, "BCE_TARGET_THRESH": threshold}
        binary = BinaryCrossEntropy(0.0, threshold, pos_weight=factors.double())
        pairs.append((loss_of(logits, given_targets, weights, **train), binary(logits.double(), soft.double())))
    for found, wanted in pairs:
        assert found.dtype == torch.promote_types(logits.dtype, torch.float32)
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


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


NUMBERS = TASKS["numbers"].losses


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_a_mean_over_images(fixed, name):
    logits, targets, labels = fixed
    kinds = {"classes": targets, "labels": labels, "numbers": 3 * labels - 1}
    kinds = [kind for task, kind in kinds.items() if name in TASKS[task].losses]
    for each in (*kinds, mixed(kinds[0], 0.3)):
        whole = loss_of(logits, each, WEIGHTS, LOSS=name)
        parts = [loss_of(logits[part], take(each, part), WEIGHTS, LOSS=name) for part in (slice(0, 2), slice(2, 6))]
        torch.testing.assert_close(parts[0] / 3 + parts[1] * 2 / 3, whole)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_converts_half_logits_to_float32(fixed, name):
    logits, targets, labels = fixed
    half = loss_of(1000 * logits.half(), labels if name in NUMBERS else targets, LOSS=name)
    assert half.dtype == torch.float32 and math.isfinite(half)


@pytest.mark.parametrize("name, of_one", [("smooth_l1", [0.125, 1.5]), ("l1", [0.5, 2]), ("mse", [0.25, 4])])
def test_loss_of_numbers_is_torchs_and_leaves_missing_numbers_out(name, of_one):
    """The loss of an image is the sum over its numbers, divided by the number of outputs."""
    outputs = torch.tensor([[0.5, 1.0], [2.0, -7.0]], requires_grad=True)
    targets = torch.tensor([[0.0, math.nan], [0.0, math.nan]])
    loss = loss_of(outputs, targets, LOSS=name)
    assert loss.item() == pytest.approx(sum(of_one) / 2 / 2)
    loss.backward()
    assert outputs.grad.isfinite().all() and outputs.grad[:, 1].tolist() == [0, 0] != outputs.grad[:, 0].tolist()


@pytest.mark.parametrize("name", NUMBERS)
def test_mixed_images_have_the_mixed_number_or_none(name):
    outputs, first = torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0], [math.nan]])
    both = Mixed(first, torch.tensor([[-1.0], [1.0]]), torch.tensor([0.25, 0.5]))
    assert loss_of(outputs, both, LOSS=name) == loss_of(outputs, torch.tensor([[-0.25], [math.nan]]), LOSS=name)


@given(batches(), st.booleans())
@examples(60)
def test_hit_is_the_dominant_class_or_any_label_of_it(batch, has_two_heads):
    """The mean of two heads decides."""
    logits, targets, shares, _ = batch
    heads = (logits, logits.flip(1)) if has_two_heads else logits
    best = (torch.stack(heads).float().mean(0) if has_two_heads else logits).argmax(1).tolist()
    right = []
    for row, column in enumerate(best):
        dominant = targets if shares is None or shares[row] >= 0.5 else targets.flip(0)
        right.append(bool(dominant[row] == column if targets.ndim == 1 else dominant[row, column] > 0))
    task = (ClassTask if targets.ndim == 1 else LabelTask)(Config())
    assert (
        task.are_right(heads, targets if shares is None else Mixed(targets, targets.flip(0), shares)).tolist() == right
    )
