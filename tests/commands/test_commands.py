"""Commands, pages and packages in messages, and the program halfstep."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep.__main__ as program
from tests.support.configs import SMALL
from tests.support.forks import ROOT
from tests.support.refusals import assert_names
from tests.support.runs import run_fresh, typed
from utils import commands
from utils.files import or_shipped, short_name


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["resume", Path("-run")], "halfstep resume ./-run"),
        (["train", "-ngpus", 2], "halfstep train -ngpus 2"),
        (["make-shards", Path("my photos")], "halfstep make-shards 'my photos'"),
    ],
)
def test_command_can_be_copied_into_a_shell(words, text):
    assert commands.command(*words) == text


def test_page_is_a_path_from_the_working_folder(here, monkeypatch):
    assert commands.page("docs/data.md") == f"{ROOT}/docs/data.md"
    monkeypatch.chdir(ROOT)
    assert commands.page("docs/data.md") == "docs/data.md"


@pytest.mark.parametrize("tool", ["pip", "another environment", "pipx", "uv"])
def test_missing_package_is_named_for_the_tool_that_made_the_environment(monkeypatch, tmp_path, tool):
    """In an environment of uv there is no pip; pipx leaves a file in its environments."""
    python = tmp_path / "python"
    python.touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path) if tool == "pip" else "")
    if tool == "pipx":
        (tmp_path / "pipx_metadata.json").touch()
    if tool == "uv":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    expected = {
        "pip": "pip install",
        "another environment": f"{python} -m pip install",
        "pipx": "pipx runpip halfstep install",
        "uv": f"uv pip install --python {python}",
    }
    assert commands.pip("install") == expected[tool]


def test_shell_without_halfstep_gets_an_alias_that_starts_it(monkeypatch):
    assert commands.alias() is None
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("sh")))
    line = f"shopt -s expand_aliases\n{commands.alias()}\nhalfstep -h"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.startswith("halfstep trains"), done.stderr


# Files whose texts generated pages have too, and the file that an older Python parses
NOT_COPIED = {"configs/schema.py", "configs/flags.py", "configs/tables.py", "utils/__init__.py"}


def texts_of(path: Path) -> list[str]:
    """Return the texts of a file except docstrings and arguments of page and pip."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    left_out |= {argument for call in calls if call.func.id in ("page", "pip") for argument in call.args}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in left_out]
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.long
def test_messages_name_pages_and_packages_through_functions():
    rooms = ("configs", "datasets", "engine", "models", "utils", "scripts")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    names = re.compile(r"docs/[\w-]+\.md|pip install|python (main_|scripts/)")
    for path in (path for path in paths if "benchmarks" not in path.parts and "maintenance" not in path.parts):
        name = str(path.relative_to(ROOT))
        assert name in NOT_COPIED or not [text for text in texts_of(path) if names.search(text)], name


