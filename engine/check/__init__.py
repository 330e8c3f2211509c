"""The -check command: plans and builds a run with the run's own functions, makes a few updates, and saves nothing.

The lines that these functions log become rows of a table, and so do the errors that they raise.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from configs.load import LoadedConfig
from datasets import CacheProgress, OpenedData, open_data
from datasets.opening import PartsToRead
from engine.batch_size import measure_step
from engine.build import build, make_model, prepare_torch
from engine.check.images import check_images
from engine.check.memory import check_memory, measure_memory, program_memory
from engine.eval_plan import EvalPlan, plan_evaluation
from engine.eval_run import weights_to_score
from engine.memory import free_memory, reports_memory
from engine.parallel import is_sharded
from engine.plan import Inputs, TrainPlan, plan_training, prior_facts_of, read_inputs
from engine.plan_lines import describe_chosen, describe_precision, how_chosen, notes_on
from engine.precision import Precision
from engine.quick_checks import (
    OK,
    WARN,
    WRONG,
    Finding,
    check_shared_memory,
    quick_checks,
    refusals,
)
from engine.resumed import restore
from engine.session import check_folder
from engine.settings import chooses
from engine.short_trial import alone, forecast_run
from engine.train.stop_conditions import why_finished
from engine.train.trainer import Trainer
from engine.weights_lines import describe_evaluation
from models import describe_size
from utils.distributed import Process, choose_device
from utils.errors import UserError
from utils.host import count_cores, find_devices
from utils.log import Log
from utils.program import restore_gc
from utils.text import WARNING, counted


class Table(Log):
    """A log whose sections become rows of a table."""

    def __init__(self):
        super().__init__(rank=0)
        self.verdicts: list[str] = []
        self._mistakes: set[str] = set()  # error messages that already have a row
        # Lines of the current section. None outside of sections, where lines are printed at once.
        self._lines: list[str] | None = None

    def say(self, *lines: str) -> None:
        if self._lines is None:
            super().say(*lines)
        else:
            self._lines += lines

    def add(self, finding: Finding) -> None:
        self.verdicts.append(finding.verdict)
        super().say(*finding.lines())

    @contextlib.contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Make a row from the lines that are logged inside the section, or from the error that ends it."""
        outer, self._lines = self._lines, []
        try:
            yield
            if self._lines:
                warns = any(line.startswith(WARNING) for line in self._lines)
                text = "\n".join(line.removeprefix(f"{title}: ") for line in self._lines)
                self.add(Finding(title, text, WARN if warns else OK))
        except UserError as error:
            if str(error) not in self._mistakes:  # several steps may raise the same error
                self._mistakes.add(str(error))
                self.add(Finding(title, str(error), WRONG))
            raise
        finally:
            self._lines = outer

    def conclude(self) -> int:
        """Print a last line with the numbers of errors and warnings. Return the exit code."""
        wrong, warnings = self.verdicts.count(WRONG), self.verdicts.count(WARN)
        skipped = "checks that depend on a failed check were skipped; " if wrong else ""
        self.say(f"check: {wrong} wrong, {counted(warnings, 'warning')}; {skipped}nothing was saved")
        if self.unprinted:
            raise self.unprinted
        return 2 if wrong else 0


def check(loaded: LoadedConfig, world_size: int | None = 1, local_size: int | None = None) -> int:
    """Check a run of `world_size` processes (None: one per device), `local_size` of them on this machine (None: all).

    An error ends its step and skips the steps that need its result. All other steps still run, so that independent
    errors are found at once. Return the exit code.
    """
    restore_gc()
    if chooses(loaded.config.MODEL.PRETRAINED):
        from engine.choice.choose import settings_of_choice

        loaded = settings_of_choice(loaded, simulated_process(loaded.config.DEVICE, world_size, local_size))
    evaluates = loaded.config.EVAL
    if evaluates:
        from configs.auto import without_auto

        loaded = without_auto(loaded)
    steps = Check(loaded, "validation" if evaluates else "both")
    with suppress(UserError):
        steps.plan_run(world_size, local_size)
    startup = time.monotonic() - loaded.started
    with suppress(UserError):
        steps.check_data()
    with suppress(UserError):
        steps.check_output()
    with suppress(UserError):
        if isinstance(steps.plan, EvalPlan):
            check_evaluation(steps.table, replace(steps.plan, inputs=alone(steps.plan.inputs)))
        elif steps.plan:
            check_training(steps.table, steps.plan, steps.folder, startup)
    return steps.table.conclude()


