"""The tables of an evaluation describe the better of two sets of weights."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.evaluation.evaluate import Evaluation
from engine.evaluation.scores import Scores
from engine.evaluation.tally import ImageResults, PerImage
from extras.report.image_results import leave_results
from tests.support.configs import small_config
from tests.support.trainers import Lines

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("metric, name", [("top1", "raw"), ("loss", "EMA")])
def test_evaluation_tables_use_the_better_of_raw_and_ema_weights(tmp_path, metric, name):
    gathered, numbers = [], np.zeros(1, int)
    results = ImageResults(*[numbers] * 5, np.ones((3, 1), int), PerImage())

    def part_of(prefix: str) -> SimpleNamespace:
        return SimpleNamespace(gather=lambda process: gathered.append(prefix) or results)

    found = {
        prefix: Evaluation(scores, part_of(prefix))
        for prefix, scores in {"": Scores(2, 60, 100, 9, 0), "EMA ": Scores(1, 50, 100, 9, 0)}.items()
    }
    plan = SimpleNamespace(config=small_config(tmp_path, f"TRAIN.BEST_METRIC={metric}"))
    leave_results(SimpleNamespace(process=SimpleNamespace(is_first=False), log=Lines()), plan, found)
    assert [each.strip() or "raw" for each in gathered] == [name]
