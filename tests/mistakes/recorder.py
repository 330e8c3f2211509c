"""A plug-in for pytest that records which lines of the program each test executes, also in programs that it starts.

    LINES_FOLDER=FOLDER python -m pytest -p tests.mistakes.recorder -n 3 --dist loadscope

Each process writes a JSON file to FOLDER: {"lines": {context: {file: bits of its lines in hex}}, "seconds": {context:
seconds}, "fixtures": {test: contexts of its fixtures}}. A context is a test, or a fixture that several tests share.
"""

import atexit
import json
import multiprocessing.util
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import coverage
import pytest
from coverage.numbits import nums_to_numbits

ROOT = Path(__file__).resolve().parents[2]
FOLDER, CONTEXT = "LINES_FOLDER", "LINES_CONTEXT"  # environment variables, which started programs inherit


class Recorder:
    """Records the executed lines of the program in this process, for one context at a time."""

    def __init__(self):
        self.coverage = coverage.Coverage(data_file=None, config_file=False, messages=False, source=[str(ROOT)],
                                          omit=["*/tests/*"])  # fmt: skip
        self.facts: dict = {"seconds": defaultdict(float), "fixtures": {}}
        self.pid, self.folder = os.getpid(), os.environ[FOLDER]  # a process of several programs may end without it
        self.coverage.start()

    def switch(self, context: str) -> None:
        os.environ[CONTEXT] = context
        self.coverage.switch_context(context)

    def save(self) -> None:
        """Write what this process recorded; nothing if it is a fork of the process that this object belongs to."""
        if self.pid != os.getpid():
            return
        self.coverage.stop()
        data, lines = self.coverage.get_data(), {}
        for context in sorted(data.measured_contexts()):
            data.set_query_context(context)
            measured = {file: data.lines(file) for file in data.measured_files()}
            lines[context] = {
                os.path.relpath(file, ROOT): nums_to_numbits(each).hex() for file, each in measured.items() if each
            }
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".json", delete=False) as file:
            json.dump({"lines": lines} | self.facts, file)


# --- the process of the tests ---

RECORDERS: list[Recorder] = []  # the recorder of this process, if any


def pytest_sessionstart(session) -> None:
    if not hasattr(session.config, "workerinput") and session.config.getoption("numprocesses", None):
        return  # this process only starts the processes that run tests
    RECORDERS.append(Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if RECORDERS:
        RECORDERS[0].facts["fixtures"][item.nodeid] = shared_fixtures(item)
        RECORDERS[0].switch(item.nodeid)
    return (yield)


def shared_fixtures(item) -> list[str]:
    definitions = [each[-1] for each in item._fixtureinfo.name2fixturedefs.values()]
    return [name_of(each) for each in definitions if each.scope != "function"]


def name_of(definition) -> str:
    return f"fixture {definition.argname} of {definition.baseid}"


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    before, begin = os.environ.get(CONTEXT, ""), time.perf_counter()
    if RECORDERS and fixturedef.scope != "function":
        name = name_of(fixturedef)
        RECORDERS[0].switch(name)
        try:
            return (yield)
        finally:
            RECORDERS[0].switch(before)
            seconds = time.perf_counter() - begin
            RECORDERS[0].facts["seconds"][name] += seconds
            RECORDERS[0].facts["seconds"][before] -= seconds  # which contains it
    return (yield)


def pytest_runtest_logreport(report) -> None:
    if RECORDERS:
        RECORDERS[0].facts["seconds"][report.nodeid] += report.duration


def pytest_sessionfinish(session) -> None:
    for each in RECORDERS:
        each.save()


# --- the programs that tests start, and their processes ---


def record_program() -> None:
    """Record the lines of this process and of its forks, for the context in the environment."""
    sys.settrace(None)  # a fork inherits the recording of its parent
    recorder = Recorder()
    recorder.switch(os.environ[CONTEXT])
    RECORDERS[:] = [recorder]
    atexit.register(recorder.save)
    multiprocessing.util.register_after_fork(recorder, record_fork)


def record_fork(recorder: Recorder) -> None:
    if recorder is RECORDERS[0]:
        sys.settrace(None)
        RECORDERS[:] = [Recorder()]
        RECORDERS[0].switch(os.environ[CONTEXT])
        multiprocessing.util.Finalize(None, RECORDERS[0].save, exitpriority=0)
