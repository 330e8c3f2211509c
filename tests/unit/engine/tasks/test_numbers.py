"""Scores of predicted numbers match scikit-learn, SciPy and simulations; the task's head, captions and answers."""

import dataclasses
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from configs.schema import Config
from datasets import Mixed
from datasets.copies import contradictions
from datasets.index import Texts
from engine.evaluation.best import Best
from engine.features.compute import why_not_fitted
from engine.features.linear import LIKE_CONSTANT, SHARES, fit_ridge
from engine.labelling.data import DataSet
from engine.predict.guesses import Measure
from engine.predict.output import as_csv
from engine.predict.predictor import Prediction
from engine.tasks.number_figures import FIGURES, grouped_half_widths, half_widths, measure_errors
from engine.tasks.number_limits import groups_and_limits
from engine.tasks.numbers import NumberTask
from engine.train.loss import build_loss
from tests.support.configs import CPU, replaced
from tests.support.number_rows import images_with, number_settings, write_rows
from tests.support.properties import examples
from tests.support.threads import Threads
from utils.distributed import Process

NAN, INF = math.nan, math.inf


def config_of(mean: tuple[float, ...] = (), deviation: tuple[float, ...] = (), **train) -> Config:
    return replaced(number_settings(), TRAIN=train, DATA={"TARGET_MEAN": mean, "TARGET_STD": deviation})


# --- figures and their intervals ---


