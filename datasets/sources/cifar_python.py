"""The Python version of CIFAR is pickled, and a pickle can run anything: this reads arrays and plain values only."""

import pickle
from pathlib import Path
from typing import Any

from utils.errors import DataError

# What the files need to rebuild their arrays, under old and new names of numpy's module.
ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it wants {module}.{name}, which is not needed for images")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def read_pickled(file: Path) -> dict:
    """The dictionary in one of CIFAR's pickled files."""
    try:
        with open(file, "rb") as source:
            content = _ArrayUnpickler(source, encoding="latin1").load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it holds a {type(content).__name__}")
    except Exception as error:  # a damaged pickle raises whatever its bytes stumble into
        raise DataError(f"{file}: refused ({error}); remove its folder to fetch the data again") from error
    return content
