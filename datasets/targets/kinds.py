"""kind_of: from the task of the settings to the class of its targets.

A kind of target is one class, which reads targets, says what they mean, and puts them into batches. To add one, such as
an angle, which is 0 again at 360 degrees:

1. `datasets/targets/angles.py`: a class like NumberTargets, or derived from it, with what differs. `parse` gets columns
   of lists, CSV files and parquet files, and `parse_tar` the samples of a tar; for angles, both return the numbers of
   NumberTargets `% 360`. `of_labels` makes targets of the numbers that the index stores. `allocate` and `put` say what
   a batch has, for example sine and cosine. `settle` measures before a run, and returns MODEL.NUM_CLASSES if the model
   has another number of outputs than there are names, such as two for an angle. `strata` are what a split divides
   evenly, and `invent` makes targets for trials of a model with MODEL.NUM_CLASSES outputs. The docstrings of OneLabel
   and OneClass describe the other methods.
2. Here: a case in kind_of.
3. What chooses it: a row in TASKS (`configs/tables.py`), or a setting (`configs/schema.py`) if a task has several
   kinds. Losses, predictions and scores belong to the task (`engine/tasks/`).
"""

from configs.schema import Config
from datasets.targets.class_labels import OneLabel


def kind_of(config: Config) -> type[OneLabel]:
    """Return the class of the targets of these settings."""
    match config.task_name:
        case "labels":
            from datasets.targets.label_sets import LabelSets

            return LabelSets
        case "numbers":
            from datasets.targets.numbers import NumberTargets

            return NumberTargets
    return OneLabel
