"""-check: makes the plan of a run, prints a row for each finding and each problem, and keeps nothing."""

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from configs.values import to_text
from datasets import ImageSet, SavedData, build_train_data, describe_balance, load_image_sets
from engine.check.images import check_cache, check_images
from engine.check.memory import FEW, MORE, estimate, fixed_bytes, free_memory, record_forward
from engine.check.quick_checks import OK, WARN, WRONG, Finding, check_output, quick_checks
from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import progress_in
from engine.checkpoint.resume import changed_images, is_run, refuse_changes
from engine.eval_run import weights_to_score
from engine.evaluation.scores import Best
from engine.parallel import gathered_blocks, is_sharded
from engine.plan import Beginning, ImageSets, Plan, begin, make_plan
from engine.plan_lines import (
    compare_with_weights,
    describe_batch_size,
    describe_evaluation,
    describe_other_validation,
    warn_of_overlap,
)
from engine.precision.policy import Precision, or_amp
from engine.session import check_name, new_folder
from engine.train.forecast import END_BY_START, Forecast
from engine.train.optimizers import AnyOptimizer, build_optimizer, check_state, trained_bytes
from engine.train.schedule import planned_updates
from engine.train.stop_conditions import why_finished
from engine.trial import build_trial, trial_config
from models import adapt, build_model, describe
from models.compilation import parts_to_compile
from models.transforms import choose_transforms
from models.transforms.blocks import ActivationCheckpointing
from models.weights.load import load_exactly
from utils.distributed import Process, choose_device, find_devices
from utils.errors import ConfigError, UserError, naming_damage
from utils.host import count_cores
from utils.log import Log
from utils.program import restore_gc
from utils.text import counted, format_bytes

T = TypeVar("T")
NEAR, FAR = 0.9, 1.5  # fractions of free memory; the need is only estimated
SECONDS, MOST_UPDATES = 3.0, 21  # for which updates are timed; for one of them, and in all
UNKNOWN = "not checked, as it depends on what is wrong"


class Rows:
    """The table that -check prints."""

    def __init__(self, log: Log):
        self.log, self.failed = log, set()  # titles of the steps that failed
        self.verdicts: list[str] = []

    def add(self, finding: Finding) -> None:
        self.verdicts.append(finding.verdict)
        self.log.say(*finding.lines())

    def step(self, title: str, task: Callable[[], T], otherwise: T = None) -> T:
        """The result of a step of the plan, or of another task; a user's mistake becomes a row."""
        try:
            return task()
        except UserError as error:
            if title not in self.failed:  # what depends on a step that failed may fail again
                self.add(Finding(title, str(error), WRONG))
            self.failed.add(title)
            return otherwise

    def report(self, title: str, task: Callable[[], Sequence[str]]) -> None:
        """Add a row of the lines that the task returns, if there are any."""
        if lines := self.step(title, task, ()):
            warns = any(line.startswith("warning: ") for line in lines)
            self.add(Finding(title, "\n".join(lines), WARN if warns else OK))

    def conclude(self) -> int:
        """The last line, and the exit code."""
        wrong, warnings = self.verdicts.count(WRONG), self.verdicts.count(WARN)
        self.log.say(f"check: {wrong} wrong, {warnings} to look at; nothing was saved")
        return 2 if wrong else 0


def check(loaded: LoadedConfig, world_size: int | None = 1, local_size: int | None = None) -> int:
    """Check a run of `world_size` processes (None: one per device), `local_size` of them here (None: all)."""
    restore_gc()
    log = Log(rank=0)
    loaded, rows = loaded.with_default_batch_size() if loaded.config.START.EVAL else loaded, Rows(log)
    log.say(*loaded.notes)

    def load_data(config: Config, saved: SavedData | None) -> ImageSets:
        return load_image_sets(config, log.say, saved, config.SAVE)

    process = rows.step("device", lambda: imagine(loaded.config.DEVICE, world_size, local_size))
    if process is None:  # only the data can be looked at
        if sets := rows.step("data", lambda: load_data(loaded.config, None)):
            check_data(rows, loaded.config, *sets)
        return rows.conclude()
    rows.add(Finding("device", f"{process.device}; processes: {process.world_size}"))
    plan = make_plan(begin(loaded, process, log, rows.step), load_data, guess_batch_size, rows.step)
    if "data" not in rows.failed:
        check_data(rows, plan.config, plan.train_set, plan.eval_set)
    check_plan(rows, plan, loaded.config.DATA.BATCH_SIZE == AUTO)
    return rows.conclude()


