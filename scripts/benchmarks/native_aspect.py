"""Measures images at their own aspect ratio (DATA.TOKENS). Prints Markdown tables.

python scripts/benchmarks/native_aspect.py accuracy              panoramas and square photos, against square crops
python scripts/benchmarks/native_aspect.py speed -photos FOLDER  training with 196 patches, against a plain ViT at 224
python scripts/benchmarks/native_aspect.py padding               the share of padding in photos of 4:3, 3:4, 1:1 and 4:1

`accuracy` draws its photos: the class is the spacing of the stripes on a small board anywhere in the photo. A square
crop keeps only the middle of a 4:1 panorama. The exit code is 1 if DATA.TOKENS is not better on panoramas by more than
two standard errors, or is worse on square photos by more than two standard errors plus one percentage point. For a
whole run against timm's train.py: loader.py run -tokens 196.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import numpy as np
from PIL import Image

from scripts.benchmarks.common import ROOT, StepWorker, Turns, compare, machine, spread, table
from scripts.command_line import Parser, at_least
from utils.text import counted

SHAPES = {"panoramas of 4:1": (256, 64), "square photos": (128, 128)}  # width, height in pixels
DISTANCES = (6, 8, 11, 15)  # spacing of the stripes of each class, in pixels
BOARD = 48  # side of the board with the stripes
PATCH, TOKENS = 8, 64
RECIPE = f"""
DATA: {{DATASET: imagefolder, IMAGE_SIZE: {PATCH * math.isqrt(TOKENS)}, BATCH_SIZE: 32,
       CROP_SCALE: [0.8, 1.0], CROP_RATIO: [1.0, 1.0], CROP_PCT: 1.0}}
