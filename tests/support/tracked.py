"""Reads back the metrics of a run from W&B's offline files and MLflow's folders, without the libraries' servers."""

import json
import struct
from pathlib import Path

BLOCK, HEADER = 32768, 7  # bytes; W&B's files are LevelDB logs; the file header is as long as a record header


def wandb_records(path: Path) -> list:
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, text = path.read_bytes(), HEADER, [], b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        text += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(text))
            text = b""
    return found


def wandb_rows(records: list) -> list[dict]:
    """Return the logged values, one dict per call, in order."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


def mlflow_points(run: Path, name: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of a metric in order."""
    lines = (run / "metrics" / name).read_text().splitlines()
    return [(int(step), float(value)) for _, value, step in (line.split() for line in lines)]
