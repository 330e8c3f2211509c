"""Fine-tunes the weights of real.py with other programs on the same files, and keeps the prediction of each image.

fastai needs packages that halfstep does not have: real.py -peers starts this file with the interpreter of -python.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
from scripts.command_line import Parser, at_least

SIDE, MODEL = 128, "tf_efficientnet_lite0"


def fastai(data: Path, weights: Path, epochs: int, seed: int, table: Path) -> None:
    """Fine-tune with fastai's vision_learner and its defaults, and write the table of predictions."""
    import timm
    from fastai.vision.all import ImageDataLoaders, Resize, accuracy, aug_transforms, set_seed, vision_learner

    create = timm.create_model
    overlay = {"file": str(weights)}  # instead of a download

    def from_file(name: str, pretrained: bool = False, **options):
        return create(name, pretrained=pretrained, pretrained_cfg_overlay=overlay if pretrained else None, **options)

    timm.create_model = from_file
    set_seed(seed, reproducible=True)
    count = sum(1 for _ in (data / "train").glob("*/*"))
    options = {
        "item_tfms": Resize(192),
        "batch_tfms": aug_transforms(size=SIDE),
        "bs": min(64, count),
        "num_workers": 0,
    }
    loaders = ImageDataLoaders.from_folder(data, train="train", valid="val", seed=seed, **options)
    learner = vision_learner(loaders, MODEL, metrics=accuracy)
    with learner.no_bar(), learner.no_logging():
        learner.fine_tune(epochs)
        found = learner.get_preds(dl=loaders.valid)[0].argmax(1).tolist()
    names = [Path(path).relative_to(data / "val").as_posix() for path in loaders.valid.items]
    write(table, names, [loaders.vocab[number] for number in found])


def timm_command(train_py: Path, data: Path, weights: Path, epochs: int, seed: int, output: Path) -> list[object]:
    """Return the command of timm's train.py. Its documentation has no flags for fine-tuning; these follow its author."""
    classes = sum(each.is_dir() for each in (data / "train").iterdir())
    flags = f"--model {MODEL} --num-classes {classes} --img-size {SIDE} --epochs {epochs} --warmup-epochs 1 -b 32"
    flags += " --opt adamw --lr 1e-3 --weight-decay 0.01 --clip-grad 1 --sched cosine --sched-on-updates"
    flags += f" --head-init-scale 0.001 --seed {seed} --workers 2 --device cpu --train-split train --val-split val"
    words = ["--pretrained", "--pretrained-path", weights, "--output", output, "--experiment", "timm"]
    return [sys.executable, train_py, data, *flags.split(), *words]


def write(table: Path, names: Sequence[str], predictions: Sequence[str]) -> None:
    rows = zip(names, [name.partition("/")[0] for name in names], predictions, strict=True)
    with open(table, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "label", "prediction"), *sorted(rows)])


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    for name in ("data", "weights", "table"):
        parser.add_argument(name, type=Path)
    for name in ("epochs", "seed"):
        parser.add_argument(name, type=at_least(0))
    given = parser.parse_args(argv)
    fastai(given.data, given.weights, given.epochs, given.seed, given.table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
