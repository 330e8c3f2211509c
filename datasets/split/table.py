"""split.csv: the part of each image, its fold if there are folds, and its first copy if there are copies."""

from pathlib import Path

from datasets.image_set import Table
from datasets.split.parts import PARTS
from utils.files import replacing
from utils.text import csv_text


def write_table(file: Path, train: Table, val: Table) -> None:
    header, columns = ["image", "part"], {part: [] for part in PARTS}
    if val.folds is not None:
        header.append("fold")
        for part, image_set in zip(PARTS, (train, val), strict=True):
            columns[part].append([f"{fold}/{val.split['folds']}" for fold in image_set.folds.tolist()])
    if val.split.get("copies"):
        from datasets.split.together import COPY_OF, first_copies

        header.append(COPY_OF)
        for part, column in zip(PARTS, first_copies((train, val)), strict=True):
            columns[part].append(column)
    with replacing(file) as out:
        out.write(f"{','.join(header)}\n".encode())
        for part, image_set in zip(PARTS, (train, val), strict=True):
            start = 0
            for keys in image_set.all_keys():
                values = [column[start : start + len(keys)] for column in columns[part]]
                out.write(_rows(keys, part, values))
                start += len(keys)


def _rows(keys: list[bytes], part: str, columns: list[list[str]]) -> bytes:
    """Return the rows of images. `columns`: the values after the part, for each column."""
    together = b"".join(keys)
    if not columns and not any(each in together for each in b'",\r\n'):  # values with these characters need quotes
        return b"".join(b"%b,%b\n" % (key, part.encode()) for key in keys)
    names = (key.decode(errors="surrogateescape") for key in keys)
    rows = zip(names, [part] * len(keys), *columns, strict=True)
    return csv_text(rows).encode(errors="surrogateescape")
