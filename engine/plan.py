"""The plan of a run: every fact that is settled before anything is built.

A run executes it. -check (engine/check/check.py, which the entries call in place of a run) makes the same plan.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unicodedata import normalize

from torch import nn

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from configs.values import flatten
from datasets import ImageSet, SavedData, build_order, check_policy, class_weights, identity, renumber
from datasets.batch_order import Order
from datasets.fingerprint import data_facts
from engine.checkpoint.resume import (
    TRAINED_ON,
    batch_size_of,
    find_checkpoint,
    global_batch_to_keep,
    is_run,
    read_saved,
    run_folder_of,
)
from engine.parallel import check_strategy
from engine.precision.policy import Precision
from engine.provenance import refuse_other_ranks
from engine.train.optimizers import check_optimizer
from models.weights.state import record_of
from utils.distributed import Process
from utils.errors import ConfigError
from utils.extras import has_extra
from utils.log import Log
from utils.program import StopSignal
from utils.runs import Identity

ImageSets = tuple[ImageSet | None, ImageSet]  # training (None in evaluation) and validation images


@dataclass(frozen=True)
class Beginning:
    """The facts that are settled before the run's folder is opened and data is read."""

    loaded: LoadedConfig
    process: Process
    precision: Precision  # the only one of a run: it holds the loss scale
    checkpoint: Path | None = None  # of -resume: to continue from or to evaluate
    saved: dict = field(default_factory=dict)  # the content of the checkpoint
    record: dict = field(default_factory=dict)  # what the file of the weights says beside them
    kept: SavedData | None = None  # classes and split of the run that is resumed or evaluated

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def folder(self) -> Path | None:
        """The folder of the run to continue; None for a new run."""
        return run_folder_of(self.checkpoint)

    @property
    def source(self) -> tuple[str, str | None]:
        """The setting that names the weights, and their file or name."""
        return source_of(self.config, self.checkpoint)


@dataclass(frozen=True)
class Plan(Beginning):
    """Every settled fact of a run: `config` is what it uses and writes to config.yaml."""

    train_set: ImageSet | None = None  # None in evaluation
    eval_set: ImageSet | None = None
    order: Order | None = None  # which training images each update sees; None in evaluation
    class_weights: list[float] | None = None  # of the training loss; None: no class counts more than another
    validation: dict = field(default_factory=dict)  # what tells these validation images from others
    facts: dict = field(default_factory=dict)  # of the data: see datasets.fingerprint
    classes_of_weights: list[str] = field(default_factory=list)  # of another program's weights that are evaluated

    @property
    def classes(self) -> list[str]:
        return self.eval_set.classes

    @property
    def num_classes(self) -> int:
        return self.config.MODEL.NUM_CLASSES or len(self.classes)

    @property
    def starts_from_its_classes(self) -> bool:
        """Whether the file of weights knows all classes, so that an evaluation before the first update tells something."""
        both = self.classes, self.record.get("class_names", ())
        here, there = ({normalize("NFC", name) for name in each} for each in both)
        return here <= there

    @property
    def scores_start(self) -> bool:
        """Whether a new run evaluates its first weights: with a budget also random ones, to see how long that takes."""
        return not self.checkpoint and (self.starts_from_its_classes or self.config.TRAIN.BUDGET is not None)

    @property
    def num_updates(self) -> int:
        return self.config.TRAIN.NUM_EPOCHS * self.order.steps_per_epoch

    def load_weights(self, model: nn.Module) -> list[str]:
        """Load what the model starts from; nothing if a whole run is resumed or evaluated. Returns lines for the log."""
        setting, source = self.source
        if is_run(self.saved) or not source:
            return []
        from models.weights.load import load_pretrained

        return load_pretrained(model, source, setting, self.config.START.EVAL, self.classes, flatten(self.config))


def refusals(config: Config) -> dict[str, Callable[[], object]]:
    """Return the checks of settings that need neither data nor a checkpoint, by the titles of their rows in -check."""
    if config.START.EVAL:
        return {}
    checks = {
        "augmentation": lambda: check_policy(config.TRAIN),
        "strategy": lambda: check_strategy(config),
        "optimizer": lambda: check_optimizer(config),
    }
    if config.TRACK and has_extra("trackers"):
        from extras.trackers import check_trackers

        checks["tracking"] = lambda: check_trackers(config)
    return checks


