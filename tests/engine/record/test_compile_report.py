"""What a run says of torch.compile: its cost, what was measured that it gains, and that it stopped working."""

import re
from unittest import mock

import pytest
import torch

from engine.memory.recovery import probe_memory
from engine.record.advice import CompileReport
from tests.support.compiling import compile_with
from tests.support.configs import small_config
from tests.support.planted import run_out
from tests.support.refusals import assert_names
from tests.support.run_hash import state_hash
from tests.support.runs import run
from tests.support.trainers import Lines, make_trainer, train
from utils.torch_internals import num_graphs

COMPILED_FORWARDS = []


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A trainer with a compiled model and its report, which is closed afterwards."""
    reports = []

    def backend(graph, inputs):
        def forward(*inputs):
            COMPILED_FORWARDS.append(graph)
            return graph(*inputs)

        return forward

    compile_with(monkeypatch, backend)

    def start(*options: str, can_measure: bool = True):
        config = small_config(tmp_path, "COMPILE=true", "MODEL.DEPTH=1", "DATA.BATCH_SIZE=359", *options)
        log = Lines()
        trainer = make_trainer(config)
        reports.append(CompileReport(log, can_measure))
        trainer.callbacks.append(reports[-1])
        return trainer, log

    yield start
    for each in reports:
        each.close()


def epoch(trainer) -> None:
    train(trainer)
    trainer.notify("on_epoch_end", None)
    trainer.end_epoch()


def test_the_first_epoch_ends_with_the_graphs_their_cost_and_a_measured_gain_and_no_other_does(start):
    trainer, log = start("DATA.DROP_LAST=false")
    train(trainer)
    made, before = num_graphs(), len(COMPILED_FORWARDS)
    with mock.patch("engine.record.advice.probe_memory", side_effect=probe_memory) as passes:
        trainer.notify("on_epoch_end", None)
    assert passes.call_count == 2 * (len(COMPILED_FORWARDS) - before) > 0, "every other one is eager"
    assert num_graphs() == made, "measuring compiles nothing"
    trainer.end_epoch()
    epoch(trainer)
    (line,) = log.said
    cost, compiled, eager = map(float, re.findall(r"([\d.]+) m?s\b", line))
    assert_names(line, "2 graphs", "359 images")
    assert cost > 0 and compiled > 0 and eager > 0 and not log.warned


def test_training_goes_on_as_without_the_report(start):
    options = ("MODEL.DROPOUT=0.2", "TRAIN.MIXUP_ALPHA=0.8", "DATA.BATCH_SIZE=180")
    watched, _ = start(*options)
    plain, _ = start(*options)
    plain.callbacks.clear()
    for trainer in (watched, plain):
        epoch(trainer)
        epoch(trainer)
    assert state_hash(watched.state_dict()) == state_hash(plain.state_dict())


@pytest.mark.parametrize("reason", ["of several processes that share a model", "without memory"])
def test_what_cannot_be_measured_is_not_claimed(start, reason):
    is_short = reason == "without memory"
    trainer, log = start(can_measure=is_short)
    found = {"side_effect": [None, "out of memory"]} if is_short else {"return_value": None}
    with mock.patch("engine.record.advice.probe_memory", **found):
        epoch(trainer)
    (line,) = log.said
    assert "1 graph" in line and not re.search(r"\d ms|pays", line)


def test_a_size_that_comes_late_is_warned_of_once_and_an_evaluation_is_not(start):
    trainer, log = start()
    epoch(trainer)
    train(trainer)
    with torch.no_grad():
        trainer.model(torch.zeros(4, 1, 8, 8))
    trainer.notify("on_epoch_end", None)
    trainer.end_epoch()
    trainer.guard.max_images = 180
    assert not log.warned
    epoch(trainer)
    (line,) = log.warned
    assert_names(line, "2 graphs", "step 8")  # of 180 and 179 images


def test_a_micro_batch_that_memory_did_not_suffice_for_is_not_measured_with(start):
    trainer, log = start()
    run_out(trainer, fits=180, step=2)
    epoch(trainer)
    assert_names(log.said[-1], "180 images")


def test_a_compiler_that_gives_up_is_warned_of(start):
    trainer, log = start("DATA.DROP_LAST=false")
    with torch._dynamo.config.patch(recompile_limit=1):
        epoch(trainer)
    (line,) = log.warned
    assert_names(line, "recompile_limit (1)", "-compile")


def test_after_the_run_nothing_is_listened_to(start):
    trainer, log = start("DATA.DROP_LAST=false")
    trainer.callbacks[0].close()
    trainer.callbacks[0].close = lambda: None  # the fixture's
    with torch._dynamo.config.patch(recompile_limit=1):
        train(trainer)
    assert not log.warned


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_process_0_of_several_measures_alone_and_compiles_nothing_more(small_yaml, tmp_path, strategy):
    flags = ["-cfg", str(small_yaml), "-compile", "-epochs", "2", "-batch_size", "180", "-output", str(tmp_path / "o")]
    options = ["-opts", f"DIST.STRATEGY={strategy}", "COMPILE=blocks", "DATA.DROP_LAST=false"]
    faults = {"compile_without_code": [{"XDG_CACHE_HOME": str(tmp_path)}]}
    ended = run("main_multi_gpu.py", *flags, *options, processes=2, faults=faults)
    assert ended.codes == [0, 0], ended.stderr
    (line,) = re.findall("^compile: .* graphs? .*", ended.stdout, re.M)
    assert ("180 images" in line) is (strategy == "ddp")
    assert "warning: compile" not in ended.printed
