"""halfstep sweep: started runs, killed and failed trials, and input that is refused before any run starts."""

import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import sweep
from scripts.sweep import is_locked, make_folder
from tests.support.cases import assert_cases, cases_of, content_of, names_of
from tests.support.forks import start_fork
from tests.support.properties import examples
from tests.support.refusals import assert_names, refused
from tests.support.run_hash import run_hash
from tests.support.runs import alive, rows_of, run, wait_until
from utils.errors import ConfigError
from utils.files import locked, write_text
from utils.program import exit_code

pytestmark = pytest.mark.slow


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


IN_TRAINING = 2.5  # a run that ends with exit code 2 after it has begun


class Pretended:
    """A simulated run. `ends` gives its exit code by name, or a KeyboardInterrupt that kills the sweep."""

    ends: dict = {}
    started: list = []  # names of the runs
    commands: dict = {}
    metric = "top1"

    def __init__(self, arguments, output, cwd):
        self.folder = Path(cwd, flag(arguments, "-output"), name := flag(arguments, "-name"))
        self.started.append(name)
        self.commands[name] = arguments
        self.code, self.options = self.ends.get(name, 0), dict(each.split("=") for each in arguments if "=" in each)
        output.write_text("error: no such data\n")
        self.output = output
        if isinstance(self.code, BaseException):
            raise self.code

    def poll(self):
        if self.code == 2:
            return 2
        self.code = 2 if self.code == IN_TRAINING else self.code
        self.folder.mkdir(exist_ok=True)
        rate = float(self.options.get("TRAIN.BASE_LR", 0))
        status = {"state": "done", "exit_code": 0} if self.code == 0 else {"state": "failed", "exit_code": self.code}
        best = {"best": {self.metric: 100 * rate, "epoch": 2}, "best_metric": self.metric}
        if self.code >= 0:  # a killed run writes nothing
            (self.folder / "status.json").write_text(json.dumps({**status, **best}))
            (self.folder / "metrics.csv").write_text("train_seconds,eval_seconds\n2,1\n2,\n")
        else:
            self.output.unlink()
        return self.code


@pytest.fixture
def pretended(monkeypatch, signal_handlers):
    monkeypatch.setattr(sweep, "start", Pretended)
    monkeypatch.setattr(Pretended, "ends", {})
    monkeypatch.setattr(Pretended, "started", [])
    monkeypatch.setattr(sweep, "SECONDS_BETWEEN_LOOKS", 0)
    return Pretended


@pytest.fixture
def start(tmp_path, small_yaml, capsys):
    """Run a sweep with these words in tmp_path / "sweep", and return its output."""

    def call(*words: str, exit_with: int | None = 0) -> str:
        code = exit_code(sweep.main, ["-output", str(tmp_path / "sweep"), *words])
        printed = "".join(capsys.readouterr())
        assert code == exit_with, printed
        return printed

    given = ["-cfg", str(small_yaml)]
    return lambda *words, **how: call(*(given if words and words != ("-table",) else []), *words, **how)


def rows(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "trials.csv")


GRID = ["-over", "TRAIN.BASE_LR=0.1,0.3", "MODEL.DEPTH=1,2", "-seeds", "0,1", "-folds", "2"]


def test_sweep_grid_covers_every_setting_seed_and_fold(tmp_path, start, pretended):
    printed = start(*GRID, "-budget", "20m")
    found = rows(tmp_path / "sweep")
    assert len(pretended.started) == len(found) == 16
    assert len({tuple(row[key] for key in ("TRAIN.BASE_LR", "MODEL.DEPTH", "seed", "fold")) for row in found}) == 16
    assert all((row["state"], row["epoch"], row["seconds"]) == ("done", "2", "5.0") for row in found)
    assert "lists images whose label is probably wrong" in printed, "the folds have judged all images"
    assert_cases("sweep", printed)
    words = pretended.commands["trial-003"]
    assert {"TRAIN.BASE_LR=0.1", "MODEL.DEPTH=1", "DATA.FOLD=1/2"} <= set(words) and flag(words, "-seed") == "1"
    assert all(flag(each, "-budget") == "20m" for each in pretended.commands.values())


def test_sweep_trial_with_smallest_loss_is_best(tmp_path, start, pretended, monkeypatch):
    monkeypatch.setattr(pretended, "metric", "loss")
    printed = start("-over", "TRAIN.BASE_LR=0.1,0.3")
    assert "lists images whose label" not in printed, "no folds"
    assert_cases("sweep_of_losses", printed)


