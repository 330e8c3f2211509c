"""The .npz and parquet files that halfstep embed writes: the features of photos, with their paths and sizes."""

import json
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.features.embedder import Photos, Table
from utils import VERSION
from utils.commands import pip
from utils.errors import ConfigError, DataError, cause_of
from utils.files import Kind, refuse_other_kind, replacing

FORMAT = 1  # version of the files
KEY = "halfstep"  # the array of an .npz file, and the entry in the metadata of a parquet file, that has the record
NPZ, PARQUET = ".npz", ".parquet"
KINDS = {
    NPZ: Kind("an .npz file of halfstep embed", (b"PK\x03\x04",), f"{KEY}.npy".encode()),
    PARQUET: Kind("a parquet file of halfstep embed", (b"PAR1",), KEY.encode()),
}


def check_output(path: Path) -> None:
    """Raise ConfigError if this is not the name of a file of features. Call this before hours of computing."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"-output: {path} must be a file whose name ends in {NPZ} or {PARQUET}")
    if kind is KINDS[PARQUET]:
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"-output: a parquet file needs pyarrow ({error}); {pip('install')} pyarrow, or name a file that "
                f"ends in {NPZ}"
            ) from None
    refuse_other_kind("-output", path, kind)


def write_features(path: Path, photos: Photos, facts: dict[str, Any], table: Table) -> None:
    """Write the paths, sizes and features. The file gets its name when it is completely on disk."""
    record = json.dumps({"format": FORMAT, KEY: VERSION} | facts | {"images": {"count": len(photos)}})
    try:
        with replacing(path) as file:
            (_write_parquet if path.suffix.lower() == PARQUET else _write_npz)(file, photos, record, table)
    except OSError as error:
        raise DataError(f"-output: {path} cannot be written ({cause_of(error)}); choose another place") from None


def _paths_of(photos: Photos, table: Table) -> list[str]:
    """Return the paths as text. Bytes that are not UTF-8 become escapes such as \\xff."""
    paths = (os.fsencode(photos.paths[index]) for index in table.indices.tolist())
    return [path.decode("utf-8", errors="backslashreplace") for path in paths]


def _write_npz(file: IO[bytes], photos: Photos, record: str, table: Table) -> None:
    paths = np.array(_paths_of(photos, table), np.str_)
    np.savez(file, **{KEY: np.array(record), "paths": paths, "sizes": table.sizes, "features": table.features})


def _write_parquet(file: IO[bytes], photos: Photos, record: str, table: Table) -> None:
    import pyarrow
    import pyarrow.parquet

    features = pyarrow.array(table.features.reshape(-1))
    columns = {
        "path": pyarrow.array(_paths_of(photos, table), pyarrow.string()),
        "width": pyarrow.array(table.sizes[:, 0]),
        "height": pyarrow.array(table.sizes[:, 1]),
        "features": pyarrow.FixedSizeListArray.from_arrays(features, table.features.shape[1]),
    }
    rows = pyarrow.table(columns).replace_schema_metadata({KEY: record})
    pyarrow.parquet.write_table(rows, file, use_dictionary=False)
