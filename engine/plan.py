"""The plan of a run, made before anything is built: a run executes it, -check prints it."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from torch import nn

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from configs.values import IMPLIED, flatten
from datasets import ImageSet, Kept, build_order, check_device, class_weights, identity, parse_policy, renumber
from datasets.batch_order import Order
from engine.checkpoint.format import WEIGHTS_ONLY
from engine.checkpoint.resume import (
    batch_size_of,
    find_checkpoint,
    global_batch_to_keep,
    is_run,
    read_saved,
    run_folder_of,
)
from engine.parallel.strategy import check_strategy
from engine.precision.policy import Precision
from engine.record.trackers import check_trackers
from engine.train.optim.names import check_optimizer
from models.weights.files import find_file, read_record
from models.weights.load import load_pretrained
from models.weights.metadata import classes_of_weights
from models.weights.state import record_of
from utils.distributed import Process
from utils.errors import ConfigError
from utils.log import Log

ImageSets = tuple[ImageSet | None, ImageSet]
AS_BEGUN = "as this run began"  # origin of a setting


class Plan:
    """From the given settings to those of the run, in this order:

    `given`, `checkpoint`, `saved` and `record` (what it says), `kept` (its classes and split), `as_begun` (settings that
    it predates), `image_sets`, `loaded` (a number for DATA.BATCH_SIZE auto), `config`, `order`.

    Each property is computed when it is first read, so that -check can report one that fails and read the others.
    Some are collective: process 0 computes them while the others wait. So all processes read them in the same order.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        process: Process,
        log: Log,
        load_data: Callable[[Config, Kept | None], ImageSets],
        find_batch_size: Callable[[Config, int, int], tuple[int, str]] | None,
    ):
        """`find_batch_size`: for DATA.BATCH_SIZE auto; (images, classes) -> (size, how it was found)."""
        self.given, self.process, self._log = loaded.config, process, log
        self._as_given, self._load_data, self._find_batch_size = loaded, load_data, find_batch_size

    def check_settings(self) -> None:
        """Refuse settings that this device or strategy does not support, and -eval without weights; needs no data."""
        _ = self.precision
        if self.given.START.EVAL:
            _ = self.checkpoint
        else:
            parse_policy(self.given.TRAIN)
            check_device(self.given.DATA, self.process.device)
            check_strategy(self.given)
            check_optimizer(self.given)
            check_trackers(self.given)

    @cached_property
    def precision(self) -> Precision:
        return Precision(self.given, self.process.device)

    @cached_property
    def checkpoint(self) -> Path | None:
        """The file of -resume, to continue from or to evaluate."""
        found = self.process.first(lambda: find_checkpoint(self.given, self._log))
        if self.given.START.EVAL and not (found or self.given.MODEL.PRETRAINED):
            raise ConfigError("-eval: no weights to evaluate; name a file with -pretrained or -resume")
        return found

    @property
    def folder(self) -> Path | None:
        """The folder of the run to continue; None for a new run."""
        return run_folder_of(self.checkpoint)

    @cached_property
    def saved(self) -> dict:
        """The checkpoint's content."""
        saved = read_saved(self.checkpoint, lazily=not self.given.START.EVAL)
        if saved.get(WEIGHTS_ONLY) and not self.given.START.EVAL:
            raise ConfigError(
                f"-resume: {self.checkpoint} holds weights only (SAVE_WEIGHTS_ONLY); resume from the last.pth of its run, "
                "or start a new run from them with -pretrained"
            )
        return saved

    @property
    def source(self) -> tuple[str, str | None]:
        """The setting that names the weights, and their file or name."""
        return (
            ("-resume", str(self.checkpoint)) if self.checkpoint else ("MODEL.PRETRAINED", self.given.MODEL.PRETRAINED)
        )

    @cached_property
    def record(self) -> dict:
        """What the file of the weights says beside them; {} for files of other programs."""
        _, source = self.source
        path = find_file(source) if source and not self.saved else None
        return read_record(path) if path else record_of(self.saved)

    @cached_property
    def kept(self) -> Kept | None:
        """Classes and split of the run that is resumed or evaluated."""
        record = self.record if is_run(self.saved) or self.given.START.EVAL else {}
        if "class_names" not in record:
            return None
        return Kept(list(record["class_names"]), record.get("split", {}), record.get("validation", {}))

    @cached_property
    def as_begun(self) -> LoadedConfig:
        """The given settings; for a run of an older version, those that it began without are as it behaved then."""
        loaded, began = self._as_given, self.record.get("config") if self.kept else None
        for key, value in IMPLIED.items() if began else ():
            # A run that was resumed by a newer version has them in its checkpoint.
            if began.get(key, value) == value and loaded.origins[key] == "default":
                loaded = loaded.with_value(key, value, AS_BEGUN)
        return loaded

    @cached_property
    def image_sets(self) -> ImageSets:
        """Training (None in evaluation) and validation images."""
        train, val = self._load_data(self.as_begun.config, self.kept)
        if val.classes != self.classes_of_weights and set(val.classes) <= set(self.classes_of_weights):
            renumber([val], self.classes_of_weights)
        return train, val

    @cached_property
    def classes_of_weights(self) -> list[str]:
        """Those that weights of another program are evaluated on, where they say their names."""
        _, source = self.source
        try:
            return classes_of_weights(source) if self.given.START.EVAL and source and not self.kept else []
        except ConfigError:  # load_weights says why they cannot be read
            return []

    @property
    def train_set(self) -> ImageSet | None:
        return self.image_sets[0]

    @property
    def eval_set(self) -> ImageSet:
        return self.image_sets[1]

    @cached_property
    def validation(self) -> dict:
        """What tells these validation images from others. Collective: one process alone goes through millions of names."""
        return self.process.first(lambda: identity(self.eval_set))

    @property
    def classes(self) -> list[str]:
        return self.eval_set.classes

    @property
    def num_classes(self) -> int:
        return self.given.MODEL.NUM_CLASSES or len(self.classes)

    @cached_property
    def loaded(self) -> LoadedConfig:
        """The settings that the run uses and writes to config.yaml, with a number in place of DATA.BATCH_SIZE auto."""
        if self.given.DATA.BATCH_SIZE != AUTO:
            return self.as_begun
        number, how = batch_size_of(self.saved), AS_BEGUN
        if number is None:
            number, how = self._find_batch_size(self.given, len(self.train_set), self.num_classes)
        return self.as_begun.with_batch_size(number, how)

    @property
    def started(self) -> float:
        """time.monotonic() at the start of the program."""
        return self._as_given.started

    @property
    def config(self) -> Config:
        return self.loaded.config

    @cached_property
    def order(self) -> Order:
        """Which training images each update sees."""
        global_batch = global_batch_to_keep(self.config, self.saved)
        return build_order(self.config, self.train_set, self.process.world_size, global_batch)

    @cached_property
    def class_weights(self) -> list[float] | None:
        """Of the training loss; None: no class counts more than another."""
        return class_weights(self.config, self.train_set)

    @property
    def num_updates(self) -> int:
        return self.config.TRAIN.NUM_EPOCHS * self.order.steps_per_epoch

    def load_weights(self, model: nn.Module) -> list[str]:
        """Load what the model starts from; nothing if a whole run is resumed or evaluated. Returns lines for the log."""
        setting, source = self.source
        if is_run(self.saved) or not source:
            return []
        return load_pretrained(model, source, setting, self.given.START.EVAL, self.classes, flatten(self.given))
