"""One run from settings to result, in the order of execution."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from configs.load import LoadedConfig
from configs.schema import Config
from datasets import (
    BadImages,
    CacheProgress,
    EvalData,
    Kept,
    Normalize,
    build_eval_data,
    build_train_data,
    cache_image_sets,
    load_image_sets,
    write_split,
)
from engine.auto_batch_size import find_batch_size
from engine.build import build_trainer
from engine.callback_list import choose_callbacks
from engine.check.quick_checks import quick_checks
from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import held_by
from engine.checkpoint.resume import is_run, refuse_changes
from engine.checkpoint.sharded_saver import make_saver
from engine.diagnose.explain import explain
from engine.epochs import Epochs, describe_progress
from engine.evaluation.evaluate import Evaluation, evaluate, evaluate_saved, weights_to_score
from engine.evaluation.scores import Best, describe_scores
from engine.memory.recovery import MemoryGuard
from engine.parallel.strategy import is_sharded
from engine.plan import ImageSets, Plan
from engine.plan_lines import describe_evaluation, describe_other_validation, describe_training
from engine.precision.policy import set_matmul
from engine.record.best_results import BestResults
from engine.record.html_report import write_at_end
from engine.record.next_steps import after_evaluation, after_failure, after_training
from engine.record.result_files import ResultFiles
from engine.record.trackers import tracking
from engine.session import Session
from engine.train.stop_conditions import DONE, EARLY_STOP, why_finished
from engine.train.teacher import load_teacher
from engine.train.trainer import Trainer
from models import adapt, build_model, describe
from models.compilation import prepare_compiler
from models.teacher import Teacher
from models.transforms import choose_transforms
from models.weights.files import find_file
from models.weights.load import check_exactly
from utils.distributed import Process
from utils.errors import LostProcess
from utils.findings import OK
from utils.host import keep_freed_memory, name_of
from utils.program import judge
from utils.seed import make_deterministic
from utils.signals import StopSignal
from utils.text import counted


def run(loaded: LoadedConfig, process: Process) -> int:
    """Train or evaluate as the settings say. Returns the exit code: 0, 1 (the last save failed),
    3 (too many updates with non-finite gradients) or 128 + signal."""
    loaded = loaded.with_default_batch_size() if loaded.config.START.EVAL else loaded
    session = Session(loaded, process)
    if process.world_size > 1:
        session.log.say(process.describe())
    if loaded.config.DETERMINISTIC:
        make_deterministic()
    if loaded.config.COMPILE and not loaded.config.START.EVAL:
        for line in prepare_compiler(os.environ, process.num_cores):
            session.log.say(line)
    try:
        code = run_evaluation(session, loaded) if loaded.config.START.EVAL else run_training(session, loaded)
    except BaseException as error:
        explained = process.name_lost_ranks(error)
        is_ours = isinstance(explained, LostProcess) or judge(explained)[1] is None
        if is_ours and session.path.name:
            session.advise(after_failure(process, session.path))
        session.end(explained)
        raise explained from (None if explained is error else error)
    session.end(None)
    return code


def run_training(session: Session, loaded: LoadedConfig) -> int:
    process, log, stop = session.process, session.log, StopSignal()
    load_data = partial(load_cached_data, session=session, signal=lambda: stop.number)
    plan = Plan(loaded, process, log, load_data, partial(find_batch_size, process=process, stop=stop))
    plan.check_settings()
    session.open_folder("train", existing=plan.folder)
    for line in plan.eval_set.notes:
        log.say(line)
    config = plan.config  # final; recovery from out-of-memory errors may still cut a batch into smaller micro-batches
    model = make_model(session, plan)
    about_model = describe(model)
    train_data = build_train_data(config, plan.train_set, process, plan.order)
    eval_data = build_eval_data(config, plan.eval_set, process)
    BadImages(plan.eval_set, config.DATA.MAX_BAD_FRACTION, log.note).check_sample(process)
    trainer = build_trainer(config, model, train_data, process, log, make_teacher(session, plan))
    trainer.guard = MemoryGuard(config, trainer, log)
    for line in describe_training(plan, about_model):
        log.say(line)
    for finding in quick_checks(config, model, train_data, process, session.path):
        if finding.verdict != OK:
            log.say(f"check: {finding.what}: {finding.found}; {finding.remedy}")
    if plan.checkpoint:
        restore(session, plan, trainer)
    session.describe(**describe_setup(plan, trainer))
    if why := why_finished(config.TRAIN, trainer.epoch, trainer.not_better):
        return leave_finished(session, plan, trainer, eval_data, why)
    log.say(f"writing to {session.path}")
    session.begin(plan.loaded)
    if process.is_first:
        write_split(session.path / "split.csv", plan.train_set, plan.eval_set)
    saver = make_saver(config, session.path, process, log)
    with tracking(config, session.path, process, log) as trackers:
        trainer.callbacks = choose_callbacks(session, plan, trainer, saver, trackers)
        if config.START.EXPLAIN:
            explain(trainer, log, session.path)
        epochs = Epochs(session, plan, trainer, eval_data, saver, stop)
        code = epochs.run()
    if config.REPORT and process.is_first and code < 128:  # whoever sent a signal wants the program to end
        write_at_end(session.path, log)
    session.advise(after_training(config, process, session.path, plan.eval_set, epochs.state))
    return code


def describe_setup(plan: Plan, trainer: Trainer) -> dict[str, str | int]:
    """For status.json: on what and how large the run is. Collective."""
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
        "classes": len(plan.classes),
        "images_per_update": plan.order.global_batch,
    }


def leave_finished(session: Session, plan: Plan, trainer: Trainer, eval_data: EvalData, why: str) -> int:
    """Train nothing; status.json says that the run is done, also if it was killed before it could. Returns the exit code."""
    is_early = why != DONE
    early = f", {why}; a higher or no limit (-opts TRAIN.EARLY_STOP=none) lets it go on" if is_early else ""
    session.log.say(f"this run is finished already, after {counted(trainer.epoch, 'epoch')}: nothing to do{early}")
    if trainer.epoch <= plan.config.TRAIN.NUM_EPOCHS and plan.checkpoint == session.path / "last.pth":
        results = BestResults(plan.config, session.path, plan.eval_set, session.log, trainer)
        bad_images = BadImages(plan.eval_set, plan.config.DATA.MAX_BAD_FRACTION, session.log.warn)
        results.complete(lambda: evaluate_saved(session.path / BEST, trainer, eval_data, bad_images))
        results.close()
        saved = {"epoch": trainer.epoch, "step": trainer.step}
        best = Best(*held_by(session.path / BEST).get("best", ()))
        progress = describe_progress(plan, trainer, session.path, saved, best)
        session.status("done", **progress, exit_code=0, reason=EARLY_STOP if is_early else None)
        if plan.config.REPORT and session.process.is_first:
            write_at_end(session.path, session.log)
    state = EARLY_STOP if is_early else "done"
    session.advise(after_training(plan.config, session.process, session.path, plan.eval_set, state))
    return 0


def load_cached_data(
    config: Config, kept: Kept | None, session: Session, signal: Callable[[], int] = lambda: 0
) -> ImageSets:
    """The image sets, cached if DATA.CACHE is set. `signal`: number of a pending stop signal, or 0."""
    process, log = session.process, session.log
    progress = CacheProgress(log.say, log.warn, signal, may_build=process.local_rank == 0)
    return process.after_first(lambda: cache_image_sets(config, load_image_sets(config, log.say, kept), progress))


def make_model(session: Session, plan: Plan) -> torch.nn.Module:
    """The model on this process's device, with its initial weights unless the run resumes."""
    process, log, config = session.process, session.log, plan.config
    torch.manual_seed(config.SEED)
    model = build_model(config, plan.num_classes)
    for line in process.after_first(lambda: plan.load_weights(model)):
        log.say(line)
    adapt(model, config)
    # FSDP moves a model to the device block by block.
    return model if is_sharded(config, process) and not config.START.EVAL else model.to(process.device)


