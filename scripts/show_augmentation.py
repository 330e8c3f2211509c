"""Draws the training images of a run as the model gets them: cropped, augmented, erased and mixed.

    python scripts/show_augmentation.py augmentation.png -cfg configs/vit_digits.yaml -opts TRAIN.MIXUP_ALPHA=0.8

The first argument is the PNG file to write, the others are the flags of the run. Shows 24 images of the first
micro-batch.
Exit codes: 0, or 2 for a mistake in the settings or the data.
"""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

import torch
from PIL import Image
from torchvision.utils import make_grid

from configs.load import load
from datasets import Normalize, Preparation, build_train_data, load_image_sets
from utils.distributed import Process
from utils.errors import ConfigError
from utils.program import exit_code
from utils.text import counted

NUM_SHOWN, NUM_COLUMNS, GAP = 24, 8, 2


def main(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["-help"], ["--help"]):
        print(__doc__)
        return 0
    if not argv or not argv[0].lower().endswith(".png"):
        raise ConfigError("the first argument must be the PNG file to write; -h shows an example")
    config = load(argv[1:]).with_default_batch_size().config
    train_set, _ = load_image_sets(config)
    process = Process(torch.device("cpu"))
    with contextlib.closing(build_train_data(config, train_set, process).windows(0, 1)) as windows:
        batch = next(next(windows).batches)
    normalize = Normalize(config.DATA)
    images, _ = Preparation(config, normalize)(batch)
    pixels = ((images[:NUM_SHOWN] - normalize.shift) / normalize.scale).round().clamp(0, 255).to(torch.uint8)
    sheet = make_grid(pixels.expand(-1, 3, -1, -1), NUM_COLUMNS, GAP, pad_value=255)
    try:
        Image.fromarray(sheet.permute(1, 2, 0).numpy()).save(argv[0])
    except OSError as error:
        raise ConfigError(f"{argv[0]}: cannot be written ({error.strerror}); choose another file") from error
    print(f"{counted(len(pixels), 'image')}: {argv[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