def test_sweep_restarts_killed_trials_but_not_finished_ones(tmp_path, start, pretended):
    pretended.ends |= {"trial-001": 3, "trial-002": -9, "trial-003": 1, "trial-004": KeyboardInterrupt()}
    pages = {"killed": start(*GRID, exit_with=130)}
    assert pretended.started == [f"trial-{number:03d}" for number in range(5)]
    pretended.ends.clear()
    pretended.started.clear()
    (tmp_path / "sweep/trial-002/status.json").write_text("{")  # damaged
    start(exit_with=3)
    pages["later"] = start("-table")
    assert_cases("sweep_that_was_killed", pages)
    assert pretended.started == [f"trial-{number:03d}" for number in range(2, 16)]
    assert [row["state"] for row in rows(tmp_path / "sweep")] == ["done", "failed"] + ["done"] * 14
    start(exit_with=3)
    assert len(pretended.started) == 14


def test_trial_that_fails_in_training_does_not_stop_its_sweep(start, pretended):
    pretended.ends |= {"trial-000": IN_TRAINING}
    start(*GRID, exit_with=1)
    assert len(pretended.started) == 16


def test_refused_trial_stops_sweep_and_allows_another_sweep(tmp_path, start, pretended):
    pretended.ends |= {"trial-000": 2}
    printed = start(*GRID, exit_with=2)
    assert len(pretended.started) == 1
    assert_names(printed, "trial 0", "no such data")
    pretended.ends.clear()
    start("-seeds", "4,5")


def test_sweep_waits_for_orphaned_run_and_forwards_stop_signal_once(tmp_path, start, pretended, monkeypatch):
    outlived, told = [True, True], []

    class Long(Pretended):
        num_polls = 0

        def poll(self):
            self.num_polls += 1
            self.folder.mkdir(exist_ok=True)
            (self.folder / "status.json").write_text('{"state": "training"}')
            if self.num_polls == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return 143 if self.num_polls == 5 else None

        def terminate(self):
            told.append(self.folder.name)

    monkeypatch.setattr(sweep, "is_locked", lambda folder: bool(outlived) and outlived.pop())
    monkeypatch.setattr(sweep, "start", Long)
    printed = start("-seeds", "0,1,2", exit_with=143)
    assert told == pretended.started == ["trial-000"] and not outlived
    assert_cases("sweep_that_was_stopped", printed)


def test_error_for_another_sweep_in_same_folder_names_the_differences(tmp_path, start, pretended):
    start(*GRID)
    assert_names(start(*GRID[:3], "-seeds", "0,2", "-epochs", "7", exit_with=2), "seeds", "-epochs", "folds")
    for words in (GRID[:3], ["-seeds", "0,1"], ["-folds", "2"]):  # each difference must be reported
        assert exit_code(sweep.main, ["-output", str(tmp_path / "sweep"), *words]) == 2
    start(*GRID)
    assert len(pretended.started) == 16


