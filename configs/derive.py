"""Derives settings from other settings."""

from typing import Any, NamedTuple

from configs.schema import VIT_FIELDS, Data
from configs.tables import LOSSES, TORCH_OPTIMIZERS, names_with
from configs.values import OPTIMIZER_VALUES, RATES, SETTINGS, build, to_text, usual_optimizer_values
from utils.runs import LATEST, without_latest

NAME_RUNS = ("MODEL.RESUME", "MODEL.PRETRAINED", "TRAIN.TEACHER_MODEL")  # settings whose value may name a run


class Merged(NamedTuple):
    """The value of each setting, and where it came from."""

    values: dict[str, Any]
    origins: dict[str, str]
    order: list[str]  # the origins of all layers, the lowest one first


def derive(merged: Merged) -> tuple[Merged, list[str]]:
    """Return the settings with the values that follow from others, and notes for the user."""
    derived = Merged(dict(merged.values), dict(merged.origins), merged.order)
    derived.values.update(name_runs(derived.values))
    _derive_data(derived.values, derived.origins)
    _derive_optimizer(derived.values, derived.origins)
    notes = _derive_model(*derived)
    return derived, notes


def name_runs(values: dict[str, Any]) -> dict[str, str]:
    """Return {key: folder of the newest run in SAVE} for the settings whose value is `latest`."""
    save = values.get("SAVE", SETTINGS["SAVE"].default)
    return {key: without_latest(values[key], save) for key in NAME_RUNS if values.get(key) == LATEST}


def _derive_data(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Fit mean and deviation to grey images; choose loss and metric by the kind of labels, unless they are set."""
    if values["DATA.IMAGE_CHANNELS"] == 1:
        for key in ("DATA.IMAGENET_MEAN", "DATA.IMAGENET_STD"):
            values[key] = values[key][:1] if values[key] == SETTINGS[key].default else values[key]
    implied, why = {}, "TRAIN.OBJECTIVE"
    if values["TRAIN.OBJECTIVE"] == "features":
        implied = {"TRAIN.BEST_METRIC": "knn" if values["DATA.LABELLED_PATH"] else "similarity"}
    elif build(values, Data, "DATA.").has_several_labels:
        loss, *_ = names_with(LOSSES, "several_labels")
        implied, why = {"TRAIN.LOSS": loss, "TRAIN.BEST_METRIC": "map"}, "several labels per image"
    for key, value in implied.items():
        if origins[key] == "default":
            values[key], origins[key] = value, f"because of {why}"


def _derive_optimizer(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Choose one spelling for each optimizer: torch's own for AdamW, Adam and SGD, lower case for the others.

    For other optimizers, torch's default values count as not set if one layer sets EPS, BETAS and MOMENTUM together,
    because PaddleViT's files always contain all three. The schedule `step` starts at epoch 0, unless AFTER_WARMUP is set.
    """
    spelling = {name.lower(): name for name in TORCH_OPTIMIZERS}
    typed = values["TRAIN.OPTIMIZER.NAME"].lower()
    values["TRAIN.OPTIMIZER.NAME"] = name = spelling.get(typed, typed)
    are_together = len({origins[each] for each in OPTIMIZER_VALUES}) == 1
    are_all_set = all(values[each] not in (None, ()) for each in OPTIMIZER_VALUES)
    if name not in TORCH_OPTIMIZERS and are_together and are_all_set:
        values.update({key: SETTINGS[key].default for key in usual_optimizer_values(values)})
    key = "TRAIN.LR_SCHEDULER.AFTER_WARMUP"
    if values["TRAIN.LR_SCHEDULER.NAME"] == "step" and origins[key] == "default":
        values[key] = False


def _derive_model(values: dict[str, Any], origins: dict[str, str], order: list[str]) -> list[str]:
    """Reset settings that do not apply to the type of model, and return notes about them.

    If one layer sets MODEL.TYPE timm, this resets the ViT settings from all lower layers. In the same layer or a higher
    one, ViT settings are errors. With MODEL.TYPE vit, a dropout rate of 0 becomes None, which means the same.
    """
    if values["MODEL.TYPE"] == "vit":
        values.update({key: None for key in RATES if values[key] == 0})
        return []
    earlier = order[: order.index(origins["MODEL.TYPE"])]
    dropped = [key for name in VIT_FIELDS if origins[key := f"MODEL.{name}"] in earlier]
    if not dropped:
        return []
    fields = ", ".join(f"{key} {to_text(values[key])}" for key in dropped)
    files = ", ".join(dict.fromkeys(origins[key] for key in dropped))
    note = f"note: these have no effect with MODEL.TYPE timm ({origins['MODEL.TYPE']}): {fields} ({files})"
    values.update({key: SETTINGS[key].default for key in dropped})
    origins.update(dict.fromkeys(dropped, "default"))
    return [note]
