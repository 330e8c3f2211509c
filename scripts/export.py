"""Writes a run's weights as .safetensors with timm's names and what is needed to use them, or a checkpoint as one file.

    python scripts/export.py output/train-20260102-03-04-05/best.pth -output vit.safetensors
    python scripts/export.py output/train-20260102-03-04-05/last.pth -output whole.pth

The file's metadata holds the architecture, the class names and the preprocessing of images (size, crop, mean, standard
deviation), each as JSON; `safetensors.safe_open(path, "pt").metadata()` reads it.

With a name that ends in .pth, a sharded checkpoint (DIST.CHECKPOINT sharded) is merged into one file, as
DIST.CHECKPOINT single would have written it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

import torch

from models.formats.common import weights_of
from models.formats.torch import to_safetensors
from scripts.command_line import Parser, read_checkpoint
from utils.errors import ConfigError
from utils.files import replacing
from utils.program import exit_code
from utils.text import counted

METADATA = ("arch", "class_names", "data", "config", "epoch", "step", "metric")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help="best.pth, last.pth or checkpoint-N.pth of a run")
    parser.add_output("FILE", ".safetensors or .pth file to write")
    parser.add_argument("-ema", action="store_true", help="write the moving average of the weights instead")
    arguments = parser.parse_args(argv)
    print(export(arguments.checkpoint, arguments.output, arguments.ema))
    return 0


def export(source: str, target: Path, ema: bool) -> str:
    """Write the file and return a summary line."""
    path, checkpoint = read_checkpoint(source, {"state_dict"})
    if target.suffix == ".pth":
        if ema:
            raise ConfigError("-ema: a .pth file contains both the weights and their moving average; leave -ema out")
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)
        return f"{target}: all of {path}, after epoch {checkpoint.get('epoch', -1) + 1}"
    weights = checkpoint.get("state_dict_ema") if ema else weights_of(checkpoint, path)[0]
    if not weights:
        raise ConfigError(f"-ema: {path} has no moving average, because its run had TRAIN.MODEL_EMA off")
    metadata = {key: json.dumps(checkpoint[key]) for key in METADATA if key in checkpoint}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(to_safetensors(weights, {"format": "pt", **metadata}))
    return f"{target}: {counted(len(weights), 'tensor')} of {checkpoint.get('arch', 'the model')}, after epoch {checkpoint.get('epoch', -1) + 1}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
