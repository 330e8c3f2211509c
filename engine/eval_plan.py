"""The plan of -eval."""

from dataclasses import dataclass
from typing import ClassVar

from datasets.fingerprint import data_facts
from engine.plan import Inputs, OpenData, Plan, refuse_other_data


@dataclass(frozen=True, kw_only=True)
class EvalPlan(Plan):
    """The plan of -eval."""

    needs_head: ClassVar[bool] = True
    classes_of_weights: list[str]  # class names in another program's weights; empty if there are none


def plan_evaluation(inputs: Inputs, open_data: OpenData) -> EvalPlan:
    """Read the validation images and number their classes as in the weights. Collective."""
    opened = open_data(inputs)
    refuse_other_data(inputs, data_facts(None, opened.val))
    names = [] if inputs.prior.saved else [*inputs.prior.outputs]
    return EvalPlan(inputs=inputs.settled(opened), eval_set=opened.val, classes_of_weights=names)
