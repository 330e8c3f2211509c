"""Each extra can be deleted. Everything else works, and a command that needs the extra explains how to get it back."""

import shutil
from pathlib import Path

import pytest

from configs.values import ALL_SETTINGS
from tests.support.forks import ROOT
from tests.support.modules import imported, imported_at_the_top
from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder, run_fresh
from utils.extras import FOLDER, first_file, needs_of

pytestmark = pytest.mark.slow

ROOMS = ("configs", "datasets", "engine", "models", "scripts", "utils", "weights", "tests")
TRAIN = "main_single_gpu -cfg {small} -output {output} -name asking -epochs 1"
# {extra: a command that needs it}. None: no command needs it directly.
ASKING: dict[str, str | None] = {
    "attention_maps": "scripts.predict {output}/run {output}/run/loss.png -attention {output}/maps",
    "budget": f"{TRAIN} -budget 5m",
    "calibration": "scripts.predict {output}/run {output}/run/loss.png -unknown 0.9",
    "cache": f"{TRAIN} -opts DATA.CACHE=disk",
    "doctor": "scripts.doctor {output}/run",
    "distillation": f"{TRAIN} -opts TRAIN.DISTILLATION_TYPE=soft",
    "embeddings": "scripts.embed {output}/run {output}/run -output {output}/features",
    "explain": f"{TRAIN} -explain_precision",
    "float8": f"{TRAIN} -amp -opts PRECISION.MODE=float8",
    "labels": "scripts.labels {output}/run",
    "native_aspect": f"{TRAIN} -opts DATA.TOKENS=16",
    "remote": f"{TRAIN} -dataset shards -data_path https://a.invalid/train-0.tar",
    "report": "scripts.report {output}/run",
    "timm_arguments": "scripts.from_timm --model resnet50",
    "trackers": f"{TRAIN} -track mlflow",
    "kubeflow": None,  # used in the environment of a TrainJob: test_missing_kubeflow_extra_is_reported
    "launchers": None,  # used for variables of srun and mpirun: test_srun_and_mpirun_are_refused_after_deleting_the_launchers_extra
    "operator_lists": f"{TRAIN} -amp -opts PRECISION.CUSTOM_BLACK_LIST=[softmax]",
    "paddlevit": f"{TRAIN} -opts MODEL.TRANS.DEPTH=2",
    "profiler": f"{TRAIN} -profile 2",
    "lora": f"{TRAIN} -opts MODEL.LORA.RANK=4",
    "memory": f"{TRAIN} -batch_size auto",
    "unlabelled": f"{TRAIN} -opts TRAIN.OBJECTIVE=features",
    "optimizers": f"{TRAIN} -opts TRAIN.OPTIMIZER.NAME=lamb",
}
# Every run uses these extras, so a run without one of them logs that it is missing.
IN_EVERY_RUN = ("calibration", "doctor", "memory", "report")


def extras() -> list[str]:
    names = {path.stem for path in FOLDER.glob("*.py")} | {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    return sorted(names - {"__init__"})


def without(name: str, folder: Path) -> Path:
    """Return a copy of the program, made of links, without an extra and the extras that need it."""
    gone = {name}
    while needing := {each for each in extras() if gone & {*needs_of(first_file(each))}} - gone:
        gone |= needing
    for path in [*ROOT.glob("main_*.py"), *(ROOT / room for room in ROOMS)]:
        (folder / path.name).symlink_to(path)
    (folder / "extras").mkdir()
    for path in FOLDER.iterdir():
        if path.stem not in gone and path.name != "__pycache__":
            (folder / "extras" / path.name).symlink_to(path)
    return folder


def test_every_extra_has_a_test_of_its_deletion():
    assert extras() == sorted(ASKING)


@pytest.mark.slow
@pytest.mark.parametrize("name", extras())
def test_programs_work_without_a_deleted_extra_or_name_it_as_missing(name, tmp_path, small_yaml):
    root, asking = without(name, tmp_path), ASKING[name]
    words = asking.split() if asking else []
    ended = run("tests/support/programs/taken_out.py", str(root), str(small_yaml), *words).done()
    if asking:
        assert_names(ended.stderr, f"extras/{name} is missing", "git checkout")
    assert (f"extras/{name} is missing: " in ended.stdout) is (name in IN_EVERY_RUN)


def test_missing_kubeflow_extra_is_reported(tmp_path, small_yaml):
    words = f"{TRAIN} -epochs 1".split()
    environment = {"KUBEFLOW_TRAINER_SERVER_URL": "https://127.0.0.1:1/status"}
    root = without("kubeflow", tmp_path)
    program = "tests/support/programs/taken_out.py"
    ended = run(program, str(root), str(small_yaml), *words, environment=environment)
    assert_names(ended.stderr, "extras/kubeflow is missing")


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        {"SLURM_NNODES": "2"},
        {"SKYPILOT_NUM_NODES": "2"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_srun_and_mpirun_are_refused_after_deleting_the_launchers_extra(tmp_path, small_yaml, environment):
    """No process may train alone if it belongs to several processes."""
    root = without("launchers", tmp_path)
    (root / "start.py").write_text((ROOT / "main_multi_gpu.py").read_text())
    words = ["-cfg", str(small_yaml), "-output", str(root / "runs"), "-epochs", "1", "-ngpus", "1"]
    ended = run_fresh(str(root / "start.py"), *words, environment=environment)
    ended.refused("extras/launchers is missing", "git checkout")
    assert not (root / "runs").exists()


def test_run_without_report_extra_still_writes_metrics(tmp_path, small_yaml):
    root = without("report", tmp_path)
    shutil.copy(ROOT / "main_single_gpu.py", root / "start.py")  # Python resolves a link to the original folder
    words = ["-cfg", small_yaml, "-output", root / "runs", "-epochs", "1", "-opts", "REPORT=true"]
    ended = run_fresh(str(root / "start.py"), *map(str, words)).done()
    assert_names(ended.stdout, "extras/report is missing", "report.html")
    written = {path.name for path in run_folder(root / "runs").iterdir()}
    assert {"metrics.csv", "steps.csv", "best.pth", "status.json"} <= written
    assert not written & {"report.html", "loss.png", "predictions.csv", "results.json", "train_batch.png"}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_extra_imports_only_extras_it_declares(path):
    name = path.relative_to(FOLDER).parts[0].removesuffix(".py")
    if name == "__init__":
        return
    allowed = {name, *needs_of(first_file(name))}
    used = {module.split(".")[1] for module in imported(path) if module.startswith("extras.")}
    assert used <= allowed, f"{path}: {used - allowed} are missing in NEEDS"


def test_program_never_imports_extras_at_module_top():
    rooms = ("configs", "datasets", "engine", "models", "scripts", "utils")
    for path in [*ROOT.glob("main_*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]:
        early = [module for module in imported_at_the_top(path) if module.split(".")[0] == "extras"]
        assert not early, (
            f"{path.relative_to(ROOT)} imports {early} at its top: import it inside the `if` of its setting"
        )


def test_settings_schema_names_only_existing_extras():
    marked = {setting.extra.name for setting in ALL_SETTINGS.values() if setting.extra}
    assert marked and marked <= {*extras()}
