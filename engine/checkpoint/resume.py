"""The search for the checkpoint that a run continues from, and the refusal of settings that do not match it."""

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

TRAINED_ON = "trained_on"  # the key of the data facts in a checkpoint
WITHOUT_STATE = (".pdparams", ".safetensors", ".npz")  # files that contain only weights


def find_checkpoint(config: Config, log: Log) -> Path | None:
    """Return the file to continue from, or None for a new run."""
    if config.START.RESUME is None:
        return None
    found = checkpoint_at(config.START.RESUME, config.SAVE, config.START.NAME, config.START.EVAL, log.warn)
    if found is None and config.START.RESUME != "auto":
        raise no_checkpoint_at(config.START.RESUME)
    if found is None:
        where = Path(config.SAVE, config.START.NAME) if config.START.NAME else config.SAVE
        log.say(f"-resume auto: no run to continue in {where}, so this is a new run")
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
    """Return the file that -resume names: by `auto`, the folder of a run, or a file. `read` as in newest_in.

    A run continues from its newest checkpoint. An evaluation uses its best weights.
    """
    if resume != "auto" and (is_evaluated or not Path(resume).is_dir()):
        from models.weights.files import find_file

        return find_file(resume)
    run = Path(resume) if resume != "auto" else Path(save, name) if name else None
    found = newest_in(run, warn, read) if run else find_newest(save, warn, read)
    return weights_in(found.parent) if found and is_evaluated else found


def run_folder_of(checkpoint: Path | None) -> Path | None:
    """Return the folder of the checkpoint's run, or None for a checkpoint outside of a run folder, which starts a new run."""
    return checkpoint.parent if checkpoint and (checkpoint.parent / "config.yaml").exists() else None


def read_saved(path: Path | None, lazily: bool, compares: bool) -> dict:
    """Return the state in a checkpoint, or {} without a checkpoint or for a file that contains only weights.

    `lazily` and `compares` are passed to read_torch.
    """
    return {} if path is None or path.suffix in WITHOUT_STATE else read_checkpoint(path, lazily, compares)


def drop_tensors(saved: dict) -> None:
    """Free the tensors of a state that has been loaded, and keep its facts about the run."""
    for key in ("state_dict", "state_dict_ema", "optimizer"):
        saved.pop(key, None)
    saved["progress"] = {name: each for name, each in saved["progress"].items() if not isinstance(each, Tensor)}


def is_run(saved: dict) -> bool:
    """Return whether this is a complete state saved by halfstep. Files of other programs have weights and at most an epoch."""
    return "progress" in saved


def batch_size_of(saved: dict) -> int | None:
    """Return DATA.BATCH_SIZE of the checkpoint's run, if known."""
    return saved.get("config", {}).get("DATA.BATCH_SIZE") if is_run(saved) else None