@st.composite
def pairs(draw) -> tuple[np.ndarray, np.ndarray]:
    """Draw true numbers, some of them missing, and predicted ones. With few decimals there are ties."""
    count, decimals = draw(st.integers(1, 60)), draw(st.sampled_from([0, 1, 9]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    true = draw(st.sampled_from([0, 500])) + rng.standard_normal(count)
    predicted = draw(st.sampled_from([-1, 0.1, 1])) * true + rng.standard_normal(count)
    true[rng.random(count) < draw(st.sampled_from([0, 0.3]))] = NAN
    return true.round(decimals), predicted.round(decimals)


@pytest.mark.slow
@given(pairs(), st.floats(-10, 500))
@examples(100)
def test_figures_of_present_numbers_equal_scikit_learns_and_scipys(drawn, mean):
    found, known = measure_errors(*drawn, mean), ~np.isnan(drawn[0])
    true, predicted = (each[known] for each in drawn)
    expected = dict.fromkeys(found, NAN)
    if len(true):
        same = np.full(len(true), mean)
        expected |= {"mae": mean_absolute_error(true, predicted), "rmse": root_mean_squared_error(true, predicted)}
        expected |= {
            "mae_of_mean": mean_absolute_error(true, same),
            "rmse_of_mean": root_mean_squared_error(true, same),
        }
    if len({*true}) > 1:
        expected["r2"] = r2_score(true, predicted)
        if len({*predicted}) > 1:
            expected["spearman"] = stats.spearmanr(true, predicted).statistic
    assert {*FIGURES} < found.keys()
    assert {name: each.value for name, each in found.items()} == pytest.approx(
        expected, rel=1e-6, abs=1e-6, nan_ok=True
    )
    for figure in FIGURES:
        value, low, high = found[figure]
        assert low <= value + 1e-9 and value <= high + 1e-9 or math.isnan(low), figure


@pytest.mark.long
@pytest.mark.parametrize("count, fewest", [(10, 0.87), (20, 0.9), (200, 0.92)])
@pytest.mark.parametrize("correlation", [0.3, 0.95])
def test_intervals_have_the_figure_of_all_images_in_95_percent(correlation, count, fewest):
    """The true number is the predicted one plus an error; its variance is 1."""
    rng, num_draws = np.random.default_rng(0), 1000
    deviation = math.sqrt(1 - correlation**2)
    of_all = {
        "mae": deviation * math.sqrt(2 / math.pi),
        "rmse": deviation,
        "r2": correlation**2,
        "spearman": 6 / math.pi * math.asin(correlation / 2),
    }
    predicted = correlation * rng.standard_normal((num_draws, count))
    true = predicted + deviation * rng.standard_normal((num_draws, count))
    found = [measure_errors(*rows, 0.0) for rows in zip(true, predicted, strict=True)]
    for figure, value in of_all.items():
        share = np.mean([each[figure].low <= value <= each[figure].high for each in found])
        assert fewest <= share <= 0.98, figure
    assert all(each["r2"].high <= 1 and each["rmse"].low > 0 for each in found)


def test_figures_of_too_few_images_have_no_interval():
    one = measure_errors(np.array([3.0, NAN]), np.array([5.0, 1.0]), 4.0)
    assert {name: each.record for name, each in one.items()} == {
        "mae": [2, None, None],
        "rmse": [2, None, None],
        "r2": [None] * 3,
        "spearman": [None] * 3,
        "mae_of_mean": [1, None, None],
        "rmse_of_mean": [1, None, None],
    }
    three = measure_errors(np.array([1.0, 2, 3]), np.array([5.0, 7, 6]), 4.0)
    assert three["spearman"].value == 0.5
    assert {tuple(three[name].record[1:]) for name in ("spearman", "rmse", "r2")} == {(None, None)}
    for count in (2, 9, 40):  # in perfect order
        assert measure_errors(np.arange(count), np.arange(count) ** 3, 0.0)["spearman"].record == [1, None, None]
    none = measure_errors(np.array([NAN]), np.array([1.0]), 4.0)
    assert none.keys() == one.keys() and all(each.record == [None] * 3 for each in none.values())


# --- intervals of predictions ---


@pytest.mark.parametrize("count", [50, 200, 1000])
def test_prediction_intervals_have_nine_of_ten_new_numbers(count):
    """Each of 1,000 columns is a validation set, whose normal errors are up to the width with probability erf."""
    errors = np.abs(np.random.default_rng(0).standard_normal((count, 1000)))
    shares = special.erf(np.array(half_widths(errors, 0.9)) / math.sqrt(2))
    noise = 3 * shares.std(ddof=1) / math.sqrt(1000)
    assert 0.9 - noise <= shares.mean() <= 0.9 + 1 / (count + 1) + noise


@pytest.mark.parametrize("count", [3, 7, 12])
def test_intervals_by_group_have_nine_of_ten_numbers_of_new_groups(count):
    """Each of 1,000 columns is a validation set. The errors of a group share a part; groups have 5 to 60 images."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(count), rng.integers(5, 60, count))
    errors = rng.standard_normal((count, 1000))[groups] + rng.standard_normal((len(groups), 1000))
    shares = special.erf(np.array(grouped_half_widths(np.abs(errors), 0.9, groups)) / 2)  # the variance is 2
    assert 0.88 <= shares.mean() <= 0.97


def test_interval_of_few_groups_is_wider_than_their_largest_error():
    errors = np.arange(1, 6, dtype=np.float64)[:, None]
    (width,) = grouped_half_widths(errors, 0.9, np.arange(5))
    assert 5 < width < 7


def test_calibration_by_group_tells_how_many_groups_it_uses():
    task, errors = NumberTask(config_of()), np.arange(30, dtype=np.float32)[:, None]
    groups = np.arange(30) // 10
    found = task.calibrate((errors, np.zeros_like(errors), groups))
    assert found["num_groups"] == 3 and found["interval"][0] > 1.4 * 26
    assert "3 groups with 30 validation images; so few groups" in task.describe_answers(found)
    few = task.calibrate((errors, np.zeros_like(errors), groups.clip(1)))
    assert "30 validation images of 2 groups are too few" in few["reason"]


def test_fewer_than_nine_numbers_give_no_interval():
    errors = np.arange(10.0)[:, None].repeat(3, 1)
    errors[[4, 5], 1], errors[4, 2] = NAN, NAN
    assert half_widths(errors, 0.9) == [9, None, 9]
    task = NumberTask(config_of((0.0,), (2.0,)))
    outputs = np.arange(9, dtype=np.float32)[:, None]
    found = task.calibrate((outputs, np.zeros_like(outputs)))
    assert (found["interval"], found["share"], found["num_images"]) == ([16.0], 0.9, 9)  # the largest, in units
    few = task.calibrate((outputs[:8], np.zeros_like(outputs[:8])))
    assert "8 validation images" in few["reason"] and "interval" not in few
    assert task.describe_answers(few) == ""


def test_exact_predictions_have_an_interval_of_no_width():
    outputs = np.arange(20, dtype=np.float32)[:, None]
    assert NumberTask(config_of((0.0,), (2.0,))).calibrate((outputs, outputs))["interval"] == [0.0]


@pytest.mark.parametrize(
    "train, chose",
    [
        ({"NUM_EPOCHS": 1}, False),
        ({"NUM_EPOCHS": 2}, True),
        ({"NUM_EPOCHS": 1, "MODEL_EMA": True}, True),
    ],
)
def test_answer_says_whether_validation_images_chose_the_weights(train, chose):
    config = replaced(config_of(**train), MODEL={"NEW_CLASSIFIER": "random"})
    outputs = np.arange(30, dtype=np.float32)[:, None]
    for settings, expected in ((config, chose), (replaced(config, MODEL={"NEW_CLASSIFIER": "linear"}), True)):
        found = NumberTask(settings).calibrate((outputs, outputs[::-1]))
        text = NumberTask(settings).describe_answers(found)
        assert found["chose_weights"] is expected and ("chose the weights" in text) is expected
        assert "90%" in text and "30 validation images" in text


# --- the scores of an evaluation ---

MEAN, DEVIATION = (40.0, -2.0), (10.0, 0.5)


def outputs_and_targets(count: int = 53, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return standardized outputs and targets [N, 2]; a third of the second numbers are missing."""
    rng = torch.Generator().manual_seed(seed)
    targets = torch.randn(count, 2, generator=rng)
    outputs = 0.5 * targets + torch.randn(count, 2, generator=rng)
    targets[::3, 1] = NAN
    return outputs, targets


def evaluated(process: Process, outputs: torch.Tensor, targets: torch.Tensor, config: Config, size: int = 7):
    """Return the scores and the results of images that are dealt out to the processes in turn, in padded batches."""
    tally = NumberTask(config).tally(CPU, torch.float64, len(targets))
    share = np.arange(process.rank, len(targets), process.world_size)
    for part in [share[start : start + size] for start in range(0, len(share), size)] or [share]:
        padded = torch.cat((outputs[part], outputs.new_full((2, outputs.shape[1]), 99.0)))
        tally.add(padded, targets[part], num_excluded=0)
    tally.add(outputs[:1], targets[:0], num_excluded=2)  # a batch without readable images
    tally.per_image.indices = share
    scores = tally.result(process)
    return scores, tally.per_image.gather(process)


@pytest.mark.parametrize("loss", ["smooth_l1", "l1", "mse"])
def test_scores_are_means_over_the_outputs_in_the_units_of_the_data(loss):
    outputs, targets = outputs_and_targets()
    config = config_of(MEAN, DEVIATION, LOSS=loss)
    scores, results = evaluated(Process(CPU), outputs, targets, config)
    true, predicted = (
        (each.double() * torch.tensor(DEVIATION) + torch.tensor(MEAN)).numpy() for each in (targets, outputs)
    )
    figures = [measure_errors(*columns) for columns in zip(true.T, predicted.T, MEAN, strict=True)]
    for name in (*FIGURES, "mae_of_mean"):
        assert getattr(scores, name) == pytest.approx(np.mean([each[name].value for each in figures]), rel=1e-6)
    low, high = (np.mean([each["mae"][side] for each in figures]) for side in (1, 2))
    assert (scores.mae_low, scores.mae_high) == pytest.approx((low, high), rel=1e-6)
    assert scores.loss == pytest.approx(build_loss(config, None)(outputs, targets).item(), rel=1e-6)
    assert math.isnan(scores.top1) and scores.num_images == 53
    np.testing.assert_allclose(results.true, true, rtol=1e-6)
    np.testing.assert_allclose(results.predicted, predicted, rtol=1e-6)


def test_output_without_a_score_is_left_out_of_the_mean():
    """All images have the same first number, so it has no R2 and no rank correlation, and none has the third."""
    outputs, targets = outputs_and_targets()
    targets[:, 0], third = 0.5, torch.full((53, 1), NAN)
    config = config_of((*MEAN, 0.0), (*DEVIATION, 1.0))
    found, results = evaluated(
        Process(CPU), torch.cat((outputs, torch.ones(53, 1)), 1), torch.cat((targets, third), 1), config
    )
    first, second, _ = results.measured
    assert math.isnan(first["r2"].value) and math.isnan(first["spearman"].value)
    assert (found.r2, found.spearman) == (second["r2"].value, second["spearman"].value)
    assert found.mae == pytest.approx((first["mae"].value + second["mae"].value) / 2)


def figures_of(scores) -> tuple[dict[str, float], dict]:
    """Return the scores that are numbers, and all others."""
    fields = dataclasses.asdict(scores)
    others = {name: value for name, value in fields.items() if value is None or isinstance(value, str)}
    return {name: value for name, value in fields.items() if name not in others}, others


@pytest.mark.parametrize("world_size", [2, 3, 60])
def test_scores_are_the_same_for_any_number_of_processes(world_size):
    given = *outputs_and_targets(), config_of(MEAN, DEVIATION)
    alone, results = evaluated(Process(CPU), *given)
    found = Threads(world_size).run(lambda process: evaluated(process, *given))
    for scores, of_images in found:
        expected, others = figures_of(replace(alone, num_excluded=2 * world_size))
        assert figures_of(scores) == (pytest.approx(expected, rel=1e-12, nan_ok=True), others)
        assert of_images.indices.tolist() == [*range(53)]
        np.testing.assert_array_equal(of_images.predicted, results.predicted)
        np.testing.assert_array_equal(of_images.true, results.true)
    assert len({repr(scores) for scores, _ in found}) == 1


def test_unreadable_images_are_counted_but_not_scored():
    outputs, targets = outputs_and_targets()
    scores, _ = evaluated(Process(CPU), outputs, targets, config_of(MEAN, DEVIATION))
    assert (scores.num_images, scores.num_excluded) == (53, 2)
    text = scores.describe_all("EMA: ", "2 numbers")
    assert all(words in text for words in ("EMA: MAE ", "53 images", "2 numbers", "2 unreadable ones left out")), text
    assert f"95%: {scores.mae_low:.4g} to {scores.mae_high:.4g}; predicting the mean: {scores.mae_of_mean:.4g}" in text


def test_half_precision_outputs_are_scored_as_float32():
    outputs, targets = outputs_and_targets()
    config = config_of(MEAN, DEVIATION)
    half, _ = evaluated(Process(CPU), outputs.bfloat16(), targets, config)
    single, _ = evaluated(Process(CPU), outputs.bfloat16().float(), targets, config)
    assert repr(half) == repr(single)


ALL, IMAGE, OUTPUT = (slice(None), slice(None)), (5, 0), (slice(None), 1)
BROKEN = [(metric, value, ALL) for metric in ("mae", "rmse", "r2", "spearman", "loss") for value in (NAN, INF)]
BROKEN += [(metric, NAN, place) for metric in ("mae", "rmse", "r2") for place in (IMAGE, OUTPUT)]
BROKEN += [(metric, INF, place) for metric in ("r2", "spearman") for place in (IMAGE, OUTPUT)]


@pytest.mark.parametrize("metric, value, place", BROKEN)
def test_scores_with_an_output_that_is_not_finite_rank_last(metric, value, place):
    """They are worse than those of large errors."""
    outputs, targets = outputs_and_targets()
    broken = outputs.clone()
    broken[place] = value
    config, images = config_of(MEAN, DEVIATION), images_with(np.zeros((53, 2)))
    (bad, results), (poor, _) = (evaluated(Process(CPU), each, targets, config) for each in (broken, 50 - outputs))
    bad, poor = (replace(each, metric=metric) for each in (bad, poor))
    assert results.errors(images.classes, 5)[0] == 53
    assert [len([*rows]) for _, _, rows in results.tables(images)] == [53, 2]
    assert bad.rank < poor.rank and not Best.of(poor, 1, "").is_worse_than(bad)


# --- the results of images ---


def test_tables_have_the_exact_true_numbers_and_all_figures():
    values = np.array([[0.1, 3.0], [1e-7, NAN], [123456789.25, 5.0], [-4.0, 250.0]])
    images, task = replace(images_with(values), classes=["age", "ink"]), NumberTask(config_of())
    outputs = torch.tensor([[0.3, 1.0], [2.0, 2.0], [7.123456789, NAN], [1.0, -1e-9]])
    _, results = evaluated(Process(CPU), outputs, torch.from_numpy(values).float(), task.config)
    (name, header, rows), (other, columns, outputs) = results.tables(images)
    assert (name, other) == ("predictions.csv", "per_output.csv")
    assert header == ("image", "age", "age_predicted", "ink", "ink_predicted")
    assert [*rows] == [
        ["0.png", 0.1, 0.3, 3, 1],
        ["1.png", 1e-07, 2, "", 2],
        ["2.png", 123456789.25, 7.12346, 5, ""],
        ["3.png", -4, 1, 250, 0],  # rounded to a millionth of the deviation
    ]
    table = [dict(zip(columns, row, strict=True)) for row in outputs]
    assert [(row["output"], row["images"]) for row in table] == [("age", 4), ("ink", 3)]
    figures = results.figures(images)["per_output"]
    for row in table:
        for figure, found in figures[row["output"]].items():
            titles = [f"{figure}{end}" for end in ("", "_low", "_high") if f"{figure}{end}" in row]
            assert len(titles) == (1 if "of_mean" in figure else 3)
            for title, value in zip(titles, found, strict=False):
                assert row[title] == ("" if value is None else float(f"{value:.6g}"))
    assert table[0]["mae"] and table[1]["mae"] == "" and table[1]["mae_of_mean"]


def test_worst_images_are_those_with_the_largest_error_in_deviations():
    outputs = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 9.0], [0.0, -4.0]])
    targets = torch.tensor([[0.0, 0.5], [0.0, NAN], [NAN, NAN], [0.0, 0.0]])
    _, results = evaluated(Process(CPU), outputs, targets, config_of(MEAN, DEVIATION))
    expected = [(3, ["ink: -2", "model: -4"]), (1, ["age: 40", "model: 70"]), (0, ["ink: -1.75", "model: -2"])]
    assert results.errors(["age", "ink"], 10) == (4, expected)
    assert results.errors(["age", "ink"], 2) == (4, expected[:2])
    assert results.complete(Process(CPU), None).is_complete