def begin(loaded: LoadedConfig, process: Process, log: Log) -> Beginning:
    """Choose the precision, and read the checkpoint. Collective."""
    config = loaded.config
    precision = Precision(config, process.device)
    checkpoint = process.first(lambda: _find(config, log))
    # One process of each machine compares the checksums.
    read = partial(read_saved, checkpoint, lazily=not config.START.EVAL, compares=process.local_rank == 0)
    saved = process.after_first(read)
    record = _record(source_of(config, checkpoint)[1], saved)
    kept = None
    if "class_names" in record and (is_run(saved) or config.START.EVAL):
        about = (record.get(key, {}) for key in ("split", "validation", TRAINED_ON))
        kept = SavedData(list(record["class_names"]), *about)
    return Beginning(loaded, process, precision, checkpoint, saved, record, kept)


def make_plan(
    begun: Beginning,
    load_data: Callable[[Config, SavedData | None], ImageSets],
    stop: StopSignal | None = None,
) -> Plan:
    """Settle what depends on the data. Collective. `stop`: a signal also ends the search of a batch size."""
    facts, process, loaded = vars(begun), begun.process, begun.loaded
    names = _classes_of_weights(begun)
    train, val = _load(begun, load_data, names)
    of_data = data_facts(train, val)
    where = {"RESUME": _describe_save(begun.saved)} if begun.saved else {}
    refuse_other_ranks(process, of_data | where)
    if loaded.config.START.EVAL:
        return Plan(**facts, eval_set=val, classes_of_weights=names, facts=of_data)
    if loaded.config.DATA.BATCH_SIZE == AUTO:
        num_classes = loaded.config.MODEL.NUM_CLASSES or len(val.classes)
        loaded = _with_batch_size(begun, len(train), num_classes, stop)
    config = loaded.config
    # An elastic run may begin with fewer nodes than may come. Its updates have the size for all of them from the start, so
    # that the number of nodes does not change what is trained.
    in_step = config.DATA.BATCH_SIZE * config.TRAIN.ACCUM_ITER * max(process.world_size, process.most)
    global_batch = global_batch_to_keep(config, begun.saved) or in_step
    return Plan(
        **facts | {"loaded": loaded},
        train_set=train,
        eval_set=val,
        facts=of_data,
        order=build_order(config, train, process.world_size, global_batch),
        class_weights=class_weights(config, train),
        validation=process.first(lambda: identity(val)),  # one process alone goes through millions of names
    )


def plan_of(config: Config, process: Process, train_set: ImageSet) -> Plan:
    """The plan of settings alone, without checkpoint and validation images: for the trials of a batch size, and benchmarks."""
    loaded = LoadedConfig(config, {}, [], [])
    precision, weights = Precision(config, process.device), class_weights(config, train_set)
    return Plan(loaded, process, precision, train_set=train_set, class_weights=weights)


def source_of(config: Config, checkpoint: Path | None) -> tuple[str, str | None]:
    return ("-resume", str(checkpoint)) if checkpoint else ("MODEL.PRETRAINED", config.MODEL.PRETRAINED)


def _find(config: Config, log: Log) -> Path | None:
    found = find_checkpoint(config, log)
    if config.START.EVAL and not (found or config.MODEL.PRETRAINED):
        raise ConfigError("-eval: no weights to evaluate; name a file with -pretrained or -resume")
    return found


def _record(source: str | None, saved: dict) -> dict:
    """What the weights say of their run; {} for files of other programs."""
    if saved or not source:
        return record_of(saved)
    from models.weights.files import find_file, read_record

    path = find_file(source)
    return read_record(path) if path else {}


def _classes_of_weights(begun: Beginning) -> list[str]:
    """Class names of another program's weights that are evaluated, where these say them."""
    _, source = begun.source
    if begun.kept or not (begun.config.START.EVAL and source):
        return []
    from models.weights.metadata import classes_of_weights

    try:
        return classes_of_weights(source)
    except ConfigError:  # load_weights says why they cannot be read
        return []


def _load(begun: Beginning, load_data: Callable[[Config, SavedData | None], ImageSets], names: list[str]) -> ImageSets:
    train, val = load_data(begun.config, begun.kept)
    if val.classes != names and set(val.classes) <= set(names):
        renumber([val], names)
    return train, val


def _describe_save(saved: dict) -> str:
    """Return what tells a checkpoint from the others of this run and of other runs."""
    run = Identity.of(saved)
    of_run = f" of {run.name}, saved {saved['run'].get('saved')}" if run else ""
    return f"step {saved.get('step')}{of_run}"


def _with_batch_size(begun: Beginning, num_images: int, num_classes: int, stop: StopSignal | None) -> LoadedConfig:
    number, how = batch_size_of(begun.saved), "as this run began"
    if number is None:
        from extras.memory.batch_size import find_batch_size  # extra: memory

        number, how = find_batch_size(begun, num_images, num_classes, stop)
    return begun.loaded.with_batch_size(number, how)