def bad_images_of(saved: dict, num_images: int, facts: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
    """Return the unreadable training images that the run has found, or [] if it continues with other images.

    `facts` are the facts of the current data.
    """
    is_same = saved.get("config", {}).get("NUM_IMAGES") == num_images
    known = saved.get("bad_images", []) if is_same and not changed_facts(saved.get(TRAINED_ON, {}), facts) else []
    return [each for each in known if each in range(num_images)]


def global_batch_to_keep(config: Config, saved: dict) -> int | None:
    """Return the images per update of the checkpoint's run if batch size and accumulation are unchanged, else None.

    A different batch size or accumulation is deliberate, and refuse_changes compares it with the checkpoint's.
    """
    then = saved.get("config", {}) if is_run(saved) else {}
    as_then = (then.get("DATA.BATCH_SIZE"), then.get("TRAIN.ACCUM_ITER"))
    return then.get("GLOBAL_BATCH") if as_then == (config.DATA.BATCH_SIZE, config.TRAIN.ACCUM_ITER) else None


def comparable(config: Config, order: Order) -> dict:
    """Return the settings as a checkpoint stores them, with GLOBAL_BATCH, NUM_IMAGES and AUGMENTATION."""
    also = {"GLOBAL_BATCH": order.global_batch, "NUM_IMAGES": order.num_images, "AUGMENTATION": REVISION}
    return flatten(config) | also


def changed_images(state: dict, path: Path, facts: Mapping[str, Any], train: ImageSet, val: ImageSet) -> dict[str, str]:
    """Return {NUM_IMAGES or IMAGES: description} if images or labels differ from the checkpoint's training data.

    `facts` are the facts of the current data. The key is NUM_IMAGES if images were only added, or if only the number of
    images is known to differ.
    """
    found = changed_facts(state.get(TRAINED_ON, {}), facts)
    if not found or CLASSES in found:  # the user allowed renamed classes, whose images have new paths
        return {}
    words, is_only_added = describe_changed_images(path.with_name("split.csv"), train, val)
    if words:
        return {"NUM_IMAGES" if is_only_added else "IMAGES": ", ".join(words)}
    lines: dict[str, list[str]] = {}
    for what, values in found.items():
        lines.setdefault("NUM_IMAGES" if what in NUMBERS else "IMAGES", []).append(f"{what}: {values}")
    return {key: ", ".join(each) for key, each in lines.items()}


def refuse_changes(
    config: Config,
    order: Order,
    split: dict,
    state: dict,
    path: Path,
    images: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Refuse to resume with settings that would change the result of the run. Return log lines about allowed changes.

    `images` is the result of `changed_images`.
    """
    if unknown := [key for key in state["config"] if key not in CHANGEABLE]:
        raise ConfigError(
            f"-resume: {path} has settings that this version of halfstep does not know: {first_of(unknown)}; continue with the "
            "version that started the run, or start a new run from its weights with -pretrained"
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
            f"-resume: these settings differ from the run of {path}:\n  "
            + "\n  ".join(f"{key}: {values}" for key, values in refused.items())
            + "\nrestore them, start a new run from its weights with -pretrained, or continue anyway with "
            + f"-opts RESUME.ALLOW_CHANGED=[{','.join(names)}]"
        )
    key, adams = "TRAIN.OPTIMIZER.NAME", ("AdamW", "Adam")  # these have the same state for each weight
    if key in different and not (saved[key] in adams and config.TRAIN.OPTIMIZER.NAME in adams):
        raise ConfigError(
            f"-resume: {key} is {config.TRAIN.OPTIMIZER.NAME}, which cannot use the optimizer state of {saved[key]}; "
            "restore the setting, or start a new run from the weights with -pretrained"
        )
    if config.START.LAST_EPOCH not in (0, state["epoch"] + 1):
        raise ConfigError(
            f"-last_epoch is {config.START.LAST_EPOCH}, but {path} is from after epoch {state['epoch'] + 1}; "
            "leave -last_epoch out"
        )
    if state.get("progress", {}).get("choices") and not order.has_updates_of(state["config"]):
        raise ConfigError(
            f"-resume: {path} is part of the way through the schedule that TRAIN.BUDGET chose, and its updates had other "
            "images; restore the images and the batch size, or start a new run from its weights with -pretrained"
        )
    lines = [f"resume: RESUME.ALLOW_CHANGED allows {key}: {values}" for key, values in different.items()]
    if not order.has_updates_of(state["config"]):
        step = (state["epoch"] + 1) * order.steps_per_epoch
        lines.append(
            f"resume: the updates now have other images, so epoch {state['epoch'] + 2} starts from its beginning, at step {step}"
        )
    then, now = state["config"].get("TRAIN.NUM_EPOCHS"), config.TRAIN.NUM_EPOCHS
    if then not in (None, now) and now > state["epoch"] + 1:
        lines.append(f"resume: {counted(now, 'epoch')} instead of {then}: the learning rate follows the new schedule")
    return lines
