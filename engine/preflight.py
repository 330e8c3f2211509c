"""-check: examines everything that a run needs, prints a row for each finding, and starts nothing."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from datasets import ImageSet, Kept, describe_balance, load_image_sets, parse_policy
from engine.auto_batch_size import calculate, max_images
from engine.check.cache import check_cache
from engine.check.images import check_images
from engine.check.memory import check_memory
from engine.check.quick_checks import (
    check_disk,
    check_fine_tuning,
    check_output,
    check_schedule,
    check_shared_memory,
    check_warm_up,
    loader_processes,
)
from engine.checkpoint.async_saver import BEST
from engine.checkpoint.format import held_by
from engine.checkpoint.resume import is_run, refuse_changes
from engine.evaluation.evaluate import weights_to_score
from engine.evaluation.scores import Best
from engine.memory.estimate import checkpoint_bytes, free_memory, weights_bytes
from engine.parallel.strategy import check_strategy
from engine.plan import ImageSets, Plan
from engine.plan_lines import (
    compare_with_weights,
    describe_batch_size,
    describe_evaluation,
    describe_other_validation,
    warn_of_overlap,
)
from engine.precision.policy import Precision
from engine.record.trackers import describe_trackers
from engine.session import check_name
from engine.train.stop_conditions import why_finished
from engine.train.teacher import load_teacher
from models import adapt, build_model, describe
from models.compilation import parts_to_compile
from models.transforms import choose_transforms
from models.transforms.blocks import ActivationCheckpointing
from models.weights.load import load_exactly
from utils.distributed import Process, choose_device, find_devices
from utils.errors import ConfigError, UserError
from utils.findings import OK, WARN, WRONG, Finding
from utils.host import count_cores
from utils.log import Log
from utils.program import restore_gc

T = TypeVar("T")


def check(loaded: LoadedConfig, world_size: int | None = 1, local_size: int | None = None) -> int:
    """Check a run of `world_size` processes (None: one per device), `local_size` of them here (None: all)."""
    restore_gc()
    preflight = Preflight(loaded)
    preflight.run(world_size, local_size)
    return preflight.conclude()


class ImaginedProcess(Process):
    """Process 0 of a run without the others: it has their number, and does not communicate."""

    def first(self, task: Callable[[], T]) -> T:
        return task()


class NotKnown(Exception):
    """A row cannot be told before the mistake that another row reports is fixed."""


class Preflight:
    """Prints the plan of a run, and its problems."""

    def __init__(self, loaded: LoadedConfig):
        self.loaded = loaded.with_default_batch_size() if loaded.config.START.EVAL else loaded
        self.config = self.loaded.config  # as given; the plan has the final one
        self.log = Log(rank=0)
        self.verdicts: list[str] = []
        self.has_weights = True  # to evaluate, unless they cannot be read
        self.model: nn.Module | None = None
        self.precision: Precision | None = None
        for note in self.loaded.notes:
            self.log.say(note)

    def add(self, finding: Finding) -> None:
        self.verdicts.append(finding.verdict)
        for line in finding.lines():
            self.log.say(line)

    def attempt(self, what: str, task: Callable[[], T]) -> T | None:
        """The task's result; a user error becomes a row."""
        try:
            return task()
        except UserError as error:
            self.add(Finding(what, str(error), WRONG))
        except NotKnown:
            self.add(Finding(what, "not checked, as it depends on what is wrong", WARN, "fix that first"))
        return None

    def report(self, what: str, task: Callable[[], list[str]]) -> None:
        """Add a row of the lines that the task returns, if there are any."""
        self.tell(what, self.attempt(what, task) or [])

    def tell(self, what: str, lines: Sequence[str]) -> None:
        """Add a row of these lines, if there are any."""
        if lines:
            warns = any(line.startswith("warning: ") for line in lines)
            self.add(Finding(what, "\n".join(lines), WARN if warns else OK))

    def run(self, world_size: int | None, local_size: int | None) -> None:
        process = self.attempt("device", lambda: imagine(self.config.DEVICE, world_size, local_size))
        if process:
            self.add(Finding("device", f"{process.device}; processes: {process.world_size}"))
        plan = self.make_plan(process or ImaginedProcess(torch.device("cpu")))
        sets = self.attempt("data", lambda: plan.image_sets)
        if sets:
            self.check_data(*sets)
        else:
            plan.image_sets = ImageSet([], []), ImageSet([], [])
        if process:
            self.check_settings(plan, sets)

    def check_data(self, train_set: ImageSet | None, eval_set: ImageSet) -> None:
        config = self.config
        self.tell("data set", eval_set.notes)
        self.attempt("data", lambda: [self.add(finding) for finding in check_images(config, train_set, eval_set)])
        if config.DATA.CACHE != "none":
            parts = {"training": train_set, "validation": eval_set}
            self.attempt("cache", lambda: self.add(check_cache(config, parts.items())))

    def check_settings(self, plan: Plan, sets: ImageSets | None) -> None:
        """Check what depends on the device; without data (`sets` None) only what needs none."""
        config, process = self.config, plan.process
        precision = self.precision = self.attempt("precision", lambda: Precision(config, process.device))
        num_classes = config.MODEL.NUM_CLASSES or (len(sets[1].classes) if sets else None)
        model = self.attempt("model", lambda: adapt(build_model(config, num_classes), config)) if num_classes else None
        self.model = model
        self.settle_batch_size(plan)
        if not config.START.EVAL:
            self.check_training(plan)
        if sets:
            self.add(check_shared_memory(plan.config, loader_processes(config, sets[1], process)))
        has_output = self.check_output(plan)
        if not (precision and model):
            self.add(
                Finding(
                    "weights, memory", "not checked, as they depend on the above", WARN, "fix the error above first"
                )
            )
            return
        self.add(Finding("model", f"{config.MODEL.NAME}, {describe(model)}"))
        if config.START.EVAL:
            self.report("precision", lambda: describe_precision(plan, precision, model))
            if sets and self.has_weights:
                self.report("weights", lambda: try_evaluation(plan))
                self.tell("evaluation", describe_evaluation(plan))
            return
        self.check_model(plan, model, bool(sets))
        if has_output:
            folder = plan.folder or Path(config.SAVE)
            sizes = checkpoint_bytes(config.TRAIN, model), weights_bytes(config.TRAIN, model)
            self.add(check_disk(plan.config, folder, *sizes))

    def check_output(self, plan: Plan) -> bool:
        """Whether the run could write its folder."""
        folder = None if self.config.START.EVAL else plan.folder
        named = lambda: check_name(self.config, folder) or str(folder or self.config.SAVE)  # noqa: E731
        if found := self.attempt("output", lambda: check_output(named())):
            self.add(found)
        return bool(found) and found.verdict == OK

    def make_plan(self, process: Process) -> Plan:
        """The plan, with its checkpoint read. If that fails, a row says so, and the others assume a new run."""

        def load_data(config: Config, kept: Kept | None) -> ImageSets:
            return load_image_sets(config, self.log.say, kept)

        plan = Plan(self.loaded, process, self.log, load_data, partial(self.estimate_batch_size, process))
        what = "weights" if self.config.START.EVAL else "resume"
        if self.attempt(what, lambda: (plan.checkpoint, plan.saved, plan.kept)) is None:
            plan.checkpoint, plan.saved, plan.kept, self.has_weights = None, {}, None, False
        return plan

    def estimate_batch_size(
        self, process: Process, config: Config, num_images: int, num_classes: int
    ) -> tuple[int, str]:
        if not (num_images and self.model and self.precision):
            raise NotKnown
        limit = max_images(config, num_images, process.world_size)
        try:
            number, how = calculate(config, self.model, self.precision, process, limit)
        except ConfigError:
            raise NotKnown from None
        if not number:
            raise ConfigError(f"DATA.BATCH_SIZE is auto: not one image fits ({how}); choose a smaller model")
        return number, f"{how}; a run tries it"

    def settle_batch_size(self, plan: Plan) -> None:
        """Find DATA.BATCH_SIZE auto. If that fails, a row says so, and the others assume 1."""
        if self.config.DATA.BATCH_SIZE == AUTO:
            loaded = self.attempt("batch size", lambda: plan.loaded)
            plan.loaded = loaded or self.loaded.with_batch_size(1, "unknown")
            if loaded:
                self.add(Finding("batch size", describe_batch_size(plan)))

    def check_training(self, plan: Plan) -> None:
        config = plan.config
        self.attempt("augmentation", lambda: parse_policy(config.TRAIN))
        self.attempt("strategy", lambda: check_strategy(config))
        self.report("tracking", lambda: describe_trackers(config))
        order = self.attempt("repeats", lambda: plan.order)
        if len(plan.train_set):
            self.report("balance", lambda: describe_balance(config, plan.train_set, plan.class_weights))
        if order:
            for finding in (*check_schedule(config.TRAIN, order), *check_fine_tuning(config, order.global_batch)):
                self.add(finding)
        self.add(check_warm_up(config.TRAIN))

    def check_model(self, plan: Plan, model: nn.Module, has_data: bool) -> None:
        """Load the initial weights, and check that training fits into memory."""
        config, precision, free = plan.config, plan.precision, free_memory(plan.process.device)
        if config.TRAIN.GRAD_CHECKPOINTING:
            checkpointing = ActivationCheckpointing(config.MODEL.NAME)
            self.attempt("checkpointing", lambda: checkpointing.apply(copy.deepcopy(model)))
        if config.COMPILE:
            how = f"COMPILE_SCOPE {config.COMPILE_SCOPE}, COMPILE_MODE {config.COMPILE_MODE}"
            self.report("compile", lambda: [f"{how}: {len(parts_to_compile(model, config))} to compile"])
        if is_run(plan.saved):
            self.report("resume", lambda: try_resume(plan, model, has_data))
        plain = build_model(config, plan.num_classes) if config.MODEL.LORA.RANK else model  # as before its adapters
        self.report("pretrained", lambda: plan.load_weights(plain) + warn_of_overlap(plan))
        if config.TRAIN.DISTILLATION_TYPE != "none" and has_data:
            self.report("teacher", lambda: load_teacher(config, plan.classes, plan.num_classes)[1])
        self.report("preprocessing", lambda: compare_with_weights(plan))
        self.report("precision", lambda: describe_precision(plan, precision, model))
        memory = self.attempt("memory", lambda: check_memory(config, model, precision, free, plan.process))
        if memory:
            self.add(memory)

    def conclude(self) -> int:
        """The last line, and the exit code."""
        wrong, warnings = self.verdicts.count(WRONG), self.verdicts.count(WARN)
        self.log.say(f"check: {wrong} wrong, {warnings} to look at; nothing was trained or saved")
        return 2 if wrong else 0


