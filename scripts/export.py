"""Writes a run's model in the format of another program, loads it there and compares its logits with the model's.

    halfstep export output/train-20260102-03-04-05 -output vit.safetensors
    halfstep export output/train-20260102-03-04-05 -to hf -output vit_for_the_hub
    halfstep export output/train-20260102-03-04-05/last.pth -output whole.pth
    halfstep export output/train-20260102-03-04-05/checkpoint-*.pth -output mean.onnx
    halfstep export runA runB runC -output soup.safetensors
    halfstep export vit_base_patch16_224.pdparams -output vit.safetensors

-to names the format. Without it, the ending of the file decides:

    safetensors  .safetensors  weights under timm's names, with settings, class names and preprocessing as JSON
    onnx         .onnx         a graph for onnxruntime and others; pip install onnx onnxscript onnxruntime
    torch        .pt2          a graph for torch.export.load
    hf           a folder      for timm's local-dir: and hf-hub:, and for transformers
    web          a folder      a page that predicts in a browser (see docs/exporting.md)

The raw or the EMA weights are written, depending on which scored better, with adapters (MODEL.LORA) merged into them.
If the name of the output ends in .pth, and -to is not given, the whole checkpoint is written. The shards of a
checkpoint (DIST.STRATEGY fsdp2) are merged into one file.

Several checkpoints, of one run or of runs that started from the same weights, are averaged (a model soup). A checkpoint
that is named twice counts twice. Weights of other programs, such as PaddleViT's, are converted to .safetensors or .pth.
"""

import argparse
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import CHECKPOINT_HELP, Parser, check_no_input
from utils.errors import ConfigError, needing
from utils.files import Kind, refuse_other_kind
from utils.text import counted

if TYPE_CHECKING:
    from engine.open_model import SavedModel

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
LEAST_SIMILAR = 0.3  # epochs 1 and 40 of a run from random weights: 0.66; runs from different random weights: 0.00


def main(argv: list[str]) -> int:
    parser = Parser(__doc__, "export")
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
    to = format_of(arguments.output, arguments.to)
    for flag, formats in ONLY_FOR.items():
        if getattr(arguments, flag) and to not in formats:
            raise ConfigError(
                f"-{flag}: {arguments.output} would have another format; leave -{flag} out, or use -to "
                f"{' or -to '.join(formats)}"
            )
    if (arguments.keep_float or arguments.accept) and not arguments.int8:
        raise ConfigError("-keep_float, -accept: they only concern -int8; add it, or leave them out")
    if arguments.calibrated and len(arguments.checkpoints) > 1:
        raise ConfigError("-calibrated: the mean of several checkpoints has no temperature; leave -calibrated out")
    print(export(arguments, to))
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
    is_named = re.fullmatch(r"(best|last|previous|checkpoint-\d+)\.pth", target.name)
    if is_named and target.exists() and (target.parent / "config.yaml").exists():
        raise ConfigError(f"-output: {target} is a checkpoint of the run in {target.parent}; name another file")


def export(arguments: argparse.Namespace, to: str) -> str:
    """Write what the checkpoints contain in the format `to`. Return a summary line."""
    from engine.open_model import NEEDED, describe_learned, open_model
    from models.weights.files import find_file, read_record

    sources, target, key = arguments.checkpoints, arguments.output, arguments.key
    if len(sources) == 1:
        path = find_file(sources[0])
        if path and "config" not in read_record(path):  # no run of halfstep wrote this file
            return convert(sources[0], target, key)
        if to == "checkpoint":
            return write_checkpoint(sources[0], target, key)
    elif to == "checkpoint":
        raise ConfigError(f"-output: {target}: a mean has no optimizer state to resume; name a .safetensors file")
    needs_no_model = to == "safetensors" and len(sources) == 1
    parts = [open_model(source, key, {"state_dict"} if needs_no_model else NEEDED) for source in sources]
    check_target(target, to, [part.path for part in parts])
    if len(parts) > 1:
        names, mean = ", ".join(part.path.name for part in parts), mean_of(parts)
        summary = f"the mean of {counted(len(parts), 'checkpoint')} ({names})"
        return "\n".join([f"{target}: {summary}; {write(mean, to, arguments)}", *describe_learned(mean.facts)])
    (saved,) = parts
    epoch = f", after epoch {saved.facts['epoch']}" if "epoch" in saved.facts else ""
    summary = f"{counted(len(saved.weights), 'tensor')} of {saved.facts.get('arch', 'the model')}{epoch}"
    return f"{target}: {summary}, from {saved.path} ({saved.key}); {write(saved, to, arguments)}"


def write(saved: "SavedModel", to: str, arguments: argparse.Namespace) -> str:
    """Write the model in the format `to`. Return a text that says how the file was checked."""
    target = arguments.output
    if to == "safetensors":
        from engine.export.files import export_weights

        return export_weights(saved, target)
    from engine.export import formats
    from engine.export.subject import Subject

    if not (arguments.photo or arguments.int8 or to == "web"):
        return formats.export(Subject(saved, arguments.calibrated), to, target)
    from datasets import PriorFacts, SavedData, open_data
    from engine.export.photo_subject import PhotoSubject, photo_of

    config, facts = saved.config, saved.facts
    if to == "web":
        photo_of(config).refuse_page(config)
    if arguments.data_path:
        config = config.changed("DATA", DATA_PATH=str(arguments.data_path))
    then = SavedData(saved.classes, facts.get("split", {}), facts.get("validation", {}), file=saved.path)
    prior = PriorFacts(saved=then)
    opened = open_data(config, prior=prior)
    subject, change = PhotoSubject(saved, arguments.calibrated, opened.val, arguments.runtime), None
    if arguments.int8:
        with needing("onnx onnxscript onnxruntime", "-int8"):
            from engine.export.int8 import Quantizer

        change = Quantizer(subject, opened.train, arguments.keep_float, arguments.accept)
    result = formats.export(subject, to, target, change)
    if to != "web":
        return result
    server = f"python -m http.server -b 127.0.0.1 -d {shlex.quote(str(target))}"
    return f"{result}\nto open it: {server}, then http://localhost:8000"


