"""Finds the checkpoint that a run continues from, and refuses settings that do not match it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from configs.combinations import CHANGEABLE
from configs.schema import Config
from configs.values import IMPLIED, flatten
from datasets import ImageSet
from datasets.batch_order import Order
from datasets.fingerprint import CLASSES, describe_changed_images
from datasets.transforms.augment import REVISION
from engine.checkpoint.format import changes, find_newest, newest_in, read_checkpoint, read_lazily
from utils.errors import ConfigError
from utils.facts import NUMBERS, changed_facts
from utils.log import Log
from utils.runs import weights_in
from utils.text import counted, first_of

TRAINED_ON = "trained_on"  # the key of a checkpoint's data_facts
WITHOUT_STATE = (".pdparams", ".safetensors", ".npz")  # files that hold nothing but weights


def find_checkpoint(config: Config, log: Log) -> Path | None:
    """The file to continue from, if any."""
    if config.START.RESUME is None:
        return None
    found = checkpoint_at(config.START.RESUME, config.SAVE, config.START.NAME, config.START.EVAL, log.warn)
    if found is None and config.START.RESUME != "auto":
        raise no_checkpoint_at(config.START.RESUME)
    if found is None:
        where = Path(config.SAVE, config.START.NAME) if config.START.NAME else config.SAVE
        log.say(f"-resume auto: no run to continue in {where}, so this is a new one")
    return found


def no_checkpoint_at(resume: str) -> ConfigError:
    return ConfigError(f"-resume: no checkpoint at {resume}; -resume auto looks for the newest run itself")


def checkpoint_at(
    resume: str,
    save: str,
    name: str,
    is_evaluated: bool,
    warn: Callable[[str], None],
    read: Callable[[Path], dict] = read_lazily,
) -> Path | None:
    """The file that -resume means: auto, the folder of a run, or a file. `read` as in newest_in.

    A run goes on from its newest checkpoint; what is evaluated are its best weights.
    """
    if resume != "auto" and (is_evaluated or not Path(resume).is_dir()):
        from models.weights.files import find_file

        return find_file(resume)
    run = Path(resume) if resume != "auto" else Path(save, name) if name else None
    found = newest_in(run, warn, read) if run else find_newest(save, warn, read)
    return weights_in(found.parent) if found and is_evaluated else found


def run_folder_of(checkpoint: Path | None) -> Path | None:
    """The folder of the checkpoint's run; None for a checkpoint outside of a run folder, which starts a new run."""
    return checkpoint.parent if checkpoint and (checkpoint.parent / "config.yaml").exists() else None


def read_saved(path: Path | None, lazily: bool, compares: bool) -> dict:
    """The checkpoint's state; empty without a checkpoint, or for a file of weights. The others as in read_torch."""
    return {} if path is None or path.suffix in WITHOUT_STATE else read_checkpoint(path, lazily, compares)


def drop_tensors(saved: dict) -> None:
    """Free the memory of a state that is loaded. What it says of the run stays."""
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        saved.pop(key, None)
    saved["progress"] = {name: each for name, each in saved["progress"].items() if not isinstance(each, Tensor)}


def is_run(saved: dict) -> bool:
    """Whether this is a complete state saved here; files of other systems have weights and at most an epoch."""
    return "progress" in saved


def batch_size_of(saved: dict) -> int | None:
    """DATA.BATCH_SIZE of the checkpoint's run, if known."""
    return saved.get("config", {}).get("DATA.BATCH_SIZE") if is_run(saved) else None


def bad_images_of(saved: dict, num_images: int, facts: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
    """The unreadable training images that the run has found; none if it goes on with other images. `facts`: of its data."""
    is_same = saved.get("config", {}).get("NUM_IMAGES") == num_images
    known = saved.get("bad_images", []) if is_same and not changed_facts(saved.get(TRAINED_ON, {}), facts) else []
    return [each for each in known if each in range(num_images)]


def global_batch_to_keep(config: Config, saved: dict) -> int | None:
    """Images per update of the checkpoint's run, if only the number of processes may have changed.

    A different batch size or accumulation is deliberate; refuse_changes compares it with the checkpoint's.
    """
    then = saved.get("config", {}) if is_run(saved) else {}
    as_then = (then.get("DATA.BATCH_SIZE"), then.get("TRAIN.ACCUM_ITER"))
    return then.get("GLOBAL_BATCH") if as_then == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) else None