def imagine(setting: str, world_size: int | None, local_size: int | None) -> Process:
    """Process 0 of such a run, with its device."""
    world_size = world_size or find_devices(setting)[1]
    local_size = local_size or world_size
    choose_device(setting, local_size - 1)  # every process on this machine needs a device
    sizes = {"local_size": local_size, "num_cores": max(1, count_cores() // local_size)}
    return ImaginedProcess(choose_device(setting, 0), world_size=world_size, **sizes)


def describe_precision(plan: Plan, precision: Precision, model: nn.Module) -> list[str]:
    """The chosen precision; applies the transforms to the model."""
    transforms = choose_transforms(plan.given, precision.device, precision.half)
    return [precision.describe(), *transforms.apply(model)]


def try_resume(plan: Plan, model: nn.Module, has_data: bool) -> list[str]:
    """Read the checkpoint into the model, as a run would."""
    path, state = plan.checkpoint, plan.saved
    lines = [f"{path}, after epoch {state['epoch'] + 1} and step {state['step']}"]
    if why := why_finished(plan.config.TRAIN, state["epoch"] + 1, state["progress"].get("not_better", 0)):
        lines.append(f"this run is finished already ({why}): nothing to do")
    if has_data:  # otherwise everything would differ
        lines += refuse_changes(plan.config, plan.order, plan.eval_set.split, state, path) + describe_other_validation(
            plan
        )
    load_exactly(model, state["state_dict"], path)
    best = Best(*state["progress"]["best"])
    if best.epoch and not held_by(path.with_name(BEST)):
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
