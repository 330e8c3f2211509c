"""Derives settings from other settings, in a list of steps. Each step returns the values that it changes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs.schema import VIT_FIELDS
from configs.tables import LOSSES, TORCH_OPTIMIZERS, names_with
from configs.values import OPTIMIZER_VALUES, RATES, SETTINGS, build, to_text, usual_optimizer_values
from utils.runs import LATEST, without_latest

NAME_RUNS = ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL")  # settings whose value may name a run


class Derived(NamedTuple):
    """Values that follow from other settings, with their origins, and notes for the user."""

    values: Mapping[str, Any] = {}
    origins: Mapping[str, str] = {}
    notes: Sequence[str] = ()


class Merged(NamedTuple):
    """The value of each setting, and where it came from."""

    values: dict[str, Any]
    origins: dict[str, str]
    order: list[str]  # the origins of all layers, the lowest one first


def derive(merged: Merged) -> tuple[Merged, list[str]]:
    """Apply all steps. Return the changed settings and notes for the user."""
    notes = []
    for step in STEPS:
        derived = step(merged)
        merged = Merged(merged.values | derived.values, merged.origins | derived.origins, merged.order)
        notes += derived.notes
    return merged, notes


def name_runs(values: dict[str, Any]) -> dict[str, str]:
    """Return {key: folder of the newest run in SAVE} for the settings whose value is `latest`."""
    save = values.get("SAVE", SETTINGS["SAVE"].default)
    return {key: without_latest(values[key], save) for key in NAME_RUNS if values.get(key) == LATEST}


def _name_newest_runs(found: Merged) -> Derived:
    """Replace the value `latest` with the folder of the newest run."""
    return Derived(name_runs(found.values))


def _fit_channels(found: Merged) -> Derived:
    """Reduce the default mean and standard deviation to one channel for grey images."""
    keys = ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD")
    is_grey = found.values["DATA.IMAGE_CHANNELS"] == 1
    return Derived(
        {key: found.values[key][:1] for key in keys if is_grey and found.values[key] == SETTINGS[key].default}
    )


def _fit_labels(found: Merged) -> Derived:
    """Choose loss and metric for several labels per image, and the metric for features, unless they are set."""
    several = build(found.values).DATA.has_several_labels
    loss, *_ = names_with(LOSSES, "several_labels")
    implied = {"TRAIN.LOSS": loss, "TRAIN.BEST_METRIC": "map"} if several else {}
    if found.values["TRAIN.OBJECTIVE"] == "features":
        implied = {"TRAIN.BEST_METRIC": "knn" if found.values["DATA.LABELLED_PATH"] else "similarity"}
    values = {key: value for key, value in implied.items() if found.origins[key] == "default"}
    return Derived(values, dict.fromkeys(values, f"because of {'several labels' if several else 'TRAIN.OBJECTIVE'}"))


def _normalize_optimizer(found: Merged) -> Derived:
    """Choose one spelling for each optimizer: torch's own for AdamW, Adam and SGD, lower case for the others.

    For other optimizers, torch's default values count as not set if one layer sets EPS, BETAS and MOMENTUM together,
    because PaddleViT's files always contain all three.
    """
    spelling = {name.lower(): name for name in TORCH_OPTIMIZERS}
    typed = found.values["TRAIN.OPTIMIZER.NAME"].lower()
    name = spelling.get(typed, typed)
    are_together = len({found.origins[each] for each in OPTIMIZER_VALUES}) == 1
    are_all_set = all(found.values[each] not in (None, ()) for each in OPTIMIZER_VALUES)
    unset = name not in TORCH_OPTIMIZERS and are_together and are_all_set
    keys = usual_optimizer_values(found.values) if unset else []
    return Derived({"TRAIN.OPTIMIZER.NAME": name} | {key: SETTINGS[key].default for key in keys})


def _count_steps_from_start(found: Merged) -> Derived:
    """Start the schedule `step` at epoch 0, unless AFTER_WARMUP is set."""
    key = "TRAIN.LR_SCHEDULER.AFTER_WARMUP"
    is_step = found.values["TRAIN.LR_SCHEDULER.NAME"] == "step"
    return Derived({key: False} if is_step and found.origins[key] == "default" else {})


def _drop_vit_fields(found: Merged) -> Derived:
    """If one layer sets MODEL.TYPE timm, reset the ViT settings from all lower layers to their defaults.

    In the same layer or a higher one, ViT settings are errors.
    """
    values, origins, order = found
    earlier = order[: order.index(origins["MODEL.TYPE"])] if values["MODEL.TYPE"] == "timm" else []
    dropped = [key for name in VIT_FIELDS if origins[key := f"MODEL.{name}"] in earlier]
    if not dropped:
        return Derived()
    fields = ", ".join(f"{key} {to_text(values[key])}" for key in dropped)
    files = ", ".join(dict.fromkeys(origins[key] for key in dropped))
    return Derived(
        values={key: SETTINGS[key].default for key in dropped},
        origins=dict.fromkeys(dropped, "default"),
        notes=[f"note: these have no effect with MODEL.TYPE timm ({origins['MODEL.TYPE']}): {fields} ({files})"],
    )


def _unset_rates(found: Merged) -> Derived:
    """With MODEL.TYPE vit, replace dropout rates of 0 by None, which means 0 for this type."""
    keys = RATES if found.values["MODEL.TYPE"] == "vit" else ()
    return Derived({key: None for key in keys if found.values[key] == 0})


# The order matters: each step sees the changes of the previous ones.
STEPS = (
    _name_newest_runs,
    _fit_channels,
    _fit_labels,
    _normalize_optimizer,
    _count_steps_from_start,
    _drop_vit_fields,
    _unset_rates,
)
