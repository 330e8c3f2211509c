"""Builds the wheel, installs it into an empty environment, and runs `halfstep` from a folder with the user's modules.

Nothing is downloaded: the packages that halfstep needs are those of the environment that runs the tests.
"""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.forks import DEADLINE
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, run_folder, status_of, wait_until
from tests.support.wheels import OPTIONS, SMALL, copy_tree, make_users_folder, printed_commands

QUICK = [*OPTIONS, "REPORT=false"]
# {command: its words, words that it prints}
COMMANDS = {
    "check": (["check", *SMALL, "-opts", *OPTIONS], ["vit_digits", "updates"]),
    "evaluate": (["evaluate", "latest", "-data_path", "photos"], ["Acc@1", "halfstep predict"]),
    "sweep": (
        ["sweep", *SMALL, "-epochs", "1", "-seeds", "0,1", "-output", "sweep", "-opts", *QUICK],
        ["halfstep compare sweep"],
    ),
    "compare": (["compare", "sweep"], ["top-1"]),  # after the sweep
}
PROCESSES = {
    "own launcher": ["halfstep", "train", *SMALL, "-ngpus", "2"],
    "torchrun": [*"torchrun --standalone --nproc_per_node 2 --no-python halfstep train".split(), *SMALL],
}


class Installed:
    """An environment with halfstep, and a folder from which it is started."""

    def __init__(self, environment: Path, folder: Path):
        self.folder = folder
        self.package = next(environment.glob("lib/python*/site-packages/halfstep"))
        path = os.pathsep.join([str(environment / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]])
        self.variables = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, *words: str, **options) -> subprocess.Popen:
        return subprocess.Popen(words, cwd=self.folder, env=self.variables, text=True, **options)

    def run(self, *words: str) -> Ended:
        process = self.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=DEADLINE)
        return Ended([process.returncode], out, err)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    tree, dist = copy_tree(tmp_path_factory.mktemp("tree") / "halfstep"), tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*pip, "-w", str(dist), str(tree)], check=True)
    return run_folder(dist)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Installed:
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text(sysconfig.get_path("purelib"))
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    return Installed(environment, make_users_folder(tmp_path_factory.mktemp("elsewhere")))


@pytest.fixture(scope="module")
def trained(installed) -> Ended:
    return installed.run("halfstep", "train", *SMALL, "-opts", *OPTIONS).done()


@pytest.fixture(scope="module")
def hash_of_trained(installed, trained) -> str:
    return run_hash(run_folder(installed.folder / "output"))


@pytest.mark.usefixtures("hash_of_trained")  # the hash of the run before "train longer"
def test_train_prints_commands_that_run(installed, trained):
    commands = printed_commands(trained.stdout)
    assert len(commands) == 3 and "comes with halfstep" in trained.stdout, trained.stdout
    for text in commands.values():
        words = shlex.split(text)
        assert words[0] == "halfstep"
        installed.run(*words).done()


@pytest.mark.parametrize("name", COMMANDS)
def test_command_runs_from_another_folder(installed, trained, name):
    words, printed = COMMANDS[name]
    ended = installed.run("halfstep", *words).done()
    assert not [each for each in printed if each not in ended.stdout], ended.printed
    assert ".py" not in ended.printed


@pytest.mark.parametrize("launcher", PROCESSES)
def test_two_processes_train_under_each_launcher(installed, launcher):
    ended = installed.run(*PROCESSES[launcher], "-output", launcher, "-epochs", "1", "-opts", *QUICK).done()
    assert status_of(run_folder(installed.folder / launcher))["state"] == "done"
    assert "2 processes" in ended.stdout


def test_run_killed_and_resumed_equals_the_uninterrupted_run(installed, hash_of_trained, tmp_path):
    here = Installed(installed.package.parents[3], tmp_path)
    make_users_folder(tmp_path)
    # Nobody reads the small pipe, so the run waits at one of its lines, however fast the machine is.
    process = here.start("halfstep", "train", *SMALL, "-opts", *OPTIONS, pipesize=4096, stdout=subprocess.PIPE)
    wait_until(lambda: [*tmp_path.glob("output/*/last.pth")] or process.poll() is not None)
    folder = run_folder(tmp_path / "output")
    assert status_of(folder)["pid"] == process.pid
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    ended = here.run("halfstep", "resume").done()
    assert "resum" in ended.stdout and run_folder(tmp_path / "output") == folder
    assert run_hash(folder) == hash_of_trained
