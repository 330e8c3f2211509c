"""The folder of one run: its name, and its lock against a second run."""

import fcntl
import time
from pathlib import Path

from configs.schema import Config
from utils.errors import ConfigError


class RunFolder:
    """A folder locked by this process until it ends."""

    def __init__(self, path: Path, is_new: bool = False):
        """`is_new`: it was made for this run."""
        self.path, self.is_new = path, is_new
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = open(path / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise cannot_write(str(path), error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system, even after kill -9
        except OSError as error:
            raise ConfigError(
                f"SAVE: another run is writing to {path}; wait for it, stop it, or choose another folder with -output, -name "
                "or -tag"
            ) from error

    @classmethod
    def of(cls, config: Config, kind: str, existing: Path | None) -> "RunFolder":
        """The folder of the run that goes on, if it has one, or a new one."""
        check_name(config, existing)
        if existing:
            return cls(existing)
        if config.NAME and not _names_a_run_to_evaluate(config):
            return cls.named(config)
        return cls.create(config.SAVE, kind, config.NAME or config.TAG)

    @classmethod
    def named(cls, config: Config) -> "RunFolder":
        """SAVE/NAME; of two runs that start at once with the same name one gets it."""
        path = Path(config.SAVE, config.NAME)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            check_name(config, None)
            return cls(path)
        except OSError as error:
            raise cannot_write(config.SAVE, error) from error
        return cls(path, is_new=True)

    @classmethod
    def create(cls, save: str, kind: str, tag: str) -> "RunFolder":
        """Create a new folder, `train-YYYYmmdd-HH-MM-SS[-TAG]`."""
        name = f"{kind}-{time.strftime('%Y%m%d-%H-%M-%S')}{'-' + tag if tag else ''}"
        for path in [Path(save) / name] + [Path(save) / f"{name}.{number}" for number in range(2, 100)]:
            try:
                path.mkdir(parents=True)
                return cls(path, is_new=True)
            except FileExistsError:
                if not path.is_dir():
                    break
            except OSError as error:
                raise cannot_write(save, error) from error
        raise ConfigError(f"SAVE: cannot make a folder in {save}; choose another with -output")


def cannot_write(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"SAVE: cannot write to {path} ({error.strerror}); choose another folder with -output")


def check_name(config: Config, existing: Path | None) -> None:
    """Refuse a NAME that is taken, or that is not the one of the run that goes on, in the folder `existing`.

    A run that -resume auto would go on with, but that was killed before its first save, starts again in its folder.
    """
    if not config.NAME or _names_a_run_to_evaluate(config):
        return
    path, other = Path(config.SAVE, config.NAME), "choose another -name"
    if existing and existing.name != config.NAME:
        raise ConfigError(
            f"NAME: a run keeps its folder, and the one to resume is in {existing}, not in {config.NAME}; leave NAME out"
        )
    if existing or not path.exists():
        return
    if not (path.is_dir() and ((path / ".lock").exists() or not any(path.iterdir()))):
        raise ConfigError(f"NAME: {path} exists, and no run made it; {other}")
    if config.MODEL.RESUME == "auto":
        if (path / "last.pth").exists():
            raise ConfigError(f"NAME: no checkpoint in {path} can be read, so the run there cannot go on; {other}")
        return
    goes_on = f"-resume {path} goes on with that run; for a new one " if (path / "last.pth").exists() else ""
    raise ConfigError(f"NAME: {path} exists; {goes_on}{other}")


def _names_a_run_to_evaluate(config: Config) -> bool:
    return config.EVAL and config.MODEL.RESUME == "auto"
