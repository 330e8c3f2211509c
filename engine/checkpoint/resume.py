"""The state in a checkpoint, and the facts that a run's plan takes from it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from configs.schema import Config
from configs.values import flatten
from datasets.order import Order
from datasets.transforms import REVISION
from utils.errors import ConfigError
from utils.log import Log

TRAINED_ON = "trained_on"  # the key in a checkpoint for facts about the training data
OVERLAP = "overlap"  # the key in a checkpoint for the comparison of validation and training images
WITHOUT_STATE = (".pdparams", ".safetensors", ".npz")  # files that contain only weights


def find_checkpoint(config: Config, log: Log) -> Path | None:
    """Return the file to continue from or to evaluate, or None for a new run."""
    checkpoint, resume = None, config.MODEL.RESUME
    if resume is not None:
        from engine.checkpoint.find import checkpoint_at, no_checkpoint_at

        checkpoint = checkpoint_at(resume, config.SAVE, config.NAME, config.EVAL, log.warn)
        if checkpoint is None and resume != "auto":
            raise no_checkpoint_at(resume)
        if checkpoint is None:
            log.say(f"-resume auto: no run to continue in {Path(config.SAVE, config.NAME)}, so this is a new run")
    if config.EVAL and not (checkpoint or config.MODEL.PRETRAINED):
        raise ConfigError("-eval: no weights to evaluate; name a file with -pretrained or -resume")
    return checkpoint


def drop_tensors(saved: dict) -> None:
    """Free the tensors of a state that has been loaded, and keep its facts about the run."""
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        saved.pop(key, None)
    saved["progress"] = {name: each for name, each in saved["progress"].items() if not isinstance(each, Tensor)}


def is_run(saved: dict) -> bool:
    """Return whether this is the complete state of a run. Other programs store weights and at most an epoch number."""
    return "progress" in saved


def bad_images_of(saved: dict, num_images: int, facts: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
    """Return the indices of the unreadable training images that the run has found, or [] if its images have changed.

    `facts` are the facts of the current data.
    """
    if saved.get("config", {}).get("NUM_IMAGES") != num_images or has_other_images(saved, facts):
        return []
    return [index for index in saved.get("bad_images", []) if index in range(num_images)]


def overlap_of(saved: dict, facts: Mapping[str, Any]) -> dict:
    """Return what the run knows about validation images that are also training images: {} if the images have changed.

    `facts` are the facts of the current data. datasets/overlap.py describes the state.
    """
    return {} if not saved or has_other_images(saved, facts) else saved.get(OVERLAP, {})


def has_other_images(saved: dict, facts: Mapping[str, Any]) -> bool:
    from utils.changed_facts import changed_facts

    return bool(changed_facts(saved.get(TRAINED_ON, {}), facts))


def global_batch_to_keep(config: Config, saved: dict) -> int | None:
    """Return the images per update of the checkpoint's run if batch size and accumulation are unchanged, else None.

    A different batch size or accumulation is deliberate. refuse_changes then compares the resulting GLOBAL_BATCH.
    """
    then = saved.get("config", {}) if is_run(saved) else {}
    as_then = (then.get("DATA.BATCH_SIZE"), then.get("TRAIN.ACCUM_ITER"))
    return then.get("GLOBAL_BATCH") if as_then == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) else None


def comparable(config: Config, order: Order) -> dict:
    """Return the settings as a checkpoint stores them, with GLOBAL_BATCH, NUM_IMAGES and AUGMENTATION."""
    also = {"GLOBAL_BATCH": order.global_batch, "NUM_IMAGES": order.num_images, "AUGMENTATION": REVISION}
    return flatten(config) | also