def test_sweep_continues_after_its_folder_was_moved(tmp_path, small_yaml, pretended, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["-cfg", str(small_yaml), "-seeds", "0,1,2"]
    pretended.ends |= {"trial-001": 1}
    assert exit_code(sweep.main, words) == 2, "-output is missing"
    assert exit_code(sweep.main, [*words, "-output", "a/sweep"]) == 1
    monkeypatch.chdir(tmp_path / "a")
    pretended.ends["trial-001"] = -9
    assert exit_code(sweep.main, ["-output", "sweep"]) == 1
    pretended.ends.clear()
    (tmp_path / "a" / "sweep").rename(tmp_path / "moved")
    assert exit_code(sweep.main, ["-output", "../moved"]) == 0
    names = [f"trial-{number:03d}" for number in (0, 1, 2, 1, 1)]
    assert pretended.started == names and len(rows(tmp_path / "moved")) == 3


def test_moved_sweep_starts_no_trial_in_the_folder_replacing_it(tmp_path, start, pretended, monkeypatch):
    class Moving(Pretended):
        def poll(self):
            if not (tmp_path / "moved").exists():
                (tmp_path / "sweep").rename(tmp_path / "moved")
                (tmp_path / "sweep").mkdir()
                (tmp_path / "sweep/trials.csv").write_text("of another sweep")
            return super().poll()

    monkeypatch.setattr(sweep, "start", Moving)
    assert_names(start(*GRID, exit_with=1), "-output", tmp_path / "sweep")
    assert pretended.started == ["trial-000"]
    assert (tmp_path / "sweep/trials.csv").read_text() == "of another sweep"


def test_two_sweeps_cannot_share_a_folder(tmp_path, start, pretended):
    (tmp_path / "sweep").mkdir()
    with locked(tmp_path / "sweep" / ".sweep.lock"):
        printed = start(*GRID, exit_with=2)
    assert not pretended.started
    assert_names(printed, tmp_path / "sweep")


@pytest.mark.parametrize("words", cases_of("mistakes-of_a_sweep"))
def test_sweep_mistake_is_refused_before_any_trial_starts(tmp_path, start, pretended, monkeypatch, words):
    monkeypatch.setenv("PATH", "")
    printed = start(*words.replace("(nothing)", "").split(), exit_with=2)
    assert not pretended.started
    assert_names(printed, *names_of("mistakes-of_a_sweep", words))


@given(names=st.sets(st.sampled_from([".DS_Store", ".git", ".nfs01", "photo.jpg", "Thumbs.db", "a.b"]), max_size=3))
@examples(30)
def test_sweep_folder_with_other_files_is_refused_unless_hidden(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("sweep")
    for name in names:
        (folder / name).write_text("")
    if all(name.startswith(".") for name in names):
        make_folder(folder)
        return
    with refused(ConfigError, "-output", "sweep.json"):
        make_folder(folder)
    assert set(os.listdir(folder)) == names


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path.parents[1] / "theirs")])
def test_replaced_sweep_lock_is_refused_and_never_followed(tmp_path, start, pretended, make):
    (tmp_path / "sweep").mkdir()
    make(tmp_path / "sweep/.sweep.lock")
    assert_names(start(*GRID, exit_with=2), "-output", tmp_path / "sweep")
    assert not (tmp_path / "theirs").exists()
    (tmp_path / "folder").mkdir()
    assert not is_locked(tmp_path / "folder") and not list((tmp_path / "folder").iterdir())
    make(tmp_path / "folder/.lock")
    assert not is_locked(tmp_path / "folder")


def test_sweep_list_values_need_brackets_and_commas_need_quotes():
    choices = sweep.read_over(["TRAIN.OPTIMIZER.BETAS=[0.9,0.99],(0.9,0.999)", "MODEL.NAME='a,b',c"])
    found = {key: sweep.choices_of(key, text) for key, text in choices.items()}
    assert found == {"TRAIN.OPTIMIZER.BETAS": ["[0.9,0.99]", "(0.9,0.999)"], "MODEL.NAME": ["a,b", "c"]}


class Forked:
    """A real run, forked from a process that has already imported torch."""

    faults: dict = {"draw_nothing": []}

    def __init__(self, arguments, output, cwd):
        output.touch()
        self.process = start_fork(arguments[1], arguments[2:], [output, output], {}, faults=self.faults)

    def poll(self):
        return self.process.exitcode

    def terminate(self):
        self.process.terminate()


@pytest.mark.long
def test_resumed_trial_after_kill_matches_a_manual_run(tmp_path, small_yaml, start, monkeypatch, signal_handlers):
    class Killed(Forked):
        faults = Forked.faults | {"signal_at": [20, int(signal.SIGKILL), [0]]}  # in the second epoch

    monkeypatch.setattr(sweep, "start", Killed)
    flags = ["-epochs", "2", "-batch_size", "32"]
    start("-seeds", "7", *flags, exit_with=1)
    assert rows(tmp_path / "sweep")[0]["state"] == "stopped"
    monkeypatch.setattr(sweep, "start", Forked)
    start()
    by_hand = ["-cfg", str(small_yaml), *flags, "-seed", "7", "-output", str(tmp_path), "-name", "by_hand"]
    assert run("main_single_gpu.py", *by_hand, faults=Forked.faults).returncode == 0
    assert run_hash(tmp_path / "sweep" / "trial-000") == run_hash(tmp_path / "by_hand")
    (row,) = rows(tmp_path / "sweep")
    assert row["state"] == "done" and float(row["seconds"]) > 0


