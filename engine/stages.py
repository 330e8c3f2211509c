"""The stages of a training run, from open to end, with the loop over its epochs.

All processes call these functions in the same order, and after the same update.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.load import LoadedConfig
from configs.schema import Config
from datasets import BadImages, EvalData, OpenedData, Window, build_eval_data, write_split
from engine.build import build, open_data_of_run
from engine.callback_list import callbacks_that_save, choose_callbacks
from engine.checkpoint.format import checkpoint_bytes
from engine.ending import Outcome, Run, close_after_error, end, save_and_stop
from engine.evaluate_weights import ByFolds, complete_best, evaluate_both, note_start
from engine.evaluation.evaluate import Evaluation
from engine.memory import naming_remedy, raises_when_full
from engine.plan import Inputs, TrainPlan, plan_training, read_inputs
from engine.plan_lines import describe_training, facts_for_status
from engine.quick_checks import OK, quick_checks, refusals, refuse_full_disk
from engine.record.next_steps import after_training
from engine.saves import Saves, make_saver
from engine.session import Session
from engine.train.counters import EpochResult, Report
from engine.train.stop_conditions import (
    DONE,
    EARLY_STOP,
    NonFinite,
    Stopped,
    refuse_if_nothing_counted,
    why_finished,
)
from engine.train.trainer import Trainer
from models import describe_size
from utils.distributed import Process
from utils.errors import ExitCode
from utils.log import Log
from utils.program import StopSignal
from utils.runs import BEST

if TYPE_CHECKING:
    from engine.record.trackers import Trackers


def run_training(session: Session, loaded: LoadedConfig, stop: StopSignal | None = None) -> int:
    """Train, and return the exit code. `stop`: the signal of the outer run, if this run is part of another."""
    process, stop = session.process, stop or StopSignal()

    # Open and build. An error here ends the run before its folder is created, or removes a new folder, and leaves the
    # status.json of a resumed run unchanged.
    plan = open_run(session, loaded, stop)
    eval_data, trainer = build_run(session, plan)
    by_folds = partial(evaluate_by_folds, session, plan, trainer, stop) if plan.config.DATA.FOLDS else None
    if why := why_no_more_epochs(plan, trainer):
        from engine.resumed import leave_finished

        return leave_finished(session, plan, trainer, eval_data, why, stop, by_folds)
    fit_into_memory(session, plan, trainer)

    # Train. All checks have passed, so the run takes over its folder.
    session.log.say(f"writing to {session.path}")
    session.begin(plan.inputs.loaded)
    if process.is_first:
        write_split(session.path / "split.csv", plan.train_set, plan.eval_set)
    with open_trackers(plan.config, session.path, process, session.log) as trackers:
        run = start_run(session, plan, trainer, eval_data, trackers, stop, by_folds)
        outcome = train(run)

    # Write the report and print the next steps.
    if not stop.number:  # after a signal the program must end soon
        run.watchers.report.write_page()
    session.advise(after_training(plan.config, process, session.path, plan.eval_set, outcome.next_step))
    return outcome.code


# --- open and build ---


def open_run(session: Session, loaded: LoadedConfig, stop: StopSignal) -> TrainPlan:
    """Check the settings, read the checkpoint, open the run's folder and the images, and return the plan."""
    for refuse in refusals(loaded.config).values():
        refuse()
    inputs = read_inputs(loaded, session.process, session.log).divided_as(session.divided)
    session.open_folder("train", existing=inputs.folder, saved=inputs.saved)

    def open_data(inputs: Inputs) -> OpenedData:
        return open_data_of_run(inputs, parts="both", session=session, signal=lambda: stop.number)

    def choose_values(inputs: Inputs, num_images: int, num_classes: int) -> Inputs:
        from engine.auto_values import choose_values

        return choose_values(inputs, num_images, num_classes, stop)

    plan = plan_training(inputs, open_data, choose_values)
    session.log.say(*plan.eval_set.notes)
    return plan


def build_run(session: Session, plan: TrainPlan) -> tuple[EvalData, Trainer]:
    """Build the validation data and the trainer, and load the state of the run to resume, if there is one."""
    config, process, log = plan.config, session.process, session.log
    eval_data = build_eval_data(config, plan.eval_set, process)
    BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.note).check_sample(process)
    trainer = build(plan, log)
    log.say(*describe_training(plan, describe_size(trainer.model)))
    for finding in quick_checks(plan, trainer.model, session.path):
        if finding.verdict != OK:
            log.say(f"check: {finding.title}: {finding.text}; {finding.remedy}")
    if plan.inputs.checkpoint:
        from engine.resumed import restore

        restore(plan, trainer, log)
    session.describe(**facts_for_status(plan, trainer.model))
    return eval_data, trainer


