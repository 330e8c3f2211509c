"""Describes files as short texts, in which every line says something that a user of the file notices.

Settings with their usual values are left out, and so are style sheets and scripts that are copies of this program's.
"""

import functools
import io
import json
import math
import re
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from configs.load import load
from configs.values import flatten
from tests.support.output_runs import BASE
from tests.support.page_text import lines_of_page
from tests.support.run_hash import NOT_REPEATABLE
from tests.support.runs import rows_of
from utils.commands import HALFSTEP

BASE64 = r"(?=[\w+/]*[G-Zg-z+/])[\w+/]{24,}=*|[\w+/]{6,}==?"
GRID = 10  # a picture is described by the mean colours of GRID x GRID parts
WIDTH = 240  # JSON of at most this many characters is on one line
SETTING = re.compile(r"(?P<indent> *)(?P<name>[\w.]+):(?: (?P<value>.*?))?(?: +# (?P<origin>.*))?")
PLAIN, QUOTED = re.compile(r"[A-Za-z_./][\w./-]*"), "none null true false yes no on off y n".split()
ROW_OF_SETTINGS = re.compile(
    r" *(?:<tbody>)?<tr><td><code>(?P<key>[A-Z_.]+)</code><td><code>(?P<value>.*)</code><td>(?P<origin>.*)"
)


def describe(path: Path) -> str:
    """Return the content of a file as text. Pictures, weights and graphs become short descriptions."""
    describer = DESCRIBERS.get(path.name) or DESCRIBERS.get(path.suffix)
    return describer(path) if describer else f"{path.stat().st_size} bytes"


# --- settings ---


@functools.cache
def usual_settings() -> tuple[Mapping[str, object], Mapping[str, str]]:
    """Return the values of a run with the settings of the stored runs (output_runs.py), and their origins."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base.yaml"
        path.write_text(BASE)
        loaded = load(["-cfg", str(path)])
    return flatten(loaded.config), loaded.origins


def unusual_settings(values: Mapping[str, object], origins: Mapping[str, str] | None = None) -> tuple[list[str], str]:
    """Return the keys of settings whose value or origin is unusual, and a sentence about all others.

    The usual origin is the most frequent one, of the settings in base.yaml, and of all others.
    """
    usual, usual_origins = usual_settings()
    shown = [key for key, value in values.items() if key not in usual or not _is_same(value, usual[key])]
    sentence = "others as in base.yaml"
    if origins:
        kinds = {key: usual_origins[key] == "default" for key in values if key in usual}
        most = {
            kind: Counter(origins[key] for key in kinds if kinds[key] == kind).most_common(1)[0][0]
            for kind in set(kinds.values())
        }
        shown = [key for key in values if key in shown or origins[key] != most[kinds[key]]]
        sentence += f", from {' and '.join(dict.fromkeys(most[kind] for kind in sorted(most)))}"
    missing = [key for key in usual if key not in values]
    if [key for key in values if key in usual] != [key for key in usual if key in values]:
        sentence += ", in another order"
    return shown, f"{sentence}{'; missing: ' * bool(missing)}{' '.join(missing)}"


def value_of(text: str) -> object:
    """Return the value of a setting in YAML, or an unusual value if it is written in another way than `as_yaml`."""
    value = yaml.safe_load(text)
    return value if as_yaml(value) == text else {"written as": text}


def as_yaml(value: object) -> str:
    """Return the text of a value in YAML. Words that YAML or Python could take for other values are quoted."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, float):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))  # YAML takes 1e-06 for a text
    if isinstance(value, str) and PLAIN.fullmatch(value) and value.lower() not in QUOTED:
        return value
    return json.dumps(value, ensure_ascii=False)


def _is_same(one: object, other: object) -> bool:
    return json.dumps(one) == json.dumps(other)  # unlike ==, it tells 1 from 1.0 and from true


