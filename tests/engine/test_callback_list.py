"""The order in which the callbacks of a run close."""

from unittest import mock

import pytest

from configs.load import load
from engine.record.image_results import BestResults
from engine.record.image_sheets import TrainBatch
from engine.record.metrics import Recorder
from engine.run import run
from tests.support.configs import CPU, small_config
from utils.distributed import Process


@pytest.mark.usefixtures("signal_handlers")
def test_the_recorder_closes_after_the_callbacks_whose_last_pictures_it_hands_on(tmp_path):
    small_config(tmp_path)
    words = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / "o"), "-epochs", "1"]
    closed = []

    def noting(kind):
        close = kind.close
        return mock.patch.object(kind, "close", lambda self: (close(self), closed.append(kind)))

    with noting(BestResults), noting(TrainBatch), noting(Recorder):
        assert run(load([*words, "-batch_size", "128", "-opts", "REPORT=true"]), Process(CPU)) == 0
    assert set(closed[:-1]) == {BestResults, TrainBatch} and closed[-1] is Recorder
