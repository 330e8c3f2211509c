"""A run that has taken over its folder, and its end: the outcome in status.json and in the log."""

import time
from dataclasses import dataclass, field

from datasets import BadImages, EvalData
from datasets.split import how_held_out
from engine.callback_list import Watchers
from engine.evaluate_weights import ByFolds, compare_with_start
from engine.plan import TrainPlan
from engine.saves import Saves
from engine.session import Session
from engine.train.stop_conditions import EARLY_STOP, Stopped, describe_time_limit
from engine.train.trainer import Trainer
from utils.errors import AFTER_SIGNAL, ExitCode, cause_of
from utils.program import StopSignal
from utils.text import format_duration


@dataclass(frozen=True)
class Run:
    """The parts of a run that has taken over its folder."""

    session: Session
    plan: TrainPlan
    trainer: Trainer
    eval_data: EvalData
    bad_images: BadImages  # one object for all evaluations, so that the log names each unreadable image once
    watchers: Watchers
    saves: Saves
    stop: StopSignal
    by_folds: ByFolds | None = None  # the evaluation of the last epoch, with DATA.FOLDS
    start: float = field(default_factory=time.perf_counter)


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


def save_and_stop(run: Run, stopped: Stopped, made_progress: bool) -> Outcome:
    """Save and end the run because of a signal or a time limit."""
    limit = describe_time_limit(run.plan.config)
    if not stopped.signal and not made_progress:
        reason = f"{limit} is too short for one update; raise it"
        return Outcome("stopped", ExitCode.NO_PROGRESS, f"stopped: {reason}", reason)
    run.saves.save()
    run.saves.wait_and_sync_best()
    done = f"after step {run.trainer.step}" + ("" if run.saves.failure else ", saved")
    if stopped.signal:
        code, why = AFTER_SIGNAL + stopped.signal, f"stopped by signal {stopped.signal}"
        return Outcome("stopped", code, f"{why} {done}", signal=stopped.signal)
    return Outcome("stopped", ExitCode.DONE, f"{limit} is nearly up {done}", "time limit")


def end(run: Run, outcome: Outcome) -> Outcome:
    """Close the callbacks, and record the outcome of the run in status.json and the log, with its best epoch."""
    for callback in run.trainer.callbacks:
        callback.close()
    if failure := run.saves.failure:
        sentence = f"{outcome.sentence}, not saved ({failure})"
        reason = "; ".join(filter(None, (outcome.reason, f"not saved: {failure}")))
        code = outcome.code or ExitCode.FAILED
        outcome = Outcome("save_failed", code, sentence, reason, outcome.signal)
    facts = {"exit_code": int(outcome.code), "reason": outcome.reason, "signal": outcome.signal}
    run.saves.show(outcome.state, **facts, eta_seconds=None)
    log, folder, best = run.session.log, run.session.path, run.trainer.best
    duration = format_duration(time.perf_counter() - run.start)
    files = {"weights": "last.pth", "curves": "loss.png", "logs": "log.txt"}
    contents = ", ".join(name for name, file in files.items() if (folder / file).exists())
    over = ""
    if best.num_images:
        over = f", over {run.trainer.task.describe_scored(run.plan.eval_set)}"
        if how := how_held_out(run.plan.eval_set):
            over = f"{over}, held out {how}"
    log.say(f"{outcome.sentence}; {run.saves.describe_best()}{over}; {duration}; {contents}: {folder}")
    log.say(*compare_with_start(best, run.trainer.before))
    return outcome


def close_after_error(run: Run) -> None:
    """Close the callbacks after an error. Their own errors go only to log.txt, so the user sees the first error."""
    for callback in run.trainer.callbacks:
        try:
            callback.close()
        except Exception as error:
            run.session.log.note(f"{type(callback).__name__} could not be closed: {cause_of(error)}")
