"""Writes a run's model in the format of another program, loads it there and compares its logits with the model's.

    python scripts/export.py output/train-20260102-03-04-05 -output vit.safetensors
    python scripts/export.py output/train-20260102-03-04-05 -to hf -output vit_for_the_hub
    python scripts/export.py output/train-20260102-03-04-05/last.pth -output whole.pth
    python scripts/export.py output/train-20260102-03-04-05/checkpoint-*.pth -output mean.onnx
    python scripts/export.py runA runB runC -output soup.safetensors
    python scripts/export.py vit_base_patch16_224.pdparams -output vit.safetensors

-to names the format. Without it, the ending of the file decides:

    safetensors  .safetensors  weights under timm's names, with settings, class names and preprocessing as JSON
    onnx         .onnx         a graph for onnxruntime and others; pip install onnx onnxscript onnxruntime
    torch        .pt2          a graph for torch.export.load
    hf           a folder      for timm's local-dir: and hf-hub:, and for transformers
    web          a folder      a page that classifies photos in a browser (see docs/exporting.md)

The raw or the EMA weights are written, depending on which scored better, with adapters (MODEL.LORA) merged into them.
If the name of the output ends in .pth, and -to is not given, the whole checkpoint is written. The shards of a
checkpoint (DIST.STRATEGY fsdp2) are merged into one file.

Several checkpoints, of one run or of runs that started from the same weights, are averaged (a model soup). A checkpoint
that is named twice counts twice. Weights of other programs, such as PaddleViT's, are converted to .safetensors or .pth.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import CHECKPOINT_HELP, Parser, check_no_input
from utils.errors import ConfigError, needing
from utils.files import Kind, refuse_other_kind
from utils.text import counted

if TYPE_CHECKING:
    from engine.open_model import SavedModel
    from models.export.subject import Figures

BY_ENDING = {".safetensors": "safetensors", ".pth": "checkpoint", ".onnx": "onnx", ".pt2": "torch"}
KINDS = {
    "safetensors": Kind("a .safetensors file with metadata", (b"",), b'{"__metadata__"'),
    "checkpoint": Kind("a checkpoint", (b"PK",), b"/data.pkl"),
    "onnx": Kind("an ONNX file of torch", (b"\x08",), b"pytorch"),
    "torch": Kind("a .pt2 file", (b"PK",), b"archive/"),
}
ONLY_FOR = {  # {flag: formats}
    "calibrated": ("onnx", "torch"),
    "photo": ("onnx", "torch", "web"),
    "int8": ("onnx", "web"),
    "runtime": ("web",),
}
FORMATS = ("safetensors", "onnx", "torch", "hf", "web")


class Graph(NamedTuple):
    """The options for graphs."""

    is_calibrated: bool = False
    takes_photo: bool = False
    int8: bool = False
    keep_float: Sequence[str] = ()  # patterns of layers that -int8 leaves in float32
    accepts_any: bool = False  # whether -int8 keeps the file even if the accuracy is lower
    data_path: Path | None = None  # the new place of the run's data, if they were moved
    runtime: Path | None = None  # an installed onnxruntime-web


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_output("FILE", "the file to write")
    parser.add_argument("-to", choices=FORMATS, metavar="FORMAT", help="one of the formats above")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-ema", dest="key", action="store_const", const="state_dict_ema", help="write the EMA weights")
    kind.add_argument("-raw", dest="key", action="store_const", const="state_dict", help="write the raw weights")
    divide_help = "divide the logits in the graph by the temperature (only for onnx and torch)"
    parser.add_argument("-calibrated", action="store_true", help=divide_help)
    photo_help = "the graph takes a photo of any size and returns probabilities (only for onnx, torch and web)"
    parser.add_argument("-photo", action="store_true", help=photo_help)
    add = parser.add_argument_group("8 bits (only for onnx and web)").add_argument
    add("-int8", action="store_true", help="as -photo, in 8 bits; compares the accuracy with float32's")
    add("-keep_float", nargs="+", default=[], metavar="LAYER", help="layers that stay in float32, such as 'blocks.3.*'")
    add("-accept", action="store_true", help="keep the file even if the accuracy is lower")
    path_help = "where the data of the run are now; -photo and -int8 read its images"
    parser.add_argument("-data_path", type=Path, metavar="PATH", help=path_help)
    runtime_help = (
        "folder of an installed onnxruntime-web, whose files are copied (only for web) [loaded from the network]"
    )
    parser.add_argument("-runtime", type=Path, metavar="FOLDER", help=runtime_help)
    arguments = parser.parse_args(argv)
    sources = arguments.checkpoints
    for flag, formats in ONLY_FOR.items():
        if getattr(arguments, flag) and format_of(arguments.output, arguments.to) not in formats:
            raise ConfigError(
                f"-{flag}: {arguments.output} would have another format; leave -{flag} out, or use -to "
                f"{' or -to '.join(formats)}"
            )
    if (arguments.keep_float or arguments.accept) and not arguments.int8:
        raise ConfigError("-keep_float, -accept: they only concern -int8; add it, or leave them out")
    if arguments.calibrated and len(sources) > 1:
        raise ConfigError("-calibrated: the mean of several checkpoints has no temperature; leave -calibrated out")
    graph = Graph(
        is_calibrated=arguments.calibrated,
        takes_photo=arguments.photo or arguments.int8 or arguments.to == "web",
        int8=arguments.int8,
        keep_float=arguments.keep_float,
        accepts_any=arguments.accept,
        data_path=arguments.data_path,
        runtime=arguments.runtime,
    )
    if len(sources) == 1:
        print(export(sources[0], arguments.output, arguments.key, arguments.to, graph))
        return 0
    to = format_of(arguments.output, arguments.to)
    if to == "checkpoint":
        raise ConfigError(
            f"-output: {arguments.output}: a mean has no optimizer state to resume; name a .safetensors file"
        )
    parts = read_alike(sources, arguments.key)
    check_target(arguments.output, to, [part.path for part in parts])
    print(write_mean(parts, to, arguments.output, graph))
    return 0


def format_of(target: Path, to: str | None) -> str:
    """Return the format that -to names, or otherwise the format for the ending of the file."""
    if not target.name:
        raise ConfigError(f"-output: {target} has no file name; add one")
    if chosen := to or BY_ENDING.get(target.suffix):
        return chosen
    raise ConfigError(f"-output: {target} must end in one of {', '.join(BY_ENDING)}; or name the format with -to")


def check_target(target: Path, to: str, sources: list[Path]) -> None:
    """Refuse to overwrite a source, a file of another format, or a checkpoint that a run has written."""
    check_no_input("-output", target, sources)
    if to in KINDS:
        refuse_other_kind("-output", target, KINDS[to])
    if target.exists() and is_checkpoint_of_run(target):
        raise ConfigError(f"-output: {target} is a checkpoint of the run in {target.parent}; name another file")


def is_checkpoint_of_run(path: Path) -> bool:
    """Return whether the path is named like a checkpoint and is in the folder of a run."""
    is_named = re.fullmatch(r"(best|last|previous|checkpoint-\d+)\.pth", path.name)
    return bool(is_named) and (path.parent / "config.yaml").exists()


def export(
    source: str | Path, target: Path, key: str | None = None, to: str | None = None, graph: Graph | None = None
) -> str:
    """Write the model of one checkpoint, or the weights of another program. Return a summary line."""
    from engine.open_model import NEEDED, open_model
    from models.weights.files import find_file, read_record

    to, path = format_of(target, to), find_file(source)
    if path and "config" not in read_record(path):  # no run of halfstep wrote this file
        return convert(source, target, key)
    if to == "checkpoint":
        return write_checkpoint(source, target, key)
    part = open_model(source, key, {"state_dict"} if to == "safetensors" else NEEDED)
    check_target(target, to, [part.path])
    epoch = f", after epoch {part.facts['epoch']}" if "epoch" in part.facts else ""
    name = f"{counted(len(part.weights), 'tensor')} of {part.facts.get('arch', 'the model')}{epoch}"
    return f"{target}: {name}, from {part.path} ({part.key}); {write(part, to, target, graph or Graph())}"


def write(part: "SavedModel", to: str, target: Path, graph: Graph) -> str:
    """Write the weights in the format `to`. Return a text that says how the file was checked."""
    import torch  # local: importing torch takes seconds

    from models.export import formats
    from models.export.subject import check_weights
    from models.weights.files import read_weights
    from models.weights.torch_files import to_safetensors

    facts = part.facts | {"weights": part.key}
    if graph.is_calibrated and not facts.get("calibration", {}).get("temperature"):
        raise ConfigError(
            f"-calibrated: {part.path} has no calibration for {part.key}; leave -calibrated out, or use the best.pth "
            "of a run with CALIBRATE: true"
        )
    if to != "safetensors":
        with torch.no_grad():
            return write_graph(replace(part, facts=facts), to, target, graph)
    metadata = {name: json.dumps(fact) for name, fact in facts.items()}
    with formats.staged(target) as path:
        path.write_bytes(to_safetensors(part.weights, {"format": "pt", **metadata}))
        with formats.naming_wrong_export(to, "halfstep", target):
            check_weights(read_weights(path).state, part.weights)
    return "read again, identical to the last bit"


def write_graph(part: "SavedModel", to: str, target: Path, graph: Graph) -> str:
    """Write the model in a format of another program. Return a text that says how the file was checked."""
    from configs.tables import import_named
    from datasets.pixels import pixels_of
    from models.export import formats
    from models.export.subject import Subject

    facts, config, classes = part.facts, part.config, part.classes
    pixels = pixels_of(config.DATA)
    facts = facts | {"exif": pixels.exif, "background": pixels.background}
    load = partial(part.build, config)
    given = (load, config, classes, facts, part.path, pixels.for_card(), figures_of(part), graph.is_calibrated)
    if not graph.takes_photo:
        return formats.export(Subject(*given), to, target)
    from datasets import Known, open_data
    from datasets.types import SavedData

    kind = import_named("engine.export", pixels.subject)
    if to == "web":
        kind.refuse_page(config)
    if graph.data_path:
        config = config.changed("DATA", DATA_PATH=str(graph.data_path))
    saved = SavedData(classes, facts.get("split", {}), facts.get("validation", {}))
    opened = open_data(config, known=Known(saved=saved))
    subject, change = kind(*given, photos=opened.val), None
    if graph.int8:
        with needing("onnx onnxscript onnxruntime", "-int8"):
            from engine.export.int8 import Quantizer

        change = Quantizer(subject, opened.train, graph.keep_float, graph.accepts_any)
    if to != "web":
        return formats.export(subject, to, target, change)
    from engine.export.web import GRAPH, write_page

    formats.check_target(to, "", target)
    with formats.staged(target) as folder:
        folder.mkdir()
        write_page(folder, subject, target.name, graph.runtime)  # first, because it may refuse -runtime
        result = formats.export(subject, "onnx", folder / GRAPH, change)
    return f"{result}\nto open it: python -m http.server -d {shlex.quote(str(target))}, then http://localhost:8000"


def figures_of(part: "SavedModel") -> "Figures | None":
    """Return the accuracy that the run has measured for these weights, or None if the checkpoint does not have it."""
    from configs.tables import METRICS
    from engine.evaluation.scores import format_value
    from engine.record.saved_files import read_object
    from models.export.subject import Figures

    facts = part.facts
    metric, value, epoch = facts.get("config", {}).get("TRAIN.BEST_METRIC"), facts.get("metric"), facts.get("epoch")
    if metric not in METRICS or not isinstance(value, int | float) or epoch is None:
        return None
    results = read_object(part.path.parent / "results.json")
    weights = "ema" if part.key.endswith("_ema") else "raw"
    is_same = (results.get("epoch"), results.get("weights")) == (epoch, weights)
    classes = results.get("per_class", {}) if is_same else {}
    return Figures(metric, METRICS[metric].title, float(value), format_value(metric, value), epoch, classes)


def write_checkpoint(source: str | Path, target: Path, key: str | None) -> str:
    """Write a whole checkpoint into one file. Return a summary line."""
    import torch

    from models.export.formats import staged
    from models.weights.files import read_checkpoint

    path, checkpoint = read_checkpoint(source, {"state_dict"})
    if key:
        raise ConfigError("-ema, -raw: a .pth file contains both the raw and the EMA weights; leave the flag out")
    check_target(target, "checkpoint", [path])
    with staged(target) as place, open(place, "wb") as file:
        torch.save(checkpoint, file)
    epoch = f", after epoch {checkpoint['epoch'] + 1}" if "epoch" in checkpoint else ""
    return f"{target}: all contents of {path}{epoch}"


def convert(source: str | Path, target: Path, key: str | None) -> str:
    """Write the weights of another program under timm's names. Return a summary line."""
    import torch

    from models.export.formats import staged
    from models.weights.files import find_file, read_state_dict
    from models.weights.torch_files import to_safetensors

    writers = {
        ".safetensors": lambda state, file: file.write(to_safetensors(state, {"format": "pt"})),
        ".pth": torch.save,
    }
    if key or target.suffix not in writers:
        raise ConfigError(
            f"{'-ema, -raw' if key else '-output'}: {source} is not a checkpoint of a run, but has weights of another "
            f"program; they can only be written unchanged, to a file that ends in {' or '.join(writers)}"
        )
    check_target(target, BY_ENDING[target.suffix], [find_file(source)])
    state = read_state_dict(source)
    with staged(target) as place, open(place, "wb") as file:
        writers[target.suffix](state, file)
    return f"{target}: {counted(len(state), 'tensor')}, {sum(tensor.numel() for tensor in state.values()):,} numbers"


