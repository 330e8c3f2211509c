"""Advice to a run that waits for its data."""

from types import SimpleNamespace

import pytest
import torch

from datasets import load_image_sets
from engine.record.console import DataWaitAdvice
from tests.support.configs import CPU, small_config
from tests.support.refusals import assert_names
from utils.distributed import Process


def advice_for(tmp_path, num_workers, num_cores, percents, *options, updates=20, in_memory=False, device=CPU):
    """What is said at each of the reports of so many updates each."""
    config, said = small_config(tmp_path, f"DATA.NUM_WORKERS={num_workers}", *options), []
    image_set = load_image_sets(config)[0]
    image_set.in_memory = in_memory
    process = Process(device, num_cores=num_cores)
    advice = DataWaitAdvice(config, image_set, process, lambda line: said.__setitem__(-1, line))
    for index, percent in enumerate(percents):
        said.append("")
        advice.on_report(None, SimpleNamespace(step=index * updates, seconds=1.0, shares={"data": percent}))
    return said


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "percent", "names"),
    [
        (1, 8, 75, ["75%", "-num_workers 4", "1", "8 cores"]),
        (4, 6, 90, ["90%", "-num_workers 6"]),
        (0, 8, 60, ["60%", "-num_workers 2"]),
        (0, 8, 100, ["100%", "-num_workers 8"]),
        (8, 8, 50, ["50%", "DATA.CACHE=16"]),
        (2, 16, 99, ["99%", "-num_workers 15"]),
    ],
)
def test_advice_names_a_number(tmp_path, num_workers, num_cores, percent, names):
    device = torch.device("cuda", 0) if num_cores == 16 else CPU  # whose training takes a core
    first, second, third = advice_for(tmp_path, num_workers, num_cores, [percent] * 3, device=device)
    assert first == third == "", "start-up does not count, and it is said once"
    assert_names(second, *names)


def test_advice_is_not_given_without_a_cause_a_remedy_or_enough_updates(tmp_path):
    assert not any(advice_for(tmp_path, 1, 8, [99, 19, 20, 5]))
    for num_workers in (0, 8):
        assert not any(advice_for(tmp_path, num_workers, 8, [99, 99, 99], in_memory=True))
    assert not any(advice_for(tmp_path, 1, 8, [0, 90, 0, 0, 0, 0], updates=2))


POLICY = "TRAIN.COLOR_JITTER=0.4"


@pytest.mark.parametrize(
    ("options", "device", "percent", "name"),
    [
        ([POLICY], "cuda", 75, "DATA.AUGMENT_ON=device"),  # 12 workers
        ([POLICY], "cuda", 40, "-num_workers 5"),
        ([POLICY, "DATA.AUGMENT_ON=device"], "cuda", 75, "-num_workers 7"),
        ([], "cuda", 75, "-num_workers 7"),
        ([POLICY], "cpu", 75, "-num_workers 8"),
    ],
)
def test_a_policy_moves_to_a_device_for_whose_rate_there_are_too_few_cores(tmp_path, options, device, percent, name):
    assert name in advice_for(tmp_path, 3, 8, [percent] * 2, *options, device=torch.device(device))[1]
