"""The plan of -eval."""

from dataclasses import dataclass, replace

from datasets import renumber
from datasets.fingerprint import data_facts
from engine.measurements import measure
from engine.plan import Inputs, LoadData, Plan, refuse_other_data
from utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EvalPlan(Plan):
    """The plan of -eval."""

    classes_of_weights: list[str]  # class names in another program's weights; empty if there are none


def plan_evaluation(inputs: Inputs, load_data: LoadData) -> EvalPlan:
    """Read the validation images and number their classes as in the weights. Collective."""
    names = _classes_of_weights(inputs)
    _, val = load_data(inputs.config, inputs.kept)
    if val.classes != names and set(val.classes) <= set(names):
        (val,) = renumber([val], names)
    refuse_other_data(inputs, data_facts(None, val))
    loaded, _, val = measure(inputs.loaded, inputs.process, None, val, inputs.saved, inputs.record)
    return EvalPlan(inputs=replace(inputs, loaded=loaded), eval_set=val, classes_of_weights=names)


def _classes_of_weights(inputs: Inputs) -> list[str]:
    """Return the class names in another program's weights, or [] if there are none."""
    _, source = inputs.source
    if inputs.kept or not source:
        return []
    from models.weights.metadata import classes_of_weights

    try:
        return classes_of_weights(source)
    except ConfigError:  # load_weights reports why the file cannot be read
        return []
