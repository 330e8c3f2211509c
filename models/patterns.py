"""How settings name parts of a model: MODEL.FREEZE, PRECISION.CUSTOM_BLACK_LIST and CUSTOM_WHITE_LIST."""

from fnmatch import fnmatchcase


def covers(pattern: str, path: str) -> bool:
    """Whether the pattern matches this module or tensor, or a module that it is inside of; the model itself never."""
    parts = path.split(".")
    return bool(path) and any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))
