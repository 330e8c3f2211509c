"""The plan of a run: everything that is decided before its model is built.

read_inputs reads the checkpoint. Then plan_training reads the data and completes the plan; for -eval, eval_plan.py
does.
-check (engine/check/) makes the same plan.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self
from unicodedata import normalize

from torch import nn

from configs.checks import is_typed
from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from datasets import (
    ImageSet,
    OpenedData,
    PriorFacts,
    SavedData,
    build_order,
    class_weights,
    validation_facts,
)
from datasets.fingerprint import data_facts
from datasets.order import Order
from datasets.types import NO_PRIOR_FACTS
from engine.checkpoint.resume import TRAINED_ON, WITHOUT_STATE, find_checkpoint, global_batch_to_keep, is_run
from engine.precision import Precision
from models.weights.record import record_of
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log

OpenData = Callable[["Inputs"], OpenedData]
# (inputs, number of training images, number of classes) -> inputs without the value auto
ChooseValues = Callable[["Inputs", int, int], "Inputs"]


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run: its settings, process and checkpoint. They are known before the images are read."""

    loaded: LoadedConfig
    process: Process
    precision: Precision  # one object for the whole run, because it holds the loss scale
    checkpoint: Path | None = None  # the checkpoint that -resume names, to continue or to evaluate
    saved: dict = field(default_factory=dict)  # the content of the checkpoint
    record: dict = field(default_factory=dict)  # metadata that halfstep stored in the weights or the checkpoint
    prior: PriorFacts = NO_PRIOR_FACTS

    @property
    def config(self) -> Config:
        return self.loaded.config

    def settled(self, opened: OpenedData) -> "Inputs":
        """Return the inputs with the settings that the data have decided."""
        origins = self.loaded.origins | {each.name: each.origin for each in opened.settings}
        return replace(self, loaded=replace(self.loaded, config=opened.config, origins=origins))

    def divided_as(self, saved: SavedData | None) -> "Inputs":
        """Return the inputs of a new run whose images are divided as another run has divided them, if one is given."""
        return self if saved is None or self.prior.saved else replace(self, prior=self.prior._replace(saved=saved))

    @property
    def folder(self) -> Path | None:
        """Return the folder of the run to continue, or None if the checkpoint is not in the folder of a run."""
        is_in_one = self.checkpoint and (self.checkpoint.parent / "config.yaml").exists()
        return self.checkpoint.parent if is_in_one else None

    @property
    def source(self) -> tuple[str, str | None]:
        """Return the setting that names the weights, and its value: a file or the name of a model."""
        return source_of(self.config, self.checkpoint)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The part of a plan that training and evaluation share."""

    inputs: Inputs
    eval_set: ImageSet
    needs_head: ClassVar[bool] = False  # whether weights without a fitting classifier are refused

    @property
    def config(self) -> Config:
        """Return the settings that the run uses and writes to config.yaml."""
        return self.inputs.config

    @property
    def process(self) -> Process:
        return self.inputs.process

    @property
    def precision(self) -> Precision:
        return self.inputs.precision

    @property
    def classes(self) -> list[str]:
        return self.eval_set.classes

    @property
    def num_classes(self) -> int:
        return self.config.MODEL.NUM_CLASSES or len(self.classes)

    def load_weights(self, model: nn.Module) -> list[str]:
        """Load the weights of MODEL.PRETRAINED, if any, and return lines for the log. `restore` loads a run's state."""
        setting, source = self.inputs.source
        if is_run(self.inputs.saved) or not source:
            return []
        from models.sized import load_for

        return load_for(self.config, model, source, setting, self.needs_head, self.classes)


@dataclass(frozen=True)
class StepPlan:
    """What a training step depends on, besides model and data. Trials, benchmarks and tests make one without a run."""

    config: Config
    process: Process
    precision: Precision
    num_classes: int
    classes: Sequence[str] | None  # names of the classes; None in a trial, whose teacher has random weights
    class_weights: list[float] | None  # class weights in the training loss; None: all are equal

    @classmethod
    def of_trial(cls, config: Config, process: Process, images: ImageSet) -> Self:
        """Return the plan of steps without a run."""
        precision, num_classes = Precision(config, process.device), config.MODEL.NUM_CLASSES or len(images.classes)
        return cls(config, process, precision, num_classes, None, class_weights(config, images))


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Plan):
    """The plan of a training run."""

    train_set: ImageSet
    order: Order  # which training images each update sees
    class_weights: list[float] | None  # class weights in the training loss; None: all are equal
    validation: dict  # fingerprint of the validation images
    facts: dict  # facts that identify the data (datasets/fingerprint.py)

    @property
    def step_plan(self) -> StepPlan:
        facts = self.precision, self.num_classes, self.classes, self.class_weights
        return StepPlan(self.config, self.process, *facts)

    @property
    def starts_from_its_classes(self) -> bool:
        """Return whether the weights know all classes of the data, so that a score before training is meaningful."""
        both = self.classes, self.inputs.record.get("class_names", ())
        here, there = ({normalize("NFC", name) for name in each} for each in both)
        return here <= there

    @property
    def holds_out(self) -> bool:
        """Return whether the run has validation images. If not, it trains on all images, and no epoch is evaluated."""
        return not self.eval_set.trains_on_all

    @property
    def is_measured(self) -> bool:
        """Return whether images are predicted by models that have not learned them: by this run, or by DATA.FOLDS."""
        return self.holds_out or self.config.DATA.FOLDS is not None

    @property
    def num_evaluated(self) -> int:
        """Return the number of images that each evaluation of the run scores."""
        return len(self.eval_set) if self.holds_out else 0

    @property
    def scores_start(self) -> bool:
        """Return whether a new run evaluates its initial weights. With a budget it always does, to time evaluations."""
        is_useful = self.starts_from_its_classes or self.config.TRAIN.BUDGET is not None
        return is_useful and self.holds_out and not self.inputs.checkpoint

    @property
    def num_updates(self) -> int:
        return self.config.TRAIN.NUM_EPOCHS * self.order.steps_per_epoch


