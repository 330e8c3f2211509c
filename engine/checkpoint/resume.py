"""Finds the checkpoint that a run continues from, and refuses settings that do not match it."""

from pathlib import Path

from configs.schema import Config
from configs.values import flatten
from datasets.batch_order import Order
from engine.checkpoint.format import changes, find_newest, read_checkpoint
from models.weights import find_file
from utils.errors import ConfigError
from utils.log import Log

WEIGHTS_ONLY = (".pdparams", ".safetensors", ".npz")


def find_checkpoint(config: Config, log: Log) -> Path | None:
    """The file to continue from, if any."""
    if config.MODEL.RESUME is None:
        return None
    if config.MODEL.RESUME != "auto":
        path = find_file(config.MODEL.RESUME)
        if path is None:
            raise ConfigError(
                f"-resume: no file at {config.MODEL.RESUME}; -resume auto looks for the newest run itself"
            )
        return path
    found = find_newest(config.SAVE, config.TAG, log.warn)
    if found is None:
        log.say(f"-resume auto: no run to continue in {config.SAVE}, so this is a new one")
    return found


def run_folder_of(checkpoint: Path | None) -> Path | None:
    """The folder of the checkpoint's run; None for a checkpoint outside of a run folder, which starts a new run."""
    return checkpoint.parent if checkpoint and (checkpoint.parent / "config.yaml").exists() else None


def read_saved(path: Path | None, lazily: bool = False) -> dict:
    """The checkpoint's state; empty without a checkpoint, or for a file of weights. `lazily` as in read_torch."""
    return {} if path is None or path.suffix in WEIGHTS_ONLY else read_checkpoint(path, lazily)


def is_run(saved: dict) -> bool:
    """Whether this is a complete state saved here; files of other systems have weights and at most an epoch."""
    return "progress" in saved


def batch_size_of(saved: dict) -> int | None:
    """DATA.BATCH_SIZE of the checkpoint's run, if known."""
    return saved["config"].get("DATA.BATCH_SIZE") if is_run(saved) else None


def global_batch_to_keep(config: Config, saved: dict) -> int | None:
    """Images per update of the checkpoint's run, if only the number of processes may have changed.

    A different batch size or accumulation is deliberate; refuse_changes compares it with the checkpoint's.
    """
    then = saved.get("config", {}) if is_run(saved) else {}
    as_then = (then.get("DATA.BATCH_SIZE"), then.get("TRAIN.ACCUM_ITER"))
    return then["GLOBAL_BATCH"] if as_then == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) else None


def comparable(config: Config, order: Order) -> dict:
    """The settings as a checkpoint stores them, with the global batch and the number of images."""
    return flatten(config) | {"GLOBAL_BATCH": order.global_batch, "NUM_IMAGES": order.num_images}


def refuse_changes(config: Config, order: Order, state: dict, path: Path) -> None:
    """Refuse to resume with settings that would change the course of the run."""
    different = changes(state["config"], comparable(config, order))
    if different and not config.RESUME.ALLOW_CHANGED:
        raise ConfigError(
            f"-resume: these settings are not those that {path} was made with:\n  "
            + "\n  ".join(different)
            + "\nput them back, or continue all the same with -opts RESUME.ALLOW_CHANGED=true"
        )
    if config.TRAIN.LAST_EPOCH not in (0, state["epoch"] + 1):
        raise ConfigError(
            f"-last_epoch is {config.TRAIN.LAST_EPOCH}, but {path} says that {state['epoch'] + 1} epochs are finished; "
            "leave -last_epoch out"
        )