MODEL: {{TYPE: vit, NAME: vit, PATCH_SIZE: {PATCH}, EMBED_DIM: 64, DEPTH: 4, NUM_HEADS: 4}}
TRAIN: {{NUM_EPOCHS: 30, WARMUP_EPOCHS: 2, BASE_LR: 2e-3, WEIGHT_DECAY: 0.05, GRAD_CLIP: 1.0}}
VALIDATE_FREQ: 10
KEEP_CHECKPOINTS: 0
TRACK: []
REPORT: false
"""


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("accuracy")
    command.set_defaults(measure=compare_accuracy)
    command.add_argument("-seeds", type=at_least(2), default=3, metavar="N", help="number of seeds, counted from 0 [3]")
    command.add_argument("-train", type=at_least(8), default=800, metavar="N", help="training photos [800]")
    command.add_argument("-epochs", type=at_least(1), default=30, metavar="N", help="epochs of each run [30]")
    command = commands.add_parser("speed")
    command.set_defaults(measure=compare_speed)
    command.add_argument("-photos", type=Path, required=True, metavar="FOLDER", help="folder written by photos.py")
    command.add_argument("-model", default="vit_tiny_patch16_224", help="a plain ViT of timm [vit_tiny_patch16_224]")
    command.add_argument("-batch_size", type=at_least(1), default=32, metavar="N", help="batch size [32]")
    command.add_argument("-rounds", type=at_least(1), default=5, metavar="N", help="number of turns of each case [5]")
    commands.add_parser("padding").set_defaults(measure=count_padding)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        return arguments.measure(arguments, Path(scratch))


def draw(rng: np.random.Generator, width: int, height: int, target: int) -> Image.Image:
    """Draw a photo: coarse noise, and a board with stripes whose spacing is the class."""
    coarse = rng.integers(60, 196, size=(height // 16, width // 16, 3), dtype=np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    pixels += rng.normal(size=pixels.shape) * 8
    left, top = int(rng.integers(width - BOARD + 1)), int(rng.integers(height - BOARD + 1))
    stripes = (np.arange(BOARD) + rng.integers(DISTANCES[target])) % DISTANCES[target] < DISTANCES[target] / 2
    pixels[top : top + BOARD, left : left + BOARD] += np.where(stripes, 45, -45)[None, :, None]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def draw_photos(folder: Path, size: tuple[int, int], num_train: int) -> None:
    """Draw photos for training, and half as many for validation."""
    for part, count in (("train", num_train), ("val", num_train // 2)):
        for number in range(count):
            target = number % len(DISTANCES)
            path = folder / part / f"every {DISTANCES[target]} pixels" / f"{number:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(np.random.default_rng([part == "val", number, *size]), *size, target).save(path)


def compare_accuracy(arguments: argparse.Namespace, scratch: Path) -> int:
    """Train on both kinds of photos with and without DATA.TOKENS. Return the exit code."""
    (scratch / "recipe.yaml").write_text(RECIPE)
    rows, has_failed = [], False
    for kind, size in SHAPES.items():
        draw_photos(scratch / kind, size, arguments.train)
        found: dict[str, list[float]] = {"square crop": [], f"DATA.TOKENS={TOKENS}": []}
        for seed in range(arguments.seeds):
            for name, values in found.items():
                options = [name] if "=" in name else []
                values.append(train(scratch, kind, seed, arguments.epochs, options))
                print(f"{kind}, {name}, seed {seed}: {values[-1]:.2f}%", file=sys.stderr, flush=True)
        square, native = found.values()
        noise = 2 * math.sqrt(sum(statistics.variance(each) / len(each) for each in (square, native)))
        difference = statistics.mean(native) - statistics.mean(square)
        has_failed |= difference <= noise if size[0] > size[1] else difference < -noise - 1
        rows.append([kind, *(spread(each, 2) for each in (square, native)), f"{difference:+.2f}", f"{noise:.2f}"])
    title = f"{machine('cpu')}; {counted(arguments.seeds, 'seed')}, {arguments.train} training photos"
    title += f", {counted(arguments.epochs, 'epoch')}"
    print(table(title, ["photos", *found, "difference of the means", "two standard errors"], rows))
    return int(has_failed)


def train(scratch: Path, kind: str, seed: int, epochs: int, options: list[str]) -> float:
    """Train, and return the best validation accuracy of the run, in percent."""
    name = f"{kind}-{seed}-{len(options)}"
    words = ["-cfg", scratch / "recipe.yaml", "-data_path", scratch / kind, "-output", scratch / "runs", "-name", name]
    words += ["-seed", seed, "-epochs", epochs, *(["-opts", *options] if options else [])]
    command = [sys.executable, ROOT / "main_single_gpu.py", *words]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    lines = (scratch / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return max(row["eval_top1"] for row in map(json.loads, lines) if row.get("eval_top1") is not None)


def compare_speed(arguments: argparse.Namespace, scratch: Path) -> int:
    """Print images/s of training with 196 patches, and of a plain ViT at 224 with timm's and with our kernels."""
    words = ["-cfg", ROOT / "configs/timm.yaml", "-dataset", "imagefolder", "-data_path", arguments.photos, "-amp"]
    words += ["-batch_size", arguments.batch_size, "-output", scratch, "-opts", f"MODEL.NAME={arguments.model}"]
    words.append("DATA.IMAGE_SIZE=224")
    cases = {
        "plain ViT at 224, timm's kernels": StepWorker(words, role="plain"),
        "plain ViT at 224": StepWorker(words),
        "DATA.TOKENS=196": StepWorker([*words, "DATA.TOKENS=196"]),
    }
    turns = Turns(rounds=arguments.rounds, steps=3, min_seconds=5.0)
    measured = compare(cases, turns)
    rows = [[name, spread(each.images_per_second), spread(each.ratios, 2)] for name, each in measured.items()]
    print(table(f"{machine()}; {arguments.model}, batch {arguments.batch_size}, {turns}", ["", "images/s", "x"], rows))
    return 0


def count_padding(arguments: argparse.Namespace, scratch: Path) -> int:
    """Print the share of padding for each shape of photo and number of patches of 16 x 16 pixels."""
    from extras.native_aspect.grids import size_of

    rows = []
    for tokens in (128, 196, 256, 576, 784, 1024):
        sizes = [size_of(*sides, 16, tokens) for sides in ((900, 1200), (1200, 900), (1000, 1000), (400, 1600))]
        shares = [1 - height * width / (256 * tokens) for height, width in sizes]
        rows.append([str(tokens), *(f"{share:.1%}" for share in shares)])
    print(table("padding", ["DATA.TOKENS", "4:3", "3:4", "1:1", "4:1"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