# --- the start of a new head ---


def leave_one_out(features: np.ndarray, target: np.ndarray, penalty: float) -> float:
    """Return the mean squared error of each image by a ridge regression of the others with a free intercept."""
    errors = []
    for image in range(len(target)):
        others = np.arange(len(target)) != image
        weight, bias = ridge(features[others], target[others], penalty)
        errors.append((features[image] @ weight + bias - target[image]) ** 2)
    return float(np.mean(errors))


def ridge(features: np.ndarray, target: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    centred = features - features.mean(0)
    gram = centred.T @ centred + penalty * np.eye(features.shape[1])
    weight = np.linalg.solve(gram, centred.T @ (target - target.mean()))
    return weight, target.mean() - features.mean(0) @ weight


@pytest.mark.parametrize("num_images, num_features", [(40, 5), (15, 15), (12, 30)], ids=["tall", "square", "wide"])
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_ridge_equals_brute_force_with_the_best_penalty(num_images, num_features, noise):
    rng = np.random.default_rng(num_images)
    features = rng.standard_normal((num_images, num_features)) * 10 ** rng.uniform(-1, 1, num_features)
    features[:, 2] = 7.0  # a constant feature
    targets = 50 + features[:, :2] @ rng.standard_normal((2, 3)) + noise * rng.standard_normal((num_images, 3))
    targets[::4, 1] = NAN
    found = fit_ridge(torch.from_numpy(features), torch.from_numpy(targets))
    assert found.weight.shape == (3, num_features) and found.weight[:, 2].abs().max() < 1e-9
    chosen = []
    for target, weight, bias in zip(targets.T, found.weight.numpy(), found.bias.tolist(), strict=True):
        known = ~np.isnan(target)
        deviation = features[known].std(0)
        deviation = np.maximum(deviation, LIKE_CONSTANT * deviation.mean())
        scaled, target = features[known] / deviation, target[known]
        variance = np.square(scaled - scaled.mean(0)).sum() / len(target)
        chosen.append(min(SHARES, key=lambda share: leave_one_out(scaled, target, share * variance)))
        expected, expected_bias = ridge(scaled, target, chosen[-1] * variance)
        np.testing.assert_allclose(weight * deviation, expected, rtol=1e-6, atol=1e-8)
        assert bias == pytest.approx(expected_bias, rel=1e-6)
    assert (max(chosen) < 1) if (noise, num_images) == (0.1, 40) else True


@pytest.mark.slow
@pytest.mark.parametrize("is_missing, reason", [(False, ""), (True, "30 numbers with 30 patterns of missing ones")])
def test_many_patterns_of_missing_numbers_prevent_a_linear_start(is_missing, reason):
    """Each of 30 columns lacks the number of another image."""
    values = np.ones((20_000, 30))
    values[range(30), range(30)] = NAN if is_missing else 1.0
    plan = SimpleNamespace(train_set=images_with(values))
    trainer = SimpleNamespace(parallel=SimpleNamespace(is_sharded=False), task=NumberTask(number_settings()))
    found = why_not_fitted(plan, trainer, [torch.nn.Linear(1280, 30)])
    assert found.endswith(reason) and bool(found) == is_missing
    assert not is_missing or why_not_fitted(plan, trainer, [torch.nn.Linear(128, 30)]) == ""


def test_equal_features_or_a_single_number_predict_the_mean():
    targets = torch.tensor([[1.0, NAN], [2.0, NAN], [6.0, 5.0]])
    for features in (torch.ones(3, 4), torch.eye(3, 4)):
        found = fit_ridge(features, targets)
        assert found.weight.isfinite().all() and found.bias[1] == 5 and (found.weight[1] == 0).all()
    alike = fit_ridge(torch.ones(3, 4), targets)
    assert (alike.weight == 0).all() and alike.bias.tolist() == pytest.approx([3, 5])


def test_new_head_of_the_task_predicts_numbers_of_its_features():
    features = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    targets = features @ torch.tensor([[1.0, -2.0], [0.0, 3.0], [0.5, 0.0]]) + torch.tensor([4.0, 0.0])
    found = NumberTask(config_of()).fit_head(features, targets, 2)
    assert (features.double() @ found.weight.T + found.bias - targets).abs().max() < 0.2


# --- captions and answers ---


def test_captions_have_the_numbers_of_images_and_of_mixed_ones():
    task = NumberTask(config_of(MEAN, DEVIATION))
    first, second = (
        torch.tensor([[0.0, 1.0], [1.0, NAN], [NAN, NAN]]),
        torch.tensor([[2.0, 3.0], [2.0, 0.0], [0.0, 0.0]]),
    )
    assert task.captions(first, ["age", "ink"]) == ["age 40, ink -1.5", "age 50", "no number"]
    assert task.captions(torch.tensor([[-4.0000005, NAN]]), ["age", "ink"]) == ["age 0"], "the precision of float32"
    mixed = Mixed(first, second, torch.tensor([0.75, 0.5, 1.0]))
    assert task.captions(mixed, ["age", "ink"]) == ["age 45, ink -1.25", "age 55", "no number"]


def test_numbers_of_a_model_are_in_the_units_of_the_data():
    task, outputs = NumberTask(config_of(MEAN, DEVIATION)), torch.tensor([[1.0, 0.0], [-4.0, 2.0]])
    numbers = task.probabilities(outputs)
    assert numbers.tolist() == [[50, -2], [0, -1]]
    assert task.answers(numbers, 1) == [[(0, 50), (1, -2)], [(0, 0), (1, -1)]]
    assert NumberTask(config_of()).probabilities(outputs).equal(outputs)
    assert not task.are_right(outputs, outputs).any()
    before, after = numbers.double().numpy()
    assert task.cost(before, after).tolist() == [5, 2] and task.difference(before, after) == 5
    images = images_with(np.array([[3.0, NAN], [7.0, 8.0]])).take(np.array([1, 0]))
    assert task.truth(images, 0).tolist() == [7, 8] and task.describe_scored(images) == "2 numbers"


@pytest.mark.parametrize(("mean", "kept"), [(4e4, torch.float32), (1.7e9, torch.float64), (-1.7e9, torch.float64)])
def test_numbers_far_from_zero_keep_their_digits(mean, kept):
    numbers = NumberTask(config_of((mean, 0.0), (100.0, 1.0))).probabilities(torch.tensor([[0.25, 0.0], [-0.01, 1.0]]))
    assert numbers.dtype is kept
    assert numbers.double().numpy() == pytest.approx(np.array([[mean + 25, 0], [mean - 1, 1]]), rel=0, abs=0.01)


def test_measures_show_their_interval_if_there_is_one():
    sure, unsure = Measure(0, "age", 41.123456789, 2.5), Measure(1, "=ink\t", -1e-7, None)
    assert [each.line for each in (sure, unsure)] == ["age\t41.12\t38.62 to 43.62", "=ink\\t\t-1e-07"]
    assert (sure.caption, unsure.caption) == ("age 41.12", "=ink\t -1e-07")
    assert sure.cells == ["41.12346", "38.62346", "43.62346"] and unsure.cells == ["-1e-07"]
    assert sure.record == {
        "output": "age",
        "number": 0,
        "value": 41.123456789,
        "low": 38.623456789,
        "high": 43.623456789,
    }
    assert unsure.record == {"output": "=ink\t", "number": 1, "value": -1e-7}
    assert (
        Measure.titles([[sure, unsure]] * 2) == ["age", "age_low", "age_high", "'=ink\t"] and Measure.titles([]) == []
    )
    assert Measure(0, "age", 1.0, 0.0).line == "age\t1\t1 to 1"
    date = Measure(0, "time", 1700000123.4, 0.31)  # a large mean does not hide the number
    assert (date.line, date.cells[0]) == ("time\t1700000123.400\t1700000123.090 to 1700000123.710", "1700000123.4")


@pytest.mark.parametrize("value, half, ends", [(0.9, 0.4, "0.500 to 1.000"), (1.5, 0.2, "1.000 to 1.000")])
def test_interval_of_a_measure_ends_at_its_limits(value, half, ends):
    found = Measure(0, "share", value, half, (None, 1.0))
    assert found.line.endswith(f"\t{ends}") and found.record["high"] == 1.0
    assert Measure(0, "share", -value, half, (0.0, None)).bounds[0] == 0.0


@pytest.mark.parametrize(
    "smallest, others, groups, limits",
    [
        (5, [0.5], 0, [0.0, None]),
        (4, [0.5], 0, [None, None]),
        (5, [0.5, -1.0], 0, [None, None]),
        (5, [NAN], 0, [0.0, None]),
        (5, [0.5], 4, [None, None]),
        (5, [0.5], 5, [0.0, None]),
    ],
    ids=["often", "rare", "lower elsewhere", "missing elsewhere", "in few groups", "in many groups"],
)
def test_numbers_that_many_training_images_have_are_limits(smallest, others, groups, limits):
    """`smallest`: training images with 0; the other 200 have different numbers. `groups`: of all images."""
    values = np.concatenate((np.zeros(smallest), np.linspace(0.1, 1, 200)))
    train, val = images_with(values), images_with(np.array(others))
    config = replaced(number_settings(), DATA={"GROUP_BY": "family" if groups else ""})
    if groups:
        train = replace(train, groups=Texts.of([b"%d" % (number % groups) for number in range(len(values))]))
    found, facts = groups_and_limits(config, train, val)
    assert facts["limits"] == [limits] and (found is not None) == bool(groups)
    empty = images_with(np.full(9, NAN))
    assert groups_and_limits(number_settings(), empty, empty)[1]["limits"] == [[None, None]]


def test_negative_numbers_and_bounds_are_no_formulas_in_the_table_of_predict():
    measures = [Measure(0, "age", -3.0, 2.5), Measure(1, "ink", 0.5, None)]
    rows = as_csv([Prediction(0, "0.png", measures)], "").splitlines()
    assert rows == ["image_path,age,age_low,age_high,ink", "0.png,-3,-5.5,-0.5,0.5"]


# --- the settings of a run ---


def test_copies_with_other_numbers_are_told_apart_to_the_last_digit(tmp_path):
    rows = ["1234500", "1234503", "1234500", *map(str, range(30))]
    data = DataSet.load(number_settings(write_rows(tmp_path / "prices.csv", rows, "path,price")))
    of_name = {data.name(number): number for number in range(len(data))}
    one, other, same = (of_name[f"{number}.png"] for number in range(3))
    near_agree = data.val.meaning.near_copies_agree
    assert contradictions({one: one, other: one}, data.label, near_agree) == [(one, other), (other, one)]
    assert [data.label(number) for number in (one, other)] == ["price 1234500.0", "price 1234503.0"]
    assert contradictions({one: one, same: one}, data.label, near_agree) == []
    assert contradictions({one: one, other: other}, data.label, near_agree) == [], "near copies may have near numbers"
