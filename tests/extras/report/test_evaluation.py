"""The tables of an evaluation describe the better of two sets of weights."""

from types import SimpleNamespace

import pytest

from engine.evaluation.evaluate import Evaluation
from engine.evaluation.scores import Scores
from extras.report.image_results import leave_results
from tests.support.configs import small_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("metric, name", [("top1", "raw"), ("loss", "EMA")])
def test_evaluation_tables_use_raw_or_ema_weights_with_better_metric(tmp_path, metric, name):
    gathered = []
    found = {
        prefix: Evaluation(scores, SimpleNamespace(gather=lambda process, prefix=prefix: gathered.append(prefix)))
        for prefix, scores in {"": Scores(2, 60, 100, 9, 0), "EMA ": Scores(1, 50, 100, 9, 0)}.items()
    }
    plan = SimpleNamespace(config=small_config(tmp_path, f"TRAIN.BEST_METRIC={metric}"))
    leave_results(SimpleNamespace(process=SimpleNamespace(is_first=False)), plan, found)
    assert [each.strip() or "raw" for each in gathered] == [name]
