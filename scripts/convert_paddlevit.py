"""Converts PaddleViT's .pdparams of a ViT or DeiT to .safetensors or .pth with timm's names, or back.

    python scripts/convert_paddlevit.py vit_base_patch16_224.pdparams -output vit_base_patch16_224.safetensors
    python scripts/convert_paddlevit.py vit.safetensors -output vit.pdparams

Training does not need it: -pretrained reads a .pdparams file directly. To read a .pdparams written here, Paddle needs
numpy 1.26 or later.
"""

import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

import torch

from models.weights.files import read_state_dict
from models.weights.paddle import to_paddle
from models.weights.torch_files import to_safetensors
from scripts.command_line import Parser
from utils.errors import ConfigError
from utils.files import replacing
from utils.program import exit_code
from utils.text import counted


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("weights", help="a file of weights: .pdparams, .pth, .safetensors or Google's .npz")
    parser.add_output("FILE", ".safetensors, .pth or .pdparams file to write")
    arguments = parser.parse_args(argv)
    print(convert(arguments.weights, arguments.output))
    return 0


def convert(source: str, target: Path) -> str:
    """Convert the file and return a summary line."""
    writers = {
        ".safetensors": lambda state, file: file.write(to_safetensors(state, {"format": "pt"})),
        ".pth": torch.save,
        ".pdparams": lambda state, file: pickle.dump(to_paddle(state), file, protocol=4),
    }
    if target.suffix not in writers:
        raise ConfigError(f"-output: {target} must end in one of {', '.join(writers)}")
    state = read_state_dict(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        writers[target.suffix](state, file)
    return f"{target}: {counted(len(state), 'tensor')}, {sum(tensor.numel() for tensor in state.values()):,} numbers"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
