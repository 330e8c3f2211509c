"""Refuses to resume a run with settings or images that would change its result."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from configs.checks import CHANGEABLE
from configs.schema import Config
from configs.values import SETTINGS, today
from datasets import ImageSet
from datasets.fingerprint import CLASSES
from datasets.order import Order
from datasets.split.listed import describe_changed_images
from engine.checkpoint.resume import TRAINED_ON, comparable
from utils.changed_facts import changed_facts
from utils.errors import ConfigError
from utils.runs import NUMBERS
from utils.text import counted, first_of


def changes(saved: dict, current: dict) -> dict[str, str]:
    """Return {key: both values} for settings that affect the result and differ between a checkpoint and this run."""
    now, current = today(saved), today(current)
    compared = {key: value for key, value in current.items() if not _may_differ(key, now.get(key), value)}
    return changed_facts(now, compared)


def _may_differ(key: str, saved: Any, current: Any) -> bool:
    setting = SETTINGS.get(key)  # None for GLOBAL_BATCH and other values that are not settings
    return setting is not None and (setting.may_change or saved in setting.alike and current in setting.alike)


def changed_images(state: dict, path: Path, facts: Mapping[str, Any], train: ImageSet, val: ImageSet) -> dict[str, str]:
    """Return {NUM_IMAGES or IMAGES: description} if images or labels differ from the checkpoint's training data.

    `facts` are the facts of the current data. The key is NUM_IMAGES if images were only added, or if only the number of
    images is known to differ.
    """
    changes = changed_facts(state[TRAINED_ON], facts)
    if not changes or CLASSES in changes:  # the user has allowed renamed classes, so images have new paths
        return {}
    image_changes, is_only_added = describe_changed_images(path.with_name("split.csv"), train, val)
    if image_changes:
        return {"NUM_IMAGES" if is_only_added else "IMAGES": ", ".join(image_changes)}
    lines: dict[str, list[str]] = {}
    for what, values in changes.items():
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
            f"-resume: {path} has settings that this version of halfstep does not know: {first_of(unknown)}; continue "
            "with the version that started the run, or start a new run from its weights with -pretrained"
        )
    saved = state["config"] | {"SPLIT": state["split"]["rule"]}
    different = changes(saved, comparable(config, order) | {"SPLIT": split["rule"]}) | images
    revisions = different.pop("AUGMENTATION", None)
    if revisions and config.TRAIN.augments:
        different["AUGMENTATION"] = f"revision {revisions}: from here on, the same settings augment images differently"
    refused = {key: values for key, values in different.items() if not config.RESUME.allows(key)}
    if refused:
        names = [*(name for name in config.RESUME.ALLOW_CHANGED if name == "CLASS_NAMES"), *different]
        raise ConfigError(
            f"-resume: these settings differ from the run of {path}:\n  "
            + "\n  ".join(f"{key}: {values}" for key, values in refused.items())
            + "\nrestore them, start a new run from its weights with -pretrained, or continue anyway with "
            + f"-opts RESUME.ALLOW_CHANGED=[{','.join(names)}]"
        )
    key, adams = "TRAIN.OPTIMIZER.NAME", ("AdamW", "Adam")  # both optimizers have the same state for each weight
    if key in different and not (saved[key] in adams and config.TRAIN.OPTIMIZER.NAME in adams):
        raise ConfigError(
            f"-resume: {key} is {config.TRAIN.OPTIMIZER.NAME}, which cannot use the optimizer state of {saved[key]}; "
            "restore the setting, or start a new run from the weights with -pretrained"
        )
    if config.TRAIN.LAST_EPOCH not in (0, state["epoch"] + 1):
        raise ConfigError(
            f"-last_epoch is {config.TRAIN.LAST_EPOCH}, but {path} was saved after epoch {state['epoch'] + 1}; "
            "leave -last_epoch out"
        )
    if state["progress"].get("choices") and not order.has_updates_of(state["config"]):
        raise ConfigError(
            f"-resume: {path} is partway through the schedule that TRAIN.BUDGET chose, but the updates would now use "
            "different images; restore the images, the batch size and DATA.DROP_LAST, "
            "or start a new run from its weights with -pretrained"
        )
    lines = [f"resume: RESUME.ALLOW_CHANGED allows {key}: {values}" for key, values in different.items()]
    if not order.has_updates_of(state["config"]):
        step = (state["epoch"] + 1) * order.steps_per_epoch
        lines.append(
            f"resume: the updates now use different images, so epoch {state['epoch'] + 2} starts from its "
            f"beginning, at step {step}"
        )
    then, now = saved["TRAIN.NUM_EPOCHS"], config.TRAIN.NUM_EPOCHS
    if then != now and now > state["epoch"] + 1:
        lines.append(f"resume: {counted(now, 'epoch')} instead of {then}: the learning rate follows the new schedule")
    return lines
