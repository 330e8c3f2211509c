"""One run from settings to result, in the order of execution."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from configs.load import LoadedConfig
from configs.schema import Config
from datasets import (
    BadImages,
    EvalData,
    ImageSet,
    Window,
    build_eval_data,
    shared_names,
    watches,
    write_split,
)
from engine.auto_batch_size import find_batch_size
from engine.build import build, load_data_sets, prepare_torch, restore
from engine.callback_list import Watchers, choose_callbacks
from engine.check.quick_checks import OK, quick_checks, refuse_full_disk
from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import progress_in
from engine.checkpoint.sharded_saver import make_saver
from engine.diagnose.explain import explain
from engine.eval_run import evaluate_both, evaluate_saved, run_evaluation
from engine.evaluation.scores import Best, rank_of
from engine.memory.estimate import checkpoint_bytes
from engine.plan import Plan, begin, make_plan, refusals
from engine.plan_lines import describe_training, measured_classes
from engine.provenance import refuse_other_ranks, setting_facts, source_facts
from engine.record.image_results import BestResults
from engine.record.next_steps import after_failure, after_training
from engine.record.report import write_at_end
from engine.record.trackers import tracking
from engine.saves import Saves, describe_progress
from engine.session import Session
from engine.train.counters import EpochResult, Report
from engine.train.stop_conditions import (
    DONE,
    EARLY_STOP,
    MOST_UPDATES,
    NO_PROGRESS,
    TIME_IS_UP,
    NonFinite,
    Stopped,
    refuse_if_nothing_counted,
    why_finished,
)
from engine.train.trainer import Trainer
from models import describe
from utils.distributed import Process
from utils.errors import LostProcess
from utils.host import name_of
from utils.log import Log
from utils.program import StopSignal, judge
from utils.text import counted, format_duration, printable


def run(loaded: LoadedConfig, process: Process) -> int:
    """Train or evaluate as the settings say. Returns the exit code: 0, 1 (the last save failed),
    3 (too many updates with non-finite gradients), 4 (no time for an update) or 128 + signal."""
    loaded = loaded.with_default_batch_size() if loaded.config.START.EVAL else loaded
    session = Session(loaded, process)
    if process.world_size > 1:
        session.log.say(process.describe())
        if unused := process.unused_devices():
            session.log.warn(
                f"{counted(unused, 'visible device')} without a process: start as many processes as devices"
            )
    prepare_torch(loaded.config, process, session.log)
    try:
        if process.rendezvous:
            refuse_other_ranks(process, setting_facts(loaded.config) | source_facts())
        code = run_evaluation(session, loaded) if loaded.config.START.EVAL else run_training(session, loaded)
    except BaseException as error:
        explained = session.explain(process.name_lost_ranks(error))
        is_ours = isinstance(explained, LostProcess) or judge(explained)[1] is None
        if is_ours and session.path.name:
            session.advise(after_failure(process, session.path))
        session.end(explained)
        raise explained from (None if explained is error else error)
    session.end(None)
    return code


def run_training(session: Session, loaded: LoadedConfig) -> int:
    process, log, stop = session.process, session.log, StopSignal()

    # Plan: every fact is settled before anything is built, and what can be refused is, before there is a folder.
    for refuse in refusals(loaded.config).values():
        refuse()
    begun = begin(loaded, process, log)
    session.open_folder("train", existing=begun.folder, saved=begun.saved)
    # Images come from the source that DATA.DATASET names: datasets/sources/__init__.py has one line for each.
    load_data = partial(load_data_sets, session=session, signal=lambda: stop.number)
    plan = make_plan(begun, load_data, partial(find_batch_size, stop=stop))
    config = plan.config  # final; recovery from out-of-memory errors may still cut a batch into smaller micro-batches
    log.say(*plan.eval_set.notes)
    if watches(plan.train_set, plan.eval_set, config.DATA.DATA_PATH):
        log.say(*process.first(lambda: shared_names(plan.train_set, plan.eval_set)))

    # Build.
    eval_data = build_eval_data(config, plan.eval_set, process)
    BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.note).check_sample(process)
    trainer = build(plan, log)
    log.say(*describe_training(plan, describe(trainer.model, config.MODEL)))
    for finding in quick_checks(plan, trainer.model, session.path):
        if finding.verdict != OK:
            log.say(f"check: {finding.title}: {finding.text}; {finding.remedy}")

    # Continue where a checkpoint ends.
    if plan.checkpoint:
        restore(plan, trainer, log)
    session.describe(**describe_setup(plan, trainer))
    if why := why_finished(config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better):
        return leave_finished(session, plan, trainer, eval_data, why)

    process.first(lambda: refuse_full_disk(session.path, checkpoint_bytes(config.TRAIN, trainer.model)))

    # Train: all checks have passed, so the folder becomes this run's.
    log.say(f"writing to {session.path}")
    session.begin(plan.loaded)
    if process.is_first:
        write_split(session.path / "split.csv", plan.train_set, plan.eval_set)
    saver = make_saver(config, session.path, process, log)
    with tracking(config, session.path, process, log) as trackers:
        watchers = choose_callbacks(session, plan, trainer, saver, trackers)
        trainer.callbacks = watchers.callbacks
        if config.START.EXPLAIN:
            explain(trainer, log, session.path)
        saves = Saves(session, plan, trainer, saver, watchers)
        code, state = train_epochs(Training(session, plan, trainer, eval_data, watchers, saves, stop))

    # Show.
    if config.REPORT and process.is_first and code < 128:  # whoever sent a signal wants the program to end
        write_at_end(session.path, log)
    session.advise(after_training(config, process, session.path, plan.eval_set, state))
    return code


@dataclass(frozen=True)
class Training:
    """The parts of a run that its loop over epochs works with."""

    session: Session
    plan: Plan
    trainer: Trainer
    eval_data: EvalData
    watchers: Watchers
    saves: Saves
    stop: StopSignal
    start: float = field(default_factory=time.perf_counter)

    @property
    def why_finished(self) -> str:
        trainer = self.trainer
        return why_finished(self.plan.config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better)


def train_epochs(training: Training) -> tuple[int, str]:
    """Train to the last epoch, or until something stops the run. Returns the exit code, and how the run ended."""
    saves, trainer, first_step = training.saves, training.trainer, training.trainer.step
    log, max_bad = training.session.log, training.plan.config.DATA.MAX_BAD_FRACTION
    bad_images = BadImages(training.plan.eval_set, max_bad, log.warn)  # each reported once in a run
    try:
        if training.plan.scores_start:
            score_start(training, bad_images)
        while not training.why_finished:
            try:
                windows = trainer.data.windows(trainer.step, training.plan.num_updates, trainer.left_out)
                with contextlib.closing(windows):
                    while not training.why_finished:
                        one_epoch(training, windows, bad_images)
            except NonFinite as error:
                # SkipLimit raised it at a report: back to last.pth or previous.pth, once in a run.
                if not saves.roll_back(error):
                    raise
        wait_for_disk(training)
        refuse_if_nothing_counted(trainer)
    except Stopped as stopped:
        training.session.process.first(training.watchers.refuse_budget)
        if stopped.number == TIME_IS_UP and trainer.step == first_step:
            limit = training.plan.config.START.MAX_TIME
            reason = f"not one update fits into RUN.MAX_TIME, {limit}; raise it"
            return end(training, "stopped", f"stopped: {reason}", NO_PROGRESS, reason=reason)
        return save_and_stop(training, stopped.number)
    except NonFinite as error:
        wait_for_disk(training)
        reason = f"{error}{saves.keep_for_doctor(training.watchers.last_update)}"
        return end(training, "stopped", f"stopped: {reason}", 3, reason=reason)
    finally:
        saves.saver.wait()
    best = training.session.path / BEST
    training.watchers.results.complete(lambda: evaluate_saved(best, trainer, training.eval_data, bad_images))
    why = training.why_finished
    return end(training, "done", why, 0, reason=None if why == DONE else EARLY_STOP)


def score_start(training: Training, bad_images: BadImages) -> None:
    """Score the weights that the run starts from, as its epoch 0: what training has to make better."""
    start, saves = time.perf_counter(), training.saves
    saves.before = evaluate_both(training.trainer, training.eval_data, bad_images)[""].scores
    training.trainer.notify("on_start_scored", saves.before, time.perf_counter() - start)
    training.session.log.say(f"before training: {saves.before.describe_short()}")
    saves.show("training", before=saves.before.figures())


def one_epoch(training: Training, windows: Iterator[Window], bad_images: BadImages) -> None:
    """Train, evaluate and save one epoch, or the rest of one."""
    trainer, saves, config = training.trainer, training.saves, training.plan.config
    number, first_step, start = trainer.epoch + 1, trainer.step, time.perf_counter()

    report = train_epoch(trainer, windows, training.session.log, training.stop, saves.save)
    trained, is_last = time.perf_counter(), number == trainer.schedule.num_epochs

    found, suffix, is_best = {}, "", False
    if number % config.VALIDATE_FREQ == 0 or is_last:
        found = evaluate_both(trainer, training.eval_data, bad_images)
    evaluated, scores = time.perf_counter(), {suffix: each.scores for suffix, each in found.items()}
    if scores:
        suffix, is_best = saves.judge(scores, number)

    num_images = (trainer.step - first_step) * trainer.data.global_batch
    images = found[suffix].images.gather(trainer.process) if is_best else None
    result = EpochResult(report, scores, num_images, trained - start, evaluated - trained, images)
    trainer.notify("on_epoch_end", result)
    trainer.end_epoch()

    also = [BEST] if is_best else []
    if config.KEEP_CHECKPOINTS and (number % config.SAVE_FREQ == 0 or is_last):
        also.append(f"checkpoint-{number}.pth")
    saves.save(metric=scores[suffix].value if scores else None, also=also)


def train_epoch(
    trainer: Trainer, windows: Iterator[Window], log: Log, stop: StopSignal, save: Callable[[], None]
) -> Report:
    """Train to the end of the epoch. Returns its report. Calls `save` every SAVE_STEPS updates."""
    config, schedule, first = trainer.config, trainer.schedule, trainer.epoch * trainer.data.steps_per_epoch
    title = f"epoch {trainer.epoch + 1}/{schedule.num_epochs}"
    images = trainer.data.global_batch
    log.start_bar((schedule.end_of(trainer.epoch) - first) * images, (trainer.step - first) * images, title)
    trainer.notify("on_epoch_start")
    try:
        while (index := trainer.step - first) < schedule.end_of(trainer.epoch) - first:
            stop_if_requested(trainer, stop, updates_left=schedule.end_of(trainer.epoch) - trainer.step)
            is_last = trainer.step == schedule.end_of(trainer.epoch) - 1
            if any(trainer.step in each for each in trainer.left_out):
                trainer.leave_out()
            else:
                trainer.update(next(windows))
                if index % config.REPORT_FREQ == 0 or is_last:
                    trainer.notify("on_report", trainer.report())
            log.move_bar(images)
            if config.SAVE_STEPS and trainer.step % config.SAVE_STEPS == 0 and not is_last:
                save()
    finally:
        log.end_bar()
    return trainer.report()


def stop_if_requested(trainer: Trainer, stop: StopSignal, updates_left: int) -> None:
    """Stop because of a signal or a callback, or give the run another number of updates, all processes after the same update."""
    is_requested = any([each.should_stop(trainer, updates_left) for each in trainer.callbacks])
    num_updates = max([each.choose(trainer) for each in trainer.callbacks], default=0)
    # One number says both, as processes exchange one: the reason to stop before the updates, of which process 0 alone knows.
    # A reason to stop is its number and 1, because 0 means to go on.
    reason = 1 + (stop.number or TIME_IS_UP) if stop.number or is_requested else 0
    reason, num_updates = divmod(trainer.process.delayed_max(reason * MOST_UPDATES + num_updates), MOST_UPDATES)
    if reason:
        raise Stopped(reason - 1)
    if num_updates:
        trainer.schedule.choose(trainer.step, num_updates)
    if num_updates or trainer.schedule.repeat(trainer.step):
        trainer.notify("on_choice")


def save_and_stop(training: Training, number: int) -> tuple[int, str]:
    """End because of a signal or the time limit."""
    training.saves.save()
    wait_for_disk(training)
    if number == TIME_IS_UP:
        limit = training.plan.config.START.MAX_TIME
        why, facts, code = f"RUN.MAX_TIME, {limit}, is nearly up", {"reason": "time limit"}, 0
    else:
        why, facts, code = f"told to stop (signal {number})", {"signal": number}, 128 + number
    saved = "" if training.saves.failure else ", saved"
    return end(training, "stopped", f"{why} after step {training.trainer.step}{saved}", code, **facts)


def wait_for_disk(training: Training) -> None:
    """Wait for the last save (a best.pth that could not be written is taken back), and note how long saving blocked."""
    saves, session = training.saves, training.session
    saves.settle()
    if session.process.is_first:
        share = saves.saver.seconds / (time.perf_counter() - training.start)
        session.log.note(f"checkpointing blocked training for {saves.saver.seconds:.3f} s, {share:.3%} of the run")


def end(training: Training, state: str, what: str, code: int, **facts) -> tuple[int, str]:
    """Close the callbacks; say in status.json and in one line what is on the disk. Returns the exit code, and how the run
    ended: as in status.json, or EARLY_STOP, or failed."""
    saves, folder = training.saves, training.session.path
    for callback in training.trainer.callbacks:
        callback.close()
    if saves.failure:
        state, code = "save_failed", code or 1
        has_one = (folder / "last.pth").exists()
        then = "then -resume auto goes on from the save before" if has_one else "there is no save to go on from"
        what += f", not saved ({saves.failure}; {then})"
        facts["reason"] = "; ".join(filter(None, (facts.get("reason"), f"not saved: {saves.failure}")))
    saves.show(state, exit_code=code, eta_seconds=None, **facts)
    lasted = format_duration(time.perf_counter() - training.start)
    files = {"weights": "last.pth", "curves": "loss.png", "logs": "log.txt"}
    things = ", ".join(name for name, file in files.items() if (folder / file).exists())
    best = training.trainer.best
    over = f", over {measured_classes(training.plan)}" if best.epoch else ""
    training.session.log.say(f"{what}; {saves.describe_best()}{over}; {lasted}; {things}: {folder}")
    if saves.before and best.epoch and not rank_of(best.metric, best.value, best.loss) > saves.before.rank:
        before = saves.before.describe_short()
        training.session.log.warn(f"no epoch was better than the start; before training: {before}")
    return code, EARLY_STOP if facts.get("reason") == EARLY_STOP else "failed" if code in (3, NO_PROGRESS) else state


def describe_setup(plan: Plan, trainer: Trainer) -> dict[str, str | int]:
    """Facts for status.json: on what and how large the run is. Collective."""
    process, model = trainer.process, trainer.model
    return {
        "device": process.device.type,
        "device_name": name_of(process.device),
        "processes": process.world_size,
        "precision": plan.precision.name,
        "parameters": sum(each.numel() for each in model.parameters()),
        "training_images": len(plan.train_set),
        "validation_images": len(plan.eval_set),
        "validation_digest": plan.validation["digest"],
        "data": plan.facts,
        "data_path": path_of_data(plan.config, plan.eval_set),
        "classes": len(plan.classes),
        "images_per_update": plan.order.global_batch,
    }


def path_of_data(config: Config, image_set: ImageSet) -> str | None:
    """The real path of the data folder or file; None for data that is not read from there."""
    path = Path(config.DATA.DATA_PATH).expanduser()
    return printable(str(path.resolve())) if path.exists() and not image_set.names_are_numbers else None


def leave_finished(session: Session, plan: Plan, trainer: Trainer, eval_data: EvalData, why: str) -> int:
    """Train nothing; status.json says that the run is done, also if it was killed before it could. Returns the exit code."""
    is_early = why != DONE
    early = f", {why}; a higher or no limit (-opts TRAIN.EARLY_STOP=none) lets it go on" if is_early else ""
    session.log.say(f"this run is finished already, after {counted(trainer.epoch, 'epoch')}: nothing to do{early}")
    if trainer.epoch <= trainer.schedule.num_epochs and plan.checkpoint == session.path / "last.pth":
        results = BestResults(plan.config, session.path, plan.eval_set, session.log, trainer)
        bad_images = BadImages(plan.eval_set, plan.config.DATA.MAX_BAD_FRACTION, session.log.warn)
        results.complete(lambda: evaluate_saved(session.path / BEST, trainer, eval_data, bad_images))
        results.close()
        saved = {"epoch": trainer.epoch, "step": trainer.step}
        best = Best(*progress_in(session.path / BEST).get("best", ()))
        progress = describe_progress(plan, trainer, session.path, saved, best)
        session.status("done", **progress, exit_code=0, reason=EARLY_STOP if is_early else None)
        if plan.config.REPORT and session.process.is_first:
            write_at_end(session.path, session.log)
    state = EARLY_STOP if is_early else "done"
    session.advise(after_training(plan.config, session.process, session.path, plan.eval_set, state))
    return 0
