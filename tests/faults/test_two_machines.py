"""Four processes on two machines: their local and global ranks differ, and they train like one process."""

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasets import build_eval_data, build_train_data
from engine.parallel.sharding import Sharded
from engine.predict.classifier import load_classifier
from models.weights.files import find_and_read
from tests.support.configs import CPU, ema, small_config
from tests.support.opened import open_sets
from tests.support.properties import examples
from tests.support.runs import Ended, epochs_of, run, run_folder, status_of
from utils.distributed import Process

SETTINGS = ["TRAIN.OPTIMIZER.NAME=SGD", "TRAIN.BASE_LR=0.05", "TRAIN.WARMUP_EPOCHS=0", *ema(0.8)]
STRATEGIES = {"ddp": [], "fsdp2": ["DIST.STRATEGY=fsdp2"]}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, small_yaml) -> Path:
    output = tmp_path_factory.mktemp("alone")
    words = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "1", "-batch_size", "64", "-opts", *SETTINGS]
    run("main_single_gpu.py", *words).done()
    return run_folder(output)


@pytest.fixture(scope="module", params=STRATEGIES)
def together(request, tmp_path_factory, small_yaml) -> tuple[Ended, Path]:
    output = tmp_path_factory.mktemp("together")
    words = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "1", "-batch_size", "16"]
    options = ["-opts", *SETTINGS, *STRATEGIES[request.param]]
    ended = run("main_multi_gpu.py", *words, *options, processes=4, faults={"name_hosts": [2]})
    assert ended.codes == [0] * 4, ended.printed
    return ended, run_folder(output)


@pytest.mark.long
def test_processes_on_two_machines_train_like_one_process(alone, together):
    _, folder = together
    names = ("train_loss", "eval_loss", "eval_loss_ema", "eval_top1", "lr", "grad_norm", "skipped")
    (mine,), (theirs,) = epochs_of(folder), epochs_of(alone)
    assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)
    _, mine = find_and_read(folder / "last.pth", set())
    _, theirs = find_and_read(alone / "last.pth", set())
    for key in ("state_dict", "state_dict_ema"):
        for name, weight in theirs[key].items():
            torch.testing.assert_close(mine[key][name], weight, rtol=0, atol=1e-5)
    assert load_classifier(folder).weights == load_classifier(alone).weights


@pytest.mark.slow
def test_run_on_two_machines_names_its_machines_and_logs(together):
    ended, folder = together
    assert "4 processes on 2 machines" in ended.stdout and "process 0 is on host0" in ended.stdout
    assert {each.name for each in folder.glob("log*.txt")} == {"log.txt", *(f"log_{rank}.txt" for rank in range(4))}
    assert "the same command with -resume" in ended.stdout
    assert status_of(folder)["about"]["processes"] == 4


def processes() -> list[Process]:
    """Return the four processes of two machines."""
    return [Process(CPU, rank=rank, local_rank=rank % 2, world_size=4, local_size=2) for rank in range(4)]


@pytest.mark.parametrize("build", [build_train_data, build_eval_data])
def test_synthetic_images_differ_between_all_processes(tmp_path, build):
    options = ["DATA.DATASET=synthetic", "DATA.SYNTHETIC_SIZE=64", "DATA.BATCH_SIZE=4", "MODEL.NUM_CLASSES=10"]
    config = small_config(tmp_path, *options)
    image_set = open_sets(config)[build is build_eval_data]
    found = []
    for process in processes():
        data = build(config, image_set, process)
        is_training = build is build_train_data
        batches = (each for window in data.windows(0, 1) for each in window.batches) if is_training else data
        found.append(next(iter(batches)).images)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))


@given(rows=st.integers(1, 40))
@examples(40)
def test_processes_of_two_machines_read_each_row_of_a_sharded_checkpoint_once(rows):
    whole, parts = torch.arange(rows), []
    for process in processes():
        sharded = Sharded.__new__(Sharded)  # without a model on four processes
        sharded.process, sharded._lengths = process, {"weight": rows}
        parts.append(sharded.local_part({"state_dict": {"weight": whole}})["state_dict"]["weight"])
    assert torch.equal(torch.cat(parts), whole)
