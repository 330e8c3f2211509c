"""The session of one start of the program: process, log, folder of the run, and status.json."""

import contextlib
import fcntl
import itertools
import json
import os
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import torch

from configs.load import LoadedConfig, to_yaml
from configs.schema import Config
from datasets.types import SavedData
from utils.distributed import Process
from utils.errors import ConfigError, FruitlessStart, cause_of
from utils.files import LOCK, FolderLock, FolderMoved, check_writable, creating, write_text
from utils.log import Log
from utils.program import OF_THE_DISK, exit_code_and_message, restore_gc, start_ticks
from utils.revision import revision
from utils.runs import CHOICE, Identity
from utils.text import cut, printable

NUM_TRIES, BETWEEN_TRIES = 11, 0.1  # to lock a run's folder; seconds between two tries


class Session:
    """Process, log and folder of a run, from start to end. Only process 0 writes status.json and config.yaml."""

    SECONDS_BETWEEN_BEATS = 10.0

    def __init__(
        self,
        loaded: LoadedConfig,
        process: Process,
        part: str = "",
        outer: "Session | None" = None,
        divided: SavedData | None = None,
    ):
        """`part`: the title of a run that is a part of the run `outer`. It prints nothing but its progress bar.

        `divided`: how `outer` has divided the images.
        """
        self.process, self.log = process, Log(process.rank, process.world_size, part)
        self.path = Path()
        self.identity = Identity("", "", "")  # the identity of the run, the same in every process
        self._loaded, self._outer, self.divided = loaded, outer, divided
        self._lock: FolderLock | None = None  # in every process
        self._owned: Path | None = None  # in process 0: the run's folder, locked by `_lock_file` until the process ends
        self._lock_file: IO[bytes] | None = None
        self._is_new, self._has_begun = False, False
        self._made: list[Path] = []  # the folders in the path of SAVE that this start creates, innermost first
        self._facts: dict[str, Any] = {}  # the content of status.json
        self._writes_status = threading.Lock()  # the thread that writes checkpoints also writes status.json
        self._beat = threading.Thread()
        self._last_write = time.monotonic()
        self._revision = ""
        self.log.say(*loaded.notes)

    def open_folder(self, kind: str, existing: Path | None = None, saved: Mapping[str, Any] | None = None) -> None:
        """Create the run folder, or continue in the folder `existing`, whose checkpoint is `saved`."""
        self.path, self.identity = self.process.first(lambda: self._open(kind, existing, saved or {}), Identity)
        self._lock = FolderLock(self.path)
        with self._writing("log.txt"):
            self.log.open(self.path)
        self.log.note(f"flags: {shlex.join(self._loaded.arguments)}")
        self._revision = revision()
        self.log.note(f"halfstep {self._revision}")
        self.log.note(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")

    def _open(self, kind: str, existing: Path | None, saved: Mapping[str, Any]) -> tuple[Path, Identity]:
        save = Path(self._loaded.config.SAVE)
        self._made = [each for each in (save, *save.parents) if not each.exists()]
        folder, self._is_new = make_folder(self._loaded.config, kind, existing)
        self._lock_file, has_lock = lock_folder(folder)
        self._owned = folder
        if not has_lock:
            self.log.warn(
                f"SAVE: {folder} is on a file system without locks, so a second start of this run would not be "
                "refused; start the run only once"
            )
        known = Identity.of(saved) if existing else None
        identity = known or Identity.new(folder)
        self._facts = {
            "version": 1,  # version of this format; it changes only if a key changes its meaning or is removed
            "state": "",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_ticks": start_ticks(os.getpid()),
            "started": now(),
            "kind": kind,
            "run": saved["run"] if known else identity._asdict(),
        }
        if self._is_new:  # the status of a resumed run stays unchanged until all checks have passed
            self.status("starting")
        return folder, identity

    def begin(self, loaded: LoadedConfig) -> None:
        """Take over the folder after all checks have passed, and write the settings to config.yaml."""
        self._has_begun = True
        restore_gc()
        self.check_folder()
        if self._owned:
            with self._writing("config.yaml"):
                write_text(self.path / "config.yaml", to_yaml(loaded.config, loaded.origins))
                if loaded.choice:
                    write_text(self.path / CHOICE, json.dumps(loaded.choice, indent=2) + "\n")

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Raise ConfigError if this required file cannot be written. Raise errors such as a full disk unchanged."""
        try:
            yield
        except OSError as error:
            raise error if error.errno in OF_THE_DISK else cannot_write(str(self.path / name), error) from error

    def describe(self, **facts) -> None:
        """Add the command, the versions and these facts to the next state that is written to status.json."""
        described = {"command": [*map(printable, self._loaded.arguments)], "halfstep": self._revision}
        described |= {name: version(name) for name in ("torch", "timm")} | {"python": sys.version.split()[0]}
        self._facts["about"] = self._facts.get("about", {}) | described | facts

    def status(self, state: str, **facts) -> None:
        """Write status.json. Each fact keeps its value until a new one is given. A value of None removes the key."""
        if self._beat.ident:
            self._beat.join()
        self._write_status(state=state, time=now(), **facts)

    def beat(self, **facts) -> None:
        """Write a heartbeat to status.json, which shows that the run is alive, at most every 10 s.

        A thread writes it, so that a slow disk does not delay training.
        """
        if self._outer:
            self._outer.beat()
        is_due = time.monotonic() - self._last_write >= self.SECONDS_BETWEEN_BEATS
        if self._owned and is_due and not self._beat.is_alive():
            beat = threading.Thread(target=self._write_in_background, kwargs=facts, daemon=True)
            beat.start()
            self._beat = beat  # assigned last, because the thread that writes checkpoints may join it at any moment

    def _write_in_background(self, **facts) -> None:
        with contextlib.suppress(FolderMoved):  # the next save raises it
            self._write_status(**facts)

    def _write_status(self, **facts) -> None:
        """Write status.json in process 0. If it cannot be written, only warn."""
        if not self._owned:
            return
        with self._writes_status:
            self._last_write = time.monotonic()
            self._facts |= {**facts, "heartbeat": now()}
            content = {key: value for key, value in self._facts.items() if value is not None}
            path = self._owned / "status.json"
            try:
                write_text(path, json.dumps(content, indent=2) + "\n", self.check_folder)
            except OSError as error:
                self.log.warn(f"cannot write {path} ({cause_of(error)}); the run's state is: {content['state']}")

    def advise(self, lines: Iterable[str]) -> None:
        """Print the next steps, in process 0."""
        self.log.say(*(lines if self.process.is_first else ()))

    def check_folder(self) -> None:
        """Raise FolderMoved if the run's folder was moved or deleted, or belongs to another run now."""
        if self._lock:
            self._lock.check()

    def end(self, error: BaseException | None) -> None:
        """End the run, with its error in the log and status.json.

        Remove a new folder if `begin` was not called, or if a FruitlessStart has left it without a checkpoint.
        """
        code, message = exit_code_and_message(error) if error else (0, "")
        reason = printable(f"{type(error).__name__}: {error}")
        if message != "":  # empty: another process prints the error
            self.log.note(f"error: {cut(message or reason)}")
        with contextlib.suppress(FolderMoved):
            if self._owned and self._is_new and (self._is_fruitless(error) or not self._has_begun):
                self._remove_folder(self._owned)
            elif error and self._has_begun:
                self.status("failed", reason=reason, exit_code=code, eta_seconds=None)
        self.log.close()
        if error is None:
            self.process.close()

    def _is_fruitless(self, error: BaseException | None) -> bool:
        return isinstance(error, FruitlessStart) and not any(self._owned.glob("*.pth"))

    def _remove_folder(self, folder: Path) -> None:
        self.check_folder()
        if self._beat.ident:
            self._beat.join()  # it writes to the folder
        if self._has_begun:
            self.log.say(f"{folder} is removed, because nothing was saved there")
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):  # a folder that is not empty stays: another run writes there
            for parent in self._made:
                parent.rmdir()


