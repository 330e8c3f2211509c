"""Programs that tests run without starting processes leave nothing behind, and fail alone."""

import os
import signal
import sys
from types import ModuleType

import pytest
import torch

from tests.support import ranks
from tests.support.in_process import ATTRIBUTES, ONLY_IN_FORKS, SIGNALS, STATE
from tests.support.run_hash import run_hash
from tests.support.runs import as_ranks, run, run_folder, typed
from utils.program import exit_code

pytestmark = pytest.mark.slow

ROOMS = ("configs", "datasets", "engine", "models", "utils")
CHANGES = "DETERMINISTIC=true TRAIN.NUM_EPOCHS=1".split()
FAULTS: dict[str, list] = {"compute_in_float64": [], "draw_nothing": [], "jump": [1]}


def state_of_process() -> dict[str, object]:
    """Return what a run may change in this process, as texts that differ if the state differs."""
    state = {read.__qualname__: str(read()) for read in STATE}
    state |= {f"{owner.__name__}.{name}": str(getattr(owner, name)) for owner, name in ATTRIBUTES}
    state |= {str(number): str(signal.getsignal(number)) for number in SIGNALS}
    return state | {"environment": dict(os.environ), "folder": os.getcwd()}


def names_of_program() -> dict[str, object]:
    """Return the values of all names in the program's modules and their classes, and in `os` and `time`."""
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ROOMS}
    owners = modules | {"os": os, "time": sys.modules["time"]}
    for module_name, module in modules.items():
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        owners |= {f"{module_name}.{value.__qualname__}": value for value in classes if value.__module__ == module_name}
    return {
        f"{owner_name}.{name}": value
        for owner_name, owner in owners.items()
        for name, value in vars(owner).items()
        if not isinstance(value, ModuleType) and not name.startswith("__") and not name.startswith("_abc_")
    }


def test_run_in_this_process_leaves_its_state_and_the_program_unchanged(small_yaml, tmp_path):
    words = ["main_single_gpu.py", "-cfg", small_yaml, "-output", tmp_path / "first", "-opts", *CHANGES]
    typed(*words, faults=FAULTS).done()  # imports all modules
    state, names = state_of_process(), names_of_program()
    words[4] = tmp_path / "o"
    typed(*words, faults=FAULTS, environment={"A": "1"}, cwd=tmp_path).done()
    assert state_of_process() == state
    after = names_of_program()
    assert [name for name in after if after[name] is not names.get(name)] == []
    assert names.keys() == after.keys()
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(run_folder(tmp_path / "first"))


def test_program_in_this_process_has_its_faults_variables_and_folder(small_yaml, tmp_path, monkeypatch):
    seen = {}

    def main(words: list[str]) -> int:
        seen.update(words=words, folder=os.getcwd(), variable=os.environ.get("A"), epoch=sys.modules["time"].time())
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.environ["B"] = "2"
        print("one")
        print("two", file=sys.stderr)
        return 3

    monkeypatch.setattr("main_single_gpu.main", main)
    state = state_of_process()
    ended = typed("main_single_gpu.py", 1, "-x", faults={"jump": [1e6]}, environment={"A": "1"}, cwd=tmp_path)
    assert state_of_process() == state
    assert (ended.codes, ended.stdout, ended.stderr) == ([3], "one\n", "two\n")
    assert (seen["words"], seen["folder"], seen["variable"]) == (["1", "-x"], str(tmp_path), "1")
    assert seen["epoch"] > 1e10  # in a million days


@pytest.mark.long
def test_two_ranks_give_the_hash_of_forks_after_other_runs(small_yaml, tmp_path):
    words = ["main_multi_gpu.py", "-cfg", str(small_yaml), "-opts", "TRAIN.NUM_EPOCHS=1"]
    run(*words, f"SAVE={tmp_path / 'forks'}", processes=2).done()
    typed(*words, f"SAVE={tmp_path / 'other'}", *CHANGES, processes=2, faults=FAULTS).done()
    pids = [process.pid for process in ranks.RANKS._processes]
    typed(*words, f"SAVE={tmp_path / 'o'}", "TRAIN.LOSS=no", processes=2).refused("TRAIN.LOSS")
    ended = typed(*words, f"SAVE={tmp_path / 'o'}", processes=2).done()
    assert ended.codes == [0, 0] and "Lr:" in ended.stdout
    assert [process.pid for process in ranks.RANKS._processes] == pids
    assert run_hash(run_folder(tmp_path / "o")) == run_hash(run_folder(tmp_path / "forks"))


# {case: (fault, exit codes)}
FAILURES = {
    "one is killed": ({"signal_at": [1, signal.SIGKILL, [1]]}, [1, -signal.SIGKILL]),
    "one runs out of memory": ({"run_out_of_memory": [8, 1, 1]}, [1, 2]),
    "both fail": ({"break_update": [1]}, [1, 1]),
}


@pytest.mark.long
@pytest.mark.parametrize(("fault", "codes"), FAILURES.values(), ids=FAILURES)
def test_rank_that_fails_is_reported_and_replaced(small_yaml, tmp_path, fault, codes):
    words = ["-cfg", str(small_yaml), "-epochs", "1", "-output", str(tmp_path)]
    done = ranks.RANKS.run("main_multi_gpu.py", words, as_ranks(2), tmp_path, fault)
    assert done[0] == codes, done
    typed("main_multi_gpu.py", *words, processes=2).done()


def test_rank_that_hangs_fails_only_its_own_test(small_yaml, tmp_path, monkeypatch):
    words = ["main_multi_gpu.py", "-cfg", str(small_yaml), "-epochs", "1", "-output", tmp_path]
    with monkeypatch.context() as changes:
        changes.setattr(ranks, "DEADLINE", 0.0)
        with pytest.raises(AssertionError):
            typed(*words, processes=2)
    typed(*words, processes=2).done()


def test_faults_that_kill_or_cannot_be_undone_run_in_forks(small_yaml, tmp_path):
    planted = sys.modules["tests.support.planted"]
    assert all(callable(getattr(planted, name)) for name in ONLY_IN_FORKS)
    words = ["-cfg", small_yaml, "-epochs", "1", "-output", tmp_path]
    ended = typed("main_single_gpu.py", *words, faults={"signal_at": [1, signal.SIGKILL, [0]]})
    assert ended.codes == [-signal.SIGKILL]
    assert exit_code(lambda words: 5, []) == 5  # this process goes on
