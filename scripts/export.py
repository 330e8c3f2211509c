"""Writes a run's weights as .safetensors under timm's names, with what is needed to use them; or a checkpoint as one file.

    python scripts/export.py output/train-20260102-03-04-05/best.pth -o vit.safetensors
    python scripts/export.py output/train-20260102-03-04-05/last.pth -o whole.pth

The file's metadata holds the architecture, the class names, and how images are prepared (size, crop, mean,
deviation), each as JSON; `safetensors.safe_open(path, "pt").metadata()` reads it.

With a name that ends in .pth, all of a checkpoint that lies in shards (DIST.CHECKPOINT sharded) is put together in one file,
as the program writes it without them.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # our folders, wherever the script is called from

import torch

from models.formats.files import find_file, read_torch, to_safetensors
from utils.errors import ConfigError, UserError
from utils.files import replacing

DESCRIPTION = ("arch", "class_names", "data", "config", "epoch", "step", "metric")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="best.pth, last.pth or checkpoint-N.pth of a run")
    parser.add_argument("-o", required=True, metavar="FILE", type=Path, help="the .safetensors or .pth file to write")
    parser.add_argument("-ema", action="store_true", help="the running mean of the weights instead of the weights")
    arguments = parser.parse_args()
    try:
        print(export(arguments.checkpoint, arguments.o, arguments.ema))
    except UserError as error:
        parser.error(str(error))


def export(source: str, target: Path, ema: bool) -> str:
    """Returns a line that says what was written."""
    path = find_file(source)
    if path is None:
        raise ConfigError(f"no file at {source}")
    checkpoint = read_torch(path)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ConfigError(f"{path} is no checkpoint of a run: it has no state_dict")
    if target.suffix == ".pth":
        if ema:
            raise ConfigError("-ema: a .pth holds the weights and their running mean both; leave -ema out")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)
        return f"{target}: all of {path}, after epoch {checkpoint.get('epoch', -1) + 1}"
    weights = checkpoint.get("state_dict_ema") if ema else checkpoint["state_dict"]
    if not weights:
        raise ConfigError(f"-ema: {path} has no running mean, since its run had TRAIN.MODEL_EMA off")
    metadata = {key: json.dumps(checkpoint[key]) for key in DESCRIPTION if key in checkpoint}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(to_safetensors(weights, {"format": "pt", **metadata}))
    return f"{target}: {len(weights)} tensors of {checkpoint.get('arch', 'the model')}, epoch {checkpoint.get('epoch')}"


if __name__ == "__main__":
    main()