def make_folder(config: Config, kind: str, existing: Path | None) -> tuple[Path, bool]:
    """Return the folder of the resumed run, or create a folder (see `new_folder`). Also return whether it is new.

    If runs start in the same second, the later ones get a number after the date. If two runs start with the same NAME,
    only one gets the folder.
    """
    check_name(config, existing)
    if existing:
        return existing, False
    path_asked = new_folder(config, kind)
    for number in itertools.count(1):
        path = path_asked if number == 1 else path_asked.with_name(f"{path_asked.name}.{number}")
        try:
            path.mkdir(parents=True)
            return path, True
        except FileExistsError as error:
            if path.name == config.NAME:
                check_name(config, None)
                return path, False
            if not path.is_dir():  # SAVE is a link to nothing, for example to a disk that is not mounted
                raise cannot_write(config.SAVE, error) from error
        except OSError as error:
            raise cannot_write(config.SAVE, error) from error


def lock_folder(folder: Path) -> tuple[IO[bytes], bool]:
    """Lock a run's folder. Return its lock file, and whether the file system has locks.

    The system releases the lock when the process ends, even after kill -9. The loader processes of a killed run end a
    little later than the run, so a held lock is tried again for a second.
    """
    try:
        file = open(folder / LOCK, "r+b", opener=creating)  # noqa: SIM115
    except OSError as error:
        raise cannot_write(str(folder), error) from error
    tries_left = NUM_TRIES
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file, True
        except (BlockingIOError, PermissionError) as error:
            tries_left -= 1
            if not tries_left:
                raise ConfigError(
                    f"SAVE: another run is writing to {folder}; wait for it, stop it, or choose another folder with "
                    "-output or -name"
                ) from error
            time.sleep(BETWEEN_TRIES)
        except OSError:
            return file, False


