"""Describes a plan, and its differences from the weights or the checkpoint, for the log, -check and status.json."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from configs.load import LoadedConfig
from configs.values import SETTINGS, convert, flatten, plain, to_text
from configs.yaml_files import Layer
from datasets import holds_out_no_more
from datasets.sources import image_root
from engine.checkpoint.resume import TRAINED_ON, is_run
from engine.evaluation.scores import TITLES, Best, format_value
from engine.plan import EvalPlan, Plan, TrainPlan
from engine.train.schedule import batch_factor
from utils.facts import changed_facts
from utils.host import name_of
from utils.text import align, counted, first_of, printable


def describe_training(plan: TrainPlan, model: str) -> list[str]:
    """Return the lines that a run logs before it trains. `model` is a description of the model without its name."""
    lines = [*(f"batch size: {how}" for how in describe_batch_size(plan)), *align(list(_most_important(plan, model)))]
    if plan.config.TRAIN.SIZE_SCHEDULE:
        sizes = (f"{side} x {side} from epoch {start + 1} on" for start, side in plan.config.train_sizes.items())
        lines.append(f"training images: {', '.join(sizes)}; evaluation at {plan.config.DATA.IMAGE_SIZE}")
    if plan.config.DATA.TOKENS:
        from extras.native_aspect.models import describe_sequences

        lines.append(describe_sequences(plan.config))
    return lines + [line for note in notes_on(plan).values() for line in note]


def notes_on(plan: TrainPlan) -> dict[str, list[str]]:
    """Return {title of a row in -check: lines} about unusual facts of a training run."""
    balance: list[str] = []
    if plan.class_weights or plan.config.DATA.SAMPLER != "shuffle":
        from datasets.balance import describe_balance

        balance = describe_balance(plan.config, plan.train_set, plan.class_weights)
    return {
        "balance": balance,
        "preprocessing": compare_with_weights(plan),
        "overlap": warn_of_overlap(plan),
    }


def _most_important(plan: TrainPlan, model: str) -> Iterator[tuple[str, str]]:
    """Yield rows (title, text) with the most important values and their origins: file, flag, weights or default."""
    config, order, origins = plan.config, plan.order, plan.inputs.loaded.origins
    sets = f"{len(plan.train_set):,} training and {counted(len(plan.eval_set), 'validation image')}"
    scale = batch_factor(config.TRAIN, order.global_batch)
    scaled = f" x {scale:.3g} (TRAIN.LINEAR_SCALED_LR)" if scale != 1 else ""
    values = {
        "DATA.BATCH_SIZE": f"batch {config.DATA.BATCH_SIZE}",
        "TRAIN.BASE_LR": f"learning rate {config.TRAIN.BASE_LR:g}{scaled}",
        "TRAIN.NUM_EPOCHS": counted(config.TRAIN.NUM_EPOCHS, "epoch"),
    }
    yield "model", f"{with_origins({'MODEL.NAME': config.MODEL.NAME}, origins)}, {model}"
    yield (
        "data",
        f"{with_origins({'DATA.DATASET': config.DATA.DATASET}, origins)}, {sets}, {counted(len(plan.classes), 'class')}",
    )
    yield "training", f"{with_origins(values, origins)}; an epoch is {order.describe_epoch()}"
    yield "precision", plan.precision.describe(f" ({_origin('AMP', origins)})")


def with_origins(values: dict[str, str], origins: dict[str, str]) -> str:
    """Return the values in one line, with their origins. Adjacent values from the same origin show it once."""
    groups = itertools.groupby(values, lambda key: _origin(key, origins))
    return ", ".join(f"{', '.join(values[key] for key in keys)} ({origin})" for origin, keys in groups)


def _origin(key: str, origins: dict[str, str]) -> str:
    origin = origins[key].partition(": ")[0]  # without the explanation of how a batch size was found
    return "checkpoint" if origin.startswith("checkpoint ") else origin  # another line shows the checkpoint's path


def describe_evaluation(plan: EvalPlan) -> list[str]:
    """Return lines about an evaluation: missing classes, and settings that differ from the checkpoint."""
    from models.weights.load import differences
    from models.weights.metadata import ARCHITECTURE, is_imagenet_by_other_names

    lines, names = [], plan.classes_of_weights
    number = np.count_nonzero(plan.eval_set.count_classes())
    if number < len(plan.classes) and (plan.inputs.kept or names == plan.classes):
        lines.append(f"the validation images have {number} of the checkpoint's {len(plan.classes)} classes")
    if names and names != plan.classes and not is_imagenet_by_other_names(plan.classes):
        lines.append(
            f"warning: the classes of the weights ({first_of(names)}) differ from the classes of the data "
            f"({first_of(plan.classes)}); class N of the weights is treated as class N of the data"
        )
    lines += [f"warning: {each}" for each in differences(plan.inputs.record, flatten(plan.config), ARCHITECTURE)]
    return [*lines, *compare_with_weights(plan)]


def facts_for_status(plan: TrainPlan, model: nn.Module) -> dict[str, str | int]:
    """Return facts for status.json: the devices, the data and the size of the run."""
    process, data = plan.process, plan.config.DATA
    path = image_root(data) or Path(data.DATA_PATH).expanduser()
    return {
        "device": process.device.type,
        "device_name": name_of(process.device),
        "processes": process.world_size,
        "precision": plan.precision.name,
        "parameters": sum(each.numel() for each in model.parameters()),
        "training_images": len(plan.train_set),
        "validation_images": len(plan.eval_set),
        "validation_digest": plan.validation["digest"],
        "data": plan.facts,
        "data_path": None if plan.eval_set.names_are_numbers or not path.exists() else printable(str(path.resolve())),
        "classes": len(plan.classes),
        "images_per_update": plan.order.global_batch,
    }


def measured_classes(plan: Plan) -> str:
    """Return '5 classes', or '3 of 5 classes' if the validation images have only 3 of them."""
    if plan.config.TRAIN.OBJECTIVE == "features":
        return "the labelled images" if plan.config.TRAIN.BEST_METRIC == "knn" else "the held-out images"
    number, total = np.count_nonzero(plan.eval_set.count_classes()), counted(len(plan.classes), "class")
    return total if number == len(plan.classes) else f"{number} of {total}"


def describe_batch_size(plan: TrainPlan) -> list[str]:
    """Return a line about the batch size if DATA.BATCH_SIZE is auto."""
    origin, _, how = plan.inputs.loaded.origins["DATA.BATCH_SIZE"].partition(": ")
    return [f"{counted(plan.config.DATA.BATCH_SIZE, 'image')}, {how}"] if origin.startswith("auto (") else []


def warn_of_overlap(plan: TrainPlan) -> list[str]:
    """Return a warning if validation images may be among the training images of the pretrained weights."""
    common = set(plan.inputs.record.get("class_names", ())) & set(plan.classes)
    here, there = plan.eval_set.split, plan.inputs.record.get("split", {})
    is_same_data = "training" in here and here["training"] == there.get("training")
    if plan.inputs.kept or not (common or is_same_data):
        return []
    if holds_out_no_more(here, there):
        if not plan.eval_set.class_folders:
            return []
        from datasets.split.by_hash import warn_of_other_folders  # imported here: needed only for weights of a run

        return warn_of_other_folders(
            plan.eval_set, plan.inputs.record.get("class_names", ()), there, ": ".join(plan.inputs.source)
        )
    setting, source = plan.inputs.source
    text, other = (", ".join(f"{key} {value}" for key, value in each.items()) for each in (here, there))
    return [
        f"warning: {setting}: the validation images ({text}) may be among the training images of {source} "
        f"({other or 'it does not say which images it held out'}), so the accuracy may be too high"
    ]


def describe_other_validation(plan: TrainPlan) -> list[str]:
    """Return a line if other validation images or another metric decided the best epoch of the resumed run."""
    then, now, best = plan.inputs.saved["validation"], plan.validation, Best(*plan.inputs.saved["progress"]["best"])
    others = [fact for fact in changed_facts(plan.inputs.saved.get(TRAINED_ON, {}), plan.facts) if "validation" in fact]
    if then == now and not others:
        if not best.epoch or best.metric == plan.config.TRAIN.BEST_METRIC:
            return []
        return [
            f"resume: TRAIN.BEST_METRIC is {plan.config.TRAIN.BEST_METRIC}, so the best epoch so far, {best.epoch} by "
            f"{TITLES[best.metric]}, does not count: the next evaluated epoch becomes best.pth"
        ]
    if not best.epoch:
        return []
    return [
        f"resume: other validation images ({then['num_images']} then, {now['num_images']} now), so the best epoch so "
        f"far, {best.epoch} with {format_value(best.metric, best.value)}, does not count: "
        "the next evaluated epoch becomes best.pth"
    ]


def compare_with_weights(plan: Plan) -> list[str]:
    """Return lines about settings taken over from the weights, and a warning if settings contradict the weights."""
    loaded, weights = plan.inputs.loaded, plan.inputs.loaded.weights
    here = flatten(loaded.config)
    if weights is None and not (plan.inputs.checkpoint or plan.config.MODEL.PRETRAINED):
        return _compare_with_timm(plan, here)
    is_resumed = is_run(plan.inputs.saved) and not plan.config.START.EVAL
    if weights is None or is_resumed:  # a resumed run keeps its settings
        return []
    texts = {key: text for key, text in weights.texts.items() if key.startswith("DATA.")}
    theirs = {key: plain(convert(SETTINGS[key], text, weights.origin)) for key, text in texts.items()}
    # A different image size is deliberate. The code that resizes the weights logs it.
    chosen = () if plan.config.START.EVAL else ("DATA.IMAGE_SIZE", "DATA.IMAGE_CHANNELS")
    lines = _describe_followed(loaded, weights)
    if options := _options_to_follow({key: value for key, value in theirs.items() if key not in chosen}, here):
        lines.append(
            f"warning: images are prepared differently than for the {weights.origin}; to do the same, add {options}"
        )
    return lines


def _compare_with_timm(plan: Plan, here: dict[str, Any]) -> list[str]:
    """Return a line if the default settings prepare images for a timm model differently than timm does."""
    if plan.config.MODEL.TYPE != "timm":
        return []
    from models.weights.metadata import usual_images

    origins, theirs = plan.inputs.loaded.origins, usual_images(plan.config.MODEL.NAME)
    if theirs.get("DATA.IMAGE_CHANNELS") != here["DATA.IMAGE_CHANNELS"]:
        return []
    theirs = {key: each for key, each in theirs.items() if origins[key] == "default" and key != "DATA.IMAGE_SIZE"}
    options = _options_to_follow(theirs, here)
    line = f"timm prepares images differently for {plan.config.MODEL.NAME}; to do the same, add {options}"
    return [line] if options else []


def _options_to_follow(theirs: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the flag -opts with the settings of `theirs` that differ here and have an effect, or ''."""
    different = [key for key in theirs if theirs[key] != here[key] and SETTINGS[key].has_effect(here)]
    words = " ".join(f"{key}={to_text(theirs[key]).replace(' ', '')}" for key in different)
    return f"-opts {words}" if words else ""


def _describe_followed(loaded: LoadedConfig, weights: Layer) -> list[str]:
    """Return lines on image and model settings taken over from the weights. Omit model settings with default values."""
    here = flatten(loaded.config)
    followed = {key: text for key, text in weights.texts.items() if loaded.origins[key] == weights.origin}
    used = [key for key in followed if key.startswith("DATA.") and SETTINGS[key].has_effect(here)]
    images = [f"{key} {to_text(here[key])}" for key in used]
    unusual = [key for key in followed if key not in here or here[key] != SETTINGS[key].default]
    model = [f"{key} {to_text(here.get(key, followed[key]))}" for key in unusual if key.startswith("MODEL.")]
    return [f"from the {weights.origin}: {', '.join(each)}" for each in (images, model) if each]
