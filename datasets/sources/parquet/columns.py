"""The columns of a parquet file that hold the images and their labels, and the names of the classes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from configs.schema import Data
from utils.errors import DataError

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes")
LABEL_NAMES = ("label", "labels", "target", "class", "class_name", "category", "cls", "y")


class Columns(NamedTuple):
    """Where to find image, file name and label of a row, in the dotted form of parquet."""

    image: str
    path: str | None  # the file name that travels with an image
    label: str
    are_names: bool  # the labels; else they are numbers
    classes: tuple[str, ...] | None  # by number, as far as the file has them


def choose_columns(file: Path, schema: Any, data: Data) -> Columns:
    """The columns by DATA.COLUMNS, else by their types and usual names. `schema`: of pyarrow."""
    images = [field for field in schema if _image_bytes(field)]
    if data.COLUMNS:
        missing = [name for name in data.COLUMNS if name not in schema.names]
        if missing:
            raise DataError(f"{file}: no column {missing[0]} (DATA.COLUMNS); it has {', '.join(schema.names)}")
        image, label = (schema.field(name) for name in data.COLUMNS)
        if image not in images:
            raise DataError(
                f"{file}: the column {image.name} (DATA.COLUMNS) has the type {image.type}; images are stored as "
                "binary, or as a struct with bytes"
            )
    else:
        image = _only(file, schema, "images", images, [field for field in images if field.name in IMAGE_NAMES])
        labels = [field for field in schema if _is_label(field)]
        named = _class_names(schema)
        label = _only(file, schema, "labels", [], [field for field in labels if _is_called(field.name, named)])
    if not _is_label(label):
        raise DataError(
            f"{file}: the column {label.name} has the type {label.type}; labels are whole numbers or names, so name "
            "another with -opts DATA.COLUMNS=[IMAGES,CLASSES]"
        )
    classes = _class_names(schema).get(label.name)
    inside = {each.name for each in image.type} if _is_struct(image.type) else ()
    path = f"{image.name}.path" if "path" in inside else None
    are_names = not _is_whole(label.type)
    return Columns(
        _image_bytes(image), path, label.name, are_names, None if are_names else classes and _distinct(classes)
    )


def _only(file: Path, schema: Any, kind: str, possible: list, usual: list) -> Any:
    """The one column of this kind: by type if that leaves no choice, or by name."""
    found = possible if len(possible) == 1 else usual
    if len(found) == 1:
        return found[0]
    names = ", ".join(field.name for field in found or possible)
    problem = f"any of these columns may hold the {kind}: {names}" if names else f"no column of {kind} is recognised"
    raise DataError(
        f"{file}: {problem} (columns: {', '.join(f'{field.name} {field.type}' for field in schema)}); name both columns "
        "with -opts DATA.COLUMNS=[IMAGES,CLASSES]"
    )


def _is_called(name: str, named: dict) -> bool:
    return name in named or name.lower() in LABEL_NAMES or name.lower().endswith(("_label", "_class"))


def _image_bytes(field: Any) -> str | None:
    """The column with the bytes, if this can be a column of images."""
    if _is_binary(field.type):
        return field.name
    if _is_struct(field.type) and any(each.name == "bytes" and _is_binary(each.type) for each in field.type):
        return f"{field.name}.bytes"
    return None


def _is_binary(kind: Any) -> bool:
    return str(kind) in ("binary", "large_binary", "binary_view")


def _is_struct(kind: Any) -> bool:
    return str(kind).startswith("struct<")


def _is_label(field: Any) -> bool:
    """Whole numbers, or names, also as a dictionary of names."""
    return _is_whole(field.type) or str(_values(field.type)) in ("string", "large_string", "string_view")


def _is_whole(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_integer(_values(kind))


def _values(kind: Any) -> Any:
    import pyarrow.types as types

    return kind.value_type if types.is_dictionary(kind) else kind


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """The names of the classes of each column that Hugging Face's metadata calls a ClassLabel."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            name: tuple(map(str, feature["names"]))
            for name, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
        }
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):  # absent, or of another program
        return {}


def _distinct(classes: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet has two classes called crane: names that repeat get their number."""
    counts = Counter(classes)
    return tuple(f"{name} ({number})" if counts[name] > 1 else name for number, name in enumerate(classes))