def read_alike(sources: list, key: str | None) -> list["SavedModel"]:
    """Read the checkpoints. Raise ConfigError if their architectures, classes or image preparation differ."""
    from engine.open_model import open_model
    from models.weights.metadata import ARCHITECTURE

    def compared(part: "SavedModel") -> dict:
        config = part.facts["config"]
        return {
            "architecture": [config.get(name) for name in ARCHITECTURE if name != "MODEL.NAME"],
            "weights": {name: tuple(tensor.shape) for name, tensor in part.weights.items()},
            "classes": list(part.facts["class_names"]),
            "image preparation": part.facts["data"],
            "standardization": [part.facts["config"].get(f"DATA.TARGET_{name}") or [] for name in ("MEAN", "STD")],
        }

    parts = [open_model(source, key) for source in sources]
    first = compared(parts[0])
    for part in parts[1:]:
        if differing := [fact for fact, value in compared(part).items() if value != first[fact]]:
            raise ConfigError(
                f"{part.path} and {parts[0].path} differ in their {differing[0]}; only models that agree can be averaged"
            )
    return parts


def write_mean(parts: list["SavedModel"], to: str, target: Path, graph: Graph) -> str:
    """Write the mean of the weights, and the metadata of the latest checkpoint except its score. Return a summary."""
    from engine.open_model import SavedModel
    from models.weights.average import average

    last = max(parts, key=lambda part: part.facts.get("epoch", 0))
    facts = {name: value for name, value in last.facts.items() if name not in ("metric", "calibration")}
    facts["averaged"] = [{"file": os.fspath(part.path), "weights": part.key} for part in parts]
    mean = average([part.weights for part in parts])
    checked = write(SavedModel(last.path, facts, "state_dict", mean), to, target, graph)
    names = ", ".join(part.path.name for part in parts)
    return f"{target}: the mean of {counted(len(parts), 'checkpoint')} ({names}); {checked}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
