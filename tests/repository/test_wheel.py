"""The wheel has the right files and metadata, and runs from a folder with modules of its user.

tests/release/test_wheel.py installs the wheel with pip, and runs all of its commands.
"""

import re
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.support.forks import ROOT
from tests.support.runs import run, run_folder, status_of
from tests.support.wheels import OPTIONS, SMALL, build_wheel, copy_tree, make_users_folder, printed_commands
from utils import VERSION

pytestmark = pytest.mark.slow

MOST_BYTES = 14 * 10**6  # of the wheel
NEVER_INSTALLED = ("tests", "deploy", "output", ".venv", "scripts/benchmarks", "scripts/maintenance", "scripts/test.sh")
NAMED = re.compile(r"(?:docs|configs|weights)/[\w/-]+\.(?:md|yaml|safetensors)|(?:README|RELIABILITY|BENCHMARKS)\.md")
PLACEHOLDER = "configs/x.yaml"  # of a comment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    tree = copy_tree(tmp_path_factory.mktemp("tree") / "halfstep")
    return build_wheel(tree, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def package(wheel, tmp_path_factory) -> Path:
    """Unpack the wheel, and return the folder of its package."""
    folder = tmp_path_factory.mktemp("packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "halfstep"


def test_wheel_is_small_and_holds_the_files_that_messages_name(wheel, package):
    assert wheel.stat().st_size <= MOST_BYTES
    files = [path for path in package.rglob("*") if path.is_file()]
    names = {str(path.relative_to(package)) for path in files}
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix == ".py"]
    assert not [name for name in names if name.startswith(NEVER_INSTALLED) or name.endswith((".pyc", ".pth", ".sh"))]
    named = {each for text in texts for each in NAMED.findall(text)} - {PLACEHOLDER}
    shipped = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.yaml")]}
    assert len(named) > 10 and named <= names, named - names
    assert shipped | {"weights/tf_efficientnet_lite0.safetensors", "__main__.py"} <= names


def test_wheel_names_its_program_version_and_requirements(package):
    (about,) = package.parent.glob("*.dist-info")
    assert (about / "entry_points.txt").read_text().split("\n")[:2] == [
        "[console_scripts]",
        "halfstep = halfstep.__main__:main",
    ]
    metadata = message_from_string((about / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"], metadata["Requires-Python"]) == ("halfstep", VERSION, ">=3.11")
    required = {text.replace(" ", "") for text in metadata.get_all("Requires-Dist")}
    assert {"torch>=2.11", "timm>=1.0.20", "pyyaml"} <= required
    assert {"onnxruntime;extra=='onnx'", "pillow-heif;extra=='heic'"} <= {text.replace('"', "'") for text in required}


def test_unpacked_wheel_trains_beside_modules_of_its_user_and_prints_its_commands(package, tmp_path):
    make_users_folder(tmp_path)
    words = [str(package / "scripts/train.py"), *SMALL, "-opts", *OPTIONS]
    ended = run(*words, cwd=tmp_path, faults={"forget_our_modules": []}).done()
    assert status_of(run_folder(tmp_path / "output"))["state"] == "done"
    assert "comes with halfstep" in ended.stdout
    commands = printed_commands(ended.stdout)
    assert len(commands) == 3 and all(text.startswith("halfstep ") for text in commands.values()), ended.stdout