def imagine(setting: str, world_size: int | None, local_size: int | None) -> Process:
    """Process 0 of such a run, with its device; it has not joined the others."""
    world_size = world_size or find_devices(setting)[1]
    local_size = local_size or world_size
    choose_device(setting, local_size - 1)  # every process on this machine needs a device
    sizes = {"local_size": local_size, "num_cores": max(1, count_cores() // local_size)}
    return Process(choose_device(setting, 0), world_size=world_size, **sizes)


def guess_batch_size(begun: Beginning, num_images: int, num_classes: int) -> tuple[int, str]:
    """The estimate of a run, without its trials."""
    from extras.memory.batch_size import OF_SO_FEW, calculate, max_images  # extra: memory

    config, process = begun.config, begun.process
    if not (num_images and begun.precision):
        return 1, UNKNOWN
    try:
        model = adapt(build_model(config, num_classes), config)
        limit = max_images(config, num_images, process.world_size)
        number, how = calculate(config, model, begun.precision, process, limit)
    except ConfigError:  # another row says it
        return 1, UNKNOWN
    if not number:
        raise ConfigError(f"DATA.BATCH_SIZE is auto: not one image fits ({how}); choose a smaller model")
    return number, "; ".join([how, *[OF_SO_FEW] * (number == limit), "a run tries it"])


def check_data(rows: Rows, config: Config, train_set: ImageSet | None, eval_set: ImageSet) -> None:
    rows.report("data set", lambda: eval_set.notes)
    rows.step("data", lambda: [rows.add(finding) for finding in check_images(config, train_set, eval_set)])
    if config.DATA.CACHE != "none":
        sets = {"training": train_set, "validation": eval_set}
        rows.step("cache", lambda: rows.add(check_cache(config, sets)))


def check_plan(rows: Rows, plan: Plan, finds_batch_size: bool) -> None:
    """Check what the device and the model have to do with; without data only what needs none."""
    config, has_data = plan.config, "data" not in rows.failed
    num_classes = config.MODEL.NUM_CLASSES or (len(plan.classes) if has_data else None)
    model = rows.step("model", lambda: adapt(build_model(config, num_classes), config)) if num_classes else None
    if finds_batch_size and "batch size" not in rows.failed:
        how = describe_batch_size(plan)
        rows.add(Finding("batch size", how, *((WARN, "fix that first") if UNKNOWN in how else ())))
    if plan.train_set:
        rows.report("balance", lambda: describe_balance(config, plan.train_set, plan.class_weights))
    folder = None if config.START.EVAL else plan.folder
    rows.step("output", lambda: check_name(config, folder))
    if "output" not in rows.failed:
        rows.add(found := check_output(str(folder or config.SAVE)))
        folder = (folder or new_folder(config, "train")) if found.verdict == OK else None
    for finding in quick_checks(plan, None if "optimizer" in rows.failed else model, folder):
        rows.add(finding)
    if not (plan.precision and model):
        found = "not checked, as they depend on the above"
        rows.add(Finding("weights, memory", found, WARN, "fix the error above first"))
        return
    rows.add(Finding("model", f"{config.MODEL.NAME}, {describe(model, None if config.START.EVAL else config.MODEL)}"))
    if not config.START.EVAL:
        check_model(rows, plan, model, has_data)
        return
    rows.report("precision", lambda: describe_precision(plan, model))
    if has_data and "weights" not in rows.failed:
        rows.report("weights", lambda: try_evaluation(plan))
        rows.report("evaluation", lambda: describe_evaluation(plan))


def check_model(rows: Rows, plan: Plan, model: nn.Module, has_data: bool) -> None:
    """Load the initial weights, and check that training fits into memory."""
    config, free = plan.config, free_memory(plan.process.device)
    if config.TRAIN.GRAD_CHECKPOINTING:
        checkpointing = ActivationCheckpointing(config.MODEL.NAME)
        rows.step("checkpointing", lambda: checkpointing.apply(copy.deepcopy(model)))
    if config.COMPILE:
        how = f"COMPILE {to_text(config.COMPILE)}"
        rows.report("compile", lambda: [f"{how}: {len(parts_to_compile(model, config))} to compile"])
    optimizer = rows.step("optimizer", lambda: build_optimizer(config.TRAIN, model))
    if is_run(plan.saved):
        rows.report("resume", lambda: naming_damage(plan.checkpoint)(try_resume)(plan, model, optimizer, has_data))
    plain = build_model(config, plan.num_classes) if config.MODEL.LORA.RANK else model  # as before its adapters
    rows.report("pretrained", lambda: plan.load_weights(plain) + warn_of_overlap(plan))
    if config.TRAIN.DISTILLATION_TYPE != "none" and has_data:
        from extras.distillation.sources import load_teacher  # extra: distillation

        rows.report("teacher", lambda: load_teacher(config, plan.classes, plan.num_classes)[1])
    rows.report("preprocessing", lambda: compare_with_weights(plan))
    rows.report("precision", lambda: describe_precision(plan, model))
    if "optimizer" in rows.failed:
        return
    if memory := rows.step("memory", lambda: check_memory(config, model, plan.precision, free, plan.process)):
        rows.add(memory)
        if has_data and memory.verdict == OK and not (rows.failed or is_sharded(config, plan.process)):
            with contextlib.suppress(torch.OutOfMemoryError):  # there may be no room for a second model
                rows.step("time", lambda: rows.add(Finding("time", estimate_time(plan, model))))


def describe_precision(plan: Plan, model: nn.Module) -> list[str]:
    """The chosen precision; applies the transforms to the model."""
    transforms = choose_transforms(plan.config, plan.process.device, plan.precision.half)
    return [plan.precision.describe(), *transforms.apply(model)]


def try_resume(plan: Plan, model: nn.Module, optimizer: AnyOptimizer | None, has_data: bool) -> list[str]:
    """Read the checkpoint into the model, as a run would; the optimizer's only has to fit."""
    path, state = plan.checkpoint, plan.saved
    lines = [f"{path}, after epoch {state['epoch'] + 1} and step {state['step']}"]
    per_epoch = plan.order.steps_per_epoch
    num_updates = planned_updates(plan.config.TRAIN, per_epoch, state["progress"].get("choices", []))
    if why := why_finished(
        plan.config.TRAIN,
        math.ceil(num_updates / per_epoch),
        state["epoch"] + 1,
        state["progress"].get("not_better", 0),
    ):
        lines.append(f"this run is finished already ({why}): nothing to do")
    if has_data:  # otherwise everything would differ
        images = changed_images(state, path, plan.facts, plan.train_set, plan.eval_set)
        lines += refuse_changes(plan.config, plan.order, plan.eval_set.split, state, path, images)
        lines += describe_other_validation(plan)
    load_exactly(model, state["state_dict"], path)
    if optimizer:
        check_state(optimizer, state["optimizer"])
    best = Best(*state["progress"]["best"])
    if best.epoch and not progress_in(path.with_name(BEST)):
        lines.append(
            f"the best epoch was {best.epoch}, but there is no {BEST}: the next evaluated one becomes the best"
        )
    return lines


def try_evaluation(plan: Plan) -> list[str]:
    """Load all weights that would be evaluated."""

    def load_foreign() -> nn.Module:
        model = build_model(plan.config, plan.num_classes)
        plan.load_weights(model)
        return model

    scored = weights_to_score(plan, load_foreign)
    return [f"to be scored: {', '.join(name.strip() or 'raw' for name, _ in scored)}"]


def check_memory(config: Config, model: nn.Module, precision: Precision, free: int, process: Process) -> Finding:
    """Compare one process's step with `free` bytes. Moves the model to its device."""
    num_sharing = process.local_size if process.device.type == "cpu" else 1  # processes that share this memory
    fixed = fixed_bytes(config, model, precision)
    if is_sharded(config, process):
        # Besides its shards a process holds two whole blocks, the current and the next one, with their gradients.
        largest = max(sum(each.nbytes for each in block.parameters()) for block in gathered_blocks(model))
        fixed = fixed // process.world_size + 4 * largest
        if config.TRAIN.ACCUM_ITER > 1:  # gradients are reduced and scattered only after the last micro-batch
            fixed += trained_bytes(model)
    advice = "lower -batch_size and raise -accum_iter alike" + or_amp(config.AMP, process.device)
    if num_sharing * fixed > FAR * free:
        return _finding(f"{format_bytes(num_sharing * fixed)} without activations", num_sharing * fixed, free, advice)
    try:
        need = estimate(config, model, precision, fixed)
    except torch.OutOfMemoryError:
        found = f"{format_bytes(free)} are too little for a batch of {counted(MORE, 'image')}"
        return Finding("memory", found, WRONG, advice)
    batch_size = config.DATA.BATCH_SIZE
    total = num_sharing * (need.fixed + batch_size * need.per_image)
    images = f"{format_bytes(batch_size * need.per_image)} for {counted(batch_size, 'image')}"
    parts = f"{format_bytes(need.fixed)} of weights, gradients and optimizer, {images}"
    fitting = need.fitting(NEAR * free / num_sharing)
    remedy = f"{advice}; there is room for about {counted(fitting, 'image')}" if fitting else advice
    shared = f", in each of {num_sharing} processes" if num_sharing > 1 else ""
    return _finding(f"about {format_bytes(total)} ({parts}{shared})", total, free, remedy)


def estimate_time(plan: Plan, model: nn.Module) -> str:
    """Train on some batches, with weights that are thrown away, and say how long all of them take."""
    config, process = plan.config, replace(plan.process, world_size=1, local_size=1)
    num_forward, seconds = FEW, 0.0
    while seconds < SECONDS / 30:  # one of few images takes as long as any; the first of a size takes longer
        for _ in range(2):
            start = time.perf_counter()
            record_forward(config, plan.precision.computing(model).train(), plan.precision, num_forward)
            seconds = time.perf_counter() - start
        if num_forward >= config.DATA.BATCH_SIZE:
            break
        num_forward = min(4 * num_forward, config.DATA.BATCH_SIZE)
    most = int(num_forward * SECONDS / (3 * seconds))  # images of a step that is not too long
    built = time.perf_counter()
    data = replace(config.DATA, BATCH_SIZE=max(FEW, min(config.DATA.BATCH_SIZE, most) // FEW * FEW))
    tried = replace(config, DATA=data, TRAIN=replace(config.TRAIN, ACCUM_ITER=1))
    tried = trial_config(tried, plan.num_classes)
    train_data = build_train_data(tried, plan.train_set, process)
    trainer, num_images = build_trial(tried, process.device, train_data), 0
    with contextlib.closing(train_data.windows(0, MOST_UPDATES)) as windows:
        trainer.update(next(windows))  # the first takes longer
        trainer.report()
        start = time.perf_counter()
        until_first = plan.made - plan.loaded.started + start - built
        while trainer.step < MOST_UPDATES and time.perf_counter() < start + SECONDS:
            window = next(windows)
            trainer.update(window)
            num_images += window.num_samples
        trainer.report()
    order, step = plan.order, plan.saved.get("step", 0) if is_run(plan.saved) else 0
    each = (time.perf_counter() - start) / num_images * order.global_batch / order.world_size
    forecast = Forecast(config, order, len(plan.eval_set), time.monotonic())
    forecast.update, forecast.end_work = each, END_BY_START * until_first
    forecast.until_first = until_first + forecast.one_evaluation() * plan.scores_start
    if not config.TRAIN.BUDGET:
        told = forecast.describe(step, forecast.seconds(step, plan.num_updates))
    else:
        from extras.budget import Allowance, Budget

        budget = Budget(forecast, Allowance(config.TRAIN.BUDGET, time.monotonic(), plan.saved.get("budget", {})))
        if not step:
            budget.refuse_too_short(step)
        told = budget.describe(step, budget.fitting(step))
    others = os.getloadavg()[0] - time.process_time() / 60  # less this process's own work in the minute it has run
    is_busy = others + torch.get_num_threads() > 1.25 * (os.cpu_count() or 1)
    busy = f"; others work on this machine (a load of {others:.1f}): it may be shorter without them" if is_busy else ""
    return f"{told}; {each:.3g} s an update, measured with {counted(num_images, 'image')}{busy}"


def _finding(needs: str, need: float, free: int, remedy: str) -> Finding:
    verdict = WRONG if need > FAR * free else WARN if need > NEAR * free else OK
    return Finding("memory", f"{needs} of {format_bytes(free)} free", verdict, "" if verdict == OK else remedy)
