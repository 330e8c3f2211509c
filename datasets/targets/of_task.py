"""The kind of targets that a task has, and how they are read."""

from collections.abc import Sequence

from configs.schema import Config
from datasets.targets.labels import OneLabel
from datasets.targets.one_class import OneClass


def meaning_of(config: Config) -> type[OneClass]:
    """Return what the targets of these settings are."""
    match config.task_name:
        case "labels":
            from datasets.targets.label_sets import LabelSets

            return LabelSets
        case "numbers":
            from datasets.targets.numbers import NumberTargets

            return NumberTargets
    return OneClass


def reading_of(config: Config, columns: Sequence[str] = ()) -> OneLabel:
    """Return how the targets of these settings are read. `columns`: of targets in a CSV file."""
    match config.task_name:
        case "labels":
            from datasets.targets.label_sets import several_labels

            return several_labels(config, columns)
        case "numbers":
            from datasets.targets.number_tables import NumberColumns

            return NumberColumns(config, columns)
    return OneLabel(config, columns)
