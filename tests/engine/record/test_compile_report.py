"""What a run says of torch.compile: its cost, and what is compiled late or not at all."""

import pytest
import torch

from engine.record.advice import CompileReport
from tests.support.compiling import compile_with
from tests.support.configs import small_config
from tests.support.refusals import assert_names
from tests.support.trainers import Lines, make_trainer, train


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A trainer with a compiled model, its report, which is closed afterwards, and the log."""
    reports = []
    compile_with(monkeypatch, lambda graph, inputs: graph.forward)

    def start(*options: str):
        config, log = small_config(tmp_path, "COMPILE=true", "MODEL.DEPTH=1", "DATA.BATCH_SIZE=359", *options), Lines()
        trainer = make_trainer(config)
        reports.append(CompileReport(log))
        trainer.callbacks.append(reports[-1])
        return trainer, log

    yield start
    for each in reports:
        each.close()


def test_the_cost_is_said_once_a_late_graph_is_warned_of_and_one_of_an_evaluation_is_not(start):
    trainer, log = start()
    for _ in range(2):
        train(trainer)
        with torch.no_grad():
            trainer.model(torch.zeros(4, 1, 8, 8))
        trainer.notify("on_epoch_end", None)
        trainer.end_epoch()
    (line,) = log.said
    assert_names(line, "2 graphs")
    assert not log.warned
    trainer.guard.max_images = 180
    train(trainer)
    (line,) = log.warned
    assert_names(line, "2 graphs", "step 8")  # of 180 and 179 images


@pytest.mark.parametrize("is_over", [False, True])
def test_a_compiler_that_gives_up_is_warned_of_as_long_as_the_run_lasts(start, is_over):
    trainer, log = start("DATA.DROP_LAST=false")
    if is_over:
        trainer.callbacks[-1].close()
        trainer.callbacks[-1].close = lambda: None  # the fixture's
    with torch._dynamo.config.patch(recompile_limit=1):
        train(trainer)
    assert len(log.warned) == (not is_over)
    assert_names(" ".join(log.warned), *([] if is_over else ["recompile_limit (1)", "-compile"]))
