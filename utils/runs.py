"""A run as a user names it: by its folder, a checkpoint in it, or the word latest."""

from pathlib import Path

from utils.errors import ConfigError

BEST, LAST = "best.pth", "last.pth"
LATEST = "latest"
OUTPUT = "output"  # where runs are by default


def without_latest(source: str | Path, save: str = OUTPUT) -> str:
    """The folder of the newest run in `save` in place of the word latest; anything else, and a file of that name, as it is."""
    if str(source) != LATEST or Path(LATEST).exists():
        return str(source)
    settings = [file for file in Path(save).expanduser().glob("*/config.yaml") if weights_in(file.parent)]
    if not settings:
        raise ConfigError(f"{LATEST}: there is no run with a checkpoint in {save}; name the folder of one")
    return str(max(settings, key=lambda file: (file.stat().st_mtime_ns, file)).parent)  # a resumed run writes it again


def weights_in(folder: str | Path) -> Path | None:
    """The best weights of a run by its folder, before there are any the last; None if there are none."""
    return next((file for name in (BEST, LAST) if (file := Path(folder) / name).is_file()), None)


def folder_of(source: str | Path) -> Path:
    """The folder of the run that is named."""
    path = Path(without_latest(source)).expanduser()
    return path.parent if path.suffix == ".pth" and (path.parent / "config.yaml").exists() else path