def describe_settings(path: Path) -> str:
    """Return the lines of unusual settings in a config.yaml, each after its section."""
    section: list[str] = []
    values, origins, lines, others = {}, {}, {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        parts = SETTING.fullmatch(line)
        if parts is None:
            others.append(line)
            continue
        section = [*section[: len(parts["indent"]) // 4], parts["name"]]
        if parts["origin"]:
            key = ".".join(section)
            values[key], origins[key] = value_of(parts["value"]), parts["origin"]
            lines[key] = f"{'.'.join(section[:-1])} {line}"
    shown, sentence = unusual_settings(values, origins)
    return "\n".join([*others, *(lines[key] for key in shown), f"({sentence})"])


def without_usual(value: object) -> object:
    """Return a value of JSON in which settings are only those that are unusual."""
    if isinstance(value, list):
        return [without_usual(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "DATA.DATASET" in value:
        shown, sentence = unusual_settings(value)
        return {key: value[key] for key in shown} | {"...": sentence}
    return {name: without_usual(each) for name, each in value.items()}


# --- texts ---


def describe_text(path: Path) -> str:
    return path.read_bytes().decode("utf-8").replace("\r", "<CR>").replace("\ufeff", "<BOM>")


def describe_code(path: Path) -> str:
    """Return where a style sheet or script was copied from, or its text if it is no copy."""
    text = path.read_bytes().decode("utf-8")
    return next((f"a copy of {name}" for name, content in own_code().items() if content == text), text)


@functools.cache
def own_code() -> Mapping[str, str]:
    """Return {path: text} of this program's style sheets and scripts."""
    paths = [path for ending in ("css", "js") for path in sorted((HALFSTEP / "engine").rglob(f"*.{ending}"))]
    return {str(path.relative_to(HALFSTEP)): path.read_bytes().decode("utf-8") for path in paths}


def describe_page(path: Path) -> str:
    """Return the lines of a page, without the usual ones in its table of all settings."""
    lines = lines_of_page(describe_text(path), own_code(), describe_picture)
    rows = {number: parts for number, line in enumerate(lines) if (parts := ROW_OF_SETTINGS.fullmatch(line))}
    first = max((number for number in rows if rows[number]["key"] == "DATA.DATASET"), default=len(lines))
    numbers = {rows[number]["key"]: number for number in rows if number >= first}
    if not numbers:
        return "\n".join(lines)
    values = {key: value_of(rows[number]["value"]) for key, number in numbers.items()}
    shown, sentence = unusual_settings(values, {key: rows[number]["origin"] for key, number in numbers.items()})
    left_out = {number for key, number in numbers.items() if key not in shown}
    kept = [line for number, line in enumerate(lines) if number not in left_out]
    kept.insert(first + len(shown), f"({sentence})")
    return "\n".join(kept).replace(f"All {len(numbers)} settings", "All N settings")


def describe_json(path: Path) -> str:
    """Return JSON with a line for each value of at most WIDTH characters."""
    text = path.read_bytes().decode("utf-8")
    try:
        value = json.loads(text)
    except ValueError:
        return describe_text(path)
    for indent in (None, 1, 2):
        for is_ascii in (False, True):
            for end in ("", "\n"):
                if text == json.dumps(value, indent=indent, ensure_ascii=is_ascii) + end:
                    form = f"(JSON, indent {indent}{', only ASCII' * is_ascii}{', a last line' * bool(end)})"
                    return "\n".join([form, *lines_of_json(without_usual(value))])
    return describe_text(path)


def lines_of_json(value: object, start: str = "", indent: str = "") -> Iterator[str]:
    """Yield lines with this value after `start`: one if it fits, otherwise one or more for each member."""
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(text) <= WIDTH:
        yield f"{indent}{start}{text}"
        return
    brackets = "{}" if isinstance(value, dict) else "[]"
    yield f"{indent}{start}{brackets[0]}"
    if isinstance(value, dict):
        for name, each in value.items():
            yield from lines_of_json(each, f"{json.dumps(name, ensure_ascii=False)}: ", f"{indent} ")
    elif any(isinstance(each, dict) for each in value):
        for each in value:
            yield from lines_of_json(each, "", f"{indent} ")
    else:
        yield from filled([json.dumps(each, ensure_ascii=False) for each in value], f"{indent} ")
    yield f"{indent}{brackets[1]}"


def filled(texts: list[str], indent: str) -> list[str]:
    """Return the texts, separated by commas, in lines that are as long as possible."""
    lines = [""]
    for text in texts:
        if lines[-1] and len(lines[-1]) + len(text) > WIDTH:
            lines.append("")
        lines[-1] += f"{', ' * bool(lines[-1])}{text}"
    return [f"{indent}{line}" for line in lines]


def describe_metrics(path: Path) -> str:
    """Return the rows of metrics.csv, metrics.jsonl or steps.csv without times and speeds."""
    is_table = path.suffix == ".csv"
    rows = rows_of(path) if is_table else [json.loads(line) for line in path.read_text().splitlines()]
    return "\n".join(str({name: value for name, value in row.items() if name not in NOT_REPEATABLE}) for row in rows)


# --- pictures and arrays ---


def describe_picture(file: Path | io.BytesIO) -> str:
    """Return format, mode, size and texts of a picture, and on another line the mean colours of its parts by rows."""
    with Image.open(file) as picture:
        lines = [f"{picture.format} {picture.mode}, width {picture.width}, height {picture.height}"]
        lines += [
            f"{name}: {text}"
            for name, text in getattr(picture, "text", {}).items()
            if not text.startswith("Matplotlib")
        ]
        pixels = np.asarray(picture.convert("RGB"), float)
    parts = [
        part
        for row in np.array_split(pixels, min(GRID, len(pixels)))
        for part in np.array_split(row, min(GRID, row.shape[1]), axis=1)
    ]
    colours = ("#" + bytes(part.mean((0, 1)).round().astype(int).tolist()).hex() for part in parts)
    return "\n".join([*lines, " ".join(colours)])


def describe_arrays(arrays: dict) -> str:
    """Return name, type, shape and three statistics of each array, which depend on the order of the elements."""
    lines = []
    for name, array in arrays.items():
        line = f"{name} {array.dtype} {list(array.shape)}"
        if array.dtype.kind in "fiub" and array.size:
            values = array.astype(float).ravel()
            weighted = (values * np.cos(np.arange(values.size))).sum()
            line += f" mean {values.mean():.5f} size {np.abs(values).mean():.5f} order {weighted:.5f}"
        elif array.size:
            line += f" {array.ravel().tolist()}"
        lines.append(line)
    return "\n".join(lines)


def describe_npz(path: Path) -> str:
    with np.load(path) as arrays:
        return describe_arrays(dict(arrays))


def describe_parquet(path: Path) -> str:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    columns = {name: np.array(table[name].to_pylist()) for name in table.column_names}
    return f"{describe_arrays(columns)}\n{metadata}"


def describe_safetensors(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        metadata = {name: _parsed(value) for name, value in sorted((file.metadata() or {}).items())}
        arrays = {name: file.get_tensor(name) for name in sorted(file.keys())}
    return "\n".join([describe_arrays(arrays), *lines_of_json(without_usual(metadata))])


def _parsed(value: str) -> object:
    try:
        return json.loads(value)
    except ValueError:
        return value


def describe_checkpoint(path: Path) -> str:
    """Return the plain values and the tensors of a checkpoint, each with its keys."""
    import torch

    lines, arrays = [], {}

    def walk(key: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            arrays[key] = value.float().numpy()
        elif isinstance(value, dict):
            for name, inner in without_usual(value).items() if key == "/config" else value.items():
                walk(f"{key}/{name}", inner)
        else:
            lines.append(f"{key}: {re.sub(BASE64, 'BASE64', repr(value))}")

    walk("", torch.load(path, weights_only=True))
    return "\n".join([*lines, describe_arrays(arrays)])


def describe_onnx(path: Path) -> str:
    """Return inputs, outputs and metadata of a graph, and its outputs for a fixed input."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    lines = [f"{key}: {value}" for key, value in sorted(facts.items())]
    ports = [("in", each) for each in session.get_inputs()] + [("out", each) for each in session.get_outputs()]
    lines += [f"{way} {each.name} {each.type} {each.shape}" for way, each in ports]
    inputs = {}
    for each, free in zip(session.get_inputs(), ([2, 3, 16, 16], []), strict=False):
        sides = [
            size if isinstance(size, int) else (free + [19, 27, 3])[place] for place, size in enumerate(each.shape)
        ]
        values = np.arange(math.prod(sides)).reshape(sides) % 251
        inputs[each.name] = values.astype(np.uint8) if "uint8" in each.type else (values / 251).astype(np.float32)
    results = dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs), strict=True))
    return "\n".join(
        [*lines, describe_arrays(results), *(str(np.round(each, 4).tolist()) for each in results.values())]
    )


def describe_tar(path: Path) -> str:
    """Return the members of a tar file. Their pixels are described by their checksum."""
    with tarfile.open(path) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar}
    shown = (content.decode() if len(content) < 9 else f"{zlib.crc32(content):08x}" for content in contents.values())
    return "\n".join(f"{name} {text}" for name, text in zip(contents, shown, strict=True))


TEXTS = ".txt .csv .jsonl .yaml .md".split()
DESCRIBERS: dict[str, Callable[[Path], str]] = {
    **dict.fromkeys(TEXTS, describe_text),
    **dict.fromkeys([".css", ".js"], describe_code),
    ".html": describe_page,
    ".json": describe_json,
    **dict.fromkeys([".png", ".jpg"], describe_picture),
    **dict.fromkeys(["metrics.csv", "metrics.jsonl", "steps.csv"], describe_metrics),
    "config.yaml": describe_settings,
    "log.txt": lambda path: "not compared: the terminal has the same lines",
    "report.html": lambda path: "not compared: other rows write the page of a stored run, without new times",
    ".bin": describe_safetensors,
    ".pt2": lambda path: "a graph",
    ".npz": describe_npz,
    ".parquet": describe_parquet,
    ".safetensors": describe_safetensors,
    ".pth": describe_checkpoint,
    ".onnx": describe_onnx,
    ".tar": describe_tar,
}
