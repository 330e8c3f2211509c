"""The callbacks of a run, in the order in which they are called."""

import time
from typing import NamedTuple, TypeVar

from configs.schema import to_seconds
from datasets import BadImages, Overlap, watches
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.resume import bad_images_of
from engine.diagnose.overflow import AutoDoctor, LastUpdate
from engine.parallel import is_sharded
from engine.plan import Plan
from engine.record.console import Console, DataWaitAdvice, TrainedOnAdvice
from engine.record.image_results import BestResults
from engine.record.image_sheets import TrainBatch
from engine.record.metrics import Recorder, RowReader
from engine.record.report import write_at_end
from engine.record.timing import Profiler, Timing
from engine.session import Session
from engine.train.callback import Callback
from engine.train.forecast import Forecast
from engine.train.stop_conditions import BadImageLimit, SkipLimit, TimeLimit
from engine.train.trainer import Trainer

T = TypeVar("T", bound=Callback)


class Watchers(NamedTuple):
    """The callbacks of a run in the order in which they are called, and those that the loop over epochs asks."""

    callbacks: list[Callback]
    last_update: LastUpdate
    results: BestResults
    bad_images: BadImages

    def refuse(self) -> None:
        """Raise the user's mistake for which a callback stops the run, if there is one."""
        for callback in self.callbacks:
            if callback.refusal:
                raise callback.refusal


def choose_callbacks(
    session: Session, plan: Plan, trainer: Trainer, saver: AsyncSaver, trackers: RowReader | None
) -> Watchers:
    """The callbacks of every process, and those of process 0 only. A new one is one line here. A callback that reads
    what another one found takes it as an argument, so it can only be made and called after it."""
    config, process, log, callbacks = plan.config, session.process, session.log, []

    def add(callback: T) -> T:
        callbacks.append(callback)
        return callback

    timing, last_update = add(Timing.on(process.device)), add(LastUpdate())
    started, num_evaluated = plan.loaded.started, len(plan.eval_set)
    forecast = add(Forecast(config, plan.order, num_evaluated, started, lambda: saver.longest, session.beat, log.say))
    results = add(BestResults(config, session.path, plan.eval_set, log, trainer))
    if process.is_first and config.REPORT:
        add(TrainBatch(config, session.path, plan.classes, log))
    if process.is_first and config.START.PROFILE:
        add(Profiler(config.START.PROFILE, session.path / "trace.json.gz", timing, log.say))
    add(Console(config, log, timing, forecast))
    doctor = None
    if process.is_first:
        # Its last pictures are those of the callbacks above, which close before it does.
        recorder = add(Recorder(config, session.path, log, timing, trainer, trackers))
        add(DataWaitAdvice(config, trainer.data.image_set, process, log.say))
        if not is_sharded(config, process):  # it needs a copy of the whole model
            doctor = add(AutoDoctor(config, session.path, log, last_update))
        if config.START.MAX_TIME:
            add(TimeLimit(to_seconds(config.START.MAX_TIME), started, lambda: saver.longest))
        if config.TRAIN.BUDGET:
            from extras.budget import budget_callbacks

            def finish() -> float:
                recorder.draw()  # the first time takes longer
                start = time.perf_counter()
                results.close()
                recorder.draw()
                if config.REPORT:
                    write_at_end(session.path, log)
                return time.perf_counter() - start

            callbacks += budget_callbacks(session, plan, trainer, forecast, finish)
    known = bad_images_of(plan.saved, len(plan.train_set), plan.facts)
    bad_images = BadImages(plan.train_set, config.DATA.MAX_BAD_FRACTION, log.warn, known)
    bad_images.forget_repaired(process)
    add(BadImageLimit(bad_images))
    if trainer.epoch == 0 and watches(plan.train_set, plan.eval_set, config.DATA.DATA_PATH):
        add(TrainedOnAdvice(Overlap(plan.train_set, plan.eval_set), process, log.say))
    add(SkipLimit(config.PRECISION.MAX_CONSECUTIVE_SKIPS, doctor.get_advice if doctor else lambda: ""))
    return Watchers(callbacks, last_update, results, bad_images)