def fit_into_memory(session: Session, plan: TrainPlan, trainer: Trainer) -> None:
    """Raise an error if the disk is too full, and try whether an update fits into the device's memory."""
    process = session.process
    process.first(lambda: refuse_full_disk(session.path, checkpoint_bytes(plan.config.TRAIN, trainer.model)))
    if raises_when_full(process.device) or process.world_size > 1:
        from engine.first_passes import arrange_ddp_buckets, fit_micro_batches

        fit_micro_batches(trainer, session.log)
        arrange_ddp_buckets(trainer)


def evaluate_by_folds(session: Session, plan: TrainPlan, trainer: Trainer, stop: StopSignal) -> dict[str, Evaluation]:
    """Evaluate a run with DATA.FOLDS by its further runs."""
    from engine.folds.evaluation import Folds

    return Folds(session, plan, trainer, stop, run_training).evaluate()


def open_trackers(config: Config, folder: Path, process: Process, log: Log) -> AbstractContextManager:
    """Open the trackers that TRACK names."""
    if not config.TRACK:
        return nullcontext()
    from engine.record.trackers import track

    return track(config, folder, process, log)


def why_no_more_epochs(plan: TrainPlan, trainer: Trainer) -> str:
    """Return why no more epochs are trained, or "" if the run continues."""
    return why_finished(plan.config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better)


# --- train ---


def start_run(
    session: Session,
    plan: TrainPlan,
    trainer: Trainer,
    eval_data: EvalData,
    trackers: "Trackers | None",
    stop: StopSignal,
    by_folds: ByFolds | None,
) -> Run:
    """Give the trainer its callbacks and the run its checkpoints."""
    saver = make_saver(session, plan.config)
    watchers = choose_callbacks(session, plan, trainer, saver, trackers)
    trainer.callbacks = watchers.callbacks
    saves = Saves(session, plan, trainer, saver, watchers)
    trainer.callbacks += callbacks_that_save(session, plan, trainer, watchers.forecast, saves.save_and_wait)
    bad_images = BadImages(plan.eval_set, plan.config.DATA.MAX_BAD_FRACTION, session.log.warn)
    return Run(session, plan, trainer, eval_data, bad_images, watchers, saves, stop, by_folds)


def train(run: Run) -> Outcome:
    """Train until the last epoch is done or something stops the run. Return the outcome."""
    try:
        outcome = train_or_stop(run)
    except Exception:
        close_after_error(run)
        raise
    return end(run, outcome)


def train_or_stop(run: Run) -> Outcome:
    """Prepare the weights, train the epochs and complete the best one. A stop in any of these stages saves the run."""
    trainer, saves = run.trainer, run.saves
    first_step = trainer.step
    try:
        prepare_weights(run)
        train_epochs(run)
        refuse_if_nothing_counted(trainer)
    except Stopped as stopped:
        run.session.process.first(run.watchers.refuse)
        return save_and_stop(run, stopped, made_progress=trainer.step != first_step)
    except NonFinite as error:
        saves.wait_and_sync_best()
        advice = [callback.on_non_finite(trainer) for callback in trainer.callbacks]
        reason = "; ".join(filter(None, [str(error), *advice]))
        return Outcome("stopped", ExitCode.NON_FINITE, f"stopped: {reason}", reason)
    finally:
        saves.saver.wait()
    results = run.watchers.report.results
    complete_best(run.session, trainer, run.eval_data, run.bad_images, results, run.stop, run.by_folds)
    why = why_no_more_epochs(run.plan, trainer)
    return Outcome("done", ExitCode.DONE, why, reason=None if why == DONE else EARLY_STOP)


def prepare_weights(run: Run) -> None:
    """Fit a new classifier, if the settings ask for it, and evaluate the weights before the first update."""
    trainer = run.trainer
    if run.plan.config.MODEL.NEW_CLASSIFIER != "random":
        from engine.features.start import start_classifier

        start_classifier(run.saves, run.eval_data, run.bad_images, run.stop)
    if trainer.before == {} and not trainer.step:
        start = time.perf_counter()
        scores = evaluate_both(trainer, run.eval_data, run.bad_images)[""].scores
        note_start(run.saves, scores, time.perf_counter() - start)


def train_epochs(run: Run) -> None:
    """Train the remaining epochs.

    After MAX_CONSECUTIVE_SKIPS skipped updates in a row, roll back to a checkpoint from before this streak and
    leave its updates out. NonFinite ends the run (exit code 3) the second time, or if no older checkpoint exists.
    """
    plan, trainer = run.plan, run.trainer
    while not why_no_more_epochs(plan, trainer):
        # The windows reach to the last update that the settings allow. The schedule may end the run earlier.
        windows = trainer.data.windows(trainer.step, plan.num_updates, trainer.left_out)
        try:
            with contextlib.closing(windows):
                while not why_no_more_epochs(plan, trainer):
                    one_epoch(run, windows)
        except NonFinite as error:  # raised by SkipLimit
            from engine.rollback import roll_back

            if not roll_back(run.saves, error):
                raise
    run.saves.wait_and_sync_best()


