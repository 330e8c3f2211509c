"""Averages the weights of checkpoints of a run, or of several runs that began from the same weights (a model soup).

    python scripts/average.py output/train-20260102-03-04-05 -last 5 -output mean.safetensors
    python scripts/average.py runA/best.pth runB/best.pth runC/best.pth -output soup.safetensors
    python scripts/average.py runA runB runC -greedy -output soup.safetensors

The file is one as scripts/export.py writes: for -eval -pretrained, scripts/predict.py, scripts/export.py and fine-tuning. Of each
checkpoint it takes the raw or the EMA weights, whichever scored better. With -greedy each checkpoint is evaluated on the
validation images of the first; the others join the best one in the order of their scores, each only if the mean scores
better with it.
"""

import os
import sys
from dataclasses import replace
from math import isinf
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from any folder

from configs.schema import Start
from scripts.command_line import CHECKPOINT_HELP, Parser, at_least, check_no_input, read_checkpoint
from scripts.export import facts_of, write_safetensors
from utils.errors import ConfigError
from utils.program import exit_code
from utils.text import counted

NEEDED = {"config", "class_names", "data"}


class Part(NamedTuple):
    """One of the checkpoints."""

    path: Path
    record: dict  # all but its weights
    key: str  # of the weights that are taken
    weights: dict
    share: float


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    parser.add_output("FILE", "the .safetensors to write")
    parser.add_argument(
        "-last", type=at_least(2), metavar="N", help="the newest N checkpoint-*.pth of each run's folder"
    )
    parser.add_argument("-weights", nargs="+", type=float, metavar="W", help="a weight for each checkpoint [all equal]")
    parser.add_argument("-greedy", action="store_true", help="only checkpoints that improve the mean")
    parser.add_argument("-data_path", help="of the validation images, for -greedy [as the first was trained]")
    parser.add_weights_choice("take")
    arguments = parser.parse_args(argv)
    if arguments.output.suffix != ".safetensors":
        raise ConfigError(
            f"-output: {arguments.output} must end in .safetensors; scripts/export.py makes other formats of it"
        )
    paths = newest(arguments.checkpoints, arguments.last) if arguments.last else arguments.checkpoints
    parts = read(paths, arguments.key, check_weights(arguments.weights, len(paths), arguments.greedy))
    check_no_input("-output", arguments.output, [part.path for part in parts])
    if arguments.greedy:
        parts = greedy(parts, arguments.data_path)
    elif arguments.data_path:
        raise ConfigError(
            f"-data_path: {arguments.data_path} is of the images that -greedy evaluates on; add it, or leave this out"
        )
    print(write(parts, arguments.output))
    return 0


def newest(folders: list[str], count: int) -> list[Path]:
    from engine.checkpoint.format import numbered

    paths = []
    for folder in folders:
        found = numbered(Path(folder)) if Path(folder).is_dir() else []
        if len(found) < count:
            raise ConfigError(
                f"-last {count}: {folder} has {counted(len(found), 'file')} checkpoint-*.pth; lower it, or train with SAVE_FREQ 1 "
                f"and KEEP_CHECKPOINTS {count}"
            )
        paths += found[:count]
    return paths


def check_weights(weights: list[float] | None, count: int, is_greedy: bool) -> list[float]:
    if weights is None:
        return [1.0] * count
    if is_greedy:
        raise ConfigError("-weights: -greedy weights all that it takes equally; leave one of them out")
    if len(weights) != count or not all(weight > 0 for weight in weights) or isinf(sum(weights)):
        raise ConfigError(f"-weights: {weights} are not {count} positive numbers, one for each checkpoint")
    return weights


