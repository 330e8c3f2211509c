"""RUN.MAX_TIME and TRAIN.EARLY_STOP end a run in time with a complete state, and the remaining time is estimated."""

import signal
from types import SimpleNamespace

import pytest

from configs.schema import to_seconds
from engine.train.callback import Callback
from engine.train.counters import EpochResult
from engine.train.forecast import Forecast, RunTimes
from engine.train.stop_conditions import Stopped, TimeLimit
from tests.support.configs import small_config
from tests.support.refusals import assert_names
from tests.support.runs import run_folder, status_of, typed
from tests.support.trainers import make_trainer, train, update
from utils.program import StopSignal

pytestmark = pytest.mark.slow

LENGTHS = {"3h30m": 12600, "90m": 5400, "5400": 5400, "1.5H": 5400, "1d": 86400, "10s": 10}
LENGTHS |= {"1-12:00:00": 129600, "01:30:00": 5400, "2-1": 176400, "1-00:30": 88200}
LENGTHS |= dict.fromkeys(["2m 5s", "30m3h", "", "-5", "soon", "3h30", "01:30", "1:2:3"])


@pytest.mark.parametrize(("text", "seconds"), LENGTHS.items())
def test_durations_are_parsed_to_seconds(text, seconds):
    assert to_seconds(text) == seconds


def first_stop(seconds: float, asked: list[tuple[float, int]], start: float = 0, save: float = 0) -> float | None:
    """Call the limit at these times with these numbers of updates left. Return the first time at which it says stop."""
    order = SimpleNamespace(steps_per_epoch=50)
    times = RunTimes(order, 1, 1000, evaluation_in_updates=0, longest_save=lambda: save)
    limit = TimeLimit(seconds, start, times, iter(now for now, _ in asked).__next__)
    trainer = SimpleNamespace(epoch=0, schedule=SimpleNamespace(num_epochs=20))
    answers = [now for now, updates_left in asked if limit.should_stop(trainer, updates_left)]
    return answers[0] if answers else None


@pytest.mark.parametrize("frequency, epoch, expected", [(1, 0, 98), (4, 0, None), (4, 3, 98), (4, 9, 98)])
@pytest.mark.parametrize("is_measured", [True, False])
def test_first_evaluation_is_expected_to_fit_before_the_time_limit(frequency, epoch, expected, is_measured):
    """An epoch of 100 s and an evaluation of 60 s do not fit into 130 s.

    The last of the 10 epochs is always evaluated.
    """
    order, now = SimpleNamespace(steps_per_epoch=100), [0.0]
    times = RunTimes(order, frequency, 1000, evaluation_in_updates=60, longest_save=lambda: 1.0, update=1.0)
    times.evaluation = 60.0 if is_measured else 0.0
    limit = TimeLimit(130, 0.0, times, lambda: now[0])
    trainer, stopped = SimpleNamespace(epoch=epoch, schedule=SimpleNamespace(num_epochs=10)), None
    for step in range(100):
        if limit.should_stop(trainer, 100 - step):
            stopped = step
            break
        now[0] += 1.0
    assert stopped == expected


def test_time_limit_reserves_time_for_saving_and_evaluation():
    asked = [(now, 50) for now in range(20, 111, 5)]
    assert first_stop(100, asked, start=10, save=2) == 100  # the limit is 110 - 2 x (5 + 2)
    assert first_stop(100, asked, start=10, save=3) == 95
    assert first_stop(100, asked, start=10, save=8) == 85
    assert first_stop(100, [(now, 50) for now in (0, 30, 31, 39, 40)]) == 40
    asked = [(0, 2), (1, 1), (31, 3), (32, 2)]  # the last update and the evaluation took 30 s
    assert first_stop(60, asked) == 32


class Asked(Callback):
    """Notes the updates that are left, and whether to stop is always `answer`."""

    def __init__(self, answer: bool):
        self.told, self.answer = [], answer

    def should_stop(self, trainer, updates_left) -> bool:
        self.told.append(updates_left)
        return self.answer


@pytest.mark.usefixtures("signal_handlers")
def test_stop_callbacks_are_given_the_number_of_updates_left(tmp_path):
    callback = Asked(False)
    trainer = make_trainer(small_config(tmp_path), callbacks=[callback])
    update(trainer, 7)
    train(trainer, trainer.data.windows(7, trainer.data.steps_per_epoch))
    assert trainer.data.steps_per_epoch > 9
    assert callback.told == list(range(trainer.data.steps_per_epoch - 7, 0, -1))


