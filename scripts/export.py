"""Writes a run's model in a format of other programs, loads it again there and compares its logits with the model's.

    python scripts/export.py output/train-20260102-03-04-05 -output vit.safetensors
    python scripts/export.py output/train-20260102-03-04-05 -output vit.onnx
    python scripts/export.py output/train-20260102-03-04-05 -to hf -output vit_for_the_hub
    python scripts/export.py output/train-20260102-03-04-05/last.pth -output whole.pth

-to says the format; without it, the ending of the file does:

    safetensors  .safetensors  weights under timm's names, with settings, class names and preprocessing as JSON
    onnx         .onnx         a graph for onnxruntime and others; pip install onnx onnxscript onnxruntime
    torch        .pt2          a graph for torch.export.load
    hf           a folder      for timm's local-dir: and hf-hub:, and of a plain ViT or DeiT also for transformers
    torchvision  .pth          a state dict for torchvision's model, and a JSON that says which
    paddle       .pdparams     PaddleViT's ViT or DeiT, and a JSON with class names and preprocessing

The weights are the raw ones or the EMA's, whichever scored better, with adapters (MODEL.LORA) merged into them. With a
name that ends in .pth and without -to, the whole checkpoint is written; one that is sharded (DIST.STRATEGY fsdp2) is
merged into one file.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from scripts.command_line import CHECKPOINT_HELP, Parser, check_no_input, read_checkpoint
from utils.errors import ConfigError
from utils.program import exit_code
from utils.text import counted

BY_ENDING = {
    ".safetensors": "safetensors",
    ".pth": "checkpoint",
    ".onnx": "onnx",
    ".pt2": "torch",
    ".pdparams": "paddle",
}
FORMATS = ("safetensors", "onnx", "torch", "hf", "torchvision", "paddle")
METADATA = ("arch", "class_names", "data", "config", "split", "validation", "step", "metric", "halfstep_version")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help=CHECKPOINT_HELP)
    parser.add_output("FILE", "the file to write")
    parser.add_argument("-to", choices=FORMATS, metavar="FORMAT", help="one of the above")
    parser.add_weights_choice("write")
    arguments = parser.parse_args(argv)
    print(export(arguments.checkpoint, arguments.output, arguments.key, arguments.to))
    return 0


def export(source: str, target: Path, key: str | None = None, to: str | None = None) -> str:
    """Write the file and return a summary line. `key`: of the weights; those that scored better if not given."""
    if not target.name:
        raise ConfigError(f"-output: {target} names no file; add a name")
    to = to or BY_ENDING.get(target.suffix)
    if to is None:
        raise ConfigError(f"-output: {target} must end in one of {', '.join(BY_ENDING)}; or say the format with -to")
    if to == "checkpoint":
        return write_checkpoint(source, target, key)
    import torch  # takes seconds

    from models.weights.files import chosen_weights

    needed = {"state_dict"} if to == "safetensors" else {"config", "class_names", "data"}
    path, checkpoint = read_checkpoint(source, needed)
    check_no_input("-output", target, [path])
    key, weights = chosen_weights(checkpoint, path, key)
    facts = facts_of(checkpoint) | {"weights": key}
    if to == "safetensors":
        checked = write_safetensors(weights, facts, target)
    else:
        from engine.predict.classifier import config_of
        from models.export.formats import export as export_model
        from models.export.subject import Subject

        with torch.no_grad():
            subject = Subject(weights, config_of(checkpoint), list(checkpoint["class_names"]), facts, path)
            checked = export_model(subject, to, target)
    epoch = f", after epoch {facts['epoch']}" if "epoch" in facts else ""
    arch = checkpoint.get("arch", "the model")
    return f"{target}: {counted(len(weights), 'tensor')} of {arch}{epoch}, from {path} ({key}); {checked}"


def facts_of(checkpoint: dict) -> dict:
    """What is written beside the weights. Epochs count from 1 there, from 0 in a checkpoint."""
    facts = {name: checkpoint[name] for name in METADATA if name in checkpoint}
    return facts | ({"epoch": checkpoint["epoch"] + 1} if "epoch" in checkpoint else {})


def write_safetensors(weights: dict, facts: dict, target: Path) -> str:
    import torch

    from models.export.staging import staged
    from models.weights.files import read_weights
    from models.weights.torch_files import to_safetensors

    metadata = {name: json.dumps(fact) for name, fact in facts.items()}
    with staged(target) as path:
        path.write_bytes(to_safetensors(weights, {"format": "pt", **metadata}))
        found = read_weights(path).state
        assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)
    return "read again, the same to the last bit"


def write_checkpoint(source: str, target: Path, key: str | None) -> str:
    import torch

    from models.export.staging import staged

    path, checkpoint = read_checkpoint(source, {"state_dict"})
    if key:
        raise ConfigError("-ema, -raw: a .pth file contains both the weights and their moving average; leave it out")
    check_no_input("-output", target, [path])
    with staged(target) as place, open(place, "wb") as file:
        torch.save(checkpoint, file)
    return f"{target}: all of {path}, after epoch {checkpoint.get('epoch', -1) + 1}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
