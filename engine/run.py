"""A run from its settings to its result, in the order of execution.

Read these files in this order: this one, plan.py, build.py, loop.py, train/trainer.py, ../datasets/loading/readers.py,
evaluation/evaluate.py and saves.py. docs/architecture.md describes them.

-eval (eval_run.py) evaluates weights on the validation images and trains nothing. -check (check/) plans and
builds a run with the functions used here, makes a few updates, prints errors and warnings, and saves nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from configs.load import LoadedConfig
from configs.schema import Config
from datasets import BadImages, build_eval_data, write_split
from engine.build import build, open_data_of_run, prepare_torch
from engine.callback_list import callbacks_that_save, choose_callbacks
from engine.checkpoint.format import checkpoint_bytes
from engine.evaluation.evaluate import Evaluation
from engine.loop import Loop
from engine.memory import raises_when_full
from engine.plan import Inputs, TrainPlan, plan_training, read_inputs
from engine.plan_lines import describe_training, facts_for_status
from engine.quick_checks import OK, quick_checks, refusals, refuse_full_disk
from engine.record.next_steps import after_failure, after_training
from engine.saves import Saves, make_saver
from engine.session import Session
from engine.settings import chooses
from engine.train.stop_conditions import why_finished
from engine.train.trainer import Trainer
from models import describe_size
from utils.distributed import Process
from utils.errors import LostProcess
from utils.log import Log
from utils.program import StopSignal, exit_code_and_message


def run(loaded: LoadedConfig, process: Process) -> int:
    """Train, or evaluate with -eval. Return an ExitCode, or 128 + the number of the signal that stopped the run."""
    evaluates = loaded.config.START.EVAL
    if chooses(loaded.config.MODEL.PRETRAINED):
        from engine.choice.choose import settings_of_choice

        loaded = settings_of_choice(loaded, process)
    if evaluates:
        loaded = loaded.with_default_batch_size()
    session = Session(loaded, process)
    if process.world_size > 1:
        session.log.say(process.describe())
    prepare_torch(loaded.config, process, session.log)
    try:
        if process.rendezvous:
            from engine.provenance import refuse_other_ranks, setting_facts, source_facts

            refuse_other_ranks(process, setting_facts(loaded.config) | source_facts())
        if evaluates:
            from engine.eval_run import run_evaluation

            code = run_evaluation(session, loaded)
        else:
            code = run_training(session, loaded)
    except BaseException as error:
        explained = process.name_lost_ranks(error)
        is_ours = isinstance(explained, LostProcess) or exit_code_and_message(explained)[1] is None
        if is_ours and session.path.name:
            session.advise(after_failure(process, session.path))
        session.end(explained)
        raise explained from (None if explained is error else error)
    session.end(None)
    return code


def run_training(session: Session, loaded: LoadedConfig, stop: StopSignal | None = None) -> int:
    """Train, and return the exit code. `stop`: the signal of the outer run, if this run is part of another."""
    process, log, stop = session.process, session.log, stop or StopSignal()

    # Plan. An error in the settings or the checkpoint ends the run before its folder is created. An error between
    # open_folder and session.begin removes a new folder, and leaves the status.json of a resumed run unchanged.
    for refuse in refusals(loaded.config).values():
        refuse()
    inputs = read_inputs(loaded, process, log).divided_as(session.divided)
    session.open_folder("train", existing=inputs.folder, saved=inputs.saved)
    # DATA.DATASET names the source of the images. configs/tables.py has a row for each source.
    open_data = partial(open_data_of_run, parts="both", session=session, signal=lambda: stop.number)
    plan = plan_training(inputs, open_data, partial(search_batch_size, stop=stop))
    config = plan.config  # these settings are final; only the micro-batches may become smaller (fit_micro_batches)
    log.say(*plan.eval_set.notes)

    # Build.
    eval_data = build_eval_data(config, plan.eval_set, process)
    BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.note).check_sample(process)
    trainer = build(plan, log)
    log.say(*describe_training(plan, describe_size(trainer.model)))
    for finding in quick_checks(plan, trainer.model, session.path):
        if finding.verdict != OK:
            log.say(f"check: {finding.title}: {finding.text}; {finding.remedy}")

    # Load the state of the run to resume, if there is one.
    if plan.inputs.checkpoint:
        from engine.resumed import restore

        restore(plan, trainer, log)
    by_folds = partial(evaluate_by_folds, session, plan, trainer, stop) if config.DATA.FOLDS else None
    session.describe(**facts_for_status(plan, trainer.model))
    if why := why_finished(config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better):
        from engine.resumed import leave_finished

        return leave_finished(session, plan, trainer, eval_data, why, stop, by_folds)

    process.first(lambda: refuse_full_disk(session.path, checkpoint_bytes(config.TRAIN, trainer.model)))
    if raises_when_full(process.device) or process.world_size > 1:
        from engine.first_passes import arrange_ddp_buckets, fit_micro_batches

        fit_micro_batches(trainer, log)
        arrange_ddp_buckets(trainer)

    # Train. All checks have passed, so the run takes over its folder.
    log.say(f"writing to {session.path}")
    session.begin(plan.inputs.loaded)
    if process.is_first:
        write_split(session.path / "split.csv", plan.train_set, plan.eval_set)
    saver = make_saver(session, config)
    with open_trackers(config, session.path, process, log) as trackers:
        watchers = choose_callbacks(session, plan, trainer, saver, trackers)
        trainer.callbacks = watchers.callbacks
        saves = Saves(session, plan, trainer, saver, watchers)
        trainer.callbacks += callbacks_that_save(session, plan, trainer, watchers.forecast, saves.save_and_wait)
        outcome = Loop(session, plan, trainer, eval_data, watchers, saves, stop, by_folds).run()

    # Write the report and print the next steps.
    if not stop.number:  # after a signal the program must end soon
        watchers.report.write_page()
    session.advise(after_training(config, process, session.path, plan.eval_set, outcome.next_step))
    return outcome.code


def search_batch_size(inputs: Inputs, num_images: int, num_classes: int, stop: StopSignal) -> tuple[int, str]:
    """Return the batch size for DATA.BATCH_SIZE auto, and how it was found. A signal ends the search."""
    from engine.batch_size import find_batch_size

    return find_batch_size(inputs, num_images, num_classes, stop)


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
