"""Hostile files, secrets in the environment, and commands and calls that must use their safe forms."""

import ast
import contextlib
import functools
import gzip
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from configs.load import load
from datasets.pixels import Pixels
from datasets.pixels.decode import decode
from datasets.pixels.rules import ImageReadError
from tests.support.cases import cases_of, content_of, names_of
from tests.support.image_sets import make_folders
from tests.support.modules import imported, parsed
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, run_folder, typed
from tests.support.weight_files import payloads
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

PACKAGES = ("configs", "datasets", "engine", "models", "scripts", "utils")
OURS = [*ROOT.glob("*.py"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("text", cases_of("mistakes-that_ask_for_python"))
def test_settings_with_python_code_are_never_executed(tmp_path, text):
    marker, path = tmp_path / "marker", tmp_path / "hostile.yaml"
    path.write_text(content_of(text).replace("MARKER", str(marker)))
    with refused(ConfigError, *names_of("mistakes-that_ask_for_python", text)):
        load(["-cfg", str(path)])
    assert not marker.exists()
    with contextlib.suppress(yaml.YAMLError, TypeError):
        yaml.unsafe_load(path.read_text())
    assert marker.exists(), "this text must be a real threat"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("kind", "least"), [("PNG", 1200), ("JPEG", 1200), ("GIF", 1200), ("WEBP", 1920)])
def test_image_with_more_pixels_than_allowed_is_refused(kind, least):
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, kind)
    assert decode(file.getvalue(), Pixels(3, max_pixels=least)).shape == (30, 40, 3)
    for limit in (least - 1, 599):  # Pillow warns for the first limit and refuses for the second
        with refused(ImageReadError, "DATA.MAX_PIXELS", limit):
            decode(file.getvalue(), Pixels(3, max_pixels=limit))


def hostile_files(marker: Path) -> dict[str, bytes]:
    """Return files that run code in readers which trust them, in each form that such a reader accepts."""
    code = payloads(marker)["system"]
    contents: dict[str, bytes] = {}
    for name, options in {"torch": {}, "old torch": {"_use_new_zipfile_serialization": False}}.items():
        file = io.BytesIO()
        torch.save({"state_dict": {"head.weight": code}}, file, **options)
        contents[name] = file.getvalue()
    contents |= {f"pickle {protocol}": pickle.dumps({"head.weight": code}, protocol) for protocol in (2, 4)}
    objects = payloads(marker)["object_array"]
    for name, save in {"npy": np.save, "npz": lambda file, array: np.savez(file, **{"head/weight": array})}.items():
        file = io.BytesIO()
        save(file, objects)
        contents[name] = file.getvalue()
    return contents


def trusting(content: bytes) -> None:
    """Read a file as nobody should."""
    for read in (
        pickle.loads,
        lambda data: torch.load(io.BytesIO(data), weights_only=False),
        lambda data: [*np.load(io.BytesIO(data), allow_pickle=True).values()],
        lambda data: np.load(io.BytesIO(data), allow_pickle=True).all(),
    ):
        with contextlib.suppress(Exception):
            read(content)


TRAIN = "main_single_gpu.py -cfg {cfg} -output {folder}/runs"
SET = f"{TRAIN} -data_path {{folder}} -dataset"
# {a command that reads a file of others: the names that the file has}
DOORS = {
    f"{TRAIN} -pretrained {{file}}": "x.pth x.safetensors x.npz x.pdparams x.ckpt pytorch_model.bin",
    f"{TRAIN} -resume {{file}}": "last.pth",
    f"{TRAIN} -eval -pretrained {{file}}": "x.pth",
    f"{TRAIN} -opts TRAIN.DISTILLATION_TYPE=soft TRAIN.TEACHER_MODEL={{file}}": "x.pth",
    f"{SET} parquet": "train.parquet",
    f"{SET} shards": "train/0.tar",
    "main_single_gpu.py -cfg {file}": "x.yaml",
    "scripts/predict.py {file} {folder}/photos -cfg {cfg}": "x.pth x.onnx x.pt2 x.npz",
    "scripts/export.py {file} -output {folder}/out.safetensors": "x.pth",
    "scripts/embed.py {file} {folder}/photos -cfg {cfg} -output {folder}/out.npz": "x.pth",
}


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
@pytest.mark.parametrize("command", DOORS)
def test_command_refuses_hostile_file_and_runs_nothing(tmp_path, small_yaml, command):
    marker = tmp_path / "marker"
    make_folders(tmp_path / "photos", {"some": 1})
    for name in DOORS[command].split():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        for kind, content in hostile_files(marker).items():
            file.write_bytes(content)
            ended = typed(*command.format(cfg=small_yaml, folder=tmp_path, file=file).split())
            assert not marker.exists(), f"{name}, {kind}: {ended.printed}"
            ended.refused(file.name)
        file.unlink()


