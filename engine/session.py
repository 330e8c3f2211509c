"""One start of the program: its process, log and run folder."""

import contextlib
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import torch

from configs.load import LoadedConfig, to_yaml
from engine.run_folder import RunFolder
from engine.status import Status
from utils.distributed import Process
from utils.files import write_text
from utils.log import Log
from utils.program import judge, restore_gc, revision


class Session:
    """Process, log and folder of a run, from start to end. Only process 0 writes to the folder."""

    def __init__(self, loaded: LoadedConfig, process: Process):
        self.process, self.log = process, Log(process.rank, process.world_size)
        self.path = Path()
        self._loaded = loaded
        self._folder: RunFolder | None = None
        self._status: Status | None = None
        self._is_new = True
        self._made: list[Path] = []  # SAVE and its parents that this start has created, innermost first
        self._has_begun = False
        self._revision = ""
        for note in loaded.notes:
            self.log.say(note)

    def open_folder(self, kind: str, existing: Path | None = None) -> None:
        """Create the run folder, or continue in that of an earlier start."""
        self.path = self.process.first(lambda: self._open(kind, existing))
        self.log.open(self.path)
        self.log.note(f"flags: {shlex.join(self._loaded.arguments)}")
        self._revision = revision()
        self.log.note(f"halfstep {self._revision}")
        self.log.note(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")

    def _open(self, kind: str, existing: Path | None) -> Path:
        config = self._loaded.config
        save = Path(config.SAVE)
        self._made = [folder for folder in (save, *save.parents) if not folder.exists()]
        self._folder = RunFolder.of(config, kind, existing)
        self._is_new = self._folder.is_new
        self._status = Status(self._folder.path, self.log.warn)
        if self._is_new:  # a run that is to be resumed is left as it is until all checks have passed
            self._status.set("starting")
        return self._folder.path

    def begin(self, loaded: LoadedConfig) -> None:
        """All checks have passed: take over the folder, and write the settings to config.yaml."""
        self._has_begun = True
        restore_gc()
        if self._folder:
            # A run started from this file is a new one: no resume, no rendezvous of this run.
            config = loaded.config
            anew = dataclasses.replace(
                config,
                NAME="",
                MODEL=dataclasses.replace(config.MODEL, RESUME=None),
                DIST=dataclasses.replace(config.DIST, URL=None, WORLD_SIZE=None, RANK=None),
            )
            write_text(self.path / "config.yaml", to_yaml(anew, loaded.origins))

    def describe(self, **facts) -> None:
        """Note in status.json, from the next state on, what runs here and by which versions."""
        if self._status:
            versions = {name: version(name) for name in ("torch", "timm")}
            python = sys.version.split()[0]
            about = {"command": self._loaded.arguments, "halfstep": self._revision, **versions, "python": python}
            self._status.add(about=about | facts)

    def status(self, state: str, **facts) -> None:
        """Write status.json. Facts stay from one state to the next; None removes one."""
        if self._status:
            self._status.set(state, **facts)

    def beat(self, **facts) -> None:
        """Show in status.json that the run is alive."""
        if self._status:
            self._status.beat(**facts)

    def advise(self, lines: Iterable[str]) -> None:
        """Say what to do next, in process 0."""
        for line in lines if self.process.is_first else ():
            self.log.say(line)

    def end(self, error: BaseException | None) -> None:
        """End the run, with an error in status.json. A start that did not get to `begin` leaves no new folder."""
        if self._folder and self._is_new and not self._has_begun:
            shutil.rmtree(self.path)
            with contextlib.suppress(OSError):  # another run is writing there
                for folder in self._made:
                    folder.rmdir()
        elif error and self._has_begun and self._folder:
            reason = f"{type(error).__name__}: {error}"
            self.status("failed", reason=reason, exit_code=judge(error)[0], eta_seconds=None)
        self.log.close()
        if error is None:
            self.process.close()
