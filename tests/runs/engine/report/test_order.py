"""The order in which a run's report and figures are closed."""

from unittest import mock

import pytest

from configs.load import load
from engine.record.metrics import Recorder
from engine.report.image_results import BestResults
from engine.report.image_sheets import TrainBatch
from engine.run import run
from tests.support.configs import CPU, small_config
from tests.support.runs import run_folder
from utils.distributed import Process

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("signal_handlers")
def test_recorder_closes_after_the_callbacks_that_draw_pictures(tmp_path):
    small_config(tmp_path)
    words = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / "o"), "-epochs", "1"]
    closed = []

    def noting(kind):
        close = kind.close
        return mock.patch.object(kind, "close", lambda self: (close(self), closed.append(kind)))

    deterministic = mock.patch("engine.build.make_deterministic")
    with noting(BestResults), noting(TrainBatch), noting(Recorder), deterministic as made:
        words += ["-batch_size", "128", "-opts", "REPORT=true", "DETERMINISTIC=true"]
        assert run(load(words), Process(CPU)) == 0 and made.called
    assert (run_folder(tmp_path / "o") / "loss.png").exists()
    assert set(closed[:-1]) == {BestResults, TrainBatch} and closed[-1] is Recorder
