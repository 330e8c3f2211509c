"""The index of a data set in parquet files: its row groups, and the label and name of each row.

Labels and names are read by their columns alone, without the images.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import Config, Data
from datasets.index import TEXT, Index, IndexWriter, index_paths, open_or_build, stamps_of
from datasets.sources.collect import RowHashes
from datasets.sources.labels import MAX_CLASSES
from datasets.sources.parquet.columns import Columns, choose_columns
from datasets.sources.parquet.files import parquet
from utils.bar import shown
from utils.errors import DataError
from utils.text import counted

NUM_THREADS = 16  # which mostly wait for the disk
INDEX_COLUMNS = {"label": "<i4", "name": TEXT, "group_file": "<i4", "group_number": "<i4", "group_rows": "<i8"}
INDEX_COLUMNS |= {"group_bytes": "<i8", "file_rows": "<i8"}
GET_AGAIN = "the file is damaged or incomplete; get it again"


class FileRows(NamedTuple):
    """What the index takes from one file."""

    groups: list[tuple[int, int, int]]  # number, rows and bytes of the images of each row group
    labels: np.ndarray  # int32 [N]
    names: list[bytes]  # [N], or nothing where images have no names


def open_parquet_index(config: Config, root: Path, files: Sequence[Path]) -> Index:
    """The index of these files, built where there is none of them as they are now."""
    made_of = {"files": stamps_of(files), "columns": list(config.DATA.COLUMNS)}
    beside = root / "parquet.index" if root.is_dir() else root.with_suffix(".index")
    return open_or_build(
        index_paths(config, beside),
        lambda index: index.facts.get("made_of") == made_of,
        lambda path: _build(path, files, config.DATA, made_of),
    )


def _build(path: Path | None, files: Sequence[Path], data: Data, made_of: dict) -> Index:
    with ThreadPoolExecutor(NUM_THREADS, "parquet") as pool:
        columns = _common_columns(files, list(pool.map(lambda file: _columns_of(file, data), files)))
        if columns.are_names:
            found = pool.map(lambda file: set(_label_column(file, columns).unique().to_pylist()), files)
            columns = columns._replace(classes=tuple(sorted(set().union(*found) - {None})))
        writer, names = IndexWriter(path, INDEX_COLUMNS), RowHashes()
        read = shown(pool.map(lambda file: _read_rows(file, columns), files), "index", len(files), unit="files")
        for number, rows in enumerate(read):
            _check_labels(files[number], rows.labels, columns.classes)
            groups = np.array(rows.groups, np.int64).reshape(-1, 3)
            writer.add("label", rows.labels)
            writer.add("name", rows.names)
            names.add(rows.names)
            writer.add("group_file", np.full(len(groups), number))
            for column, values in zip(("group_number", "group_rows", "group_bytes"), groups.T, strict=True):
                writer.add(column, values)
            writer.add("file_rows", [len(rows.labels)])
    hashes = np.sort(names.take())
    facts = {"made_of": made_of, "image": columns.image, "classes": columns.classes, "are_names": columns.are_names}
    # Whether each image has a name of its own. A row without one has an empty name.
    facts["has_keys"] = not (hashes[1:] == hashes[:-1]).any() and hash(b"") not in hashes
    return writer.finish(facts)


def _common_columns(files: Sequence[Path], found: Iterable[Columns]) -> Columns:
    """The columns of all files, which must be the same."""
    first, *others = found
    for file, columns in zip(files[1:], others, strict=True):
        for name, here, there in zip(Columns._fields, first, columns, strict=True):
            if name != "path" and here != there:
                what = {"are_names": "another type of labels", "classes": "other names of classes"}.get(
                    name, f"another {name} column"
                )
                raise DataError(
                    f"{file} has {what} than {files[0]}, so they are of different data sets; move one of them elsewhere"
                )
    return first if all(columns.path == first.path for columns in others) else first._replace(path=None)


def opened(file: Path, **options: Any) -> Any:
    """A pyarrow ParquetFile. DataError if this is none; OSError if the file system fails."""
    module = parquet()
    import pyarrow

    try:
        return module.ParquetFile(file, **options)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise
        raise DataError(f"{file}: this is no parquet file ({error}); {GET_AGAIN}") from error


def read_columns(file: Path, columns: Sequence[str], group: int | None = None, **options: Any) -> Any:
    """A pyarrow table of these columns, of one row group or of all. DataError if the file is damaged."""
    import pyarrow

    with opened(file, **options) as content:
        try:
            # Without threads of pyarrow, which would not survive the fork of a loader process.
            if group is None:
                return content.read(list(columns), use_threads=False)
            return content.read_row_group(group, list(columns), use_threads=False)
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None):
                raise
            raise DataError(f"{file}: {', '.join(columns)} cannot be read ({error}); {GET_AGAIN}") from error


def _columns_of(file: Path, data: Data) -> Columns:
    with opened(file) as content:
        return choose_columns(file, content.schema_arrow, data)


def _label_column(file: Path, columns: Columns) -> Any:
    """The labels of a file as whole numbers or texts."""
    import pyarrow
    import pyarrow.types as types

    column = read_columns(file, [columns.label]).column(0)
    if columns.are_names:
        return column.cast(pyarrow.string())
    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def _read_rows(file: Path, columns: Columns) -> FileRows:
    import pyarrow

    labels = _label_column(file, columns)
    if labels.null_count:
        row = labels.is_null().index(True).as_py()
        raise DataError(f"{file}, row {row}: {columns.label} is missing; remove the row, or give it a label")
    if columns.are_names:
        import pyarrow.compute as compute

        # Numbered here, so that no text is kept: a few bytes for each image.
        labels = compute.index_in(labels, value_set=pyarrow.array(columns.classes, pyarrow.string()))
    numbers = labels.to_numpy()
    if len(numbers) and not -MAX_CLASSES < numbers.min() <= numbers.max() < MAX_CLASSES:
        row = int(np.abs(numbers.astype(np.float64)).argmax())
        raise DataError(
            f"{file}, row {row}: {columns.label} is {numbers[row]}, which is not a class number; choose the column of the "
            "labels with -opts DATA.COLUMNS=[IMAGES,CLASSES]"
        )
    names = []
    if columns.path:
        texts = read_columns(file, [columns.path]).column(0).flatten()[0]
        names = [] if texts.null_count else [text.encode(errors="surrogateescape") for text in texts.to_pylist()]
    return FileRows(_groups(file, columns), numbers.astype(np.int32), names or [b""] * len(numbers))


def _groups(file: Path, columns: Columns) -> list[tuple[int, int, int]]:
    """Number, rows and bytes of the images of each row group that has rows. Every row must have an image."""
    with opened(file) as content:
        metadata, groups = content.metadata, []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        chunk = next(
            chunk
            for chunk in (group.column(each) for each in range(group.num_columns))
            if chunk.path_in_schema == columns.image
        )
        if chunk.statistics is not None and chunk.statistics.null_count:
            _refuse_without_bytes(file, columns, number, sum(rows for _, rows, _ in groups))
        if group.num_rows:
            groups.append((number, group.num_rows, chunk.total_uncompressed_size))
    return groups


def _refuse_without_bytes(file: Path, columns: Columns, group: int, first: int) -> None:
    wanted = [columns.image, *([columns.path] if columns.path else [])]
    rows = read_columns(file, wanted, group).column(0).to_pylist()
    row = next(row for row, value in enumerate(rows) if (value["bytes"] if isinstance(value, dict) else value) is None)
    raise DataError(f"{file}, row {first + row}: {without_bytes(rows[row])}")


def without_bytes(value: Any) -> str:
    """What is wrong with a row that has no image, and what to do."""
    if isinstance(value, dict) and value.get("path"):
        return (
            f"the image is only named ({value['path']}), its bytes are not in the file; write the file anew with embedded "
            "images (in Hugging Face's library: map with embed_table_storage), or use -dataset csv with the paths"
        )
    return "there is no image; remove the row"


def _check_labels(file: Path, labels: np.ndarray, classes: Sequence[str] | None) -> None:
    if len(labels) and labels.min() < 0:
        row, count = int((labels < 0).argmax()), int((labels < 0).sum())
        raise DataError(
            f"{file}, row {row}: the label is {labels[row]}, as in {counted(count, 'row')} of {len(labels):,}, which means "
            "that it is not known, as in test images of a competition; move files without labels elsewhere"
        )
    if classes is not None and len(labels) and labels.max() >= len(classes):
        row = int((labels >= len(classes)).argmax())
        raise DataError(
            f"{file}, row {row}: label {labels[row]} (from 0), but the file names {counted(len(classes), 'class')}; "
            "correct the label"
        )
