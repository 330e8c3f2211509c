"""Converts PaddleViT's .pdparams of a ViT or DeiT to .safetensors or .pth with timm's names, or back.

    python scripts/convert_paddlevit.py vit_base_patch16_224.pdparams -o vit_base_patch16_224.safetensors
    python scripts/convert_paddlevit.py vit.safetensors -o vit.pdparams

Training does not need it: -pretrained takes a .pdparams file as it is. A .pdparams written here needs numpy 1.26 or
newer beside Paddle.
"""

import argparse
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # our folders, wherever the script is called from

import torch

from models.formats.files import read_state_dict, to_safetensors
from models.formats.paddle import to_paddle
from utils.errors import ConfigError, UserError
from utils.files import replacing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="a file of weights: .pdparams, .pth, .safetensors or Google's .npz")
    parser.add_argument("-o", required=True, metavar="FILE", type=Path, help=".safetensors, .pth or .pdparams to write")
    arguments = parser.parse_args()
    try:
        print(convert(arguments.weights, arguments.o))
    except UserError as error:
        parser.error(str(error))


def convert(source: str, target: Path) -> str:
    """Returns a line that says what was written."""
    writers = {
        ".safetensors": lambda state, file: file.write(to_safetensors(state, {"format": "pt"})),
        ".pth": torch.save,
        ".pdparams": lambda state, file: pickle.dump(to_paddle(state), file, protocol=4),
    }
    if target.suffix not in writers:
        raise ConfigError(f"-o: {target} ends in none of {', '.join(writers)}")
    state = read_state_dict(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        writers[target.suffix](state, file)
    return f"{target}: {len(state)} tensors, {sum(tensor.numel() for tensor in state.values()):,} numbers"


if __name__ == "__main__":
    main()
