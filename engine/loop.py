"""The loop over epochs, which trains, evaluates and saves each epoch and ends the run."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from datasets import BadImages, EvalData, Window
from datasets.split import how_held_out
from engine.callback_list import Watchers
from engine.evaluate_weights import ByFolds, compare_with_start, complete_best, evaluate_both, note_start
from engine.evaluation.evaluate import Evaluation
from engine.memory import naming_remedy
from engine.plan import TrainPlan
from engine.saves import Saves
from engine.session import Session
from engine.train.counters import EpochResult, Report
from engine.train.stop_conditions import (
    DONE,
    EARLY_STOP,
    NonFinite,
    Stopped,
    describe_time_limit,
    refuse_if_nothing_counted,
    why_finished,
)
from engine.train.trainer import Trainer
from utils.errors import AFTER_SIGNAL, ExitCode, cause_of
from utils.log import Log
from utils.program import StopSignal
from utils.runs import BEST
from utils.text import format_duration


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training run: its state, exit code and reason."""

    state: str  # the final state in status.json
    code: int  # the exit code
    sentence: str  # how the run ended, for the log
    reason: str | None = None  # the reason in status.json, if any
    signal: int | None = None  # in status.json: the number of the signal that stopped the run

    @property
    def next_step(self) -> str:
        """Return the state that engine/record/next_steps.py uses to choose the next steps."""
        if self.reason == EARLY_STOP:
            return EARLY_STOP
        return "failed" if self.code in (ExitCode.NON_FINITE, ExitCode.NO_PROGRESS) else self.state