def read(paths: list, key: str | None, shares: list[float]) -> list[Part]:
    """The checkpoints; ConfigError unless they are of one architecture, with the same classes and preparation of images."""
    from models.weights.files import chosen_weights
    from models.weights.metadata import ARCHITECTURE

    if len(paths) < 2:
        raise ConfigError(
            f"there is one checkpoint, {paths[0]}; name more of them, or -last N with the folder of a run"
        )
    parts: list[Part] = []
    for source, share in zip(paths, shares, strict=True):
        path, content = read_checkpoint(source, NEEDED)
        part = Part(path, facts_of(content), *chosen_weights(content, path, key), share)
        for what, of_one in {
            "architecture": lambda each: [
                each.record["config"].get(name) for name in ARCHITECTURE if name != "MODEL.NAME"
            ],
            "weights": lambda each: {name: tuple(tensor.shape) for name, tensor in each.weights.items()},
            "classes": lambda each: list(each.record["class_names"]),
            "preparation of images": lambda each: each.record["data"],
        }.items():
            if parts and of_one(part) != of_one(parts[0]):
                raise ConfigError(
                    f"{path} and {parts[0].path} differ in their {what}; only like models can be averaged"
                )
        parts.append(part)
    return parts


def mean_of(parts: list[Part]) -> dict:
    from models.weights.state import average

    return average([part.weights for part in parts], [part.share for part in parts])


def greedy(parts: list[Part], data_path: str | None) -> list[Part]:
    """Those whose mean scores best, found by adding one after the other."""
    score = Scorer(parts[0], data_path)
    scored = sorted(((score(part.weights), part) for part in parts), key=lambda each: each[0].rank, reverse=True)
    best, taken = scored[0][0], [scored[0][1]]
    say(f"{scored[0][1].path}: {best.describe('alone')}")
    for alone, part in scored[1:]:
        found = score(mean_of([*taken, part]))
        is_better = found.rank > best.rank
        say(
            f"{part.path}: {alone.describe('alone')}; {found.describe('joined')}: {'taken' if is_better else 'left out'}"
        )
        if is_better:
            best, taken = found, [*taken, part]
    return taken


class Scorer:
    """Evaluates weights on the validation images of a checkpoint's run."""

    def __init__(self, part: Part, data_path: str | None):
        from datasets import BadImages, Kept, Normalize, build_eval_data, load_image_sets
        from engine.precision.policy import Precision, set_matmul
        from engine.predict.classifier import config_of
        from utils.distributed import Process, choose_device

        record = part.record
        config = replace(config_of(record), START=Start(EVAL=True))
        config = replace(config, DATA=replace(config.DATA, DATA_PATH=data_path or config.DATA.DATA_PATH))
        kept = Kept(list(record["class_names"]), record.get("split", {}), record.get("validation", {}))
        _, images = load_image_sets(config, say, kept)
        self.process = Process(choose_device(config.DEVICE, local_rank=0))
        self.config, self.num_classes = config, config.MODEL.NUM_CLASSES or len(record["class_names"])
        self.precision = Precision(config, self.process.device)
        set_matmul(config.PRECISION.MATMUL)
        self.data = build_eval_data(config, images, self.process)
        self.normalize = Normalize(config.DATA).to(self.process.device)
        self.bad_images, self.path = BadImages(images, config.DATA.MAX_BAD_FRACTION, say), part.path

    def __call__(self, weights: dict):
        from engine.evaluation.evaluate import evaluate
        from models import build_model
        from models.transforms import choose_transforms
        from models.weights.load import load_exactly

        model = build_model(self.config, self.num_classes)
        load_exactly(model, weights, self.path)
        device = self.process.device
        choose_transforms(self.config, device, self.precision.half).apply(model.to(device))
        found = evaluate(model, self.data, self.normalize, self.precision, self.process, self.bad_images)
        return replace(found.scores, metric=self.config.TRAIN.BEST_METRIC)


def say(line: str) -> None:
    print(line, file=sys.stderr)


def write(parts: list[Part], target: Path) -> str:
    """The facts are those of the checkpoint of the latest epoch; its score is not that of the mean."""
    last = max(parts, key=lambda part: part.record.get("epoch", 0))
    facts = {name: value for name, value in last.record.items() if name != "metric"} | {"weights": "state_dict"}
    facts["averaged"] = [{"file": os.fspath(part.path), "weights": part.key, "share": part.share} for part in parts]
    checked = write_safetensors(mean_of(parts), facts, target)
    return f"{target}: the mean of {counted(len(parts), 'checkpoint')} ({', '.join(part.path.name for part in parts)}); {checked}"


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
