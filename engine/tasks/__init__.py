"""What a model learns from the images. Each task is a file here, a row of TASKS in configs/tables.py, and a kind of target
in datasets/targets.py. Other code asks the row or the task, and names no task."""

from configs.schema import Config
from configs.tables import import_named
from engine.tasks.task import Task


def find_task(config: Config) -> Task:
    """Return what a model with these settings learns."""
    return import_named("engine.tasks", config.task.where)(config)