def new_folder(config: Config, kind: str) -> Path:
    """Return the path for a new run: SAVE/NAME, or SAVE/train-YYYYmmdd-HH-MM-SS (eval- for an evaluation)."""
    if config.NAME and not _names_a_run_to_evaluate(config):
        return Path(config.SAVE, config.NAME)
    return Path(config.SAVE, "-".join(filter(None, (kind, time.strftime("%Y%m%d-%H-%M-%S"), config.NAME))))


def cannot_write(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"SAVE: cannot write to {path} ({cause_of(error)}); choose another folder with -output")


def check_name(config: Config, existing: Path | None) -> None:
    """Refuse a NAME that is taken, or that differs from the name of the resumed run in the folder `existing`.

    With -resume auto, a run that was killed before its first save starts again in its folder.
    """
    if not config.NAME or _names_a_run_to_evaluate(config):
        return
    path = Path(config.SAVE, config.NAME)
    if existing and existing.name != config.NAME:
        raise ConfigError(
            f"NAME: the run to resume is in {existing} and keeps its folder, but NAME is {config.NAME}; leave NAME out"
        )
    if existing or not path.exists():
        return
    is_run, has_saved = (path / LOCK).exists(), (path / "last.pth").exists()
    is_empty = path.is_dir() and not any(path.iterdir())
    if config.MODEL.RESUME == "auto" and (is_run or is_empty) and not has_saved:
        return
    resume = f"-resume {path} continues that run; for a new one " if has_saved else ""
    raise ConfigError(f"NAME: {path} exists; {resume}choose another -name")


def check_folder(config: Config, existing: Path | None) -> Path:
    """Return the folder that a run would use, without creating it. Raise ConfigError if it is not writable."""
    check_name(config, existing)
    folder = existing or Path(config.SAVE)
    try:
        check_writable(folder)
    except OSError as error:
        raise cannot_write(str(folder), error) from error
    return existing or new_folder(config, "train")


def _names_a_run_to_evaluate(config: Config) -> bool:
    return config.EVAL and config.MODEL.RESUME == "auto"


def now() -> str:
    """Return date and time with the time zone, as in 2026-01-02T03:04:05+01:00 (RFC 3339)."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
