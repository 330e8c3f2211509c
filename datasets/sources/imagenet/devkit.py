"""The labels of ImageNet's official validation images, out of the development kit."""

import io
import tarfile
import zlib
from pathlib import Path

import numpy as np

from utils.errors import DataError

DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
META, TRUTH = "data/meta.mat", "data/ILSVRC2012_validation_ground_truth.txt"
MAX_BYTES = 64 << 20  # of a file in the kit; the real ones have less than one MB
GET_AGAIN = "get it again"


def read_devkit(file: Path) -> list[str]:
    """The synset of each validation image, in the order of their names."""
    found = _read_files(file)
    synsets = _synsets_by_id(file, found[META])
    lines = found[TRUTH].split()
    wrong = next(
        (number for number, line in enumerate(lines, 1) if not line.isdigit() or int(line) not in synsets), None
    )
    if wrong or not lines:
        raise DataError(f"{file}: {TRUTH}, line {wrong or 1} is not the ID of a class in {META}; {GET_AGAIN}")
    return [synsets[int(line)] for line in lines]


def _read_files(file: Path) -> dict[str, bytes]:
    """Both files of the kit, read without unpacking it."""
    found = {}
    try:
        with tarfile.open(file, "r:gz") as kit:
            for member in kit:
                name = next((name for name in (META, TRUTH) if member.name.endswith(f"/{name}")), None)
                if name and member.isfile() and member.size <= MAX_BYTES:
                    found[name] = kit.extractfile(member).read()
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{file} cannot be read ({error}); {GET_AGAIN}") from error
    if missing := [name for name in (META, TRUTH) if name not in found]:
        raise DataError(f"{file} has no {missing[0]}; {GET_AGAIN}")
    return found


def _synsets_by_id(file: Path, content: bytes) -> dict[int, str]:
    """The synset of each class by its number in the kit, which is not its place among the sorted synsets.

    loadmat builds arrays of what it reads, and executes nothing.
    """
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{file} can only be read with the package scipy; pip install scipy") from error
    try:
        synsets = np.atleast_1d(loadmat(io.BytesIO(content), squeeze_me=True, variable_names=["synsets"])["synsets"])
        rows = zip(*(synsets[name].tolist() for name in ("ILSVRC2012_ID", "WNID", "num_children")), strict=True)
        return {int(number): str(synset) for number, synset, num_children in rows if num_children == 0}
    except Exception as error:  # scipy raises whatever its parsing runs into
        raise DataError(f"{file}: {META} cannot be read ({type(error).__name__}: {error}); {GET_AGAIN}") from error
