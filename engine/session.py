"""One start of the program: its settings, process, log, and the folder that it writes to."""

import dataclasses
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

from configs.load import LoadedConfig, to_yaml
from configs.values import flatten
from engine.run_folder import RunFolder
from utils.distributed import Process
from utils.files import write_text
from utils.log import Log
from utils.program import restore_gc


class Session:
    """What every part of a run needs at hand. Only process 0 writes; the others ask and are told."""

    def __init__(self, loaded: LoadedConfig, process: Process):
        self.config = loaded.config
        self.settings = flatten(loaded.config)
        self.process = process
        self.log = Log(process.rank)
        self.started = loaded.started
        self.path = Path()
        self._loaded = loaded
        self._folder: RunFolder | None = None
        self._is_new = True
        self._has_begun = False
        for note in loaded.notes:
            self.log.say(note)

    def open_folder(self, kind: str, existing: Path | None = None) -> None:
        """Make the run's folder, or go on in one that an earlier start of it made."""
        self._is_new = existing is None
        self.path = self.process.first(lambda: self._open(kind, existing))
        self.log.open(self.path)
        self.log.note(f"flags: {shlex.join(self._loaded.arguments)}")
        self.log.note(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")

    def _open(self, kind: str, existing: Path | None) -> Path:
        config = self.config
        self._folder = RunFolder(existing) if existing else RunFolder.create(config.SAVE, kind, config.TAG)
        return self._folder.path

    def settle_batch_size(self, number: int, how: str) -> None:
        """From here on the settings have this number where they said auto; those that are saved too."""
        self._loaded = self._loaded.with_batch_size(number, how)
        self.config = self._loaded.config
        self.settings = flatten(self.config)

    def begin(self) -> None:
        """All is found right: from here on the folder is this start's, and says with which settings."""
        self._has_begun = True
        restore_gc()
        if self._folder:
            # Whoever starts from this file wants the same run anew, not this one to go on, nor to be its process 0.
            config = self.config
            anew = dataclasses.replace(
                config,
                MODEL=dataclasses.replace(config.MODEL, RESUME=None),
                DIST=dataclasses.replace(config.DIST, URL=None, WORLD_SIZE=None, RANK=None),
            )
            write_text(self.path / "config.yaml", to_yaml(anew, self._loaded.origins))

    def status(self, state: str, **facts) -> None:
        if self._folder:
            try:
                self._folder.status(state, **facts)
            except OSError as error:
                self.log.warn(f"cannot write {self.path / 'status.json'} ({error}), which should say: {state}")

    def end(self, error: BaseException | None) -> None:
        """The run is over: say why in status.json. A start that never began leaves no folder, nor a trace in an old one."""
        if error and self._folder:
            if self._has_begun:
                self.status("failed", reason=f"{type(error).__name__}: {error}")
            elif self._is_new:
                shutil.rmtree(self.path)
        self.log.close()
        if error is None:
            self.process.close()
