"""The folder of one run: its name, and its lock against a second run."""

import fcntl
import time
from pathlib import Path

from utils.errors import ConfigError


class RunFolder:
    """A folder locked by this process until it ends."""

    def __init__(self, path: Path):
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"SAVE: cannot write to {path} ({error.strerror}); choose another folder with -output"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system, even after kill -9
        except OSError as error:
            raise ConfigError(
                f"SAVE: another run is writing to {path}; wait for it, stop it, or choose another folder with -output or -tag"
            ) from error

    @classmethod
    def create(cls, save: str, kind: str, tag: str) -> "RunFolder":
        """Create a new folder, `train-YYYYmmdd-HH-MM-SS[-TAG]`."""
        name = f"{kind}-{time.strftime('%Y%m%d-%H-%M-%S')}{'-' + tag if tag else ''}"
        for path in [Path(save) / name] + [Path(save) / f"{name}.{number}" for number in range(2, 100)]:
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                if not path.is_dir():
                    break
            except OSError as error:
                raise ConfigError(
                    f"SAVE: cannot write to {save} ({error.strerror}); choose another folder with -output"
                ) from error
        raise ConfigError(f"SAVE: cannot make a folder in {save}; choose another with -output")
