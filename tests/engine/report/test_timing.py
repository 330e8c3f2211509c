"""Where the time goes: phases by a clock that the test moves, advice, and the trace for a profiler's viewer."""

import contextlib
import csv
import gzip
import json
import re
import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from configs.load import load
from datasets import load_image_sets
from engine.checkpoint.format import changes
from engine.report.data_wait_advice import Advice
from engine.report.metrics import StepRows
from engine.report.recorder import Recorder
from engine.report.timing import MOST_MARKS, PHASES, HostClock, Phases, shares
from engine.run import run
from tests.support.configs import CPU, SMALL, small_config
from tests.support.refusals import assert_names
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder
from tests.support.trainers import make_trainer
from utils.distributed import Process


class HandClock(HostClock):
    """Stands still unless it is moved."""

    def __init__(self):
        self.time = 0.0

    def now(self) -> float:
        return self.time


class TimedPhases(Phases):
    """Every phase takes the time that the test says, whatever really happens in it."""

    def __init__(self, **seconds: float):
        super().__init__(HandClock())
        self._seconds = seconds

    def begin(self, name: str) -> None:
        super().begin(name)
        self._clock.time += self._seconds.get(name, 0.0)

    @property
    def time(self) -> float:
        return self._clock.time


def train_rows(trainer, num_epochs: int = 1) -> list[dict]:
    """The reports of whole epochs."""
    rows = []
    trainer.on_report = rows.append
    windows = trainer.data.windows(0, num_epochs * trainer.data.steps_per_epoch)
    for _ in range(num_epochs):
        trainer.train_epoch(windows, save=lambda: None)
        trainer.end_epoch()
    return rows


def run_here(folder, phases: Phases, *options: str) -> str:
    """A whole run in this process, with these phases; returns its log."""
    path = folder / "settings.yaml"
    path.write_text(SMALL)
    loaded = load(["-cfg", str(path), "-output", str(folder / "runs"), "-opts", *options])
    with mock.patch.object(Phases, "on", return_value=phases):
        assert run(loaded, Process(CPU)) == 0
    return (run_folder(folder / "runs") / "log.txt").read_text()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_phases_add_up_to_the_time_that_passed(tmp_path, accumulation):
    trainer = make_trainer(small_config(tmp_path, "REPORT_FREQ=7", f"TRAIN.ACCUM_ITER={accumulation}"))
    trainer.phases = TimedPhases(data=0.5, copy=0.25, forward=2, backward=4, optimizer=1, other=0.125)
    rows = train_rows(trainer)
    assert sum(row["seconds"] for row in rows) == pytest.approx(trainer.phases.time - 0.125)  # the last is under way
    for row in rows:
        assert sum(row[f"{name}_pct"] for name in PHASES) == pytest.approx(100, abs=0.05)
        assert row["backward_pct"] == pytest.approx(2 * row["forward_pct"], abs=0.02)
        assert row["optimizer_pct"] == pytest.approx(row["forward_pct"] / 2 / accumulation, abs=0.02)
        assert row["communication_pct"] == 0


def test_real_time_adds_up_too_and_is_spent_in_the_model(tmp_path):
    rows = train_rows(make_trainer(small_config(tmp_path)))
    for row in rows:
        assert sum(row[f"{name}_pct"] for name in PHASES) == pytest.approx(100, abs=0.05)
        assert min(row["forward_pct"], row["backward_pct"], row["optimizer_pct"]) > 0


