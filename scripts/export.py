"""Writes a run's weights as .safetensors with timm's names and what is needed to use them, or a checkpoint as one file.

    python scripts/export.py output/train-20260102-03-04-05 -output vit.safetensors
    python scripts/export.py output/train-20260102-03-04-05/last.pth -output whole.pth

The weights are the raw ones or the EMA's, whichever scored better, with adapters (MODEL.LORA) merged into them. The file's
metadata holds the architecture, the class names, the preprocessing of images (size, crop, mean, standard deviation, under
timm's names), all settings and the finished epochs, each as JSON; scripts/predict.py and `safetensors.safe_open(path, "pt").metadata()` read it.

With a name that ends in .pth, a sharded checkpoint (DIST.CHECKPOINT sharded) is merged into one file, as
DIST.CHECKPOINT single would have written it.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

import torch

from models.formats.adapters import merged
from models.formats.common import weights_of
from models.formats.torch import to_safetensors
from scripts.command_line import CHECKPOINT_HELP, Parser, read_checkpoint
from utils.errors import ConfigError
from utils.files import replacing
from utils.program import exit_code
from utils.text import counted

METADATA = ("arch", "class_names", "data", "config", "split", "validation", "step", "metric", "halfstep_version")


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoint", help=CHECKPOINT_HELP)
    parser.add_output("FILE", ".safetensors or .pth file to write")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-ema", dest="key", action="store_const", const="state_dict_ema", help="write the EMA weights")
    kind.add_argument("-raw", dest="key", action="store_const", const="state_dict", help="write the raw weights")
    arguments = parser.parse_args(argv)
    print(export(arguments.checkpoint, arguments.output, arguments.key))
    return 0


def export(source: str, target: Path, key: str | None = None) -> str:
    """Write the file and return a summary line. `key`: of the weights; those that scored better if not given."""
    if target.suffix not in (".safetensors", ".pth"):
        raise ConfigError(f"-output: {target} must end in .safetensors or .pth, the two formats that are written")
    path, checkpoint = read_checkpoint(source, {"state_dict"})
    epoch = checkpoint.get("epoch", -1) + 1
    if target.suffix == ".pth":
        if key:
            raise ConfigError(
                "-ema, -raw: a .pth file contains both the weights and their moving average; leave it out"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            torch.save(checkpoint, file)
        return f"{target}: all of {path}, after epoch {epoch}"
    key = key or weights_of(checkpoint, path)[1]
    if not checkpoint.get(key):
        raise ConfigError(f"-ema: {path} has no moving average, because its run had TRAIN.MODEL_EMA off")
    weights = merged(checkpoint[key], checkpoint.get("config", {}))
    facts = {name: checkpoint[name] for name in METADATA if name in checkpoint} | {"epoch": epoch, "weights": key}
    metadata = {name: json.dumps(fact) for name, fact in facts.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(to_safetensors(weights, {"format": "pt", **metadata}))
    return f"{target}: {counted(len(weights), 'tensor')} of {checkpoint.get('arch', 'the model')}, after epoch {epoch}, from {path} ({key})"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