def make_teacher(session: Session, plan: Plan) -> Teacher | None:
    """The teacher of a distillation; every process has the whole of it."""
    if plan.config.TRAIN.DISTILLATION_TYPE == "none":
        return None
    teacher, lines = session.process.after_first(lambda: load_teacher(plan.config, plan.classes, plan.num_classes))
    for line in [*lines, f"teacher: {plan.config.TRAIN.TEACHER_MODEL}, {teacher.describe()}"]:
        session.log.say(line)
    return teacher


def restore(session: Session, plan: Plan, trainer: Trainer) -> None:
    """Continue from a checkpoint: from its whole state, or from the weights and epoch of another system."""
    config, path, state = plan.config, plan.checkpoint, plan.saved
    if not is_run(state):
        trainer.epoch = config.START.LAST_EPOCH or state.get("epoch", -1) + 1
        trainer.step = trainer.epoch * trainer.data.steps_per_epoch
        session.log.say(f"resume: {path} has weights only; epoch {trainer.epoch + 1} starts with a fresh optimizer")
        return
    for line in refuse_changes(config, plan.order, plan.eval_set.split, state, path):
        session.log.say(line)
    if state.get("class_weights") != plan.class_weights:
        session.log.warn("resume: TRAIN.CLASS_WEIGHTS: the weights are not those of the epochs before")
    check_exactly(trainer.model, state["state_dict"], path)
    trainer.load_state_dict(state)
    for line in describe_other_validation(plan):
        session.log.say(line)
        trainer.best, trainer.not_better = Best(), 0
    session.log.say(f"resume: {path}, after epoch {trainer.epoch} and step {trainer.step}")


