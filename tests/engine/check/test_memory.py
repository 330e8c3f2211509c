"""The memory that training will take, weighed against what is free."""

import re

import pytest
import torch

from configs.schema import Optimizer
from engine.check.check import check_memory
from engine.check.quick_checks import OK, WARN, WRONG
from engine.memory.estimate import fixed_bytes, saved_bytes
from engine.precision.policy import Precision
from models import build_model
from tests.support.configs import CPU, replaced, small_config
from utils.distributed import Process


def test_memory_is_weighed_against_what_is_free(tmp_path):
    config = small_config(tmp_path, "DATA.BATCH_SIZE=64")
    precision, model = Precision(config, CPU), build_model(config, 10)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert fixed_bytes(config, model, precision) == 4 * weights  # and gradients, and two of Adam's
    assert fixed_bytes(replaced(config, TRAIN={"MODEL_EMA": True}), model, precision) == 6 * weights
    precision.device = torch.device("cuda")  # where others than torch's fused optimizers skip an update by copies
    for name, count in (("AdamW", 4), ("lamb", 7)):
        assert (
            fixed_bytes(replaced(config, TRAIN={"OPTIMIZER": Optimizer(NAME=name)}), model, precision)
            == count * weights
        )
    precision.device = CPU
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert fixed_bytes(config, model, precision) == weights + 3 * trained
    model.requires_grad_(True)
    few, more, most = (saved_bytes(config, model, precision, count) for count in (2, 4, 8))
    assert most - more == 2 * (more - few) > 0
    need = 4 * weights + 64 * 1.2 * (more - few) / 2
    found = [check_memory(config, model, precision, int(need * share), Process(CPU)) for share in (0.6, 1.0, 1.2)]
    assert [finding.verdict for finding in found] == [WRONG, WARN, OK]
    assert re.search(r"about \d+ images", found[0].remedy)
    assert (
        check_memory(config, model, precision, int(need * 1.2), Process(CPU, world_size=2, local_size=2)).verdict
        == WRONG
    ), "two share it"
    assert check_memory(config, model, precision, weights, Process(CPU)).verdict == WRONG


def test_memory_of_shards_is_a_part_of_the_weights_and_two_whole_blocks(tmp_path):
    config = small_config(tmp_path, "MODEL.DEPTH=8", "DIST.STRATEGY=fsdp2")
    precision, model = Precision(config, CPU), build_model(config, 10)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    process = Process(CPU, world_size=4, local_size=1)
    for accumulated, need in ((1, weights + 4 * block), (2, 2 * weights + 4 * block)):  # 4 * weights / 4 processes
        options = replaced(config, TRAIN={"ACCUM_ITER": accumulated})
        found = [check_memory(options, model, precision, int(need / 1.5) + one, process).text for one in (-1, 1)]
        assert ["without activations" in line for line in found] == [True, False]


def test_what_a_layer_keeps_for_its_backward_is_counted_once(tmp_path):
    config = small_config(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 1000), torch.nn.Sigmoid(), torch.nn.Linear(1000, 10)
    )
    kept = saved_bytes(config, model, Precision(config, CPU), 50)
    # The images, the sigmoid's output (of two layers), the logarithms of the probabilities, the targets; small change.
    assert kept == pytest.approx(50 * (4 * (64 + 1000 + 10) + 8), abs=64)
