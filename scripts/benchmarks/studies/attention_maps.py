"""Whether maps of what a model looks at lie on the object: scenes with one bright square at a random place on noise.

python scripts/benchmarks/studies/attention_maps.py

Trains small models to tell the colour of the square, then maps the validation images as `scripts/predict.py -attention` does. A
map hits where the middle of its largest value lies on the square, which has a ninth of the image. Exit code 1 if a model that
must hit does so in less than 90% of the images.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that the script runs from any folder

import numpy as np
from PIL import Image
from torch import Tensor

import main_single_gpu
from engine.evaluation.classifier import load_classifier
from engine.evaluation.output import Maps
from engine.evaluation.predictor import Look, Predictor
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.distributed import Process, choose_device
from utils.program import exit_code

SIDE, SQUARE, BRIGHTEST_NOISE = 48, 16, 120
COLOURS = {"red": (230, 60, 60), "green": (60, 230, 60), "blue": (60, 60, 230), "yellow": (230, 230, 60)}
VIT = ("MODEL.TYPE=vit", "MODEL.PATCH_SIZE=8", "MODEL.EMBED_DIM=48", "MODEL.DEPTH=3", "MODEL.NUM_HEADS=3")
MODELS = {
    "ViT with a class token": VIT,
    "ViT with the mean of its tokens": (*VIT, "MODEL.KWARGS.global_pool=avg", "MODEL.KWARGS.class_token=false"),
    "resnet10t": ("MODEL.TYPE=timm", "MODEL.NAME=resnet10t"),
}
MUST_HIT, ENOUGH = ("ViT with a class token", "resnet10t"), 0.9


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-seed", type=at_least(0), default=0, metavar="N", help="of scenes and weights [0]")
    parser.add_argument("-epochs", type=at_least(1), default=10, metavar="N", help="of each run [10]")
    parser.add_argument("-train", type=at_least(50), default=1500, metavar="N", help="training scenes [1500]")
    arguments = parser.parse_args(argv)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(Path(folder) / "train", arguments.train, arguments.seed)
        paths = write_scenes(Path(folder) / "val", 300, arguments.seed + 1000)
        for name, options in MODELS.items():
            weights = train(Path(folder), arguments.seed, arguments.epochs, options)
            found[name] = hits(weights, paths)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    rows = [[name, kind, f"{100 * right:.1f}", f"{100 * hit:.1f}"] for name, (kind, right, hit) in found.items()]
    columns = ["", "maps", "top-1, %", "maximum on the object, %"]
    print(Table(f"300 scenes, {arguments.epochs} epochs. {machine('cpu')}", columns, rows).markdown())
    return int(any(found[name][2] < ENOUGH for name in MUST_HIT))


def write_scenes(folder: Path, number: int, seed: int) -> list[str]:
    """A folder of PNGs for each colour. Returns their paths."""
    rng, paths = np.random.default_rng(seed), []
    for index in range(number):
        colour = list(COLOURS)[index % len(COLOURS)]
        scene = rng.integers(0, BRIGHTEST_NOISE, (SIDE, SIDE, 3))
        top, left = rng.integers(0, SIDE - SQUARE + 1, 2)
        scene[top : top + SQUARE, left : left + SQUARE] = COLOURS[colour] + rng.integers(-25, 25, 3)
        path = folder / colour / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene.astype(np.uint8)).save(path)
        paths.append(str(path))
    return paths


def train(folder: Path, seed: int, epochs: int, options: tuple[str, ...]) -> Path:
    """One run by the entry script. Returns its last weights."""
    output = tempfile.mkdtemp(dir=folder)
    words = ["-cfg", ROOT / "configs/vit_digits.yaml", "-dataset", "imagefolder", "-data_path", folder, "-seed", seed]
    words += ["-batch_size", 50, "-epochs", epochs, "-output", output, "-num_workers", 0, "-opts", "DEVICE=cpu"]
    images = [f"DATA.IMAGE_SIZE={SIDE}", "DATA.IMAGE_CHANNELS=3", "DATA.TRAIN_CROP=simple", "TRAIN.BASE_LR=1e-3"]
    means = ["DATA.IMAGENET_MEAN=[0.5,0.5,0.5]", "DATA.IMAGENET_STD=[0.25,0.25,0.25]", "TRAIN.WARMUP_EPOCHS=1"]
    ends = [f"VALIDATE_FREQ={epochs}", f"SAVE_FREQ={epochs}", "TENSORBOARD=false", "REPORT=false"]
    call(main_single_gpu.main, *words, *images, *means, *ends, *options)
    (last,) = Path(output).glob("*/last.pth")
    return last


def hits(weights: Path, paths: list[str]) -> tuple[str, float, float]:
    """The kind of maps, the fraction of images that are classified right, and of those whose map hits."""
    process, classifier, found = Process(choose_device("cpu", 0)), load_classifier(weights), []
    maps = Maps.of(classifier, process.device, Path(), paths)

    def look(batch: Look) -> list[bool]:
        return on_object(batch.pixels, maps.source(batch.inputs, batch.best))

    for prediction in Predictor(classifier, process)(paths, look=look):
        found.append((prediction.guesses[0].name == Path(prediction.path).parent.name, prediction.picture))
    right, hit = np.mean(found, axis=0)
    return maps.source.title, float(right), float(hit)


def on_object(pixels: Tensor, maps: Tensor) -> list[bool]:
    """Whether the middle of each map's largest value lies on a pixel that is too bright for noise."""
    bright, side, cells = pixels.amax(1) > BRIGHTEST_NOISE, pixels.shape[-1], maps.shape[-1]
    found = []
    for index, highest in enumerate(maps.flatten(1).argmax(1).tolist()):
        row, column = (int((place + 0.5) * side / cells) for place in divmod(highest, cells))
        found.append(bool(bright[index, row, column]))
    return found


def call(program: Callable[[list[str]], int], *words: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = program(list(map(str, words)))
    assert code == 0, words


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
