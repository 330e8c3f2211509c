"""Describes a plan for the log, -check and status.json."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from datasets.split import how_held_out
from engine.plan import TrainPlan
from engine.train.schedule import batch_factor
from utils.host import name_of
from utils.text import align, counted, printable


def describe_training(plan: TrainPlan, model: str) -> list[str]:
    """Return the lines that a run logs before it trains. `model` is a description of the model without its name."""
    chosen = [f"{title}: {line}" for title, lines in describe_chosen(plan).items() for line in lines]
    lines = [*chosen, *align(list(_most_important(plan, model)))]
    if plan.config.TRAIN.SIZE_SCHEDULE:
        sizes = (f"{shape} from epoch {start + 1} on" for start, shape in plan.config.train_shapes.items())
        lines.append(f"training images: {', '.join(sizes)}; evaluation at {plan.config.DATA.IMAGE_SIZE}")
    return lines + [line for note in notes_on(plan).values() for line in note]


def notes_on(plan: TrainPlan) -> dict[str, list[str]]:
    """Return {title of a row in -check: lines} about unusual facts of a training run."""
    balance: list[str] = []
    if plan.class_weights or plan.config.DATA.SAMPLER != "shuffle":
        from datasets.balance import describe_balance

        balance = describe_balance(plan.config, plan.train_set, plan.class_weights)
    notes = {"balance": balance}
    if plan.inputs.record or plan.inputs.loaded.weights or plan.config.MODEL.TYPE == "timm":
        from engine.weights_lines import compare_training_with_weights, warn_of_overlap

        notes |= {"preprocessing": compare_training_with_weights(plan), "overlap": warn_of_overlap(plan)}
    return notes


def _most_important(plan: TrainPlan, model: str) -> Iterator[tuple[str, str]]:
    """Yield rows (title, text) with the most important values and their origins: file, flag, weights or default."""
    config, order, origins = plan.config, plan.order, plan.inputs.loaded.origins
    sets = f"{len(plan.train_set):,} training and {counted(len(plan.eval_set), 'validation image')}"
    if not plan.holds_out:
        sets = f"all {counted(len(plan.train_set), 'image')} for training"
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
        f"{with_origins({'DATA.DATASET': config.DATA.DATASET}, origins)}, {sets}, "
        f"{counted(len(plan.classes), config.task.noun)}",
    )
    yield "training", f"{with_origins(values, origins)}; an epoch is {order.describe_epoch()}"
    yield "precision", describe_precision(plan, f" ({_origin('AMP', origins)})")


def describe_precision(plan: TrainPlan, origin: str = "") -> str:
    return plan.precision.describe(origin, trains=True, is_fastest=bool(how_chosen(plan, "AMP")))


def with_origins(values: dict[str, str], origins: dict[str, str]) -> str:
    """Return the values in one line, with their origins. Adjacent values from the same origin show it once."""
    groups = itertools.groupby(values, lambda key: _origin(key, origins))
    return ", ".join(f"{', '.join(values[key] for key in keys)} ({origin})" for origin, keys in groups)


def _origin(key: str, origins: dict[str, str]) -> str:
    origin = origins[key].partition(": ")[0]  # without the explanation of how a batch size was found
    return "checkpoint" if origin.startswith("checkpoint ") else origin  # another line shows the checkpoint's path


def facts_for_status(plan: TrainPlan, model: nn.Module) -> dict[str, str | int]:
    """Return facts for status.json: the devices, the data and the size of the run."""
    process, data = plan.process, plan.config.DATA
    path = Path(data.image_root or data.DATA_PATH).expanduser()
    is_in_files = path.exists() and not plan.eval_set.storage.names_are_numbers
    return {
        "device": process.device.type,
        "device_name": name_of(process.device),
        "processes": process.world_size,
        "precision": plan.precision.name,
        "parameters": sum(each.numel() for each in model.parameters()),
        "training_images": len(plan.train_set),
        "validation_images": len(plan.eval_set) if plan.is_measured else 0,
        "validation_images_in_training": plan.eval_set.watch.num_in_training,
        "validation_images_held_out": how_held_out(plan.eval_set) or None,
        "validation_digest": plan.validation["digest"],
        "data": plan.facts,
        "data_path": printable(str(path.resolve())) if is_in_files else None,
        "classes": len(plan.classes),
        "validation_classes": int(plan.eval_set.count_classes().astype(bool).sum()),
        "images_per_update": plan.order.global_batch,
    }


def describe_chosen(plan: TrainPlan) -> dict[str, list[str]]:
    """Return {title: lines} about the settings whose value is auto."""
    precision, size = how_chosen(plan, "AMP"), how_chosen(plan, "DATA.BATCH_SIZE")
    return {
        "-amp auto": [precision] if precision else [],
        "batch size": [f"{counted(plan.config.DATA.BATCH_SIZE, 'image')}, {size}"] if size else [],
    }


def how_chosen(plan: TrainPlan, key: str) -> str:
    """Return how the value of a setting that is auto was chosen, or "" for other settings."""
    origin, _, how = plan.inputs.loaded.origins[key].partition(": ")
    return how if origin.startswith("auto (") else ""
