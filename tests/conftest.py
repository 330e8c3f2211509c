"""Fixtures and hooks for all tests."""

import gc
import signal
import sys
from pathlib import Path

import pytest

from datasets.sources import arrays
from tests.support import contracts
from tests.support.configs import SMALL
from tests.support.distribution import pytest_xdist_make_scheduler  # noqa: F401 (a hook)
from tests.support.forks import ROOT, end_server, kill_started, put_halfstep_on_path, start_server
from tests.support.graphs import read_operators_once
from tests.support.in_process import SHIPPED_DIGITS, read_few_digits
from tests.support.networks import two_hosts  # noqa: F401 (a fixture)
from tests.support.properties import pytest_collection_modifyitems, pytest_runtest_makereport  # noqa: F401 (hooks)
from tests.support.ranks import RANKS
from utils.program import STOPPING
from utils.torch_internals import import_timm

import_timm()  # before a test does, because an ordinary import of timm takes 6 s longer
contracts.install()
read_few_digits()
read_operators_once()
BEFORE = pytest.StashKey[set[Path]]()  # the files of the checkout at the start


@pytest.fixture(scope="session", autouse=True)
def halfstep_on_path(tmp_path_factory):
    put_halfstep_on_path(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module", autouse=True)
def nothing_left_running():
    yield
    kill_started()


@pytest.fixture(autouse=True)
def contracts_hold():
    contracts.BROKEN.clear()
    yield
    assert not contracts.BROKEN


@pytest.fixture(autouse=True)
def no_limit_of_pixels():
    """Reset Pillow's pixel limit, which reading a data set sets for the whole process."""

    def remove() -> None:
        if "PIL.Image" in sys.modules:
            sys.modules["PIL.Image"].MAX_IMAGE_PIXELS = None

    remove()
    yield
    remove()


@pytest.fixture(scope="session")
def small_yaml(tmp_path_factory) -> Path:
    """Write the small settings to a file and return it."""
    path = tmp_path_factory.mktemp("settings") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def all_digits(monkeypatch) -> None:
    """Let the data set `digits` have all its images in this process."""
    monkeypatch.setattr(arrays, "DIGITS", SHIPPED_DIGITS)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Run the test in an empty folder, so that messages name files by short paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def signal_handlers():
    """Restore the signal handlers that a run in this process sets."""
    before = {each: signal.getsignal(each) for each in STOPPING}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def files_of_checkout() -> set[Path]:
    return {path for folder in (ROOT, ROOT / "output") for path in folder.glob("[!._]*")}


def pytest_sessionstart(session) -> None:
    session.stash[BEFORE] = files_of_checkout()
    if session.config.getoption("numprocesses", None):
        start_server()  # one for all workers, which are started after this


def pytest_collection_finish() -> None:
    """Exempt the million objects of imported modules from garbage collection, which would search them repeatedly."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session) -> None:
    """Fail if tests left runs or files in the checkout, where `latest` would then mean a test's run."""
    RANKS.end()
    end_server()
    is_worker = hasattr(session.config, "workerinput")  # its other workers may be in the middle of a test
    if not is_worker and (left := files_of_checkout() - session.stash[BEFORE]):
        print("\nERROR: tests left these files in the checkout:", *sorted(map(str, left)))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
