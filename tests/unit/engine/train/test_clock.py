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
from engine.train.callback import Callback
from engine.train.clock import PHASES, Clock, HostTime
from engine.train.counters import Counters, EpochResult, Report
from tests.support.configs import CPU, small_config
from tests.support.forks import DEADLINE
from tests.support.trainers import Reports, make_trainer, train, update
from utils.distributed import Process
from utils.log import Log

pytestmark = pytest.mark.slow


class HandTime(HostTime):
    """A time that moves only when the test moves it."""

    def __init__(self):
        self.time, self.num_marks = 0.0, 0
        self.on_mark = lambda: None

    def now(self) -> float:
        self.num_marks += 1
        self.on_mark()
        return self.time


class PlannedClock(Clock):
    """A Clock for which every phase takes the time that the test sets, whatever really happens."""

    def __init__(self, **seconds: float):
        self.hand, self._seconds = HandTime(), seconds
        super().__init__(CPU, self.hand)

    @contextlib.contextmanager
    def __call__(self, name: str):
        with super().__call__(name):
            yield
            self.hand.time += self._seconds.get(name, 0.0)
        self.hand.time += self._seconds["other"] / 2


EVALUATION = 1000.0


def train_epochs(config: Config, clock: PlannedClock) -> list[Report]:
    """Return the reports of two epochs. Each batch takes 0.5 s to load, and each epoch ends with an evaluation."""

    def load_slowly(batch):
        clock.hand.time += 0.5
        return batch

    reports = Reports()
    trainer = make_trainer(config, callbacks=[reports])
    trainer.clock = clock
    for epoch in range(2):
        windows = trainer.data.windows(
            44 * epoch // config.TRAIN.ACCUM_ITER, 44 * (epoch + 1) // config.TRAIN.ACCUM_ITER
        )
        train(trainer, (window._replace(batches=map(load_slowly, window.batches)) for window in windows))
        clock.hand.time += EVALUATION
        trainer.end_epoch()
    return reports.seen


@pytest.mark.parametrize("accumulation", [1, 2])
def test_phase_times_sum_to_training_time_without_evaluation(tmp_path, accumulation):
    clock = PlannedClock(copy=0.25, forward=2, backward=4, optimizer=1, other=0.125)
    reports = train_epochs(small_config(tmp_path, "REPORT_FREQ=7", f"TRAIN.ACCUM_ITER={accumulation}"), clock)
    assert sum(report.seconds for report in reports) == pytest.approx(clock.hand.time - 2 * (0.0625 + EVALUATION))
    in_epoch = clock.shares()
    for shares in (in_epoch, *(report.shares for report in reports)):
        assert sum(shares.values()) == pytest.approx(100, abs=0.05)
        assert shares["data"] == pytest.approx(shares["forward"] / 4, abs=0.02), "a wait for the loader is data time"
        assert shares["copy"] == pytest.approx(shares["forward"] / 8, abs=0.02)
        assert shares["backward"] == pytest.approx(2 * shares["forward"], abs=0.02)
        assert shares["optimizer"] == pytest.approx(shares["forward"] / 2 / accumulation, abs=0.02)
        assert 0 < shares["other"] < shares["forward"] / 4 and shares["communication"] == 0


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
        reports = Reports()
        trainer = make_trainer(small_config(tmp_path, "REPORT_FREQ=3"), callbacks=[reports, Forget()])
        trainer.clock, read = Clock.on(torch.device("cuda")), trainer.counters.read

        def waiting_read(process):
            QueuedEvent.host_has_waited = True
            return read(process)

        trainer.counters.read = waiting_read
        train(trainer)
    assert [sum(report.shares.values()) for report in reports.seen] == [pytest.approx(100, abs=0.05)] * 5
    total = sum(report.seconds for report in reports.seen)
    assert total == pytest.approx((QueuedEvent.clock - 1) / 1000), "1 ms per event"


def test_device_without_timing_events_reports_only_data_wait():
    clock, seconds = Clock.on(torch.device("mps")), {**dict.fromkeys(PHASES, 0.0), "data": 1.0, "forward": 3.0}
    assert clock.shares(seconds) == {**dict.fromkeys(PHASES), "data": 25.0}


def test_communication_time_excludes_overlap_with_backward():
    """Gradients take 5 s, and their average another 3 s, for which DDP waits at the end of backward."""
    hand = HandTime()
    clock = Clock(CPU, hand)
    backward_is_over = threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            hand.time += 5
            return gradient

    def average(state, bucket):
        future = torch.futures.Future()

        def finish():
            backward_is_over.wait(timeout=DEADLINE)
            hand.time += 3
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model.register_comm_hook(None, average)
        for syncs in (False, True):
            clock.start_epoch()
            with contextlib.nullcontext() if syncs else model.no_sync():
                loss = model(Slow.apply(torch.ones(2, 4, requires_grad=True))).sum()
                with clock("backward"):
                    if syncs:
                        clock.mark_communication(loss)
                    num_marks, hand.on_mark = hand.num_marks, backward_is_over.set
                    loss.backward()  # marks the start of communication, if there is any
                    assert hand.num_marks - num_marks == syncs
            seconds = clock.lap()
            assert (seconds["backward"], seconds["communication"]) == (5, 3 if syncs else 0)
            hand.on_mark = lambda: None
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
        console = Console(config, log, SimpleNamespace(), lambda: (time.now - 10) / 15)
        time.now = 0.0
        train(make_trainer(config, callbacks=[time, console]))
        assert [each for each in reads if 10 < each < 110] == [each for each in expected if each % 20 == 10]


def test_progress_bar_reads_counters_without_other_processes(tmp_path):
    """Only one process has a terminal, so a collective would wait for the others forever."""
    config, log, asked = small_config(tmp_path), Log(rank=1), []
    log.on_terminal = True
    console = Console(config, log, SimpleNamespace(), itertools.count(2, 2).__next__)
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
    console = Console(config, log, forecast)
    console.on_epoch_end(trainer, EpochResult(Report(*[0] * 11), {"": Scores(1.0, 50.0, 100.0, 90, 0)}, 1, 1, 1))
    assert told[-1].endswith(" 1:00")


class MicroBatches(Callback):
    """Counts the micro-batches whose backward pass is over."""

    def __init__(self):
        self.count = 0

    def on_micro_batch(self, trainer, batch, weight) -> None:
        self.count += 1


def test_gradients_are_averaged_only_in_last_micro_batch(tmp_path):
    finished, averaged = MicroBatches(), set()

    def average(state, bucket):
        averaged.add(finished.count)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    trainer = make_trainer(small_config(tmp_path, "TRAIN.ACCUM_ITER=3"), callbacks=[finished])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer.parallel = Parallel(Process(CPU, world_size=2))
        trainer.replicate(accumulates=True)
        trainer.replica.register_comm_hook(None, average)
        update(trainer)
    finally:
        dist.destroy_process_group()
    assert finished.count == 3 and averaged == {2}
