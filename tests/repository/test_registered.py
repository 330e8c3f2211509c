"""Every entry in the program's tables is complete, and does what its table promises.

Each failure names the file to edit: `FILE: add ...`. CONTRIBUTING.md has the recipes.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from configs.load import load
from configs.schema import Config
from configs.tables import LOSSES, METRICS, PIXEL_KINDS, SOURCES, TASKS, TORCH_OPTIMIZERS, TaskRow
from configs.values import ALL_SETTINGS, SETTINGS
from datasets.pixels.kinds import kind_of_pixels, pixels_of
from datasets.targets.class_labels import OneLabel
from datasets.targets.kinds import kind_of
from engine.export.photo import Photo
from engine.export.photo_subject import photo_of
from engine.record.columns import COLUMNS
from engine.tasks import task_class
from engine.tasks.classes import ClassTask
from engine.tasks.numbers import NumberTask
from engine.tasks.task import Task
from engine.train.callback import Callback
from engine.train.loss import CrossEntropy, build_loss, loss_class
from engine.train.optimizers import build_optimizer
from scripts.maintenance.make_settings_page import PAGES
from tests.support.configs import SMALL, replaced
from tests.support.forks import ROOT
from tests.support.modules import parsed
from tests.support.native_files import by_pillow, dicom, npy
from tests.support.run_table import OF_TRAINING
from tests.support.runs import rows_of, run_folder, typed


def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# Documentation generated from the program's tables


@pytest.mark.parametrize("page", PAGES)
def test_generated_docs_page_matches_the_program_tables(page):
    made = PAGES[page]() == text_of(page)
    assert made, f"{page}: run python scripts/maintenance/make_settings_page.py to add new entries to its tables"


# Losses


@pytest.mark.parametrize("name", LOSSES)
def test_registered_loss_has_a_class_with_expected_arguments(name):
    cls = loss_class(name)
    assert name == "cross_entropy" or cls is not CrossEntropy, f"engine/train/loss.py: add {name} to loss_class"
    taken = list(inspect.signature(cls).parameters)
    assert taken == ["settings", "class_weights"], f"add the arguments settings and class_weights to {cls}"


LABELS = torch.tensor([[1.0, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1]])
# {task: targets of four images with three outputs, and what the best outputs say}
LEARNED = {
    "classes": (torch.tensor([2, 0, 1, 2]), lambda outputs: outputs.argmax(1)),
    "labels": (LABELS, lambda outputs: (outputs > 0).float()),
    "numbers": (3 * LABELS - 1, lambda outputs: outputs.round()),
}


@pytest.mark.parametrize(("task", "name"), [(task, name) for task, row in TASKS.items() for name in row.losses])
def test_outputs_that_minimize_a_registered_loss_are_right(task, name):
    assert task in LEARNED, f"tests/repository/test_registered.py: add targets of the task {task} to LEARNED"
    targets, read = LEARNED[task]
    loss = build_loss(replaced(Config(), TRAIN={"LOSS": name, "SMOOTHING": 0.0}), None)
    outputs = torch.full((4, 3), 0.1, requires_grad=True)
    optimizer = torch.optim.Adam([outputs], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss(outputs, targets).backward()
        optimizer.step()
    assert read(outputs.detach()).equal(targets), f"{name}: {outputs}"


def test_every_loss_class_is_registered_in_losses():
    classes = {loss_class(name) for name in LOSSES}
    rows = {f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for cls in classes}
    for path in sorted((ROOT / "engine/train").glob("*.py")):
        for node in parsed(path).body:
            calls = [each for each in getattr(node, "body", []) if getattr(each, "name", "") == "__call__"]
            arguments = [argument.arg for call in calls for argument in call.args.args]
            if isinstance(node, ast.ClassDef) and arguments == ["self", "logits", "targets"]:
                where = f"{path.stem}.{node.name}"
                assert where in rows, f"configs/tables.py, engine/train/loss.py: add {where} to LOSSES and loss_class"


# Optimizers


VALUES = {"BETAS": (0.7, 0.8), "EPS": 1e-3, "MOMENTUM": 0.3}  # none is a default


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_registered_optimizer_has_fused_kernels_and_uses_its_settings(name):
    row, cls = TORCH_OPTIMIZERS[name], getattr(torch.optim, name, None)
    assert cls, f"configs/tables.py: add to TORCH_OPTIMIZERS only classes of torch.optim, not {name}"
    taken = inspect.signature(cls).parameters
    assert "fused" in taken, f"configs/tables.py: add to TORCH_OPTIMIZERS only classes with fused kernels, not {name}"
    for setting in row.settings:
        known = f"TRAIN.OPTIMIZER.{setting}" in SETTINGS and setting.lower() in taken
        assert known, f"configs/schema.py: add {setting} to Optimizer; the row of {name} names it"
    config = replaced(Config(), TRAIN={"WEIGHT_DECAY": 0.0, "BASE_LR": 0.01})
    values = {setting: VALUES[setting] for setting in row.settings}
    train = dataclasses.replace(
        config.TRAIN, OPTIMIZER=dataclasses.replace(config.TRAIN.OPTIMIZER, NAME=name, **values)
    )
    layer, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(layer.state_dict())
    arguments = {setting.lower(): value for setting, value in values.items()}
    optimizers = [build_optimizer(train, layer), cls(theirs.parameters(), lr=0.01, weight_decay=0.0, **arguments)]
    for number in range(3):
        images = torch.arange(12.0).reshape(4, 3) - number
        for model, optimizer in zip((layer, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight, theirs.weight, msg=f"{name}: its settings {row.settings} have no effect")


# Data sets


OF_SOURCES = text_of("datasets/opening.py")


@pytest.mark.parametrize("name", SOURCES)
def test_registered_data_source_is_read(name):
    """tests/unit/datasets/test_every_source.py reads each of them."""
    by_torchvision = name.startswith(("torchvision/", "cifar"))
    case = rf'case .*"{name}"'
    assert by_torchvision or re.search(case, OF_SOURCES), f"datasets/opening.py: add a case for {name}"


def test_every_case_of_a_data_source_has_a_row():
    cases = [name for line in re.findall(r"case (.*):", OF_SOURCES) for name in re.findall(r'"(\w+)"', line)]
    assert {*cases} <= {*SOURCES}, "configs/tables.py: SOURCES has no row for a case of datasets/sources"


# Pixels

PHOTO = np.array([[0, 1, 2], [3, 4, 255]])
# {value of DATA.PIXELS: a file that it reads}
PHOTOS = {
    **dict.fromkeys(("8bit", "native", "uint8"), by_pillow(PHOTO.astype(np.uint8), "PNG")),
    "uint16": npy(PHOTO.astype(np.uint16)),
    "float32": npy(PHOTO.astype(np.float32)),
    "window": dicom(PHOTO.astype(np.uint16)),
}


@pytest.mark.parametrize("value", PIXEL_KINDS)
def test_registered_pixels_have_a_name_and_a_graph_and_decode_a_photo(value):
    kind = kind_of_pixels(value)
    assert kind.name in PIXEL_KINDS, f"{kind.__module__}: give {kind.__name__} a name in PIXEL_KINDS"
    photo = photo_of(replaced(Config(), DATA={"PIXELS": value}))
    assert issubclass(photo, Photo) and (photo is Photo) == (value == "8bit"), value
    assert value in PHOTOS, f"tests/repository/test_registered.py: add a file that DATA.PIXELS={value} reads to PHOTOS"
    pixels = pixels_of(replaced(Config(), DATA={"PIXELS": value, "IMAGE_CHANNELS": 1}).DATA)
    image = pixels.decode(PHOTOS[value])
    assert image.shape == (2, 3, 1)
    assert np.rint(255 * (image[..., 0] / image.max())).tolist() == PHOTO.tolist()  # a window scales its values


# Tasks and their scores


@pytest.mark.parametrize("name", TASKS)
def test_registered_task_has_a_class_targets_and_scores(name):
    row = TASKS[name]
    cls = task_class(name)
    assert issubclass(cls, Task), f"derive {cls} from Task"
    assert name == "classes" or cls is not ClassTask, f"engine/tasks/__init__.py: add {name} to task_class"
    option = "DATA.LABEL_SEPARATOR=|" if name == "labels" else f"TRAIN.OBJECTIVE={name}"
    config = load(["-opts", "DATA.DATASET=csv", option], needs_file=False).config
    kind = kind_of(config)
    assert issubclass(kind, OneLabel), "datasets/targets/: derive it from OneLabel"
    has_one_class = row.has_classes and not row.has_several_classes
    assert has_one_class == (kind is OneLabel), f"datasets/targets/kinds.py: add {name} to kind_of"
    assert {*row.metrics} <= METRICS.keys(), f"configs/tables.py: add the metrics of {name} to METRICS"


# What scripts/predict.py and a graph of scripts/export.py -photo ask a task
OF_ANSWERS = ("answers_are", "most_difference", "probabilities", "answers", "answer", "truth", "difference", "cost")
NEED_CLASSES = {"into", "unsure", "unknown"}  # flags of scripts/predict.py


def lacking_for_answers(row: TaskRow, task: type[Task]) -> list[str]:
    """Return what a task whose models answer questions about images does not declare."""
    lacking = [f"engine/tasks/: add {name} to {task.__name__}" for name in OF_ANSWERS if not hasattr(task, name)]
    if row.has_classes and not row.has_several_classes:
        return lacking
    if not NEED_CLASSES <= {*row.not_predicted} or not row.why_not_predicted:
        lacking.append(f"configs/tables.py: add {NEED_CLASSES} to not_predicted, and why_not_predicted")
    if not row.has_classes and row.noun == "class":
        lacking.append("configs/tables.py: add the noun of an output")
    if not row.has_classes and getattr(task, "answers_are", "numbers") != "numbers":  # page.js reads this output
        lacking.append(f"engine/tasks/: set answers_are of {task.__name__} to numbers")
    return lacking


@pytest.mark.parametrize("name", TASKS)
def test_registered_task_has_what_its_answers_need(name):
    row = TASKS[name]
    assert not lacking_for_answers(row, task_class(name))


def test_task_without_classes_that_declares_no_answers_is_noticed():
    angles = TaskRow("", ("mse",), ("mae",), has_classes=False)
    lacking = lacking_for_answers(angles, Task)
    assert len(lacking) == len(OF_ANSWERS) + 2 and "engine/tasks/: add probabilities to Task" in lacking
    complete = angles._replace(noun="angle", not_predicted=(*NEED_CLASSES,), why_not_predicted="it predicts angles")
    assert not lacking_for_answers(complete, NumberTask)


def test_every_task_is_trained_killed_and_resumed_by_a_row_of_the_run_table():
    trained = [
        load(["-opts", "REPORT=false", *words.split()], needs_file=False).config.task for words in OF_TRAINING.values()
    ]
    missing = [name for name, row in TASKS.items() if row not in trained]
    assert not missing, f"tests/support/run_table.py: add a row for {missing}"


def test_every_score_and_loss_belongs_to_a_task():
    assert {*METRICS} == {metric for row in TASKS.values() for metric in row.metrics}
    assert {*LOSSES} == {loss for row in TASKS.values() for loss in row.losses}, "configs/tables.py: TASKS"


# Settings that have an effect only with some values of another setting


def test_full_name_of_every_setting_is_found_outside_of_configs():
    """A search for a setting shall lead to the place where it acts, also if the code there has only its section."""
    rooms = ("datasets", "engine", "models", "utils")
    files = [*ROOT.glob("main_*.py"), *ROOT.glob("scripts/*.py")]
    files += [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    missing = [key for key in ALL_SETTINGS if not re.search(rf"(?<!\w){re.escape(key)}(?!\w)", text)]
    assert not missing, f"add these names to the docstring of the function that uses them: {missing}"


def test_settings_depend_only_on_existing_values_of_other_settings():
    known = {"TRAIN.LOSS": LOSSES, "DATA.DATASET": SOURCES}
    for key, setting in SETTINGS.items():
        if setting.only:
            names = [known.get(other, SETTINGS[other].choices) for other in setting.only.keys]
            wrong = [each for each in setting.only.values if all(names) and not any(each in some for some in names)]
            assert not wrong, f"configs/tables.py: Only(...) of {key} names {wrong}, which is no value of its setting"


# Callbacks


def test_every_callback_is_added_to_a_run():
    """engine/callback_list.py adds the program's callbacks, or imports a package that makes them."""
    for module in pkgutil.walk_packages(engine.__path__, "engine."):
        importlib.import_module(module.name)
    added, kinds = text_of("engine/callback_list.py"), [Callback]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds[1:]:
        if not kind.__module__.startswith("engine.") or kind.__subclasses__():
            continue
        name, path = kind.__name__, file_of(kind.__module__)
        package = kind.__module__.rpartition(".")[0]
        made = added + (calls_in(package) if f"from {package} import" in added else "")
        is_added = f"{name}(" in made or f"{name}.on(" in made
        assert is_added, f"engine/callback_list.py: add {name} of {path}"
        assert kind.__doc__ != Callback.__doc__ and kind.__doc__, f"{path}: add a sentence to {name}"


def file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


def calls_in(package: str) -> str:
    """Return the calls in a package's files, without the definitions of its classes."""
    trees = [parsed(path) for path in (ROOT / package.replace(".", "/")).glob("*.py")]
    return "\n".join(ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))


# Metrics of an epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a small run that evaluates, reports and saves."""
    folder = tmp_path_factory.mktemp("registered")
    (folder / "small.yaml").write_text(SMALL)
    flags = ["-cfg", folder / "small.yaml", "-output", folder / "output"]
    words = "-batch_size 480 -epochs 1 -opts TRAIN.MODEL_EMA=true REPORT=true"
    typed("main_single_gpu.py", *flags, *words.split()).done()
    return run_folder(folder / "output")


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name.partition(",")[0])
def test_metrics_column_has_a_value(folder, column):
    """tests/unit/engine/record/test_epoch_table.py compares the values."""
    (row,), names = rows_of(folder / "metrics.csv"), column.name.split(", ")
    measured = any(row.get(name) for name in names)
    assert measured, (
        f"engine/stages.py: add the value of the metric {column.name} to EpochResult; its column is empty after a run"
    )