def write_checkpoint(source: str, target: Path, key: str | None) -> str:
    """Write a whole checkpoint into one file. Return a summary line."""
    import torch

    from engine.export.files import staged
    from models.weights.files import find_and_read

    path, checkpoint = find_and_read(source, {"state_dict"})
    if key:
        raise ConfigError("-ema, -raw: a .pth file contains both the raw and the EMA weights; leave the flag out")
    check_target(target, "checkpoint", [path])
    with staged(target) as place, open(place, "wb") as file:
        torch.save(checkpoint, file)
    epoch = f", after epoch {checkpoint['epoch'] + 1}" if "epoch" in checkpoint else ""
    return f"{target}: all contents of {path}{epoch}"


def convert(source: str, target: Path, key: str | None) -> str:
    """Write the weights of another program under timm's names. Return a summary line."""
    import torch

    from engine.export.files import staged
    from models.weights.files import find_file, read_state_dict
    from models.weights.torch_files import to_safetensors

    if key or target.suffix not in (".safetensors", ".pth"):
        raise ConfigError(
            f"{'-ema, -raw' if key else '-output'}: {source} is not a checkpoint of a run, but has weights of another "
            f"program; they can only be written unchanged, to a file that ends in .safetensors or .pth"
        )
    check_target(target, BY_ENDING[target.suffix], [find_file(source)])
    state = read_state_dict(source)
    with staged(target) as place, open(place, "wb") as file:
        if target.suffix == ".pth":
            torch.save(state, file)
        else:
            file.write(to_safetensors(state))
    return f"{target}: {counted(len(state), 'tensor')}, {sum(tensor.numel() for tensor in state.values()):,} numbers"


def refuse_others(parts: list["SavedModel"]) -> None:
    """Raise ConfigError if architectures, classes or the preparation of images differ."""
    from models.units import Scale
    from models.weights.metadata import ARCHITECTURE

    def compared(part: "SavedModel") -> dict:
        config = part.facts["config"]
        return {
            "architecture": [config.get(name) for name in ARCHITECTURE if name != "MODEL.NAME"],
            "weights": {name: tuple(tensor.shape) for name, tensor in part.weights.items()},
            "classes": part.classes,
            "image preparation": part.facts["data"],
            "standardization": Scale.of(part.config),
        }

    first = compared(parts[0])
    for part in parts[1:]:
        if differing := [fact for fact, value in compared(part).items() if value != first[fact]]:
            raise ConfigError(
                f"{part.path} and {parts[0].path} differ in their {differing[0]}; only models that agree can be "
                "averaged"
            )


def refuse_unrelated(parts: list["SavedModel"]) -> None:
    """Raise ConfigError if the weights have different origins: their mean would be noise."""
    from models.weights.average import similarity

    first = parts[0]
    for part in parts[1:]:
        if (cosine := similarity(first.weights, part.weights)) < LEAST_SIMILAR:
            raise ConfigError(
                f"{part.path} and {first.path}: their weights have nothing in common (cosine {cosine:.2f}), as after a "
                "start from different random weights, so their mean would predict nothing; average checkpoints of one "
                "run, or runs that were fine-tuned from the same weights"
            )


def mean_of(parts: list["SavedModel"]) -> "SavedModel":
    """Return the mean of the weights, with the metadata of the latest checkpoint except its score."""
    from engine.open_model import SavedModel
    from models.weights.average import average

    refuse_others(parts)
    refuse_unrelated(parts)
    last = max(parts, key=lambda part: part.facts.get("epoch", 0))
    facts = {name: value for name, value in last.facts.items() if name not in ("metric", "calibration")}
    facts["averaged"] = [
        {"file": os.fspath(part.path), "weights": part.key, "split": part.facts.get("split", {})} for part in parts
    ]
    facts |= facts_of_learned(parts)
    return SavedModel(last.path, facts, "state_dict", average([part.weights for part in parts]))


def facts_of_learned(parts: list["SavedModel"]) -> dict[str, Any]:
    """Return the metadata of a mean whose parts held out different images, so that none is held out.

    {}: the same images.

    The places of the same data can have different names.
    """
    from models.weights.record import LEARNED

    held_out, places = [], []
    for part in parts:
        split = part.facts.get("split", {})
        rule = {key: value for key, value in split.items() if key not in ("training", "validation")}
        held_out.append((rule, part.facts.get("validation", {})))
        if "training" in split:
            places.append(split["training"])
        places += part.facts.get(LEARNED, [])
    if not places or all(images == held_out[0] for images in held_out):
        return {}
    split = {"rule": "none", "training": places[0], "validation": places[0]}
    return {"split": split, "validation": {}, LEARNED: [*dict.fromkeys(places)]}


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
