"""A plugin of pytest: remembers how long each test file takes, and with --quick runs those that fit into a minute.

There is no list to keep: what is left out follows from the durations of the runs before. Of files that never ran, those
that start programs are left out.
"""

import os
from collections import Counter
from pathlib import Path

SECONDS = (
    60.0  # of tests for each worker; starting and collecting take the rest of the 90 that scripts/test.sh promises
)
STARTS_PROGRAMS = ("support.runs", "support.forks", "subprocess", "main_single_gpu", "main_multi_gpu")
KEY = "halfstep/seconds_of_files"


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the quickest test files, by the last runs")


def pytest_configure(config):
    config.pluginmanager.register(Durations(config), "durations")


class Durations:
    """The seconds of each file of this run, which are added to those of the runs before."""

    def __init__(self, config):
        self.config, self.seconds = config, Counter()
        self.cache = getattr(config, "cache", None)  # None with -p no:cacheprovider

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self, session):
        if self.cache and not hasattr(self.config, "workerinput") and not self.config.option.keyword:
            known = self.cache.get(KEY, {})
            self.cache.set(KEY, known | {file: round(each, 2) for file, each in self.seconds.items()})

    def pytest_collection_modifyitems(self, config, items):
        if not config.getoption("--quick"):
            return
        known = self.cache.get(KEY, {}) if self.cache else {}
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        files = {item.nodeid.partition("::")[0]: item.path for item in items}
        seconds = {file: known.get(file, guess(path)) for file, path in files.items()}
        left, chosen = SECONDS * min(workers, os.cpu_count() or 1), set()
        for file in sorted(seconds, key=lambda file: (seconds[file], file)):
            left -= seconds[file]
            if left >= 0:
                chosen.add(file)
        skipped = [item for item in items if item.nodeid.partition("::")[0] not in chosen]
        items[:] = [item for item in items if item.nodeid.partition("::")[0] in chosen]
        config.hook.pytest_deselected(items=skipped)


def guess(path: Path) -> float:
    """Seconds of a file that was never measured."""
    text = path.read_text(encoding="utf-8")
    return 1e9 if any(word in text for word in STARTS_PROGRAMS) else 2.0
