"""-check: looks at everything that a run will need, prints a row for each, and starts nothing."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from datasets import ImageSet, build_order, check_repeats, load_image_sets, parse_policy
from datasets.batch_order import Order
from engine.check.cache import check_cache
from engine.check.images import check_images
from engine.check.quick_checks import (
    check_disk,
    check_output,
    check_rate,
    check_shared_memory,
    check_warm_up,
    checkpoint_bytes,
    loader_processes,
)
from engine.checkpoint.resume import (
    batch_size_of,
    find_checkpoint,
    global_batch_to_keep,
    read_saved,
    refuse_changes,
    run_folder_of,
)
from engine.memory.auto_batch_size import expect
from engine.memory.estimate import check_memory, free_memory
from engine.parallel.sharding import check_strategy
from engine.precision.policy import Precision
from engine.run import find_weights, weights_to_score
from engine.session import Session
from models import build_model, describe
from models.transforms.activation_checkpointing import recompute_blocks
from models.transforms.cpu_kernels import parts_to_compile
from models.weights import load_exactly, load_pretrained
from utils.distributed import Process, choose_device, find_devices
from utils.errors import UserError
from utils.findings import OK, WARN, WRONG, Finding
from utils.program import restore_gc

T = TypeVar("T")


def check(loaded: LoadedConfig, world_size: int | None = 1, local_size: int | None = None) -> int:
    """Look at a run of `world_size` processes (None: one a device), `local_size` of them here (None: all). 2 or 0."""
    restore_gc()
    preflight = Preflight(loaded)
    preflight.run(world_size, local_size)
    return preflight.conclude()


class Preflight:
    """One process's look at a run of however many; it joins no others."""

    def __init__(self, loaded: LoadedConfig):
        loaded = loaded.with_default_batch_size() if loaded.config.EVAL else loaded
        self.config = loaded.config
        self.session = Session(loaded, Process(torch.device("cpu")))
        self.verdicts: list[str] = []

    def add(self, finding: Finding) -> None:
        self.verdicts.append(finding.verdict)
        for line in finding.lines():
            self.session.log.say(line)

    def attempt(self, what: str, task: Callable[[], T]) -> T | None:
        """What the task gives; a user's mistake becomes a row."""
        try:
            return task()
        except UserError as error:
            self.add(Finding(what, str(error), WRONG))
            return None

    def tell(self, what: str, task: Callable[[], str]) -> None:
        """The same, for a task that gives what is to be said."""
        found = self.attempt(what, task)
        if found is not None:
            self.add(Finding(what, found))

    def run(self, world_size: int | None, local_size: int | None) -> None:
        config = self.config
        process = self.attempt("device", lambda: pretend(config.DEVICE, world_size, local_size))
        if process:
            self.session.process.device = process.device
            self.add(Finding("device", f"{process.device}; processes: {process.world_size}"))
        sets = self.attempt("data", lambda: load_image_sets(config)) or (None, None)
        if sets[1]:
            if sets[1].notes:
                warns = any(note.startswith("warning: ") for note in sets[1].notes)
                self.add(Finding("data set", "\n".join(sets[1].notes), WARN if warns else OK))
            self.attempt("data", lambda: [self.add(finding) for finding in check_images(config, *sets)])
            if config.DATA.CACHE != "none":
                parts = zip(("training", "validation"), sets, strict=True)
                self.attempt("cache", lambda: self.add(check_cache(config, parts)))
        if process:
            self.look_at_settings(process, *sets)

    def look_at_settings(self, process: Process, train: ImageSet | None, val: ImageSet | None) -> None:
        """What has to do with this device; without data (`val` None) what does not need them."""
        config, free = self.config, free_memory(process.device)
        precision = self.attempt("precision", lambda: Precision(config, process.device))
        num_classes = config.MODEL.NUM_CLASSES or (len(val.classes) if val else None)
        model = self.attempt("model", lambda: build_model(config, num_classes)) if num_classes else None
        checkpoint = None if config.EVAL else self.attempt("resume", lambda: find_checkpoint(self.session))
        if config.DATA.BATCH_SIZE == AUTO:
            can_guess = train and model and precision
            guess = partial(expect, config, model, precision, process, free) if can_guess else None
            config = self.settle_batch_size(checkpoint, len(train or ()), guess)
        order = build_order(config, train or ImageSet([], []), process.world_size)
        if not config.EVAL:
            self.attempt("augmentation", lambda: parse_policy(config.TRAIN))
            self.attempt("strategy", lambda: check_strategy(config))
            self.attempt("repeats", lambda: check_repeats(order))
            self.add(check_rate(config.TRAIN, order.global_batch))
            self.add(check_warm_up(config.TRAIN))
        if val:
            self.add(check_shared_memory(config, loader_processes(config, val, process)))
        output = check_output(config.SAVE)
        self.add(output)
        if not (precision and model):
            self.add(Finding("weights, memory", "not looked at, as they depend on the above", WARN, "mend that first"))
            return
        self.add(Finding("model", f"{config.MODEL.NAME}, {describe(model)}"))
        if config.TRAIN.GRAD_CHECKPOINTING:
            self.attempt("checkpointing", lambda: recompute_blocks(config, copy.deepcopy(model)))
        if config.EVAL:
            self.tell("precision", lambda: in_words(precision, model))
            if val:
                self.tell("weights", lambda: try_evaluation(self.session, val.classes))
            return
        if config.COMPILE:
            how = f"COMPILE_SCOPE {config.COMPILE_SCOPE}, COMPILE_MODE {config.COMPILE_MODE}"
            self.tell("compile", lambda: f"{how}: {len(parts_to_compile(model, config))} to compile")
        self.look_at_weights(model, order, checkpoint)
        self.tell("precision", lambda: in_words(precision, model))
        memory = self.attempt("memory", lambda: check_memory(config, model, precision, free, process))
        if memory:
            self.add(memory)
        if output.verdict == OK:
            folder = run_folder_of(checkpoint) or Path(config.SAVE)
            self.add(check_disk(config, folder, checkpoint_bytes(config.TRAIN, model)))

    def settle_batch_size(self, checkpoint: Path | None, num_images: int, guess: Callable[[int], int] | None) -> Config:
        """In the place of auto, for the rows that follow: that of the run to go on with, or what a run would find."""
        number, how = None, "as the run was begun with"
        with contextlib.suppress(UserError):  # other rows say what is wrong
            number = batch_size_of(read_saved(checkpoint))
            if number is None and guess:
                high = ", too high where little is left to train (MODEL.FREEZE)" if self.config.MODEL.FREEZE else ""
                number, how = guess(num_images), f"estimated{high}; a run tries it out"
        if number:
            self.add(Finding("batch size", f"{number} images, {how}"))
        elif number == 0:
            self.add(
                Finding("batch size", "not one image fits", WRONG, "lower DATA.IMAGE_SIZE or take a smaller model")
            )
        else:
            self.add(Finding("batch size", "not estimated, as it depends on what is wrong", WARN, "mend that first"))
        self.session.settle_batch_size(number or 1, how)
        self.config = self.session.config
        return self.config

    def look_at_weights(self, model: torch.nn.Module, order: Order, checkpoint: Path | None) -> None:
        """Load what the run would start from."""
        config = self.config
        if config.MODEL.PRETRAINED:
            self.tell("pretrained", lambda: "\n".join(load_pretrained(model, config.MODEL.PRETRAINED)))
        if checkpoint:
            self.tell("resume", lambda: try_resume(self.session, model, checkpoint, order))

    def conclude(self) -> int:
        """The last line, and the exit code."""
        wrong, warnings = self.verdicts.count(WRONG), self.verdicts.count(WARN)
        self.session.log.say(f"check: {wrong} wrong, {warnings} to look at; nothing was trained or saved")
        return 2 if wrong else 0


