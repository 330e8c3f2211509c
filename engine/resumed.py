"""Resumes a run: loads the state of its checkpoint, or ends the run if it is already finished."""

from datasets import BadImages, EvalData
from engine.checkpoint.format import progress_in
from engine.checkpoint.resume import drop_tensors, is_run, overlap_of
from engine.evaluate_weights import ByFolds, complete_best
from engine.evaluation.best import Best
from engine.plan import TrainPlan
from engine.record.next_steps import after_training
from engine.saves import describe_progress
from engine.session import Session
from engine.train.stop_conditions import DONE, EARLY_STOP
from engine.train.trainer import Trainer
from utils.errors import naming_damage
from utils.log import Log
from utils.program import StopSignal
from utils.runs import BEST
from utils.text import counted, warning


def restore(plan: TrainPlan, trainer: Trainer, log: Log) -> None:
    """Load the state of a run. From another program's file, take only the epoch (-last_epoch).

    make_model has loaded the weights.
    """
    config, path, state = plan.config, plan.inputs.checkpoint, plan.inputs.saved
    if not is_run(state):
        trainer.epoch = config.TRAIN.LAST_EPOCH or state.get("epoch", -1) + 1
        trainer.step = trainer.epoch * trainer.data.steps_per_epoch
        log.say(f"resume: {path} has weights only; epoch {trainer.epoch + 1} starts with a fresh optimizer")
        return
    from engine.checkpoint.compare import changed_images, refuse_changes

    with naming_damage(path):
        images = changed_images(state, path, plan.facts, plan.train_set, plan.eval_set)
        log.say(*refuse_changes(config, plan.order, plan.eval_set.split, state, path, images))
        if state["class_weights"] != plan.class_weights:
            log.say(warning("resume: TRAIN.CLASS_WEIGHTS: the class weights differ from those of the earlier epochs"))
    from engine.weights_lines import describe_other_validation, has_other_validation
    from models.weights.load import check_exactly

    check_exactly(trainer.model, state["state_dict"], path)
    with naming_damage(path):
        trainer.load_state_dict(state)
    drop_tensors(state)
    plan.eval_set.watch.num_in_training = overlap_of(state, plan.facts).get("num_in_training")
    for line in describe_other_validation(plan):
        log.say(line)
        trainer.best, trainer.not_better = Best(), 0
    if trainer.before and has_other_validation(plan):
        trainer.before = None
    log.say(f"resume: {path}, after epoch {trainer.epoch} and step {trainer.step}")


def leave_finished(
    session: Session,
    plan: TrainPlan,
    trainer: Trainer,
    eval_data: EvalData,
    why: str,
    stop: StopSignal,
    by_folds: ByFolds | None,
) -> int:
    """End a run that has no epochs left, and return the exit code.

    Write its last status.json and report again, because the run may have been killed before it wrote them.
    """
    is_early = why != DONE
    early = f"{why}; to continue, raise the limit or remove it (-opts TRAIN.EARLY_STOP=none)"
    reason = early if is_early else "nothing to do"
    session.log.say(f"this run is already finished, after {counted(trainer.epoch, 'epoch')}: {reason}")
    # Only last.pth has the final state, and only if NUM_EPOCHS was not lowered below the number of trained epochs.
    if trainer.epoch <= trainer.schedule.num_epochs and plan.inputs.checkpoint == session.path / "last.pth":
        from engine.report import RunReport

        report = RunReport(session, plan, trainer)
        bad_images = BadImages(plan.eval_set, plan.config.DATA.MAX_BAD_FRACTION, session.log.warn)
        complete_best(session, trainer, eval_data, bad_images, report.results, stop, by_folds)
        report.results.close()
        saved = {"epoch": trainer.epoch, "step": trainer.step}
        best = Best.from_state(progress_in(session.path / BEST).get("best", ()))
        progress = describe_progress(plan, trainer, session.path, saved, best)
        session.status("done", **progress, exit_code=0, reason=EARLY_STOP if is_early else None)
        report.write_page()
    state = EARLY_STOP if is_early else "done"
    session.advise(after_training(plan.config, session.process, session.path, plan.eval_set, state))
    return 0
