"""Every entry in the program's tables is complete: its code and its test.

Each failure names the file to edit: `FILE: add ...`. CONTRIBUTING.md has the recipes.
"""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import engine
from configs.tables import LOSSES, METRICS, PIXEL_KINDS, SOURCES, TASKS, TORCH_OPTIMIZERS, import_named
from configs.values import SETTINGS
from datasets.targets.one_class import OneClass
from engine.export.photo import Photo
from engine.record.columns import COLUMNS
from engine.tasks.task import Task
from engine.train.callback import Callback
from scripts.maintenance.make_settings_page import PAGES
from tests.support.configs import SMALL
from tests.support.forks import ROOT
from tests.support.modules import parsed
from tests.support.runs import rows_of, run_folder, typed


def text_of(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def defines(path: str, statement: str) -> bool:
    """Return whether the file exists and has the statement, such as "class Loss", at its top level."""
    return (ROOT / path).exists() and bool(re.search(rf"^{statement}\b", text_of(path), re.M))


@functools.cache
def texts_below(folder: str) -> dict[str, str]:
    """Return {path: text} of the test files in a folder, except this file."""
    return {str(path): text_of(path) for path in sorted((ROOT / folder).rglob("test_*.py")) if path != Path(__file__)}


def assert_tested(name: str, folder: str, where: str) -> None:
    """Fail unless a test of this folder mentions the name."""
    mentioned = any(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) for text in texts_below(folder).values())
    assert mentioned, f"{where}: add a test of {name}"


# Documentation generated from the program's tables


@pytest.mark.parametrize("page", PAGES)
def test_generated_docs_page_matches_the_program_tables(page):
    made = PAGES[page]() == text_of(page)
    assert made, f"{page}: run python scripts/maintenance/make_settings_page.py to add new entries to its tables"


# Losses


@pytest.mark.parametrize("name", LOSSES)
def test_registered_loss_has_a_class_with_expected_arguments_and_a_test(name):
    file, _, cls = LOSSES[name].where.rpartition(".")
    path = f"engine/train/{file}.py"
    is_defined = defines(path, f"class {cls}")
    assert is_defined, f"{path}: add the class {cls}, which LOSSES in configs/tables.py names for {name}"
    taken = list(inspect.signature(import_named("engine.train", LOSSES[name].where)).parameters)
    assert taken == ["settings", "class_weights"], f"{path}: add the arguments settings and class_weights to {cls}"
    assert_tested(name, "tests/engine/train", "tests/engine/train/test_loss.py")


def test_every_loss_class_is_registered_in_losses():
    rows = {row.where for row in LOSSES.values()}
    for path in sorted((ROOT / "engine/train").glob("*.py")):
        for node in parsed(path).body:
            calls = [each for each in getattr(node, "body", []) if getattr(each, "name", "") == "__call__"]
            arguments = [argument.arg for call in calls for argument in call.args.args]
            if isinstance(node, ast.ClassDef) and arguments == ["self", "logits", "targets"]:
                where = f"{path.stem}.{node.name}"
                assert where in rows, f'configs/tables.py: add a row to LOSSES for "{where}"'


# Optimizers


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_registered_optimizer_has_fused_kernels_settings_and_test(name):
    row, cls = TORCH_OPTIMIZERS[name], getattr(torch.optim, name, None)
    assert cls, f"configs/tables.py: add to TORCH_OPTIMIZERS only classes of torch.optim, not {name}"
    taken = inspect.signature(cls).parameters
    assert "fused" in taken, f"configs/tables.py: add to TORCH_OPTIMIZERS only classes with fused kernels, not {name}"
    for setting in row.settings:
        known = f"TRAIN.OPTIMIZER.{setting}" in SETTINGS and setting.lower() in taken
        assert known, f"configs/schema.py: add {setting} to Optimizer; the row of {name} names it"
    assert_tested(name, "tests/engine/train", "tests/engine/train/test_optimizers.py")


# Data sets


