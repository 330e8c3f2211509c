"""The time of each phase, measured with a clock that the test moves."""

import contextlib
import itertools
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from configs.schema import Config
from engine.evaluation.scores import Scores
from engine.parallel import Parallel
from engine.record.console import Console
from engine.record.timing import HostClock, Timing, shares
from engine.train.callback import PHASES, Callback
from engine.train.counters import Counters, EpochResult, Report
from tests.support.configs import CPU, small_config
from tests.support.forks import DEADLINE
from tests.support.trainers import Reports, make_trainer, train, update
from utils.distributed import Process
from utils.log import Log

pytestmark = pytest.mark.slow


class HandClock(HostClock):
    """A clock that moves only when the test moves it."""

    def __init__(self):
        self.time, self.num_marks = 0.0, 0
        self.on_mark = lambda: None

    def now(self) -> float:
        self.num_marks += 1
        self.on_mark()
        return self.time


class PlannedTiming(Timing):
    """A Timing in which every phase takes the time that the test sets, whatever really happens."""

    def __init__(self, **seconds: float):
        self.clock, self._seconds = HandClock(), seconds
        super().__init__(self.clock)

    def on_phase(self, trainer, name: str) -> None:
        super().on_phase(trainer, name)
        self.clock.time += self._seconds.get(name, 0.0)


EVALUATION = 1000.0


def train_epochs(config: Config, timing: PlannedTiming) -> list[Report]:
    """Return the reports of two epochs. Each batch takes 0.5 s to load, and each epoch ends with an evaluation."""

    def load_slowly(batch):
        timing.clock.time += 0.5
        return batch

    reports = Reports()
    trainer = make_trainer(config, callbacks=[timing, reports])
    for epoch in range(2):
        windows = trainer.data.windows(
            44 * epoch // config.TRAIN.ACCUM_ITER, 44 * (epoch + 1) // config.TRAIN.ACCUM_ITER
        )
        train(trainer, (window._replace(batches=map(load_slowly, window.batches)) for window in windows))
        timing.clock.time += EVALUATION
        trainer.end_epoch()
    return reports.seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_phase_times_sum_to_training_time_without_evaluation(tmp_path, accumulation):
    timing = PlannedTiming(copy=0.25, forward=2, backward=4, optimizer=1, other=0.125)
    reports = train_epochs(small_config(tmp_path, "REPORT_FREQ=7", f"TRAIN.ACCUM_ITER={accumulation}"), timing)
    assert sum(report.seconds for report in reports) == pytest.approx(timing.clock.time - 2 * (0.125 + EVALUATION))
    assert sum(timing.epoch_seconds.values()) == pytest.approx(timing.clock.time / 2 - 0.125 - EVALUATION)
    for found in (report.shares for report in reports):
        assert sum(found.values()) == pytest.approx(100, abs=0.05)
        assert found["data"] == pytest.approx(found["forward"] / 4, abs=0.02), "a wait for the loader is data time"
        assert found["backward"] == pytest.approx(2 * found["forward"], abs=0.02)
        assert found["optimizer"] == pytest.approx(found["forward"] / 2 / accumulation, abs=0.02)
        assert found["communication"] == 0


class QueuedEvent:
    """A device's event that can be read only after the host has waited for the device."""

    host_has_waited = False
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        QueuedEvent.clock += 1
        self.time = QueuedEvent.clock

    def elapsed_time(self, other):
        assert QueuedEvent.host_has_waited, "an event was read during a step"
        return other.time - self.time


class Forget(Callback):
    def on_report(self, trainer, report) -> None:
        QueuedEvent.host_has_waited = False


def test_device_timing_events_are_not_read_between_reports(tmp_path):
    with mock.patch("torch.cuda.Event", QueuedEvent), mock.patch("torch.cuda.current_stream"):
        reports, timing = Reports(), Timing.on(torch.device("cuda"))
        trainer = make_trainer(small_config(tmp_path, "REPORT_FREQ=3"), callbacks=[timing, reports, Forget()])
        report = trainer.report

        def waiting_report():
            QueuedEvent.host_has_waited = True
            return report()

        trainer.report = waiting_report
        train(trainer)
    assert [sum(each.shares.values()) for each in reports.seen] == [pytest.approx(100, abs=0.05)] * 5
    assert sum(timing.epoch_seconds.values()) == pytest.approx((QueuedEvent.clock - 1) / 1000), "1 ms per event"


def test_device_without_timing_events_reports_only_data_wait():
    seconds = {**dict.fromkeys(PHASES, 0.0), "data": 1.0, "forward": 3.0}
    assert shares(seconds, torch.device("mps")) == {**dict.fromkeys(PHASES), "data": 25.0}


