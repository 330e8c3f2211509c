"""What a model learns: each task is a file here and a row of TASKS in configs/tables.py. Other code asks them."""

from configs.schema import Config
from configs.tables import import_named
from engine.tasks.task import Task


def find_task(config: Config) -> Task:
    """Return what a model with these settings learns."""
    return import_named("engine.tasks", config.task.where)(config)