def read_inputs(loaded: LoadedConfig, process: Process, log: Log) -> Inputs:
    """Choose the precision and read the checkpoint. Collective."""
    config, is_evaluated = loaded.config, loaded.config.EVAL
    precision = Precision(config, process.device)
    checkpoint = process.first(lambda: find_checkpoint(config, log))

    def read() -> dict:
        if checkpoint is None or checkpoint.suffix in WITHOUT_STATE:
            return {}
        from engine.checkpoint.find import read_checkpoint

        # One process per machine verifies the checksums.
        return read_checkpoint(checkpoint, lazily=not is_evaluated, verify=process.local_rank == 0)

    saved = process.after_first(read)
    source = source_of(config, checkpoint)[1]
    record, file = _record(source, saved)
    prior = prior_facts_of(loaded)._replace(
        trained=record.get("config", {}), outputs=list(record.get("class_names", ()))
    )
    if is_run(saved):
        prior = prior._replace(began=saved.get("config", {}))
    if "class_names" in record and (is_run(saved) or is_evaluated):
        records = (record.get(key, {}) for key in ("split", "validation", TRAINED_ON))
        prior = prior._replace(saved=SavedData(prior.outputs, *records, file))
    elif is_evaluated and source:
        from models.weights.metadata import classes_of_weights

        with suppress(ConfigError):  # load_weights reports why the file cannot be read
            prior = prior._replace(outputs=classes_of_weights(source))
    return Inputs(loaded, process, precision, checkpoint, saved, record, prior)


def prior_facts_of(loaded: LoadedConfig) -> PriorFacts:
    """Return the facts that the command line and the settings of the weights contain."""
    implied = loaded.weights.texts if loaded.weights else {}
    typed = frozenset(key for key in loaded.origins if is_typed(key, loaded.origins))
    return PriorFacts(implied=implied, origins=loaded.origins, typed=typed)


def plan_training(inputs: Inputs, open_data: OpenData, choose_values: ChooseValues) -> TrainPlan:
    """Read the data and make the plan of a training run. Collective.

    `choose_values` serves AMP and DATA.BATCH_SIZE auto.
    """
    process, opened = inputs.process, open_data(inputs)
    train, val, inputs = opened.train, opened.val, inputs.settled(opened)
    facts = data_facts(train, val)
    refuse_other_data(inputs, facts)
    if AUTO in (inputs.config.AMP, inputs.config.DATA.BATCH_SIZE):
        inputs = choose_values(inputs, len(train), inputs.config.MODEL.NUM_CLASSES or len(val.classes))
    config = inputs.config
    # The global batch is the number of images per update. TRAIN.LINEAR_SCALED_LR scales the learning rate with it. An
    # elastic run always uses the global batch of its largest size. A resumed run keeps its global batch if BATCH_SIZE
    # and ACCUM_ITER are unchanged. So in these runs an update has the same images with any number of processes.
    full_batch = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * max(process.world_size, process.max_world_size)
    global_batch = global_batch_to_keep(config, inputs.saved) or full_batch
    return TrainPlan(
        inputs=inputs,
        train_set=train,
        eval_set=val,
        order=build_order(config, train, process.world_size, global_batch),
        class_weights=class_weights(config, train),
        # In one process, because there may be millions of names.
        validation=process.first(lambda: validation_facts(val)),
        facts=facts,
    )


def source_of(config: Config, checkpoint: Path | None) -> tuple[str, str | None]:
    return ("-resume", str(checkpoint)) if checkpoint else ("MODEL.PRETRAINED", config.MODEL.PRETRAINED)


def _record(source: str | None, saved: dict) -> tuple[dict, Path | None]:
    """Return the metadata that halfstep stored in the weights, or {} if another program wrote them, and their file."""
    if saved or not source:
        return record_of(saved), Path(source) if source else None
    from models.weights.files import find_file, read_record

    path = find_file(source)
    return read_record(path) if path else {}, path


def refuse_other_data(inputs: Inputs, facts: dict) -> None:
    """Raise ConfigError if the processes have read different data or different checkpoints. Collective."""
    if inputs.process.rendezvous is None:
        return
    from engine.provenance import refuse_other_ranks  # local: a single process has nothing to compare

    if inputs.saved:
        facts = facts | {"RESUME": f"step {inputs.saved.get('step')}, saved by {inputs.saved.get('run')}"}
    refuse_other_ranks(inputs.process, facts)