class Check:
    """The steps of a check before anything is built. Each step sets a field, which stays None after an error."""

    def __init__(self, loaded: LoadedConfig, parts: PartsToRead):
        self.parts, self.loaded, self.config, self.table = parts, loaded, loaded.config, Table()
        self.inputs: Inputs | None = None
        self.opened: OpenedData | None = None
        self.plan: TrainPlan | EvalPlan | None = None
        self.folder: Path | None = None
        self.table.say(*loaded.notes)

    def plan_run(self, world_size: int | None, local_size: int | None) -> None:
        """Make the plan as process 0 of a run would make it."""
        from engine.auto_values import choose_values  # local: only a setting that is auto needs it

        config, table = self.config, self.table
        with table.section("device"):
            process = simulated_process(config.DEVICE, world_size, local_size)
            table.say(f"{process.device}; processes: {process.world_size}")
        prepare_torch(config, process, table)
        more = refusals(config) if self.parts == "both" else {}
        for title, refuse in {"precision": partial(Precision, config, process.device), **more}.items():
            with suppress(UserError), table.section(title):
                refuse()
        with table.section("checkpoint"):
            self.inputs = read_inputs(self.loaded, process, table)
        with table.section("plan"):
            if self.parts == "validation":
                self.plan = plan_evaluation(self.inputs, self.open_data)
            else:
                self.plan = plan_training(self.inputs, self.open_data, choose_values)

    def open_data(self, inputs: Inputs | None = None) -> OpenedData:
        """Open the data as a run would. `inputs` are missing if the checkpoint cannot be read."""
        prior, process = (inputs.prior, inputs.process) if inputs else (prior_facts_of(self.loaded), None)
        with self.table.section("data"):
            cache = CacheProgress(self.table.say, self.table.warn, is_check=True, within=self.cache_section)
            self.opened = open_data(self.config, self.parts, prior, process, output=self.config.SAVE, cache=cache)
        return self.opened

    def cache_section(self) -> contextlib.AbstractContextManager[None]:
        return self.table.section("cache")

    def check_data(self) -> None:
        """Read the images and add the rows about them, even if the run cannot be planned for another reason."""
        if self.inputs is None:
            with suppress(UserError):
                self.open_data()
        if self.opened is None:
            return
        with self.table.section("data set"):
            self.table.say(*self.opened.val.notes)
        train, val = self.opened.train, self.opened.val
        train = None if train is None else replace(train, read_cached=None)
        val = replace(val, read_cached=None)
        with self.table.section("images"):
            for finding in check_images(self.opened.config, train, val):
                self.table.add(finding)

    def check_output(self) -> None:
        """Add the row about the run's folder."""
        is_resumed = self.inputs is not None and self.parts == "both"
        with self.table.section("output"):
            self.folder = check_folder(self.config, self.inputs.folder if is_resumed else None)
            self.table.say(f"{self.folder} can be written to")


