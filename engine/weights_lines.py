"""Describes how a plan differs from its weights or its checkpoint, for the log and -check."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.load import LoadedConfig
from configs.tables import METRICS
from configs.values import SETTINGS, convert, flatten, plain, to_text
from configs.yaml_files import Layer
from datasets.pixels.kinds import pixels_of
from datasets.split import FOLDS
from datasets.split.trained_on import holds_out_no_more
from engine.checkpoint.resume import TRAINED_ON, is_run
from engine.eval_plan import EvalPlan
from engine.evaluation.best import Best
from engine.evaluation.scores import format_value
from engine.plan import Plan, TrainPlan
from models.weights.load import differences
from models.weights.metadata import ARCHITECTURE, is_imagenet_by_other_names, usual_images
from utils.changed_facts import changed_facts
from utils.text import counted, first_of, warning


def describe_evaluation(plan: EvalPlan) -> list[str]:
    """Return lines about an evaluation: missing classes, and settings that differ from the checkpoint."""
    lines, names = [], plan.classes_of_weights
    number = np.count_nonzero(plan.eval_set.count_classes())
    if number < len(plan.classes) and (plan.inputs.prior.saved or names == plan.classes):
        lines.append(
            f"the validation images have {number} of the checkpoint's "
            f"{counted(len(plan.classes), plan.config.task.noun)}"
        )
    if names and names != plan.classes and not is_imagenet_by_other_names(plan.classes):
        lines.append(
            warning(
                f"the classes of the weights ({first_of(names)}) differ from the classes of the data "
                f"({first_of(plan.classes)}); class N of the weights is treated as class N of the data"
            )
        )
    lines += [warning(each) for each in differences(plan.inputs.record, flatten(plan.config), ARCHITECTURE)]
    return [*lines, *compare_with_weights(plan, may_differ=())]


def warn_of_overlap(plan: TrainPlan) -> list[str]:
    """Return a warning if validation images may be among the training images of the pretrained weights."""
    common = set(plan.inputs.record.get("class_names", ())) & set(plan.classes)
    here, there = plan.eval_set.split, plan.inputs.record.get("split", {})
    is_same_data = "training" in here and here["training"] == there.get("training")
    if not plan.is_measured or plan.inputs.prior.saved or not (common or is_same_data):
        return []
    # If the images differ, the folds differ too, even with the same record.
    is_redrawn = here["rule"] == FOLDS and plan.inputs.record.get("validation") != plan.validation
    if holds_out_no_more(here, there) and not is_redrawn:
        from datasets.split.by_hash import warn_of_other_folders  # imported here: needed only for weights of a run

        return warn_of_other_folders(
            plan.eval_set, plan.inputs.record.get("class_names", ()), there, ": ".join(plan.inputs.source)
        )
    setting, source = plan.inputs.source
    text, other = (", ".join(f"{key} {value}" for key, value in each.items()) for each in (here, there))
    redrawn = ", drawn from other images" if is_redrawn else ""
    return [
        warning(
            f"{setting}: the validation images ({text}) may be among the training images of {source} "
            f"({other or 'it does not say which images it held out'}{redrawn}), so the scores may be too good"
        )
    ]


def has_other_validation(plan: TrainPlan) -> bool:
    """Return whether the resumed run had other validation images."""
    changed = changed_facts(plan.inputs.saved[TRAINED_ON], plan.facts)
    return plan.inputs.saved["validation"] != plan.validation or any("validation" in fact for fact in changed)


def describe_other_validation(plan: TrainPlan) -> list[str]:
    """Return a line if other validation images or another metric decided the best epoch of the resumed run."""
    then, now = plan.inputs.saved["validation"], plan.validation
    best = Best.from_state(plan.inputs.saved["progress"]["best"])
    if not has_other_validation(plan):
        if not best.exists or best.metric == plan.config.TRAIN.BEST_METRIC:
            return []
        return [
            f"resume: TRAIN.BEST_METRIC is {plan.config.TRAIN.BEST_METRIC}, so the best epoch so far, {best.epoch} by "
            f"{METRICS[best.metric].title}, does not count: the next evaluated epoch becomes best.pth"
        ]
    if not best.exists:
        return []
    return [
        f"resume: other validation images ({then['num_images']} then, {now['num_images']} now), so the best epoch so "
        f"far, {best.epoch} with {format_value(best.metric, best.value)}, does not count: "
        "the next evaluated epoch becomes best.pth"
    ]


def compare_training_with_weights(plan: TrainPlan) -> list[str]:
    """Return the lines of compare_with_weights, or about the images of a timm model that starts without weights."""
    if is_run(plan.inputs.saved):  # a resumed run keeps its settings
        return []
    if plan.inputs.loaded.weights is None and not (plan.inputs.checkpoint or plan.config.MODEL.PRETRAINED):
        return _compare_with_timm(plan, flatten(plan.config))
    # A different image size is deliberate. The code that resizes the weights logs it.
    chosen = ("DATA.IMAGE_SIZE", "DATA.IMAGE_CHANNELS", *pixels_of(plan.config.DATA).chosen)
    return compare_with_weights(plan, chosen)


def compare_with_weights(plan: Plan, may_differ: Sequence[str]) -> list[str]:
    """Return lines about settings taken over from the weights, and a warning if settings contradict the weights."""
    loaded, weights = plan.inputs.loaded, plan.inputs.loaded.weights
    here = flatten(loaded.config)
    if weights is None:
        return []
    texts = {key: text for key, text in weights.texts.items() if key.startswith("DATA.")}
    of_weights = {key: plain(convert(SETTINGS[key], text, weights.origin)) for key, text in texts.items()}
    lines = _describe_followed(loaded, weights)
    if options := _options_to_follow({key: value for key, value in of_weights.items() if key not in may_differ}, here):
        lines.append(
            warning(f"images are prepared differently than for the {weights.origin}; to do the same, add {options}")
        )
    return lines


def _compare_with_timm(plan: Plan, here: dict[str, Any]) -> list[str]:
    """Return a line if the default settings prepare images for a timm model differently than timm does."""
    if plan.config.MODEL.TYPE != "timm":
        return []
    origins, of_weights = plan.inputs.loaded.origins, usual_images(plan.config.MODEL.NAME)
    if of_weights.get("DATA.IMAGE_CHANNELS") != here["DATA.IMAGE_CHANNELS"]:
        return []
    of_weights = {
        key: value for key, value in of_weights.items() if origins[key] == "default" and key != "DATA.IMAGE_SIZE"
    }
    options = _options_to_follow(of_weights, here)
    line = f"timm prepares images differently for {plan.config.MODEL.NAME}; to do the same, add {options}"
    return [line] if options else []


def _options_to_follow(of_weights: dict[str, Any], here: dict[str, Any]) -> str:
    """Return the flag -opts with the settings of `of_weights` that differ here and have an effect, or ''."""
    different = [key for key in of_weights if of_weights[key] != here[key] and SETTINGS[key].has_effect(here)]
    options = " ".join(f"{key}={to_text(of_weights[key]).replace(' ', '')}" for key in different)
    return f"-opts {options}" if options else ""


def _describe_followed(loaded: LoadedConfig, weights: Layer) -> list[str]:
    """Return lines on image and model settings taken over from the weights. Omit model settings with default values."""
    here = flatten(loaded.config)
    followed = {key: text for key, text in weights.texts.items() if loaded.origins[key] == weights.origin}
    used = [key for key in followed if key.startswith("DATA.") and SETTINGS[key].has_effect(here)]
    images = [f"{key} {to_text(here[key])}" for key in used]
    unusual = [key for key in followed if key not in here or here[key] != SETTINGS[key].default]
    model = [f"{key} {to_text(here.get(key, followed[key]))}" for key in unusual if key.startswith("MODEL.")]
    return [f"from the {weights.origin}: {', '.join(each)}" for each in (images, model) if each]
