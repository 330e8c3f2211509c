"""The allowed imports between top-level folders and between packages in them, and no clashes with public packages."""

import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.modules import ROOT, bound_names, imported, imported_at_the_top

# The folders of the program from bottom to top. The files of a folder import only their own folder and those before it.
TOWER = ("utils", "configs", "models", "datasets", "engine", "scripts")
# {folder: the only modules of configs that it may import}. Other folders may import them all.
PARTS = {
    "models": ("configs.schema", "configs.tables", "configs.values"),
    "datasets": ("configs.schema", "configs.tables"),
}


# Features that most runs do not use. Other files import them only inside the functions that use them.
RARE = tuple(
    """configs.translate.paddlevit_files configs.bare_words configs.auto engine.own_photos datasets.sources.recognised
    models.weights.recognised models.weights.paddle models.lora models.positions models.trace
    models.transforms.float8 models.transforms.operator_lists datasets.cache datasets.loading.replacements
    datasets.sources.remote datasets.sources.server engine.train.budget engine.train.distillation
    engine.train.profiler engine.train.timm_optimizers engine.tasks.labels
    configs.image_size datasets.pixels.native datasets.pixels.card datasets.pixels.survey
    engine.export.native_photo configs.rare_checks
    engine.tasks.numbers engine.train.number_loss
    engine.half_copy engine.rollback engine.evaluate_saved engine.train.adaptive_clipping engine.train.fused_loss_scale
    datasets.targets.label_sets datasets.targets.numbers
    engine.report.numbers engine.confidence.calibration
    engine.confidence.unknown engine.predict.attention_maps engine.export engine.record.trackers engine.report
    engine.doctor engine.choice engine.folds engine.labelling engine.auto_values engine.update_times""".split()
)


