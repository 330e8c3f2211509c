"""Tests without the marks slow and long pass with the oldest Python, torch and timm that halfstep supports."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.support.forks import ADDRESS, ROOT

REQUIREMENTS = ("requirements.txt", "requirements-dev.txt")
PYTHON = re.search(r">=(\S+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])[1]
PACKAGES = re.findall(r"^(torch|timm)>=(\S+)", (ROOT / "requirements.txt").read_text(), re.M)


def oldest_python() -> str:
    """Return the oldest supported Python, which may be the one that runs this test."""
    if sys.version.startswith(f"{PYTHON}."):
        return sys.executable
    python = shutil.which(f"python{PYTHON}")
    if python is None and shutil.which("uv"):
        done = subprocess.run(["uv", "python", "find", PYTHON], capture_output=True, text=True)
        python = done.stdout.strip() or None
    return python or pytest.skip(f"needs Python {PYTHON} (uv python install {PYTHON})")


@pytest.fixture
def oldest(tmp_path):
    """Return the Python of an environment with the oldest versions: that of OLDEST, or a new one, several GB."""
    if "OLDEST" in os.environ:
        yield Path(os.environ["OLDEST"], "bin/python")
        return
    folder, python = tmp_path / "oldest", oldest_python()
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    words = ["torchvision", *(f"{name}=={version}" for name, version in PACKAGES)]
    if python == sys.executable:  # the other packages are those of the environment that runs this test
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    else:
        words += [word for name in REQUIREMENTS for word in ("-r", str(ROOT / name))]
    command = [folder / "bin/python", "-m", "pip", "install", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a network, or an environment in the folder that OLDEST names: {done.stderr[-500:]}")
    yield folder / "bin/python"
    shutil.rmtree(folder)


def test_quick_tests_pass_with_the_oldest_versions(oldest):
    modules = "".join(f"import {name}; print({name}.__version__.partition('+')[0]); " for name, _ in PACKAGES)
    code = f"import sys; print('{{}}.{{}}'.format(*sys.version_info)); {modules}"
    versions = subprocess.run([oldest, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert versions[0] == PYTHON, versions
    for (name, expected), version in zip(PACKAGES, versions[1:], strict=True):
        assert version == expected or version.startswith(f"{expected}."), (name, version)
    print(f"Python {versions[0]}, which is {'also' if oldest_python() == sys.executable else 'not'} the usual one here")
    environment = os.environ | {"PATH": f"{Path(oldest).parent}:{os.environ['PATH']}"}
    environment.pop(ADDRESS, None)  # the fork server of this process has other versions
    words = [oldest, "-m", "pytest", "-rs", "-m", "not slow and not long"]
    words += ["-n", str(os.cpu_count()), "--dist", "loadscope"]
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]
