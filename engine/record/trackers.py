"""Starts the process of each tracker that TRACK names, and ends it with the run."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config
from configs.values import flatten
from engine.record.follower import END, FAILED, SAY, WARN
from utils.distributed import Process
from utils.errors import ConfigError, cause_of
from utils.log import Log

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}  # what pip installs
PATIENCE = 8.0  # seconds that the end of a run waits for a tracker that does nothing
LONGEST_END = 60.0  # and for one that still sends
ROOT = Path(__file__).resolve().parent.parent.parent


def check_trackers(config: Config) -> None:
    """Refuse a tracker whose package is missing."""
    for name in config.TRACK:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # without an origin it is a folder of that name
            raise ConfigError(f"TRACK: {name} needs the package {PACKAGES[name]}: pip install {PACKAGES[name]}")


def describe_trackers(config: Config) -> list[str]:
    """For -check: the trackers of the run, with the versions of their packages."""
    check_trackers(config)
    distributions = importlib.metadata.packages_distributions()
    return [f"{name} {importlib.metadata.version(distributions[name][0])}" for name in dict.fromkeys(config.TRACK)]


@contextlib.contextmanager
def tracking(config: Config, folder: Path, process: Process, log: Log) -> Iterator[None]:
    """Show the run on all trackers of TRACK while the block runs."""
    names = dict.fromkeys(config.TRACK) if process.is_first else ()
    processes = [each for name in names if (each := start(name, config, folder, log))]
    end = FAILED
    try:
        yield
        end = END
    finally:
        for each in processes:
            each.tell(end)
        deadline = time.monotonic() + LONGEST_END
        for each in processes:
            each.wait(deadline)


def start(name: str, config: Config, folder: Path, log: Log) -> "TrackerProcess | None":
    try:
        return TrackerProcess(name, config, folder, log)
    except OSError as error:
        log.warn(f"{name}: cannot be started ({cause_of(error)}); training continues")
        return None


class TrackerProcess:
    """The process that follows the run (engine/record/follower.py), seen from the run."""

    def __init__(self, name: str, config: Config, folder: Path, log: Log):
        self._name, self._log, self._heard, self._is_left = name, log, time.monotonic(), False
        command = [sys.executable, "-m", "engine.record.follower", str(folder), name, str(os.getpid())]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
            start_new_session=True,  # Ctrl-C is for the run
        )
        self.tell(json.dumps({"settings": flatten(config)}))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def _listen(self) -> None:
        for line in self._process.stdout:
            kind, text = json.loads(line)
            self._heard = time.monotonic()
            if kind in (SAY, WARN):
                (self._log.say if kind == SAY else self._log.warn)(text)
        code = self._process.wait()
        if code and not self._is_left:
            self._log.warn(f"{self._name}: its process ended with code {code}; training continues")

    def wait(self, deadline: float) -> None:
        """Wait for its end while it does something, and then end it."""
        asked = time.monotonic()
        while self._process.poll() is None:
            now = time.monotonic()
            if now > min(deadline, max(asked, self._heard) + PATIENCE):
                self._log.warn(
                    f"{self._name}: not everything was sent when the run ended; it has what was sent until now"
                )
                self._is_left = True
                with contextlib.suppress(ProcessLookupError):  # it has ended just now
                    os.killpg(self._process.pid, signal.SIGKILL)
            time.sleep(0.05)
        self._thread.join(1.0)  # what it said last