def test_communication_time_excludes_overlap_with_backward():
    """Gradients take 5 s, and their average another 3 s, for which DDP waits at the end of backward."""
    timing = PlannedTiming()
    backward_is_over = threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            timing.clock.time += 5
            return gradient

    def average(state, bucket):
        future = torch.futures.Future()

        def finish():
            backward_is_over.wait(timeout=DEADLINE)
            timing.clock.time += 3
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(None, average)
        for world_size, is_last in ((2, False), (1, True), (2, True)):
            syncs = world_size == 2 and is_last
            trainer = SimpleNamespace(process=Process(CPU, world_size=world_size))
            timing.restart()
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss = model(Slow.apply(torch.ones(2, 4, requires_grad=True))).sum()
                timing.on_phase(trainer, "backward")
                timing.on_loss(trainer, loss, is_last)
                num_marks, timing.clock.on_mark = timing.clock.num_marks, backward_is_over.set
                loss.backward()  # marks the start of communication, if there is any
            assert timing.clock.num_marks - num_marks == syncs
            timing.on_phase(trainer, "other")
            seconds = timing.lap()
            assert (seconds["backward"], seconds["communication"]) == (5, 3 if syncs else 0)
            timing.clock.on_mark = lambda: None
            backward_is_over.clear()
    finally:
        dist.destroy_process_group()


class MovesTime(Callback):
    """Simulates updates of 10 s."""

    def __init__(self):
        self.now = 0.0

    def on_update(self, trainer) -> None:
        self.now += 10


def test_progress_bar_reads_counters_at_most_once_a_second(tmp_path, monkeypatch):
    config, log, time, reads = small_config(tmp_path, "REPORT_FREQ=1000"), Log(rank=1), MovesTime(), []
    read = Counters.read
    monkeypatch.setattr(Counters, "read", lambda *arguments: reads.append(time.now) or read(*arguments))
    for log.on_terminal, expected in ((False, []), (True, list(range(20, 110, 10)))):
        reads.clear()
        console = Console(config, log, Timing(HostClock()), SimpleNamespace(), lambda: (time.now - 10) / 15)
        time.now = 0.0
        train(make_trainer(config, callbacks=[time, console]))
        assert [each for each in reads if 10 < each < 110] == [each for each in expected if each % 20 == 10]


def test_progress_bar_reads_counters_without_other_processes(tmp_path):
    """Only one process has a terminal, so a collective would wait for the others forever."""
    config, log, asked = small_config(tmp_path), Log(rank=1), []
    log.on_terminal = True
    console = Console(config, log, Timing(HostClock()), SimpleNamespace(), itertools.count(2, 2).__next__)
    counters = SimpleNamespace(read=lambda process: asked.append(process.world_size) or {})
    trainer = SimpleNamespace(process=Process(CPU, world_size=2), counters=counters)
    console._report = Report(*[0] * 11)
    console.on_update(trainer)
    assert asked == [1]


def test_time_left_after_an_epoch_counts_none_of_its_own_evaluation(tmp_path):
    config, told = small_config(tmp_path), []
    # The forecast counts 60 s for each of the two evaluations that is still to come.
    forecast = SimpleNamespace(left=lambda trainer, num_done: 60.0 * (2 - num_done))
    log = SimpleNamespace(show=told.append, detail=lambda line: None)
    trainer = make_trainer(config)
    console = Console(config, log, Timing(HostClock()), forecast)
    console.on_epoch_end(trainer, EpochResult(Report(*[0] * 11), {"": Scores(1.0, 50.0, 100.0, 90, 0)}, 1, 1, 1))
    assert told[-1].endswith(" 1:00")


class Losses(Callback):
    """Records for each loss whether its micro-batch is the last of its update."""

    def __init__(self):
        self.is_last = []

    def on_loss(self, trainer, loss, is_last) -> None:
        self.is_last.append(is_last)


def test_gradients_are_averaged_only_in_last_micro_batch(tmp_path):
    losses, averaged = Losses(), set()

    def average(state, bucket):
        averaged.add(len(losses.is_last))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    trainer = make_trainer(small_config(tmp_path, "TRAIN.ACCUM_ITER=3"), callbacks=[losses])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer.parallel = Parallel(Process(CPU, world_size=2))
        trainer.replicate(accumulates=True)
        trainer.replica.register_comm_hook(None, average)
        update(trainer)
    finally:
        dist.destroy_process_group()
    assert losses.is_last == [False, False, True] and averaged == {3}