def test_hostile_images_are_replaced_and_run_nothing(tmp_path, small_yaml):
    marker, data = tmp_path / "marker", tmp_path / "data"
    for part in ("train", "val"):
        for name in ("ant", "bee"):
            (data / part / name).mkdir(parents=True)
            for number in range(8):
                np.save(data / part / name / f"{number}.npy", np.full((8, 8), number, np.uint8))
    unreadable = {
        f"{kind}.{ending}": content for kind, content in hostile_files(marker).items() for ending in ("npy", "png")
    }
    for name, content in unreadable.items():
        (data / "train/ant" / name).write_bytes(content)
    flags = f"-cfg {small_yaml} -output {tmp_path}/runs -dataset imagefolder -data_path {data} -epochs 1"
    options = "-opts DATA.PIXELS=native DATA.MAX_BAD_FRACTION=0.9 DATA.DROP_LAST=false"
    ended = typed("main_single_gpu.py", *flags.split(), *options.split()).done()
    assert not marker.exists()
    assert_names(ended.stdout, *unreadable)


def test_hostile_files_run_code_in_readers_that_trust_them(tmp_path, monkeypatch):
    # Another test of this process may have fetched weights by a name, after which torch trusts no file.
    monkeypatch.delenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", raising=False)
    marker = tmp_path / "marker"
    for kind, content in hostile_files(marker).items():
        trusting(content)
        assert marker.exists(), f"{kind}: the file must be a real threat"
        marker.unlink()


@functools.cache
def calls() -> list[tuple[str, str, dict[str, str]]]:
    """Return (file, full name of the called function, its named arguments) of all calls in the program."""
    found = []
    for path in OURS:
        names = names_of_imports(parsed(path))
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call):
                first, *rest = ast.unparse(node.func).split(".")
                named = {each.arg: ast.unparse(each.value) for each in node.keywords if each.arg}
                found.append((str(path.relative_to(ROOT)), ".".join([names.get(first, first), *rest]), named))
    return found


def names_of_imports(tree: ast.Module) -> dict[str, str]:
    """Return {name in the file: full name} of everything that a file imports: np is numpy."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_program_code_never_loads_files_unsafely():
    unsafe = "eval exec compile yaml.load yaml.unsafe_load yaml.full_load torch.jit.load torch.hub.load".split()
    for file, function, named in calls():
        assert function not in unsafe, f"{file}: {function}"
        assert not function.endswith((".extract", ".extractall")), f"{file}: {function} writes what a tar says"
        if function == "torch.load":
            assert named.get("weights_only") == "True", file
        if function == "numpy.load":
            assert named.get("allow_pickle") == "False", file
        if function == "PIL.Image.open":  # with the allowed formats, because for some others Pillow starts Ghostscript
            assert "formats" in named, file
    called = {function for _, function, _ in calls()}
    assert called >= {"torch.load", "numpy.load", "PIL.Image.open"}
    assert not any("LOAD_TRUNCATED_IMAGES" in path.read_text() for path in OURS)


def test_only_the_reader_of_paddle_files_imports_pickle():
    """It replaces the method that finds classes; tests/unit/models/test_paddle_weights.py opens hostile files."""
    unpickling = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    importing = [path.relative_to(ROOT).as_posix() for path in OURS if imported(path) & unpickling]
    assert importing == ["models/weights/paddle.py"]


def test_durations_never_use_the_wall_clock():
    # MLflow needs a timestamp for each value. Run identities, status.json, ends and heartbeats have timestamps too.
    names = ("record/saved_run", "train/forecast", "session")
    times_of_day = [
        "utils/runs.py",
        "engine/train/budget.py",
        "engine/record/trackers/mlflow_listener.py",
        *(f"engine/{name}.py" for name in names),
    ]
    for file, function, _ in calls():
        clocks = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow")
        assert file in times_of_day or not function.endswith(clocks), f"{file}: {function}"


SECRETS = {
    name: f"the-secret-of-{name}"
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SLURM_JWT", "DATABASE_URL", "HALFSTEP_ANYTHING")
}


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_run_files_and_output_contain_no_secret_environment_variables(tmp_path, start, processes):
    """Check two runs: one that succeeds, and one that fails with a traceback."""
    profile = ["-profile", "1"]
    flags = ["-batch_size", "4", *profile, "-opts", "TRACK=tensorboard", "DATA.SYNTHETIC_SIZE=256"]
    done = start(tmp_path / "done", *flags, processes=processes, set_variables=[SECRETS])
    failed = start(tmp_path / "failed", *flags, processes=processes, set_variables=[SECRETS], break_update=[3])
    assert done.returncode == 0 and failed.returncode == 1, done.printed + failed.printed
    for output in ("done", "failed"):
        files = [path for path in run_folder(tmp_path / output).rglob("*") if path.is_file()]
        assert {"config.yaml", "log.txt", "status.json", "steps.csv"} <= {path.name for path in files}
        for path in files:
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            assert b"the-secret-of" not in content and not any(name.encode() in content for name in SECRETS), path
    assert "the-secret-of" not in done.printed + failed.printed
