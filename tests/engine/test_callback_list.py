"""Which callbacks a run has, and the order in which they close."""

import importlib
import pkgutil
from unittest import mock

import pytest

import engine
from configs.load import load
from engine.record.image_results import BestResults
from engine.record.image_sheets import TrainBatch
from engine.record.metrics import Recorder
from engine.run import run
from engine.train.callback import Callback
from tests.support.configs import CPU, small_config
from tests.support.modules import ROOT
from tests.support.runs import run_folder
from utils.distributed import Process


def test_every_callback_is_added_to_a_run():
    for module in pkgutil.walk_packages(engine.__path__, "engine."):
        importlib.import_module(module.name)
    added, kinds = (ROOT / "engine/callback_list.py").read_text(encoding="utf-8"), [Callback]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds[1:]:
        is_ours = kind.__module__.startswith("engine.") and not kind.__subclasses__()
        assert not is_ours or f"{kind.__name__}(" in added or f"{kind.__name__}.on(" in added, (
            f"engine/callback_list.py: no line adds {kind.__name__} of {kind.__module__}"
        )


@pytest.mark.usefixtures("signal_handlers")
def test_the_recorder_closes_after_the_callbacks_whose_last_pictures_it_hands_on(tmp_path):
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
