"""DATA_PATH: where the data is, and the message when it is not there."""

from pathlib import Path

from configs.schema import Data
from utils.errors import DataError, not_a_file


def data_root(data: Data, expects: str) -> Path:
    """DATA_PATH, which must exist; `expects` describes the layout that the data set needs there."""
    root = Path(data.DATA_PATH).expanduser()
    if not root.exists():
        raise DataError(f"DATA.DATA_PATH: nothing at {root}; {expected_layout(data, expects)}")
    kind = not_a_file(root)
    if kind not in (None, "a folder"):
        raise DataError(f"DATA.DATA_PATH: {root} is {kind}; {expected_layout(data, expects)}")
    return root


def expected_layout(data: Data, expects: str) -> str:
    """The end of every message about a wrong layout."""
    return f"{data.DATASET} expects {expects} there; set -data_path or -dataset (layouts: docs/data.md)"
