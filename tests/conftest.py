"""Fixtures and hooks for all tests."""

import signal
import sys
from pathlib import Path

import pytest

from tests.support import contracts
from tests.support.configs import SMALL
from tests.support.forks import ROOT, end_server, kill_started
from utils.program import STOPPING

contracts.install()


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
def checkout_stays_as_it_is():
    """Fail a test that writes runs or files into the checkout, where `latest` would mean a test's run."""

    def list_files() -> set[Path]:
        return {path for folder in (ROOT, ROOT / "output") for path in folder.glob("[!._]*")}

    before = list_files()
    yield
    assert not list_files() - before


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


def pytest_sessionfinish(session) -> None:
    end_server()
