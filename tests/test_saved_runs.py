"""Runs that a release saved in the middle of an epoch can be resumed, evaluated and compared by this version.

`python -m tests.support.make_saved_runs` made them; it belongs to each release.
"""

import json
import shutil
from pathlib import Path

import pytest

from models.weights.torch_files import read_torch
from tests.support.make_saved_runs import KINDS, SAVED, losses_of, program_of, write_data
from tests.support.run_hash import state_hash
from tests.support.runs import run, run_folder, typed

pytestmark = pytest.mark.slow

RUNS = sorted(path.relative_to(SAVED).with_suffix("") for path in SAVED.glob("*/*.json"))


@pytest.fixture(params=[pytest.param(each, id=str(each)) for each in RUNS])
def saved(request, here, tmp_path) -> Path:
    """A copy of the output folder of a saved run, beside its data."""
    write_data(here)
    shutil.copytree(SAVED / request.param, tmp_path / "runs" / request.param.name)
    return tmp_path / "runs" / request.param.name


def hashes_of(checkpoint: Path) -> dict[str, str]:
    """Return a hash for each part of a checkpoint that a resumed run takes over unchanged."""
    state = read_torch(checkpoint)
    parts = {name: state.get(name) for name in ("state_dict", "state_dict_ema", "amp_scaler", "epoch", "step")}
    parts["optimizer"] = state["optimizer"]["state"]  # its arguments come from the settings
    assert parts["state_dict"] and parts["optimizer"]
    return {name: state_hash({name: part}) for name, part in parts.items()}


def test_every_listed_kind_of_run_has_a_saved_run():
    assert {each.name for each in RUNS} == KINDS.keys()


def test_saved_run_resumes_with_its_state_and_ends_with_the_same_losses(saved, request, here):
    expected = json.loads((SAVED / request.node.callspec.params["saved"]).with_suffix(".json").read_text())
    folder, processes = run_folder(saved), KINDS[saved.name][1]
    saved_hashes = hashes_of(folder / "last.pth")
    flags = ["-resume", str(folder), "-output", str(saved)]
    faults = {"keep_first_state": [str(here / "first.pth")]}
    run(program_of(processes), *flags, processes=processes, cwd=here, faults=faults).done()
    # The losses below hardly depend on the optimizer's state and on the average, so these are compared by themselves.
    assert hashes_of(here / "first.pth") == saved_hashes
    found = losses_of(folder)
    # Processors round differently, so the losses are not the same to the last bit.
    assert found["steps"] == pytest.approx(expected["steps"], rel=1e-3)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-3)
    assert run_folder(saved) == folder, "the resumed run made a second folder"


def test_best_weights_of_a_saved_run_reach_their_recorded_accuracy(saved, here, tmp_path):
    folder = run_folder(saved)
    status = json.loads((folder / "status.json").read_text())
    expected = status["best"][status["best_metric"]]
    paths = {"-cfg": folder / "config.yaml", "-pretrained": folder / "best.pth", "-output": tmp_path / "output"}
    words, processes = [str(word) for pair in paths.items() for word in pair], KINDS[saved.name][1]
    # Synthetic images differ between processes.
    run(program_of(processes), "-eval", *words, processes=processes, cwd=here).done()
    results = json.loads((run_folder(tmp_path / "output") / "results.json").read_text())
    assert results["value"] == pytest.approx(expected, abs=0.5), results


def test_compare_script_reads_saved_runs_of_all_kinds(tmp_path):
    shutil.copytree(SAVED, tmp_path / "saved")
    table = typed("scripts/compare.py", "-any_data", *(tmp_path / "saved" / each for each in RUNS)).done().stdout
    assert all(each.name in table for each in RUNS), table
