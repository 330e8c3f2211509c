"""The callbacks of a run, in the order in which they are called. A new one is one line here."""

from configs.duration import to_seconds
from datasets import BadImages
from engine.checkpoint.async_saver import AsyncSaver
from engine.checkpoint.resume import bad_images_of
from engine.diagnose.auto_doctor import AutoDoctor
from engine.diagnose.failing_batch import LastUpdate
from engine.diagnose.fp32_compare import Float32Compare
from engine.parallel.strategy import is_sharded
from engine.plan import Plan
from engine.record.best_results import BestResults
from engine.record.compile_report import CompileReport
from engine.record.console import Console
from engine.record.data_wait_advice import DataWaitAdvice
from engine.record.heartbeat import Heartbeat, Pace
from engine.record.metrics import Recorder
from engine.record.profiler import Profiler
from engine.record.timing import Timing
from engine.record.trackers import Trackers
from engine.record.train_batch import TrainBatch
from engine.session import Session
from engine.train.stop_conditions import BadImageLimit, SkipLimit, TimeLimit
from engine.train.trainer import Callback, Trainer


def choose_callbacks(
    session: Session, plan: Plan, trainer: Trainer, saver: AsyncSaver, trackers: Trackers
) -> list[Callback]:
    """The callbacks of every process, and those of process 0 only."""
    config, process, log = plan.config, session.process, session.log
    timing, last_update = Timing.on(process.device), LastUpdate()
    pace = Pace(plan.num_updates)
    console = Console(config, log, timing, pace, has_ema=trainer.ema is not None)
    callbacks = [timing, last_update]  # first: others read their results
    callbacks.append(BestResults(config, session.path, plan.eval_set, log, trainer))
    advice = lambda: ""  # noqa: E731
    if process.is_first:
        if config.REPORT:
            callbacks.append(TrainBatch(config, session.path, plan.classes, log))
        recorder = Recorder(config, session.path, log, timing, trainer, trackers)
        if config.START.PROFILE:
            callbacks.append(Profiler(config.START.PROFILE, session.path / "trace.json.gz", timing, log.say))
        if config.PRECISION.SHADOW_STEPS and trainer.precision.half is not None:
            callbacks.append(Float32Compare(config.PRECISION, last_update, log, recorder.add_comparison))
        callbacks += [console, recorder, Heartbeat(pace, session.beat)]
        callbacks.append(DataWaitAdvice(config, trainer.data.image_set, process, log.say))
        if not is_sharded(config, process):  # it needs a copy of the whole model
            doctor = AutoDoctor(config, session.path, log, last_update)
            callbacks.append(doctor)
            advice = doctor.get_advice
        if config.COMPILE:
            callbacks.append(CompileReport(log, can_measure=not is_sharded(config, process)))
        if config.START.MAX_TIME:
            seconds = to_seconds(config.START.MAX_TIME)
            callbacks.append(TimeLimit(seconds, plan.started, lambda: saver.longest))
    else:
        callbacks.append(console)
    known = bad_images_of(plan.saved, len(plan.train_set))
    bad_images = BadImages(plan.train_set, config.DATA.MAX_BAD_FRACTION, log.warn, known)
    bad_images.forget_repaired(process)
    return [*callbacks, BadImageLimit(bad_images), SkipLimit(config.PRECISION.MAX_CONSECUTIVE_SKIPS, advice)]