def test_what_happens_between_epochs_is_in_no_phase(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    trainer.phases = TimedPhases(forward=1)
    end_epoch = trainer.end_epoch

    def evaluate_for_long():
        trainer.phases._clock.time += 1000
        end_epoch()

    trainer.end_epoch = evaluate_for_long
    rows = train_rows(trainer, num_epochs=2)
    assert sum(row["seconds"] for row in rows) == 2 * trainer.data.steps_per_epoch
    assert not trainer.phase_seconds, "they are those of an epoch"


def test_a_slow_loader_shows_as_waiting(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    trainer.phases = TimedPhases(forward=1)
    load_batches = trainer.data._load

    def slow(pieces):
        for batch in load_batches(pieces):
            trainer.phases._clock.time += 3
            yield batch

    trainer.data._load = slow
    assert [row["data_pct"] for row in train_rows(trainer)] == [75.0] * 4


class QueuedEvent:
    """A device's event: it can be read only when the host has waited for the device."""

    created = reads = 0
    host_has_waited = False
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        QueuedEvent.created += 1

    def record(self, stream):
        QueuedEvent.clock += 1
        self.time = QueuedEvent.clock

    def elapsed_time(self, other):
        assert QueuedEvent.host_has_waited, "an event was read in a step"
        return other.time - self.time


def test_device_events_are_read_at_reports_only_and_used_again(tmp_path):
    trainer = make_trainer(small_config(tmp_path, "REPORT_FREQ=10"))
    with mock.patch("torch.cuda.Event", QueuedEvent), mock.patch("torch.cuda.current_stream"):
        trainer.phases = Phases.on(torch.device("cuda"))
        created = []
        report = trainer.report

        def waiting_report():
            QueuedEvent.host_has_waited = True
            return report()

        def note(row):
            QueuedEvent.host_has_waited = False
            created.append(QueuedEvent.created)
            assert sum(row[f"{name}_pct"] for name in PHASES) == pytest.approx(100, abs=0.05)

        trainer.report, trainer.on_report = waiting_report, note
        windows = trainer.data.windows(0, 88)
        for _ in range(2):
            trainer.train_epoch(windows, save=lambda: None)
            trainer.end_epoch()
    assert len(created) == 12
    assert created[0] < created[1] == created[-1]


def test_marks_without_a_report_have_bounded_memory_and_leave_no_trace_in_the_next():
    phases = TimedPhases(forward=1, other=2)
    for _ in range(MOST_MARKS):
        phases.begin("forward")
        phases.begin("other")
    assert len(phases._marks) == MOST_MARKS
    seconds = phases.lap()
    assert seconds["forward"] == MOST_MARKS / 2 and seconds["other"] == pytest.approx(MOST_MARKS, abs=2)
    phases.begin("forward")
    phases.begin("other")
    assert phases.lap() == {**dict.fromkeys(PHASES, 0.0), "forward": 1.0}


def test_where_a_queue_has_no_events_only_waiting_is_told():
    seconds = {**dict.fromkeys(PHASES, 0.0), "data": 1.0, "forward": 3.0}
    assert shares(seconds, torch.device("mps")) == {**dict.fromkeys(PHASES), "data": 25.0}


def test_communication_is_what_is_left_of_it_when_gradients_are_computed():
    """A model whose gradients take 5 s, and their average another 3, of which DDP waits at the end of backward."""
    phases = TimedPhases()
    backward_is_over = threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            phases._clock.time += 5
            return gradient

    def average(state, bucket):
        future = torch.futures.Future()

        def finish():
            backward_is_over.wait(timeout=10)
            phases._clock.time += 3
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    mark = phases._mark

    def watched_mark(name):
        mark(name)
        if name == "communication":
            backward_is_over.set()

    phases._mark = watched_mark
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer = torch.nn.Linear(4, 4)
        model = torch.nn.parallel.DistributedDataParallel(layer)
        model.register_comm_hook(None, average)
        for syncs in (False, True):
            phases.restart()
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss = model(Slow.apply(torch.ones(2, 4, requires_grad=True))).sum()
                phases.begin_backward(loss, syncs=syncs)
                loss.backward()
            phases.begin("other")
            seconds = phases.lap()
            assert (seconds["backward"], seconds["communication"]) == (5, 3 if syncs else 0)
    finally:
        dist.destroy_process_group()


def test_communication_is_looked_for_where_gradients_are_averaged(tmp_path):
    """In the last micro-batch, of several processes."""
    trainer = make_trainer(small_config(tmp_path, "TRAIN.ACCUM_ITER=2"))
    trainer.replica.no_sync = contextlib.nullcontext
    windows = trainer.data.windows(0, 2)
    for world_size, expected in ((1, [False, False]), (2, [False, True])):
        trainer.process.world_size = world_size
        with mock.patch.object(trainer.phases, "begin_backward") as begin_backward:
            trainer.update(next(windows))
        assert [call.kwargs["syncs"] for call in begin_backward.call_args_list] == expected


def advice_for(tmp_path, num_workers, num_cores, in_memory=False):
    config = small_config(tmp_path, f"DATA.NUM_WORKERS={num_workers}")
    image_set = load_image_sets(config)[0]
    image_set.in_memory = in_memory
    with mock.patch("engine.report.data_wait_advice.cores_per_process", return_value=num_cores):
        return Advice(config, image_set, Process(CPU))


def rows(*percents, updates=20):
    return [{"step": index * updates, "seconds": 1.0, "data_pct": percent} for index, percent in enumerate(percents)]


@pytest.mark.parametrize(
    ("num_workers", "num_cores", "percent", "expected"),
    [
        (1, 8, 75, "75% of the time is spent waiting for data: try -num_workers 4 .now 1; each process has 8 cores"),
        (4, 6, 90, "90% .*: try -num_workers 6 "),
        (0, 8, 60, "60% .*: try -num_workers 2 "),
        (0, 8, 100, "100% .*: try -num_workers 8 "),
        (8, 8, 50, "50% .*: there is a worker for each core already; DATA.CACHE=disk .* DATA.CACHE_SIDE=16 "),
    ],
)
def test_advice_names_a_number(tmp_path, num_workers, num_cores, percent, expected):
    advice = advice_for(tmp_path, num_workers, num_cores)
    said = [advice.look_at(row) for row in rows(percent, percent, percent)]
    assert said[0] is None and said[2] is None, "start-up does not count, and it is said once"
    assert re.match(expected, said[1]), said[1]


def test_advice_is_not_given_without_a_cause_or_a_remedy(tmp_path):
    fast = advice_for(tmp_path, 1, 8)
    assert not any(fast.look_at(row) for row in rows(99, 19, 20, 5))
    hopeless = advice_for(tmp_path, 8, 8, in_memory=True)
    assert not any(hopeless.look_at(row) for row in rows(99, 99, 99))


def test_a_few_slow_updates_are_not_enough_for_advice(tmp_path):
    advice = advice_for(tmp_path, 1, 8)
    said = [advice.look_at(row) for row in rows(0, 90, 0, 0, 0, 0, updates=2)]
    assert said == [None] * 6


def test_a_run_that_waits_says_so_once_and_one_that_does_not_is_silent(tmp_path):
    for name, seconds in (("slow", 9), ("fast", 0.1)):
        folder = tmp_path / name
        folder.mkdir()
        with mock.patch("engine.report.data_wait_advice.cores_per_process", return_value=4):
            log = run_here(folder, TimedPhases(data=seconds, forward=2, backward=4), "TENSORBOARD=true")
        assert log.count("-num_workers 3") == (name == "slow")
        times = re.findall(r"time: ([\d.]+)% waiting for data, .* ([\d.]+)% forward, ([\d.]+)% backward", log)
        with open(run_folder(folder / "runs") / "steps.csv") as file:
            steps = list(csv.DictReader(file))
        metrics = (run_folder(folder / "runs") / "metrics.jsonl").read_text().splitlines()
        expected = {"slow": 75.0, "fast": 3.23}[name]  # data is asked for twice: for the batch, and for one more
        assert [json.loads(row)["data_wait_pct"] for row in metrics] == [expected] * 2
        assert {float(row["data_pct"]) for row in steps} == {expected}
        assert len(times) == 2 and float(times[0][2]) == pytest.approx(2 * float(times[0][1]), abs=0.2)
    assert_board_has(run_folder(folder / "runs") / "tensorboard", len(steps))


def assert_board_has(folder, num_reports):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    assert all(len(board.Scalars(f"time/{name}")) == num_reports for name in PHASES)


def test_importing_tensorboard_is_in_no_phase(tmp_path):
    phases, open_board = TimedPhases(forward=2, backward=4), Recorder._open_board

    def import_for_long(recorder):
        phases._clock.time += 1000 * (recorder._board is None)
        return open_board(recorder)

    with mock.patch.object(Recorder, "_open_board", import_for_long):
        run_here(tmp_path, phases, "TENSORBOARD=true")
    with open(run_folder(tmp_path / "runs") / "steps.csv") as file:
        assert {float(row["other_pct"]) for row in csv.DictReader(file)} == {0.0}


def test_profile_writes_a_trace_with_the_phases_and_the_run_goes_on(tmp_path):
    phases = Phases(HostClock())
    log = run_here(tmp_path, phases, "PROFILE=3", "TRAIN.ACCUM_ITER=2", "TRAIN.NUM_EPOCHS=1")
    path = run_folder(tmp_path / "runs") / "trace.json.gz"
    assert f"profile: {path}" in log and log.index("profile:") < log.index("Step[0020/")
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    named = {name: [event for event in events if event["name"] == name] for name in PHASES}
    # After its two micro-batches each update asks for one more.
    numbers = {name: len(found) for name, found in named.items() if found}
    assert numbers == {"data": 9, "copy": 6, "forward": 6, "backward": 6, "optimizer": 3}
    forward = named["forward"][0]
    inside = {e["name"] for e in events if forward["ts"] < e["ts"] < forward["ts"] + forward["dur"]}
    assert "aten::linear" in inside and "aten::_foreach_add_" not in inside
    assert log.rstrip().splitlines()[-1].startswith("done;") and not phases.shows_ranges


def test_a_profiled_run_ends_as_one_without_and_may_be_resumed_without(tmp_path):
    hashes = []
    for option in ("PROFILE=2", "PROFILE=null"):
        folder = tmp_path / option
        folder.mkdir()
        run_here(folder, Phases(HostClock()), option, "TRAIN.NUM_EPOCHS=1", "DATA.BATCH_SIZE=128")
        hashes.append(run_hash(run_folder(folder / "runs")))
    assert hashes[0] == hashes[1]
    assert changes({"PROFILE": 2}, {"PROFILE": None}) == []


def test_a_run_too_short_for_a_trace_says_so(tmp_path):
    log = run_here(tmp_path, Phases(HostClock()), "PROFILE=3", "DATA.BATCH_SIZE=700", "TRAIN.NUM_EPOCHS=2")
    assert_names(log, "PROFILE", "update 7")
    assert not (run_folder(tmp_path / "runs") / "trace.json.gz").exists()


def test_a_run_that_ends_within_a_trace_keeps_what_there_is(tmp_path):
    run_here(tmp_path, Phases(HostClock()), "PROFILE=100", "DATA.BATCH_SIZE=160", "TRAIN.NUM_EPOCHS=1")
    with gzip.open(run_folder(tmp_path / "runs") / "trace.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    assert names.count("optimizer") == 8 - 6


def test_without_profile_no_range_is_opened(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    windows = trainer.data.windows(0, 1)
    with mock.patch("torch.profiler.record_function", side_effect=AssertionError("a range was opened")):
        trainer.update(next(windows))


def test_rows_of_a_run_from_before_there_were_these_columns_stay(tmp_path):
    (tmp_path / "steps.csv").write_text("step,loss\n0,2.5\n20,2.25\n")
    rows = StepRows(tmp_path, 20, ("step", "loss", "data_pct"))
    rows.add({"step": 20, "loss": 2.0, "data_pct": 12.5})
    rows.add({"step": 40, "loss": 1.5, "data_pct": None})
    rows.close()
    written = (tmp_path / "steps.csv").read_text()
    assert written == "step,loss,data_pct\n0,2.5,\n20,2,12.5\n40,1.5,\n"
    StepRows(tmp_path, 60, ("step", "loss", "data_pct")).close()
    assert (tmp_path / "steps.csv").read_text() == written
