"""Each row of the table of run hashes, started in several ways: a killed run ends with the same bits, others close."""

import functools
import random
import shutil
import signal

import pytest
import torch

from configs.load import load
from engine.checkpoint.find import read_checkpoint
from models.weights.torch_files import read_torch
from tests.support.run_hash import NOT_REPEATABLE, results, run_hash
from tests.support.run_table import OF_TRAINING, ROWS, WAYS, words_of, write_data
from tests.support.runs import epochs_of, typed

# {(row, way): the setting that the refusal names}
REFUSED = {
    **{("float8", way): "PRECISION.MODE" for way in WAYS},
    **{(row, "fsdp2"): "PRECISION.MODE" for row in ("naive", "naive_float16")},
    **{(row, "fsdp2"): "TRAIN.OPTIMIZER.NAME" for row in ("lamb", "muon", "adafactor")},
    ("adaptive_clipping", "fsdp2"): "TRAIN.CLIP_MODE",
    ("batch_norm", "fsdp2"): "DIST.STRATEGY",
}
# {row: the part of the result that depends on processes and micro-batches}. fsdp2 is compared with two processes of
# ddp.
DIFFERENT = {
    "dropout": "the random numbers of an update depend on the process",
    "checkpointing": "drop path, as above",
    "batch_norm": "each micro-batch has its own statistics",
    "synthetic": "each process makes its own images",
}
# The largest difference between weights in float64, and the rows that compute or resize with less precision.
EXACT = 1e-10
TOLERANCES = {
    "float32": 1e-3,
    **{row: 5e-3 for row, settings in ROWS.items() if "AMP=true" in settings},
    **{row: 1e-7 for row in ("growing_images", "hard_distillation")},  # float32 interpolation
    "adafactor": 1e-5,
}
CELLS = [
    (row, way)
    for row in ROWS
    for way in WAYS
    if way != "straight" or (row, way) in REFUSED
    if way != "fsdp2" or row in OF_TRAINING
    if way not in ("split", "two") or row not in DIFFERENT
]
# scripts/test.sh tries one way of every second row, and with -all every way. A killed run must also keep its averages.
EVERYDAY = {random.Random(row).choice([cell for cell in CELLS if cell[0] == row]) for row in [*ROWS][::2]}
EVERYDAY |= {("ema", "killed")}


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """Return start(row, way, **faults), which runs a cell and returns its folder and the ended run."""
    root = tmp_path_factory.mktemp("table")
    write_data(root)

    def start(row, way, **fault):
        faults = {"draw_nothing": []}
        if row != "float32" and "AMP=true" not in ROWS[row]:
            faults["compute_in_float64"] = []
        processes, output = WAYS[way][0], root / row / way
        script = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
        words = [*words_of(row, way, root / "float32/straight/run/best.pth"), "SAVE=" + str(output), "NAME=run"]
        ended = typed(script, *words, processes=processes, cwd=root, faults=faults | fault)
        return output / "run", ended

    start.root = root
    return start


@pytest.fixture(scope="session")
def trained(start):
    """Return trained(row, way), which runs a cell without faults and returns its folder. Each cell runs once."""

    @functools.cache
    def trained(row, way):
        if "{teacher}" in ROWS[row]:
            trained("float32", "straight")
        folder, ended = start(row, way)
        ended.done()
        return folder

    return trained


def assert_close(folder, expected, tolerance):
    ours, theirs = (read_checkpoint(each / "last.pth") for each in (folder, expected))
    assert (ours["step"], ours["epoch"]) == (theirs["step"], theirs["epoch"])
    for kind in ("state_dict", "state_dict_ema"):
        weights, others = ({} if state.get(kind) is None else state[kind] for state in (ours, theirs))
        assert weights.keys() == others.keys()
        for name, weight in weights.items():
            weight, other = (each.whole() if hasattr(each, "whole") else each for each in (weight, others[name]))
            difference = (weight.double() - other.double()).abs().max()
            assert difference <= tolerance, f"{kind}: {name} differs by {difference}"
    for mine, other in zip(epochs_of(folder), epochs_of(expected), strict=True):
        names = [name for name in other if "loss" in name or (tolerance <= EXACT and name not in NOT_REPEATABLE)]
        assert [mine[name] for name in names] == pytest.approx(
            [other[name] for name in names], abs=10 * tolerance + 2e-4
        )


@pytest.mark.slow
def test_every_setting_of_the_table_takes_effect(start):
    assert len({*ROWS.values()}) == len(ROWS)
    for row in ROWS:
        words = words_of(row, "straight", start.root / "best.pth")
        keys = [word.split("=")[0] for word in words[words.index("-opts") + 1 :]]
        assert len({*keys}) == len(keys), f"{row} has a setting twice"
        notes = load(["-cfg", str(start.root / "base.yaml"), *words[2:]]).notes
        assert not [note for note in notes if note.split()[1] in keys], row


@pytest.mark.slow
def test_run_hash_depends_on_every_part_of_a_run(trained, tmp_path):
    folder = shutil.copytree(trained("ema", "straight"), tmp_path / "run")
    values = results(folder)
    assert {name.split("/")[0] for name in values} == {
        *("weights", "averages", "moments", "groups", "scaler", "counters", "best", "metrics.csv", "steps.csv")
    }
    expected, state = run_hash(folder), read_torch(folder / "last.pth")
    changed = {
        "weights": {"state_dict": {name: weight + 1e-6 for name, weight in state["state_dict"].items()}},
        "averages": {"state_dict_ema": {name: weight + 1e-6 for name, weight in state["state_dict_ema"].items()}},
        "step": {"step": state["step"] + 1},
        "moments": {"optimizer": {**state["optimizer"], "state": {}}},
        "scaler": {"amp_scaler": {**state["amp_scaler"], "scale": 2.0}},
    }
    for part, change in changed.items():
        torch.save(state | change, folder / "last.pth")
        assert run_hash(folder) != expected, part
    torch.save(dict(reversed(state.items())), folder / "last.pth")
    assert run_hash(folder) == expected, "the order in a file is no result"
    metrics = (folder / "metrics.csv").read_text()
    (folder / "metrics.csv").write_text(metrics.replace("0,", "1,", 1))
    assert run_hash(folder) != expected


def as_parameters(row, way):
    marks = pytest.mark.slow if (row, way) in EVERYDAY else pytest.mark.long
    return pytest.param(row, way, id=f"{row}-{way}", marks=marks)


@pytest.mark.parametrize(("row", "way"), [as_parameters(*cell) for cell in CELLS])
def test_run_ends_the_same_however_it_is_started(start, trained, row, way):
    if (row, way) in REFUSED:
        ended = start(row, way)[1]
        assert set(ended.codes) == {2} and REFUSED[row, way] in ended.stderr
    elif way == "killed":
        straight, drawn = trained(row, "straight"), random.Random(row)
        num_updates = read_checkpoint(straight / "last.pth")["step"]
        # After the second update at the earliest: after the first, the EMA still equals the weights.
        step, place = drawn.randrange(2, num_updates), [drawn.randrange(3, num_updates + 1), drawn.randrange(10)]
        fault = drawn.choice([{"signal_at": [step, signal.SIGKILL, [0]], "save_at_once": []}, {"kill_at": place}])
        folder, ended = start(row, way, **fault)
        assert ended.returncode == -signal.SIGKILL, (fault, ended.printed)
        start(row, way)[1].done()
        assert run_hash(folder) == run_hash(straight), fault
    else:
        expected = trained(row, "two" if row in DIFFERENT else "straight")
        assert_close(trained(row, way), expected, TOLERANCES.get(row, EXACT))