@pytest.mark.parametrize("name", SOURCES)
def test_registered_data_source_has_function_and_test(name):
    row = SOURCES[name]
    for where in filter(None, (row.where, row.where_of_url)):
        file, _, function = where.rpartition(".")
        path = f"datasets/sources/{file}.py"
        is_defined = defines(path, f"def {function}")
        assert is_defined, f"{path}: add the function {function}, which SOURCES in configs/tables.py names for {name}"
        taken = list(inspect.signature(import_named("datasets.sources", where)).parameters)
        first = [each for each in taken if each != "_"]  # *_ stands for the last arguments
        is_fitting = first == ["config", "only_validation", "say"][: len(first)] and (len(first) == 3 or "_" in taken)
        assert is_fitting, f"{path}: add the arguments config, only_validation and say to {function}"
    quoted = re.compile(rf"[\"' ]{re.escape(name.removesuffix('/NAME'))}[\"'/]")
    is_tested = any(quoted.search(text) for text in texts_below("tests").values())
    assert is_tested, f"tests/datasets: add a test that loads {name}"


def test_every_dataset_reader_is_registered_in_sources():
    rows = {where for row in SOURCES.values() for where in (row.where, row.where_of_url)}
    for path in sorted((ROOT / "datasets/sources").glob("*.py")):
        for name in re.findall(
            r"^def (read_\w+)\(\n? *config: Config, (?:only_validation: bool, )?(?:say: |\*_)", text_of(path), re.M
        ):
            where = f"{path.stem}.{name}"
            assert where in rows, f'configs/tables.py: add a row to SOURCES for "{where}"'


# Pixels


@pytest.mark.parametrize("value", PIXEL_KINDS)
def test_registered_pixels_have_a_name_a_graph_and_a_test(value):
    kind = import_named("datasets", PIXEL_KINDS[value])
    is_named = PIXEL_KINDS.get(kind.name) == PIXEL_KINDS[value]
    assert is_named, f"{kind.__module__}: give {kind.__name__} a name that PIXEL_KINDS in configs/tables.py has"
    assert issubclass(import_named("engine.export", kind.photo), Photo), kind.photo
    assert_tested(value, "tests/datasets", f"tests/datasets/native_pixels: use DATA.PIXELS={value}")


# Tasks and their scores


@pytest.mark.parametrize("name", TASKS)
def test_registered_task_has_a_class_targets_scores_and_a_test(name):
    row = TASKS[name]
    file, _, cls = row.where.rpartition(".")
    path = f"engine/tasks/{file}.py"
    assert defines(path, f"class {cls}"), f"{path}: add the class {cls}, which TASKS in configs/tables.py names"
    assert issubclass(import_named("engine.tasks", row.where), Task), f"{path}: derive {cls} from Task"
    assert issubclass(import_named("datasets", row.targets), OneClass), f"datasets/: derive {row.targets} from OneClass"
    assert {*row.metrics} <= METRICS.keys(), f"configs/tables.py: add the metrics of {name} to METRICS"
    assert row.needed.keys() <= SETTINGS.keys(), f"configs/schema.py: add the settings that {name} names"
    assert_tested(cls, "tests/engine", "tests/engine/tasks")


def test_every_score_and_loss_belongs_to_a_task():
    assert {*METRICS} == {metric for row in TASKS.values() for metric in row.metrics}
    assert {*LOSSES} == {loss for row in TASKS.values() for loss in row.losses}, "configs/tables.py: TASKS"


# Settings that have an effect only with some values of another setting


def test_settings_depend_only_on_existing_values_of_other_settings():
    known = {"TRAIN.LOSS": LOSSES, "DATA.DATASET": SOURCES}
    for key, setting in SETTINGS.items():
        if setting.only:
            names = [known.get(other, SETTINGS[other].choices) for other in setting.only.keys]
            wrong = [each for each in setting.only.values if all(names) and not any(each in some for some in names)]
            assert not wrong, f"configs/tables.py: Only(...) of {key} names {wrong}, which is no value of its setting"


# Callbacks


def test_every_callback_is_added_to_a_run_and_tested():
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
        assert_tested(name, "tests", "tests/{}/test_{}".format(*path.rsplit("/", 1)))


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
def test_metrics_column_has_a_value_and_a_test(folder, column):
    (row,), names = rows_of(folder / "metrics.csv"), column.name.split(", ")
    measured = any(row.get(name) for name in names)
    assert measured, (
        f"engine/loop.py: add the value of the metric {column.name} to EpochResult; its column is empty after a run"
    )
    tested = any(f'"{name}"' in text_of("tests/engine/record/test_epoch_table.py") for name in names)
    assert tested, f"tests/engine/record/test_epoch_table.py: add the value of the metric {column.name} to USUAL"