def one_epoch(run: Run, windows: Iterator[Window]) -> None:
    """Train, evaluate and save one epoch, or the rest of an epoch after a resume.

    Evaluate every VALIDATE_FREQ epochs and after the last one. Save every epoch.
    """
    trainer, saves, config = run.trainer, run.saves, run.plan.config
    number, start = trainer.epoch + 1, time.perf_counter()
    with naming_remedy(trainer, run.session.path):  # if memory runs out
        report, num_images = train_epoch(trainer, windows, run.session.log, run.stop, saves.save)
    trained = time.perf_counter()

    is_last = number == trainer.schedule.num_epochs
    evaluations = evaluate_epoch(run, number, is_last)
    scores = {suffix: evaluation.scores for suffix, evaluation in evaluations.items()}
    evaluated = time.perf_counter()

    suffix, is_best, images = "", False, None
    if evaluations:
        suffix, is_best, images = saves.compare_with_best(evaluations, number)
    elif not run.plan.holds_out:
        is_best = saves.take_as_best(number)
    seconds = trained - start, evaluated - trained
    result = EpochResult(report, scores, num_images, *seconds, images=images, times=trainer.clock.shares())
    trainer.notify("on_epoch_end", result)
    trainer.end_epoch()

    extra_names = [BEST] if is_best else []
    if config.KEEP_CHECKPOINTS and (number % config.SAVE_FREQ == 0 or is_last):
        extra_names.append(f"checkpoint-{number}.pth")
    saves.save(metric=scores[suffix].value if scores else None, extra_names=extra_names)


def train_epoch(
    trainer: Trainer, windows: Iterator[Window], log: Log, stop: StopSignal, save: Callable[[], None]
) -> tuple[Report, int]:
    """Train to the end of the epoch, and call `save` every SAVE_STEPS updates.

    Return the report of the epoch and the number of images that were trained on.
    """
    config, schedule, first = trainer.config, trainer.schedule, trainer.epoch * trainer.data.steps_per_epoch
    title, num_images, report = f"epoch {trainer.epoch + 1}/{schedule.num_epochs}", 0, None
    per_update = trainer.data.global_batch
    log.start_bar((schedule.end_of(trainer.epoch) - first) * per_update, (trainer.step - first) * per_update, title)
    trainer.clock.start_epoch()
    trainer.notify("on_epoch_start")
    try:
        while (index := trainer.step - first) < schedule.end_of(trainer.epoch) - first:
            trainer.notify("before_update")
            stop_if_requested(trainer, stop, updates_left=schedule.end_of(trainer.epoch) - trainer.step)
            is_last = trainer.step == schedule.end_of(trainer.epoch) - 1
            report = None
            if any(trainer.step in streak for streak in trainer.left_out):
                trainer.leave_out()
            else:
                window = next(windows)
                trainer.update(window)
                num_images += window.num_samples
                if index % config.REPORT_FREQ == 0 or is_last:
                    report = trainer.report()
                    trainer.notify("on_report", report)
            log.move_bar(per_update)
            if config.SAVE_STEPS and trainer.step % config.SAVE_STEPS == 0 and not is_last:
                save()
    finally:
        log.end_bar()
    return report or trainer.report(), num_images


def stop_if_requested(trainer: Trainer, stop: StopSignal, updates_left: int) -> None:
    """Raise Stopped if a signal or a callback of any process asks to stop.

    With several processes a vote takes effect one update later (Process.delayed_max), at the same step in all of them.
    """
    asks_to_stop = any([callback.should_stop(trainer, updates_left) for callback in trainer.callbacks])
    signal, asks_to_stop = trainer.process.delayed_max([stop.number, int(asks_to_stop)])
    if signal or (asks_to_stop and not any([callback.shortens_run(trainer) for callback in trainer.callbacks])):
        raise Stopped(signal)


def evaluate_epoch(run: Run, number: int, is_last: bool) -> dict[str, Evaluation]:
    """Evaluate the weights after this epoch, if it is due. Return {suffix of the weights: evaluation}."""
    if run.by_folds and is_last:
        run.saves.save()  # a resumed run then continues with the folds
        return run.by_folds()
    is_due = is_last or number % run.plan.config.VALIDATE_FREQ == 0
    if not (run.plan.holds_out and is_due):
        return {}
    return evaluate_both(run.trainer, run.eval_data, run.bad_images)
