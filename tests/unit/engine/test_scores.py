"""Scores, the best epoch and the intervals of accuracies, compared with scipy and with definitions written out."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from engine.evaluation.best import Best
from engine.evaluation.image_test import ImageTest
from engine.evaluation.scores import Scores, confidence
from engine.tasks.numbers import NumberScores
from tests.support.properties import examples

METRICS = ["top1", "top5", "loss", "macro_recall", "macro_f1", "micro_f1", "map"]
VALUES = st.sampled_from([0.0, 25.0, 50.0, 100.0, math.nan, math.inf])


@pytest.mark.slow
@given(st.integers(0, 1100) | st.sampled_from([0, 1, 99, 100, 999, 1000]), st.floats(0, 1), st.sampled_from(METRICS))
@examples(200)
def test_accuracy_on_few_images_has_scipys_wilson_interval(total, share, metric):
    right = round(share * total)
    percent = 100 * right / max(total, 1)
    text, best = confidence(percent, total), Best(percent, 3, num_images=total, metric=metric).describe(False)
    assert bool(text) == (0 < total < 1000) and confidence(math.nan, total) == ""
    if text:
        assert (text in best) == (metric == "top1")
        level, *ends, count = re.findall(r"[\d.]+", text)
        digits = 0 if total < 100 else 1
        assert (level, int(count)) == ("95", total) and {len(end.partition(".")[2]) for end in ends} == {digits}
        wanted = binomtest(right, total).proportion_ci(method="wilson")
        assert [float(end) for end in ends] == pytest.approx(
            [100 * wanted.low, 100 * wanted.high], abs=0.51 / 10**digits
        )


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 200))
@examples(60)
def test_two_runs_on_the_same_images_are_compared_by_mcnemars_test(only_first, only_second, others):
    found = ImageTest(only_first + only_second + others, only_first, only_second)
    disagree = only_first + only_second
    assert found.p == pytest.approx(binomtest(only_first, disagree).pvalue if disagree else 1)
    # The gain of each image: -1, 1 or 0. Half an image is added to each of the four kinds, two of which gain nothing.
    gains, counts = np.array([-1, 1, 0]), np.array([only_first + 0.5, only_second + 0.5, others + 1.0])
    mean = np.average(gains, weights=counts)
    error = math.sqrt(np.average((gains - mean) ** 2, weights=counts) / counts.sum())
    assert found.interval == pytest.approx((100 * (mean - 1.96 * error), 100 * (mean + 1.96 * error)))
    assert found.value == pytest.approx(100 * (only_second - only_first) / found.num_images)


@st.composite
def scores(draw, metric: str) -> Scores:
    values = {name: draw(VALUES) for name in METRICS}
    return Scores(**values, num_images=draw(st.integers(1, 9)), num_excluded=0, metric=metric)


@pytest.mark.slow
@given(st.sampled_from(METRICS).flatmap(lambda metric: st.tuples(scores(metric), scores(metric))))
@examples(200)
def test_best_epoch_has_the_best_metric_then_the_smallest_loss(pair):
    one, other = pair
    gains = [-each.loss if each.metric == "loss" else getattr(each, each.metric) for each in pair]
    gains = [gain if math.isfinite(gain) else -math.inf for gain in gains]
    losses = [each.loss if math.isfinite(each.loss) else math.inf for each in pair]
    is_better = gains[1] > gains[0] or (gains[1] == gains[0] and losses[1] < losses[0])
    assert Best.of(one, 3, "").is_worse_than(other) == is_better == (one.rank < other.rank)
    assert type(replace(one, **{one.metric: np.float64(1)}).value) is float, "a checkpoint holds no numbers of numpy"
    assert Best().is_worse_than(one) and not Best().exists and Best.of(one, 3, "").exists
    copied = replace(one, **{name: float(str(getattr(one, name))) for name in METRICS})  # NaN is another object
    best, same = Best.of(one, 3, ""), Best.from_state(Best.of(copied, 3, "").state())
    assert best == same and {best: 1}[same] == 1, "processes and a resumed run compare best epochs, also with NaN"
    assert best not in (Best.of(one, 2, ""), Best.of(one, 3, "_ema"), Best())


def test_evaluation_whose_metric_is_minus_one_exists():
    start = Best.of(NumberScores(0.5, 0.0, 0.0, 9, 0, metric="loss"), 0, "")
    for value in (-1.0, 0.0, math.nan):
        best = Best.from_state([value, *start.state()[1:]])
        assert best.exists and best.epoch == 0 and best == start
    for none in ([], Best().state()):
        assert not Best.from_state(none).exists


@given(scores("top1"), st.sets(st.sampled_from(["macro_recall", "macro_f1", "micro_f1", "map"])))
@examples(40)
def test_figures_are_all_measured_metrics_and_counts(given, missing):
    known = Scores(**vars(given) | dict.fromkeys(missing))
    of_groups = {"num_groups", "top1_low", "top1_high"}
    assert {*known.figures()} == {*vars(given)} - missing - {"metric"} - of_groups
    assert {*replace(known, num_groups=7).figures()} == {*known.figures(), "num_groups"}
    assert {*known.more()} == {*METRICS} - missing - {"top1", "top5", "loss"}