@pytest.mark.usefixtures("signal_handlers")
def test_stop_signal_takes_precedence_over_the_time_limit(tmp_path):
    stop = StopSignal()
    stop.number = signal.SIGINT
    with pytest.raises(Stopped) as stopped:
        train(make_trainer(small_config(tmp_path), callbacks=[Asked(True)]), stop=stop)
    assert stopped.value.signal == signal.SIGINT


@pytest.mark.long
def test_early_stopped_run_stays_finished_until_limit_is_lifted(tmp_path, small_yaml):
    flags = ["-cfg", str(small_yaml), "-output", str(tmp_path / "run"), "-resume", "auto", "-opts"]
    # With a learning rate of zero, no evaluation is better than the first.
    flags += ["TRAIN.BASE_LR=0", "TRAIN.WARMUP_START_LR=0", "TRAIN.EARLY_STOP=2", "DATA.BATCH_SIZE=160"]
    flags += ["TRAIN.BEST_EPOCH=highest"]

    def start(*options: str, processes: int = 1) -> tuple[str, str | None, int, int]:
        """Continue the run. Return its state, the reason, the number of epochs and the best epoch."""
        script = f"main_{'multi' if processes > 1 else 'single'}_gpu.py"
        ended = typed(script, *flags, *options, processes=processes)
        assert set(ended.codes) == {0}, ended.printed
        said.append(ended.stdout)
        status = status_of(run_folder(tmp_path / "run"))
        return status["state"], status.get("reason"), status["epoch"], status["best_epoch"]

    said: list[str] = []
    assert start("TRAIN.NUM_EPOCHS=2") == ("done", None, 2, 1)
    assert start("TRAIN.NUM_EPOCHS=6", processes=2) == ("done", "early stop", 3, 1)
    assert start("TRAIN.NUM_EPOCHS=6") == ("done", "early stop", 3, 1)
    assert_names(said[-1], "TRAIN.EARLY_STOP=none")
    assert start("TRAIN.NUM_EPOCHS=4", "TRAIN.EARLY_STOP=none") == ("done", None, 4, 1)


class MovesTime(Callback):
    """Simulates a first update of 100 s and other updates of 10 s."""

    now = 30.0

    def on_update(self, trainer) -> None:
        self.now += 100 if trainer.step == 1 else 10


def test_remaining_time_includes_updates_evaluations_and_final_work(tmp_path, all_digits):
    told, said, time = [], [], MovesTime()
    config = small_config(tmp_path, "REPORT_FREQ=1", "RUN.MAX_TIME=16m", "CALIBRATE=false")
    trainer = make_trainer(config)
    order = trainer.data.order
    num_evaluated = 3 * order.num_images / order.steps_per_epoch  # evaluating them takes as long as an update
    times = RunTimes.of(config, order, num_evaluated, longest_save=lambda: 5)
    calls = lambda **facts: told.append(facts), said.append, lambda: time.now
    forecast = Forecast(config, times, 0.0, *calls)
    trainer.callbacks = [time, forecast]
    report = train(trainer)
    # The final report is estimated as half of the 30 s before the first update; a save takes 5 s.
    assert [each["eta_seconds"] for each in told] == [None, *range(86 * 10 + 40, 44 * 10 + 30, -10)]
    assert told[-1]["position"] == {"epoch": 0, "step": 44}
    (line,) = said
    assert_names(line, "15 min", "RUN.MAX_TIME", "16m", "2 epochs")  # 900 s are needed, 820 s are left
    time.now += 100
    trainer.notify("on_epoch_end", EpochResult(report, {"": None}, 1437, 440, 100))
    assert forecast.left(trainer, 1) == 44 * 10 + 100 + 20
    time.now += 8
    trainer.end_epoch()
    trainer.notify("on_epoch_start")
    assert forecast.left(trainer, 1) == 44 * 10 + 108 + 20
    assert forecast.left(trainer, 2) == 44 * 10 + 20
    assert "1.5 of 2" in forecast.describe(44, 547)  # 292 s in total
    trainer.notify("on_rollback")
    assert forecast.left(trainer, 0) is None