def pretend(setting: str, world_size: int | None, local_size: int | None) -> Process:
    """Process 0 of such a run, without the others."""
    world_size = world_size or find_devices(setting)[1]
    local_size = local_size or world_size
    choose_device(setting, local_size - 1)  # each process here needs a device
    return Process(choose_device(setting, 0), world_size=world_size, local_size=local_size)


def in_words(precision: Precision, model: torch.nn.Module) -> str:
    """What was chosen, having made the model compute so."""
    return "\n".join([precision.describe().removeprefix("precision: "), *precision.prepare(model)])


def try_resume(session: Session, model: torch.nn.Module, path: Path, order: Order) -> str:
    """Read the checkpoint into the model, as a run would."""
    state = read_saved(path)
    if "progress" not in state:
        return "\n".join(load_pretrained(model, str(path), setting="-resume"))
    if order.num_images:  # else the data could not be read, and all would differ
        refuse_changes(
            session, state, path, replace(order, resumed_global_batch=global_batch_to_keep(session.config, state))
        )
    load_exactly(model, state["state_dict"], path)
    return f"{path}, after epoch {state['epoch'] + 1} and step {state['step']}"


def try_evaluation(session: Session, classes: list[str]) -> str:
    """Load all weights that an evaluation would score."""
    names = [name.strip() or "raw" for name, _ in weights_to_score(session, find_weights(session), classes)]
    return f"to be scored: {', '.join(names)}"