def simulated_process(setting: str, world_size: int | None, local_size: int | None) -> Process:
    """Return process 0 of a run of this size, with its device but without the other processes."""
    world_size = world_size or find_devices(setting)[1]
    local_size = local_size or world_size
    choose_device(setting, local_size - 1)  # raises an error unless every process on this machine has a device
    sizes = {"local_size": local_size, "num_cores": max(1, count_cores() // local_size)}
    return Process(choose_device(setting, 0), world_size=world_size, **sizes)


def check_evaluation(table: Table, plan: EvalPlan) -> None:
    """Add the rows about an evaluation, and load all weights that -eval would evaluate."""
    table.add(check_shared_memory(plan.config, plan.eval_set, plan.process))
    with table.section("precision"):
        table.say(plan.precision.describe())
    with table.section("evaluation"):
        table.say(*describe_evaluation(plan))
    with table.section("weights"):
        loaded = weights_to_score(plan, partial(make_model, plan, table))
        table.say(f"will be scored: {', '.join(name.strip() or 'raw' for name, _ in loaded)}")


def check_training(table: Table, plan: TrainPlan, folder: Path | None, startup: float) -> None:
    """Build everything that a run builds and try some updates. `startup`: seconds from program start to the plan."""
    config, start, trainer, finished = plan.config, time.monotonic(), None, ""
    single = replace(plan, inputs=alone(plan.inputs))
    free = free_memory(plan.process.device)
    with suppress(UserError), table.section("model"):
        trainer = build(single, table)
        table.say(f"{config.MODEL.NAME}, {describe_size(trainer.model)}")
    for title, lines in {**describe_chosen(plan), **notes_on(plan)}.items():
        with table.section(title):
            table.say(*lines)
    for finding in quick_checks(plan, trainer and trainer.model, folder):
        table.add(finding)
    if trainer is None:
        return
    with table.section("precision"):
        table.say(describe_precision(plan))
    if plan.inputs.checkpoint:
        with table.section("resume"):
            restore(single, trainer, table)
            finished = why_finished(config.TRAIN, trainer.schedule.num_epochs, trainer.epoch, trainer.not_better)
            if finished:
                table.say(f"this run is already finished ({finished}): nothing to do")
    for finding in check_labels(plan, trainer):
        table.add(finding)
    startup += time.monotonic() - start
    if is_sharded(config, plan.process):
        table.add(Finding("memory", "not measured, because DIST.STRATEGY fsdp2 divides the model among the processes"))
        return
    enough = True
    with table.section("memory"):
        if reports_memory(plan.process.device):
            measure_memory(table, trainer, free)
        else:
            step = measure_step(config, plan.num_classes)
            program, free = program_memory(trainer)
            memory = check_memory(config, plan.process, program, step, free)
            table.add(memory)
            enough = memory.verdict == OK
    if enough and WRONG not in table.verdicts and not finished:
        measure_times(table, single, trainer, startup)


def measure_times(table: Table, plan: TrainPlan, trainer: Trainer, startup: float) -> None:
    """Add the rows about the speed of updates. `startup`: see forecast_run."""
    if not how_chosen(plan, "AMP"):
        with table.section("half precision"):
            table.say(compare_precisions(plan))
    with table.section("time"):
        table.say(estimate_time(plan, trainer, startup))


def compare_precisions(plan: TrainPlan) -> str:
    """Time updates in both precisions, and describe the faster one."""
    from engine.update_times import time_precisions

    config = plan.config
    times = time_precisions(config, plan.num_classes, plan.process, config.DATA.BATCH_SIZE)
    if times is None:
        return "not measured, because updates in both precisions do not fit into memory"
    advice = {(False, True): ": use -amp", (True, False): ": leave -amp out, unless you need to save memory"}
    return times.describe() + advice.get((config.AMP, times.half_is_faster), "")


def check_labels(plan: TrainPlan, trainer: Trainer) -> Iterator[Finding]:
    """Count the labels that are probably wrong, like halfstep labels, by the features that fit a new classifier."""
    has_one_label = plan.config.task.has_classes and not plan.config.task.has_several_classes
    if not has_one_label or plan.config.MODEL.NEW_CLASSIFIER == "random" or plan.inputs.checkpoint:
        return
    from engine.features.compute import features_of_images, has_zero_classifier
    from engine.features.doubts import FEWEST_JUDGED, MOST_JUDGED, describe_doubts
    from utils.commands import command

    data, sets, most = plan.config.DATA, [plan.train_set, plan.eval_set], plan.config.CHECK_IMAGES
    if plan.train_set.makes_batches or trainer.parallel.is_sharded or not has_zero_classifier(trainer):
        return
    if most:
        sets = [each.take(np.linspace(0, len(each) - 1, min(most, len(each))).astype(np.int64)) for each in sets]
    if sum(map(len, sets)) * plan.num_classes > MOST_JUDGED:
        return
    if data.IMAGE_CHANNELS not in (1, 3) or data.RGB:
        from engine.features.channels import start_channels

        start_channels(trainer, plan.train_set, note=lambda line: None)
    # Unreadable images are reported in another row.
    features = [features_of_images(images, trainer, note=lambda line: None) for images in sets]
    count = sum(len(part.targets) for part in features)
    if text := describe_doubts(features, plan.num_classes):
        arguments = plan.inputs.loaded.arguments
        options = arguments[arguments.index("-opts") :] if "-opts" in arguments else []
        words = (plan.config.MODEL.PRETRAINED, "-dataset", data.DATASET, "-data_path", data.DATA_PATH, *options)
        yield Finding("labels", text, WARN, f"list them: {command('labels', *words)}")
    elif count >= FEWEST_JUDGED:
        yield Finding("labels", f"no sign of wrong ones among {count:,}")
    elif count:
        yield Finding("labels", f"too few images ({count}) to judge labels; {FEWEST_JUDGED} are needed")


def estimate_time(plan: TrainPlan, trainer: Trainer, startup: float) -> str:
    """Make some updates, evaluate a batch, and describe how long the whole run takes.

    Raise ConfigError if the run takes too long for TRAIN.BUDGET. `startup`: see forecast_run.
    """
    step, forecast = trainer.step, forecast_run(plan, trainer, startup)
    times = forecast.times
    speed = f"; {times.update:.3g} s per update, {times.evaluation:.3g} s per evaluation"
    if plan.config.TRAIN.BUDGET:
        from engine.train.budget import Allowance, Budget

        allowance = Allowance(plan.config.TRAIN.BUDGET, time.monotonic(), plan.inputs.saved.get("budget", {}))
        budget, schedule = Budget(step, forecast, allowance), trainer.schedule
        num_updates = schedule.num_updates if schedule.choices else budget.fitting(step)
        return budget.describe(step, num_updates) + speed
    return forecast.describe(step, times.until_end(step, trainer.schedule.num_updates)) + speed