def allowed(name: str, arrows: tuple[str, ...]) -> bool:
    return any(name == arrow or name.startswith(arrow + ".") for arrow in arrows)


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("room", TOWER)
def test_folders_import_only_themselves_and_those_below(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    below = TOWER[: TOWER.index(room)]
    arrows = (room, *(each for each in below if each != "configs" or room not in PARTS), *PARTS.get(room, ()))
    for path in files:
        ours = {name for name in imported(path) if name.split(".")[0] in (*TOWER, "main_single_gpu", "main_multi_gpu")}
        wrong = {name for name in ours if not allowed(name, arrows)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_rare_features_are_imported_only_where_they_are_used():
    for path in (*ROOT.glob("main_*.py"), *(path for room in TOWER for path in (ROOT / room).rglob("*.py"))):
        if not allowed(module_of(path), RARE):
            early = {name for name in imported_at_the_top(path) if allowed(name, RARE)}
            assert not early, f"{path.relative_to(ROOT)}: import {early} inside the `if` of its setting"


def test_only_open_data_reads_sources():
    """Other packages get images that are divided, numbered and measured. They import single helpers of the sources."""
    functions = re.findall(r"import (read_\w+)$", (ROOT / "datasets/opening.py").read_text(), re.M)
    readers = {*functions, "read_source", "read_class_folders"}
    modules = {module_of(path) for path in (ROOT / "datasets" / "sources").rglob("*.py")}
    for path in (path for room in TOWER if room != "datasets" for path in (ROOT / room).rglob("*.py")):
        found = {name for name in bound_names(path) if name in modules or name.rpartition(".")[2] in readers}
        assert not found, f"{path.relative_to(ROOT)} imports {found}; open_data returns finished images"
        assert '"datasets.sources"' not in path.read_text(encoding="utf-8"), path


def test_no_file_imports_itself_through_others():
    files = {module_of(path): path for room in TOWER for path in (ROOT / room).rglob("*.py")}
    graph = {name: imported(path) & files.keys() - {name} for name, path in files.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_program_never_imports_libraries_that_import_public_datasets_package():
    banned = ("accelerate", "transformers", "torch.hub", "datasets.load")
    for room in TOWER:
        for path in (ROOT / room).rglob("*.py"):
            assert not {name for name in imported(path, also_names=True) if allowed(name, banned)}, path


def test_programs_load_run_settings_only_through_settings_module():
    """This way includes the settings of the pretrained weights. Other files read settings without them."""
    files = [*ROOT.glob("*.py"), *(path for room in TOWER for path in (ROOT / room).rglob("*.py"))]
    loaders = {"configs.load.load", "configs.load.resolve"}
    users = {path.name for path in files if loaders & imported(path, also_names=True)}
    expected = {"settings.py", "settings_of_weights.py", "make_shards.py", "from_timm.py"}
    assert users == expected


def test_no_test_module_imports_another():
    """Code that several test modules need is in tests/support."""
    for path in (ROOT / "tests").rglob("*.py"):
        imports = re.findall(r"^ *(?:from|import) tests\b(?:.*\([^)]*\)|.*)", path.read_text(encoding="utf-8"), re.M)
        others = [line for line in imports if re.search(r"\btest_", line)]
        assert not others, f"{path.relative_to(ROOT)}: {others}"


def test_no_file_beside_a_script_has_the_name_of_a_standard_module():
    """Python looks for modules in a script's folder first, so numbers.py there would replace the one NumPy needs."""
    files = [path for room in (*TOWER, "tests") for path in (ROOT / room).rglob("*.py")]
    folders = {path.parent for path in files if '__name__ == "__main__"' in path.read_text(encoding="utf-8")}
    assert ROOT / "tests/support" in folders
    for path in (path for folder in folders for path in folder.glob("*.py")):
        assert path.stem not in sys.stdlib_module_names - {"__init__", "__main__"}, path


# {folder: its files and packages, from bottom to top}. A file may import its own package and the packages before it.
PACKAGES = {
    "configs": (
        "__init__ tables schema image_size removed values yaml_files arguments rare_checks checks bare_words translate "
        "translate.timm_arguments translate.other_programs typed_names flags translate.paddlevit_files "
        "translate.paddlevit load auto"
    ).split(),
    "models": (
        "parts units heads features transforms trace compilation lora weights.sharded weights.adapters kwargs weights "
        "positions vit timm_models __init__ sized"
    ).split(),
    "datasets": (
        "order types targets index pixels.native.unread pixels.rules passes pixels.decode pixels.card "
        "transforms.operations transforms.augment pixels.survey pixels pixels.native pixels.kinds image_set "
        "class_numbers sources.tar targets.labels targets.class_labels targets.label_sets targets.numbers "
        "targets.kinds balance fingerprint bad_images neighbours identity split transforms sources "
        "sources.torchvision_sets loading.replacements loading copies overlap cache opening build __init__"
    ).split(),
    "engine": (
        "catalogue open_model parallel train.adaptive_clipping train.clipping train.loss_scale train.fused_loss_scale "
        "train.computing half_copy precision evaluation infer train confidence.temperature features.linear tasks "
        "checkpoint confidence record settings_of_weights own_photos settings predict session provenance memory "
        "first_passes plan eval_plan weights_lines plan_lines fine_tuning_rate quick_checks export report compare "
        "build batch_size update_times auto_values doctor eval_run evaluate_saved evaluate_weights features "
        "short_trial choice callback_list best_scores saves features.saved labelling features.start folds resumed "
        "ending rollback stages check run __init__"
    ).split(),
}


def layer(room: str, name: str) -> int:
    """Return the index of the innermost listed package that contains a module of the folder."""
    inside = name.removeprefix(room).removeprefix(".") or "__init__"
    around = [package for package in PACKAGES[room] if allowed(inside, (package,))]
    assert around, f"{name} is not in PACKAGES; add it at its place in the order"
    return PACKAGES[room].index(max(around, key=len))


@pytest.mark.parametrize("room", PACKAGES)
def test_subpackages_import_in_one_direction(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        own = layer(room, module_of(path))
        above = {name for name in imported(path) if allowed(name, (room,)) and layer(room, name) > own}
        assert not above, f"{path.relative_to(ROOT)} imports {above} from above"