@dataclass
class Loop:
    """The loop over epochs, starting at the trainer's epoch. All processes call its methods after the same update."""

    session: Session
    plan: TrainPlan
    trainer: Trainer
    eval_data: EvalData
    watchers: Watchers
    saves: Saves
    stop: StopSignal
    by_folds: ByFolds | None = None  # the evaluation of the last epoch, with DATA.FOLDS
    start: float = field(default_factory=time.perf_counter)

    def __post_init__(self):
        config, log = self.plan.config, self.session.log
        # One object for all evaluations, so that the log names each unreadable image once.
        self.bad_images = BadImages(self.plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)

    def run(self) -> Outcome:
        """Train until the last epoch is done or something stops the run. Return the outcome."""
        try:
            outcome = self.train()
        except Exception:
            self.close_after_error()
            raise
        return self.end(outcome)

    def train(self) -> Outcome:
        first_step = self.trainer.step
        try:
            self.train_epochs()
            refuse_if_nothing_counted(self.trainer)
        except Stopped as stopped:
            self.session.process.first(self.watchers.refuse)
            return self.save_and_stop(stopped, made_progress=self.trainer.step != first_step)
        except NonFinite as error:
            self.saves.wait_and_sync_best()
            advice = [each.on_non_finite(self.trainer) for each in self.trainer.callbacks]
            reason = "; ".join(filter(None, [str(error), *advice]))
            return Outcome("stopped", ExitCode.NON_FINITE, f"stopped: {reason}", reason)
        finally:
            self.saves.saver.wait()
        results = self.watchers.report.results
        data = self.eval_data, self.bad_images
        complete_best(self.session, self.trainer, *data, results, self.stop, self.by_folds)
        why = self.why_finished
        return Outcome("done", ExitCode.DONE, why, reason=None if why == DONE else EARLY_STOP)

    @property
    def why_finished(self) -> str:
        """Return why no more epochs are trained, or "" if the run continues."""
        trainer = self.trainer
        return why_finished(self.plan.config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better)

    def train_epochs(self) -> None:
        """Train the remaining epochs.

        After MAX_CONSECUTIVE_SKIPS skipped updates in a row, roll back to a checkpoint from before this streak and
        leave its updates out. NonFinite ends the run (exit code 3) the second time, or if no older checkpoint exists.
        """
        trainer = self.trainer
        if self.plan.config.MODEL.NEW_CLASSIFIER != "random":
            from engine.features.start import start_classifier

            start_classifier(self.saves, self.eval_data, self.bad_images, self.stop)
        if trainer.before == {} and not trainer.step:
            self.score_start()
        while not self.why_finished:
            # The windows reach to the last update that the settings allow. The schedule may end the run earlier.
            windows = trainer.data.windows(trainer.step, self.plan.num_updates, trainer.left_out)
            try:
                with contextlib.closing(windows):
                    while not self.why_finished:
                        self.one_epoch(windows)
            except NonFinite as error:  # raised by SkipLimit
                if not self.saves.roll_back(error):
                    raise
        self.saves.wait_and_sync_best()

    def score_start(self) -> None:
        """Evaluate the initial weights as the baseline (epoch 0)."""
        start = time.perf_counter()
        scores = evaluate_both(self.trainer, self.eval_data, self.bad_images)[""].scores
        note_start(self.saves, scores, time.perf_counter() - start)

    def one_epoch(self, windows: Iterator[Window]) -> None:
        """Train, evaluate and save one epoch, or the rest of an epoch after a resume.

        Evaluate every VALIDATE_FREQ epochs and after the last one. Save every epoch.
        """
        trainer, saves, config = self.trainer, self.saves, self.plan.config
        number, start = trainer.epoch + 1, time.perf_counter()

        with naming_remedy(trainer, self.session.path):  # if memory runs out
            report, num_images = train_epoch(trainer, windows, self.session.log, self.stop, saves.save)
        trained, is_last = time.perf_counter(), number == trainer.schedule.num_epochs

        evaluations = self.evaluate(number, is_last)
        suffix, is_best, images = "", False, None
        evaluated, scores = (
            time.perf_counter(),
            {suffix: evaluation.scores for suffix, evaluation in evaluations.items()},
        )
        if evaluations:
            suffix, is_best, images = saves.compare_with_best(evaluations, number)
        elif not self.plan.holds_out:
            is_best = saves.take_as_best(number)
        result = EpochResult(report, scores, num_images, trained - start, evaluated - trained, images=images)
        trainer.notify("on_epoch_end", result)
        trainer.end_epoch()

        extra_names = [BEST] if is_best else []
        if config.KEEP_CHECKPOINTS and (number % config.SAVE_FREQ == 0 or is_last):
            extra_names.append(f"checkpoint-{number}.pth")
        saves.save(metric=scores[suffix].value if scores else None, extra_names=extra_names)

    def evaluate(self, number: int, is_last: bool) -> dict[str, Evaluation]:
        """Evaluate the weights after this epoch, if it is due. Return {suffix of the weights: evaluation}."""
        if self.by_folds and is_last:
            self.saves.save()  # a resumed run then continues with the folds
            return self.by_folds()
        is_due = is_last or number % self.plan.config.VALIDATE_FREQ == 0
        if not (self.plan.holds_out and is_due):
            return {}
        return evaluate_both(self.trainer, self.eval_data, self.bad_images)

    def save_and_stop(self, stopped: Stopped, made_progress: bool) -> Outcome:
        """Save and end the run because of a signal or a time limit."""
        limit = describe_time_limit(self.plan.config)
        if not stopped.signal and not made_progress:
            reason = f"{limit} is too short for one update; raise it"
            return Outcome("stopped", ExitCode.NO_PROGRESS, f"stopped: {reason}", reason)
        self.saves.save()
        self.saves.wait_and_sync_best()
        done = f"after step {self.trainer.step}" + ("" if self.saves.failure else ", saved")
        if stopped.signal:
            code, why = AFTER_SIGNAL + stopped.signal, f"stopped by signal {stopped.signal}"
            return Outcome("stopped", code, f"{why} {done}", signal=stopped.signal)
        return Outcome("stopped", ExitCode.DONE, f"{limit} is nearly up {done}", "time limit")

    def end(self, outcome: Outcome) -> Outcome:
        """Close the callbacks, and record the outcome of the run in status.json and the log, with its best epoch."""
        for callback in self.trainer.callbacks:
            callback.close()
        if failure := self.saves.failure:
            sentence = f"{outcome.sentence}, not saved ({failure})"
            reason = "; ".join(filter(None, (outcome.reason, f"not saved: {failure}")))
            code = outcome.code or ExitCode.FAILED
            outcome = Outcome("save_failed", code, sentence, reason, outcome.signal)
        facts = {"exit_code": int(outcome.code), "reason": outcome.reason, "signal": outcome.signal}
        self.saves.show(outcome.state, **facts, eta_seconds=None)
        log, folder, best = self.session.log, self.session.path, self.trainer.best
        lasted = format_duration(time.perf_counter() - self.start)
        files = {"weights": "last.pth", "curves": "loss.png", "logs": "log.txt"}
        things = ", ".join(name for name, file in files.items() if (folder / file).exists())
        over = ""
        if best.num_images:
            over = f", over {self.trainer.task.describe_scored(self.plan.eval_set)}"
            if how := how_held_out(self.plan.eval_set):
                over = f"{over}, held out {how}"
        log.say(f"{outcome.sentence}; {self.saves.describe_best()}{over}; {lasted}; {things}: {folder}")
        log.say(*compare_with_start(best, self.trainer.before))
        return outcome

    def close_after_error(self) -> None:
        """Close the callbacks after an error. Their own errors go only to log.txt, so the user sees the first error."""
        for callback in self.trainer.callbacks:
            try:
                callback.close()
            except Exception as error:
                self.session.log.note(f"{type(callback).__name__} could not be closed: {cause_of(error)}")