def test_trial_gets_a_stop_signal_when_its_sweep_dies(tmp_path):
    if os.uname().sysname != "Linux":
        pytest.skip("only Linux can signal a process when its parent dies")
    output = tmp_path / "out"
    read, write = os.pipe()
    if (parent := os.fork()) == 0:
        trap = "trap 'echo told; exit' TERM; echo ready"
        program = ["/bin/sh", "-c", f"{trap}; for n in $(seq 6000); do sleep 0.1; done"]
        started = sweep.start(program, output, str(tmp_path))
        os.write(write, str(started.pid).encode())
        try:
            wait_until(lambda: output.read_text() == "ready\n")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    pid = int(os.read(read, 20))
    os.waitpid(parent, 0)
    wait_until(lambda: not alive(pid))
    assert output.read_text() == "ready\ntold\n"


def test_slurm_array_tasks_run_trials_and_share_one_table(tmp_path, start, monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: became.append((words, environment)))
    monkeypatch.setenv("SLURM_PROCID", "0")
    start("-seeds", "0,1", "-trial", "0", exit_with=None)
    begun_in = os.getcwd()
    monkeypatch.chdir(tmp_path)
    assert exit_code(sweep.main, ["-output", "sweep", "-trial", "1"]) is None and os.getcwd() == begun_in
    words, environment = became[1]
    assert [flag(words, "-name") for words, _ in became] == ["trial-000", "trial-001"]
    assert flag(words, "-seed") == "1" and "SLURM_PROCID" not in environment
    (tmp_path / "sweep" / "trial-001").mkdir()
    (tmp_path / "sweep" / "trial-001" / "status.json").write_text('{"state": "done"}')
    start("-seeds", "0,1", "-trial", "1")
    assert len(became) == 2, "this trial is already done"
    start("-table")
    assert [row["state"] for row in rows(tmp_path / "sweep")] == ["waiting", "done"]


def test_full_disk_for_sweep_tables_does_not_stop_trials(tmp_path, start, pretended, monkeypatch):
    full = OSError(28, "No space left on device")

    def refuse_tables(path, text):
        if path.name == "trials.csv":
            raise full
        write_text(path, text)

    monkeypatch.setattr(sweep, "write_text", refuse_tables)
    printed = start("-seeds", "0,1")
    assert len(pretended.started) == 2 and "trials.csv" in printed
    pretended.ends["trial-001"] = full
    start("-seeds", "0,1")  # both trials are done
    (tmp_path / "sweep" / "trial-001" / "status.json").unlink()
    assert_names(start(exit_with=2), "-output", "trial 1")
    monkeypatch.setattr(sweep, "write_text", Mock(side_effect=full))
    assert_names(start(exit_with=2), "-output", tmp_path / "sweep")


PLAN = {"version": 3, "over": {"TRAIN.BASE_LR": "1e-3,2e-3"}, "seeds": [], "points": [{"TRAIN.BASE_LR": "1e-3"}]}


@pytest.mark.parametrize("change", cases_of("mistakes-in_a_plan"))
def test_invalid_sweep_plan_is_reported_in_one_line(tmp_path, small_yaml, start, change):
    plan = json.dumps(PLAN | {"flags": ["-cfg", str(small_yaml)]})
    (tmp_path / "sweep").mkdir()
    # Of two equal keys, the last one counts.
    (tmp_path / "sweep/sweep.json").write_text(f"{plan[:-1]}, {content_of(change)}}}")
    printed = start("-table", exit_with=2)
    assert printed.count("\n") == 1
    assert_names(printed, *names_of("mistakes-in_a_plan", change))


def test_folder_of_a_sweep_has_the_short_flags_of_other_commands():
    for flag in ("-o", "-out", "-output"):
        arguments, flags = sweep.parse([flag, "sweeps/lr", "-epochs", "1"])
        assert (arguments.output, flags) == (Path("sweeps/lr"), ["-epochs", "1"])


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("Epoch 1\nerror: one\nagain\nerror: two\n", "two"),
        ("error: one", "one"),
        ("Epoch 1\nKilled\n", "Killed"),
        ("", "no output"),
        (None, "see its output"),
    ],
)
def test_table_of_a_sweep_names_the_last_error_of_a_run(tmp_path, printed, error):
    if printed is not None:
        (tmp_path / "output").write_text(printed)
    assert sweep.last_error(tmp_path / "output") == error
