"""What a model learns: each task is a file here and a row of TASKS in configs/tables.py. Other code asks them."""

from configs.schema import Config
from engine.tasks.task import Task


def find_task(config: Config) -> Task:
    """Return what a model with these settings learns."""
    return task_class(config.task_name)(config)


def task_class(name: str) -> type[Task]:
    """Return the class of a task in TASKS."""
    match name:
        case "labels":
            from engine.tasks.labels import LabelTask

            return LabelTask
        case "numbers":
            from engine.tasks.numbers import NumberTask

            return NumberTask
    from engine.tasks.classes import ClassTask

    return ClassTask
