"""The time that is left of a run, by a clock that only the test moves."""

from engine.train.counters import EpochResult
from engine.train.forecast import Forecast
from engine.train.trainer import Callback
from tests.support.configs import small_config
from tests.support.refusals import assert_names
from tests.support.trainers import make_trainer, train


class MovesTime(Callback):
    """The first update takes 100 s, each other one 10 s."""

    now = 30.0

    def on_update(self, trainer) -> None:
        self.now += 100 if trainer.step == 1 else 10


def test_the_time_left_is_that_of_updates_evaluations_and_the_end(tmp_path):
    told, said, time = [], [], MovesTime()
    config = small_config(tmp_path, "REPORT_FREQ=1", "RUN.MAX_TIME=16m")
    trainer = make_trainer(config)
    order = trainer.data.order
    num_evaluated = 3 * order.num_images / order.steps_per_epoch  # so many that they take as long as an update
    calls = lambda: 5, lambda **facts: told.append(facts), said.append, lambda: time.now
    forecast = Forecast(config, order, num_evaluated, 0.0, *calls)
    trainer.callbacks = [time, forecast]
    report = train(trainer)
    # The report at the end is taken for a third of the 30 s until the first update; a save takes 5.
    assert [each["eta_seconds"] for each in told] == [None, *range(86 * 10 + 35, 44 * 10 + 25, -10)]
    assert told[-1]["position"] == {"epoch": 0, "step": 44}
    (line,) = said
    assert_names(line, "15 min", "RUN.MAX_TIME", "16m", "2 epochs")  # 895 s are left of 820
    time.now += 100
    trainer.notify("on_epoch_end", EpochResult(report, {"": None}, 1437, 440, 100))
    assert forecast.left(trainer, 1) == 44 * 10 + 100 + 15
    time.now += 8
    trainer.end_epoch()
    trainer.notify("on_epoch_start")
    assert forecast.left(trainer, 1) == 44 * 10 + 104 + 15
    assert forecast.left(trainer, 2) == 44 * 10 + 15
    assert "1.5 of 2" in forecast.describe(44, 547)  # of 292
    trainer.notify("on_rollback")
    assert forecast.left(trainer, 0) is None