def run_evaluation(session: Session, loaded: LoadedConfig) -> int:
    """Evaluate weights on the validation images: of a checkpoint both the raw and the EMA weights."""
    process, log = session.process, session.log
    plan = Plan(loaded, process, log, partial(load_cached_data, session=session), find_batch_size=None)
    plan.check_settings()
    session.open_folder("eval")
    config, eval_set, precision = plan.config, plan.eval_set, plan.precision
    for line in eval_set.notes:
        log.say(line)
    data = build_eval_data(config, eval_set, process)
    log.say(f"data: {counted(data.num_samples, 'validation image')}, {counted(len(eval_set.classes), 'class')}")
    for line in describe_evaluation(plan):
        log.say(line)
    log.say(f"precision: {precision.describe()}")
    set_matmul(config.PRECISION.MATMUL)
    keep_freed_memory(process.device)
    normalize = Normalize(config.DATA, torch.float32).to(process.device)
    bad_images = BadImages(eval_set, config.DATA.MAX_BAD_FRACTION, log.warn)
    found, transforms = {}, choose_transforms(config, process.device, precision.half)
    for name, model in weights_to_score(plan, partial(make_model, session, plan)):
        if not found:
            log.say(f"model: {config.MODEL.NAME}, {describe(model)}")
        for line in transforms.apply(model.to(process.device)):
            log.say(line)
        if not found:  # the weights can be used
            session.begin(plan.loaded)
            session.status("evaluating")
        start = time.perf_counter()
        found[name] = evaluate(model, data, normalize, precision, process, bad_images)
        for line in describe_scores(found[name].scores, name, time.perf_counter() - start):
            log.say(line)
        transforms.revert(model)  # the next weights may be loaded into it
    leave_results(session, plan, found)
    session.status(
        "done", exit_code=0, **{name.strip().lower() or "raw": each.scores.figures() for name, each in found.items()}
    )
    weights = find_file(plan.source[1]) if plan.kept else None
    session.advise(after_evaluation(weights, session.path, eval_set))
    return 0


def leave_results(session: Session, plan: Plan, found: dict[str, Evaluation]) -> None:
    """Tables and pictures of the weights that score best. A collective."""
    metric = plan.config.TRAIN.BEST_METRIC
    scores = {name: replace(each.scores, metric=metric) for name, each in found.items()}
    name, best = max(scores.items(), key=lambda item: item[1].rank)
    images = found[name].images.gather(session.process)
    if session.process.is_first:
        files = ResultFiles(session.path, plan.eval_set, session.log)
        files.write(images, Best.of(best, 0, "_ema" if name else ""), plan.config.REPORT)
