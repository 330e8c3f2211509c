"""Fine-tunes the weights that come with halfstep with few labels, against training from scratch at the same cost.

    python scripts/benchmarks/studies/fine_tuning.py                        10 and 50 digits of each class, 5 seeds
    python scripts/benchmarks/studies/fine_tuning.py -labels 10 -seeds 2

All runs have the same model, 30 epochs, batches of 32, and the 359 held-out digits to validate on. A seed draws the digits
to train on too. From scratch, the rate is also the best of RATES, found with a seed that is not reported. An accuracy is of
the last epoch, and of the EMA if that is better. The former recipe is what README's line for fine-tuning named before
configs/finetune.yaml: configs/vit_base_patch16_224.yaml, its warm-up shortened as the run is, from 32 of 300 to 3.2 epochs.
"""

import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that the script runs from any folder

import numpy as np
from PIL import Image

from configs.schema import Config
from datasets.shuffle import shuffled
from datasets.sources.digits import read_digits
from main_single_gpu import main as run_entry
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.command_line import Parser, at_least
from utils.program import exit_code

RATES = ("1e-3", "3e-3", "1e-2")
MODEL = "MODEL.PATCH_SIZE=4 MODEL.EMBED_DIM=96 MODEL.DEPTH=4 MODEL.NUM_HEADS=3"
DATA = "DATA.DATASET=imagefolder DATA.IMAGE_SIZE=32 DATA.CROP_PCT=1 DATA.INTERPOLATION=bilinear DATA.HFLIP=0"
DIGITS = f"{MODEL} {DATA} DATA.BATCH_SIZE=32 DATA.BATCH_SIZE_EVAL=359 VALIDATE_FREQ=30 TENSORBOARD=false"
FINETUNE, FORMER = "configs/finetune.yaml", "configs/vit_base_patch16_224.yaml"
WEIGHTS = f"MODEL.PRETRAINED={ROOT / 'weights/vit_fractals.safetensors'}"
SCRATCH = "TRAIN.LAYER_DECAY=none MODEL.DROPPATH=0"
# The file, and further settings.
RUNS = {
    "fractal weights, finetune.yaml": (FINETUNE, WEIGHTS),
    "fractal weights, finetune.yaml, BASE_LR 8e-3": (FINETUNE, f"{WEIGHTS} TRAIN.BASE_LR=8e-3"),
    "fractal weights, former recipe": (FORMER, f"{WEIGHTS} TRAIN.NUM_EPOCHS=30 TRAIN.WARMUP_EPOCHS=3.2"),
    "from scratch, finetune.yaml": (FINETUNE, ""),
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-labels", nargs="+", type=at_least(1), default=[10, 50], metavar="N", help="a class [10 50]")
    parser.add_argument("-seeds", type=at_least(2), default=5, metavar="N", help="how many, from 0; at least 2 [5]")
    arguments = parser.parse_args(argv)
    rows = []
    for labels in arguments.labels:
        with tempfile.TemporaryDirectory() as folder:
            rows += [[str(labels), *row] for row in compare(labels, arguments.seeds, Path(folder))]
    columns = ["labels of each class", "run", "top-1 of each seed, %", "mean", "standard deviation"]
    print(Table(f"{arguments.seeds} seeds. {machine()}", columns, rows).markdown())
    return 0


def compare(labels: int, num_seeds: int, folder: Path) -> list[list[str]]:
    """A row for each of RUNS, and for the best rate from scratch."""
    for seed in range(num_seeds + 1):
        write_digits(folder / str(seed), labels, seed)
    options = {rate: f"{SCRATCH} TRAIN.BASE_LR={rate}" for rate in RATES}
    searched = {rate: train(FINETUNE, options[rate], folder, num_seeds) for rate in RATES}
    best = max(searched, key=searched.get)
    runs = RUNS | {f"from scratch, BASE_LR {best}, no layer decay or drop path": (FINETUNE, options[best])}
    found = {name: [] for name in runs}
    for seed in range(num_seeds):
        for name, (file, words) in runs.items():
            found[name].append(train(file, words, folder, seed))
            print(f"{labels} labels, seed {seed}, {name}: {found[name][-1]:.2f}", file=sys.stderr, flush=True)
    return [
        [name, " ".join(f"{each:.2f}" for each in each_seed), f"{statistics.mean(each_seed):.2f}"]
        + [f"{statistics.stdev(each_seed):.2f}"]
        for name, each_seed in found.items()
    ]


def write_digits(folder: Path, labels: int, seed: int) -> None:
    """Class folders: `labels` digits of each class to train on, and all that are held out."""
    train, val = read_digits(Config())
    drawn = [np.flatnonzero(train.targets == each) for each in range(10)]
    drawn = np.concatenate(
        [members[shuffled(len(members), seed, number)[:labels]] for number, members in enumerate(drawn)]
    )
    for part, image_set, indices in (("train", train, drawn), ("val", val, range(len(val)))):
        for index in indices:
            path = folder / part / str(image_set.targets[index]) / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image_set.images[index]).save(path)


def train(file: str, words: str, folder: Path, seed: int) -> float:
    """Top-1 of one run by the entry script, in this process to save the start of others; per cent."""
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(io.StringIO()):
        command = ["-cfg", ROOT / file, "-data_path", folder / str(seed), "-seed", seed, "-output", output, "-amp"]
        code = run_entry([str(each) for each in (*command, "-opts", *DIGITS.split(), *words.split())])
        assert code == 0, f"a run ended with exit code {code}"
        (metrics,) = Path(output).glob("*/metrics.jsonl")
        last = json.loads(metrics.read_text().splitlines()[-1])
    return max(last["eval_top1"], last.get("eval_top1_ema") or 0.0)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