def comparable(config: Config, order: Order) -> dict:
    """The settings as a checkpoint stores them, with the global batch, the number of images and AUGMENTATION."""
    also = {"GLOBAL_BATCH": order.global_batch, "NUM_IMAGES": order.num_images, "AUGMENTATION": REVISION}
    return flatten(config) | also


def changed_images(state: dict, path: Path, facts: Mapping[str, Any], train: ImageSet, val: ImageSet) -> dict[str, str]:
    """Return {NUM_IMAGES or IMAGES: in words} if images or labels are not those that the checkpoint was trained on.

    `facts`: of the data now. NUM_IMAGES: images were added, or of a part nothing more than its other number is known.
    """
    found = changed_facts(state.get(TRAINED_ON, {}), facts)
    if not found or CLASSES in found:  # a class that was renamed by leave: its images have other paths
        return {}
    words, is_only_added = describe_changed_images(path.with_name("split.csv"), train, val)
    if words:
        return {"NUM_IMAGES" if is_only_added else "IMAGES": ", ".join(words)}
    told: dict[str, list[str]] = {}
    for what, values in found.items():
        told.setdefault("NUM_IMAGES" if what in NUMBERS else "IMAGES", []).append(f"{what}: {values}")
    return {key: ", ".join(each) for key, each in told.items()}


def refuse_changes(
    config: Config,
    order: Order,
    split: dict,
    state: dict,
    path: Path,
    images: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Refuse to resume with settings that would change the course of the run. Returns what to say of allowed changes.

    `images`: of `changed_images`.
    """
    if unknown := [key for key in state["config"] if key not in CHANGEABLE]:
        raise ConfigError(
            f"-resume: {path} has settings that this version of halfstep does not know: {first_of(unknown)}; continue with the "
            "version that began the run, or start a new run from its weights with -pretrained"
        )
    then, now = ({"SPLIT": each["rule"]} if each else {} for each in (state.get("split"), split))
    saved = IMPLIED | state["config"] | then
    different = changes(saved, comparable(config, order) | now) | images
    revisions = different.pop("AUGMENTATION", None)
    if revisions and config.TRAIN.augments:
        different["AUGMENTATION"] = f"revision {revisions}: the same settings change images differently from here on"
    refused = {key: values for key, values in different.items() if not config.START.allows(key)}
    if refused:
        names = [*(name for name in config.START.ALLOW_CHANGED if name == "CLASS_NAMES"), *different]
        raise ConfigError(
            f"-resume: these settings are not those that {path} was made with:\n  "
            + "\n  ".join(f"{key}: {values}" for key, values in refused.items())
            + "\nput them back, start a new run from its weights with -pretrained, or continue all the same with "
            + f"-opts RESUME.ALLOW_CHANGED=[{','.join(names)}]"
        )
    key, adams = "TRAIN.OPTIMIZER.NAME", ("AdamW", "Adam")  # which keep the same of each weight
    if key in different and not (saved[key] in adams and config.TRAIN.OPTIMIZER.NAME in adams):
        raise ConfigError(
            f"-resume: {key} is {config.TRAIN.OPTIMIZER.NAME}, which cannot go on with what {saved[key]} has kept of each "
            "weight; put it back, or start a new run from the weights with -pretrained"
        )
    if config.START.LAST_EPOCH not in (0, state["epoch"] + 1):
        raise ConfigError(
            f"-last_epoch is {config.START.LAST_EPOCH}, but {path} is from after epoch {state['epoch'] + 1}; "
            "leave -last_epoch out"
        )
    if state.get("progress", {}).get("choices") and not order.has_updates_of(state["config"]):
        raise ConfigError(
            f"-resume: {path} has gone a part of the way that TRAIN.BUDGET chose, in updates of other images; put these back, "
            "or start a new run from its weights with -pretrained"
        )
    lines = [f"resume: RESUME.ALLOW_CHANGED allows {key}: {values}" for key, values in different.items()]
    if not order.has_updates_of(state["config"]):
        step = (state["epoch"] + 1) * order.steps_per_epoch
        lines.append(
            f"resume: its updates have other images, so epoch {state['epoch'] + 2} begins anew, at step {step}"
        )
    then, now = state["config"].get("TRAIN.NUM_EPOCHS"), config.TRAIN.NUM_EPOCHS
    if then not in (None, now) and now > state["epoch"] + 1:
        lines.append(f"resume: {counted(now, 'epoch')} instead of {then}: the learning rate follows the new schedule")
    return lines
