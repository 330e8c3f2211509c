"""Tests that need a GPU. They are skipped without one; --on_cpu runs those with a `device` on the CPU."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--on_cpu", action="store_true", help="run the tests that take `device` on the CPU, with tiny sizes"
    )


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)
            walks = config.getoption("--on_cpu", False) and "device" in item.fixturenames
            if not torch.cuda.is_available() and not walks:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def no_wait(device):
    """Let torch raise an error if the host waits for the device, between no_wait(True) and no_wait(False)."""

    def switch(on: bool) -> None:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if on else "default")

    yield switch
    switch(False)
