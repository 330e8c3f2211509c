"""DATA_PATH: where the data is, and what to say when it is not there."""

from pathlib import Path

from configs.schema import Data
from utils.errors import DataError, not_a_file


def data_root(data: Data, expects: str) -> Path:
    """DATA_PATH, which exists; `expects` says what the data set wants to find there."""
    root = Path(data.DATA_PATH).expanduser()
    if not root.exists():
        raise DataError(f"DATA.DATA_PATH: nothing at {root}; {what_is_expected(data, expects)}")
    kind = not_a_file(root)
    if kind not in (None, "a folder"):
        raise DataError(f"DATA.DATA_PATH: {root} is {kind}; {what_is_expected(data, expects)}")
    return root


def what_is_expected(data: Data, expects: str) -> str:
    """The end of every message about a layout that is not as it must be."""
    return f"{data.DATASET} expects {expects} there; set -data_path or -dataset (layouts: docs/data.md)"