def train_epoch(
    trainer: Trainer, windows: Iterator[Window], log: Log, stop: StopSignal, save: Callable[[], None]
) -> tuple[Report, int]:
    """Train to the end of the epoch, and call `save` every SAVE_STEPS updates.

    Return the report of the epoch and the number of images that were trained on.
    """
    config, schedule, first = trainer.config, trainer.schedule, trainer.epoch * trainer.data.steps_per_epoch
    title, num_images = f"epoch {trainer.epoch + 1}/{schedule.num_epochs}", 0
    per_update = trainer.data.global_batch
    log.start_bar((schedule.end_of(trainer.epoch) - first) * per_update, (trainer.step - first) * per_update, title)
    trainer.notify("on_epoch_start")
    try:
        while (index := trainer.step - first) < schedule.end_of(trainer.epoch) - first:
            trainer.notify("before_update")
            stop_if_requested(trainer, stop, updates_left=schedule.end_of(trainer.epoch) - trainer.step)
            is_last = trainer.step == schedule.end_of(trainer.epoch) - 1
            if any(trainer.step in each for each in trainer.left_out):
                trainer.leave_out()
            else:
                window = next(windows)
                trainer.update(window)
                num_images += window.num_samples
                if index % config.REPORT_FREQ == 0 or is_last:
                    trainer.notify("on_report", trainer.report())
            log.move_bar(per_update)
            if config.SAVE_STEPS and trainer.step % config.SAVE_STEPS == 0 and not is_last:
                save()
    finally:
        log.end_bar()
    return trainer.report(), num_images


def stop_if_requested(trainer: Trainer, stop: StopSignal, updates_left: int) -> None:
    """Raise Stopped if a signal or a callback of any process asks to stop.

    With several processes a vote takes effect one update later (Process.delayed_max), at the same step in all of them.
    """
    asks_to_stop = any([each.should_stop(trainer, updates_left) for each in trainer.callbacks])
    signal, asks_to_stop = trainer.process.delayed_max([stop.number, int(asks_to_stop)])
    if signal or (asks_to_stop and not any([each.shortens_run(trainer) for each in trainer.callbacks])):
        raise Stopped(signal)
