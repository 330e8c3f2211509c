"""Builds the callbacks of a run, in the order in which they are called."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from configs.schema import to_seconds
from datasets import BadImages, watches
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.resume import OVERLAP, bad_images_of, overlap_of
from engine.parallel import is_sharded
from engine.plan import TrainPlan
from engine.record.console import Console
from engine.record.metrics import Recorder
from engine.session import Session
from engine.train.callback import Callback
from engine.train.forecast import Forecast, RunTimes
from engine.train.stop_conditions import BadImageLimit, SkipLimit, TimeLimit
from engine.train.trainer import Trainer

if TYPE_CHECKING:
    from engine.record.trackers import Trackers
    from engine.report import RunReport

T = TypeVar("T", bound=Callback)


class Watchers(NamedTuple):
    """The callbacks of a run in calling order. Other code uses some of them directly."""

    callbacks: list[Callback]
    forecast: Forecast
    report: "RunReport"
    bad_images: BadImages

    def refuse(self) -> None:
        """Raise the first `refusal` that a callback has set, if any."""
        for callback in self.callbacks:
            if callback.refusal:
                raise callback.refusal


def choose_callbacks(
    session: Session, plan: TrainPlan, trainer: Trainer, saver: AsyncSaver, trackers: "Trackers | None"
) -> Watchers:
    """Return the callbacks of this process. Some exist only in process 0. To add a callback, add a line here.

    A callback that uses another callback gets it as an argument. So the other callback is created and called first.
    """
    config, process, log, callbacks = plan.config, session.process, session.log, []

    def add(callback: T) -> T:
        callbacks.append(callback)
        return callback

    started = plan.inputs.loaded.started
    times = RunTimes.of(config, plan.order, plan.num_evaluated, lambda: saver.longest)
    forecast = add(Forecast(config, times, started, session.beat, log.say))
    if config.CALIBRATE and plan.is_measured:
        from engine.confidence.calibration import Calibration

        groups_and_limits = trainer.task.groups_and_limits(plan.train_set, plan.eval_set)
        add(Calibration(session.path, log, trainer, plan.inputs.saved.get("calibration", {}), *groups_and_limits))
    from engine.report import RunReport

    report = RunReport(session, plan, trainer)
    callbacks += report.callbacks
    if process.is_first and config.PROFILE:
        from engine.train.profiler import Profiler

        add(Profiler(config.PROFILE, session.path / "trace.json.gz", log.say))
    add(Console(config, log, forecast))
    if process.is_first:
        # Callbacks are closed in this order. The recorder follows the report's callbacks, so it draws the curves last.
        add(Recorder(session.path, log, trainer, trackers, report.curves.draw))
        if not plan.train_set.storage.in_memory:
            from engine.record.advice import DataWaitAdvice

            add(DataWaitAdvice(config, plan.train_set, process, log.say))
        if config.RUN.MAX_TIME:
            add(TimeLimit(to_seconds(config.RUN.MAX_TIME), started, times))
    from engine.doctor import Doctor

    class_facts = {"class_names": list(plan.classes), "class_weights": plan.class_weights}
    # The doctor examines in process 0 and copies the whole model, so it does not examine a sharded run.
    doctor = add(Doctor(config, session.path, log, class_facts, process.is_first and not is_sharded(config, process)))
    known = bad_images_of(plan.inputs.saved, len(plan.train_set), plan.facts)
    bad_images = BadImages(plan.train_set, config.DATA.MAX_BAD_FRACTION, log.warn, known)
    bad_images.forget_repaired(process)
    add(BadImageLimit(bad_images))
    known_overlap = overlap_of(plan.inputs.saved, plan.facts)
    # A run that is resumed in epoch 1 with other images lacks the fingerprints of its first images.
    is_compared = plan.holds_out and watches(plan.train_set, plan.eval_set, config.DATA.DATA_PATH)
    if (known_overlap or trainer.step == 0) and is_compared:
        from datasets.overlap import Overlap
        from engine.record.advice import TrainedOnAdvice

        trainer.parts[OVERLAP] = Overlap(plan.train_set, plan.eval_set, process, known_overlap)
        add(TrainedOnAdvice(trainer.parts[OVERLAP], log.say, session.describe))
    add(SkipLimit(config.PRECISION.MAX_CONSECUTIVE_SKIPS, doctor.get_advice))
    return Watchers(callbacks, forecast, report, bad_images)


def callbacks_that_save(
    session: Session, plan: TrainPlan, trainer: Trainer, forecast: Forecast, save: Callable[[], None]
) -> list[Callback]:
    """Return the last callbacks of this process. They call `save`, which returns when the checkpoint is on the disk."""
    if not plan.config.TRAIN.BUDGET:
        return []
    from engine.train.budget import Allowance, Budget

    # A new run counts from the start of the program. A resumed run counts from now, because its number of updates is
    # chosen and has no reserve for another start of the program.
    started = time.monotonic() if plan.inputs.checkpoint else plan.inputs.loaded.started
    allowance = Allowance(plan.config.TRAIN.BUDGET, started, plan.inputs.saved.get("budget", {}))
    trainer.parts["budget"] = allowance
    return [Budget(trainer.step, forecast, allowance, session.log.say, save)]