def test_every_script_is_the_file_of_a_command():
    scripts = {path.name for path in (ROOT / "scripts").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert {file for file, _, _ in program.COMMANDS.values()} == {f"scripts/{name}" for name in scripts}
    for name, (file, first, _) in program.COMMANDS.items():
        assert first or Path(file).stem.replace("_", "-") == name


# --- which program a command starts ---

SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
RANK = {"RANK": "0", "WORLD_SIZE": "2"}
TRAIN, MULTI = program.TRAIN, program.MULTI
STARTS = [
    ("train -cfg vit_digits", {}, [TRAIN, "-cfg", "vit_digits"]),
    ("train -amp -ngpus 2", {}, [MULTI, "-amp", "-ngpus", "2"]),
    ("check --ngpus=2", {}, [MULTI, "-check", "--ngpus=2"]),
    ("train -rank 0 -world-size 2", {}, [MULTI, "-rank", "0", "-world-size", "2"]),
    ("train", RANK, [MULTI]),
    ("train", RANK | {"WORLD_SIZE": "1"}, [TRAIN]),
    ("train", {"RANK": "0", "WORLD_SIZE": "two"}, [MULTI]),  # it reports the mistake
    ("evaluate a.pth -amp", TORCHRUN | {"WORLD_SIZE": "2"}, [MULTI, "-eval", "-pretrained", "a.pth", "-amp"]),
    ("train", TORCHRUN, [TRAIN]),
    ("train", TORCHRUN | {"PET_NNODES": "1:4"}, [MULTI]),  # elastic: others may join
    ("train", SRUN, [MULTI]),
    ("train", SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, [TRAIN]),
    ("resume", {}, [TRAIN, "-resume", "auto"]),
    ("resume -amp", {}, [TRAIN, "-resume", "auto", "-amp"]),
    ("resume output/a -epochs 9", {}, [TRAIN, "-resume", "output/a", "-epochs", "9"]),
    ("evaluate -resume output/a", {}, [TRAIN, "-eval", "-resume", "output/a"]),
    ("predict latest photos", RANK, ["scripts/predict.py", "latest", "photos"]),
    ("make-shards -h", {}, ["scripts/make_shards.py", "-h"]),
    ("-version", {}, [TRAIN, "-version"]),
    ("--version", {}, [TRAIN, "-version"]),
]


@pytest.mark.parametrize("line, environment, expected", STARTS)
def test_command_starts_the_program_of_its_flags_and_launcher(monkeypatch, line, environment, expected):
    started = []
    for name in [each for each in os.environ if each.startswith(("SLURM", "PMI", "OMPI", "TORCHELASTIC", "PET_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/nowhere/halfstep", *line.split()])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "execv", lambda file, words: started.append((file, words)))
    program.main()
    ((file, words),) = started
    assert file == words[0] == sys.executable
    assert words[1:] == [str(ROOT / expected[0]), *expected[1:]]


def test_halfstep_alone_lists_its_commands(monkeypatch, capsys):
    for words in ([], ["-h"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["halfstep", *words])
        assert program.main() == 0
        printed = capsys.readouterr().out
        assert [line.split()[1] for line in printed.splitlines()[2:]] == [*program.COMMANDS]


@pytest.mark.parametrize("name, near", [("trian", "train"), ("exprot", "export"), ("xyz", "halfstep -h")])
def test_unknown_command_is_refused_with_a_near_one(monkeypatch, capsys, name, near):
    monkeypatch.setattr(sys, "argv", ["halfstep", name])
    assert program.main() == 2
    assert_names(capsys.readouterr().err, name, near)


# --- files by name ---


@pytest.mark.slow
def test_help_of_a_clone_run_by_module_name():
    variables = {"PATH": "", "PYTHONSAFEPATH": "1"}
    done = run_fresh("halfstep/__main__.py", "train", "-h", environment=variables).done()
    assert done.stdout.startswith("usage: halfstep train [PHOTOS] [-cfg FILE]")
    assert "halfstep evaluate output/" in done.stdout and ".py" not in done.stdout


@pytest.mark.parametrize(
    "name", ["vit_digits", "vit_digits.yaml", "configs/vit_digits.yaml", "./configs/vit_digits.yaml"]
)
def test_shipped_settings_are_found_from_another_folder(here, name):
    words = ["-output", here / "output", "-opts", "MODEL.DEPTH=1", "DATA.NUM_WORKERS=0", "REPORT=false", "TRACK=[]"]
    ended = typed("main_single_gpu.py", "-cfg", name, "-dataset", "nosuchset", *words)
    assert ended.returncode == 2
    assert_names(ended.stderr, "nosuchset")  # the file was read


def test_file_of_the_working_folder_wins_over_the_shipped_one(here):
    path = Path("configs/vit_digits.yaml")
    assert or_shipped(path) == ROOT / path and short_name(ROOT / path) == str(path)
    path.parent.mkdir()
    path.write_text(SMALL)
    assert or_shipped(path) == path and short_name(ROOT / path) == str(ROOT / path)
    assert or_shipped(Path("configs/../README.md")) == Path("configs/../README.md")
    assert or_shipped(Path("docs/data.md")) == Path("docs/data.md")  # only settings and weights


def test_base_line_finds_shipped_settings(here):
    from engine.settings import load_settings

    Path("mine.yaml").write_text("BASE: [configs/vit_digits.yaml]\nMODEL: {DEPTH: 3}\n")
    loaded = load_settings(["-cfg", "mine.yaml"])
    assert (loaded.config.MODEL.DEPTH, loaded.config.MODEL.EMBED_DIM) == (3, 64)
    assert loaded.origins["MODEL.EMBED_DIM"] == "configs/vit_digits.yaml"


def test_log_names_shipped_settings_and_weights(here):
    from engine.settings import load_settings
    from models.weights.files import find_file

    loaded = load_settings(["-cfg", "vit_digits"])
    assert loaded.notes[0] == f"-cfg: configs/vit_digits.yaml comes with halfstep ({ROOT / 'configs/vit_digits.yaml'})"
    assert loaded.origins["MODEL.DEPTH"] == "configs/vit_digits.yaml"
    for name in ("weights/tf_efficientnet_lite0", "weights/tf_efficientnet_lite0.safetensors"):
        assert find_file(name) == ROOT / "weights/tf_efficientnet_lite0.safetensors"


@pytest.mark.long
def test_number_of_processes_in_a_settings_file_is_followed_or_named(small_yaml, tmp_path):
    file = tmp_path / "two.yaml"
    file.write_text(f"NGPUS: 2\n{small_yaml.read_text()}")
    words = ["-cfg", str(file), "-output", str(tmp_path / "o"), "-check", "-check_images", "10"]
    assert "2 processes" in run_fresh("halfstep/__main__.py", "train", *words).printed
    said = typed("main_single_gpu.py", *words).printed
    assert_names(said, "NGPUS", "two.yaml", "one process", "main_multi_gpu.py")
    typed("main_single_gpu.py", *words, "-ngpus", "2").refused("NGPUS", "-ngpus 2", "main_multi_gpu.py")
    typed("main_single_gpu.py", *words, "-ngpus", "1").done()
