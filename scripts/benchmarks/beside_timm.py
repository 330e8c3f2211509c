"""Compares halfstep with timm's train.py: both train each recipe from the same weights on the same batches.

    python scripts/benchmarks/beside_timm.py -train_py pytorch-image-models/train.py [-- ARGUMENT ...]

The settings are translated as in from_timm.py. Each row has the largest relative differences in loss and learning rate
over all updates, and the relative norm of the difference in the final weights and in their EMA. The exit code is 1 if a
loss differs by more than 1e-5. The script runs on the CPU and takes minutes. Each ARGUMENT is passed to both programs.
"""

import contextlib
import importlib.util
import io
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # so that the script runs from any folder

from utils.program import exit_code  # isort: skip
import torch
from torch import Tensor

from scripts.benchmarks.common import machine, table
from scripts.benchmarks.worker import TrainerWorker
from scripts.command_line import Parser, local_path

BATCH, LIMIT = 4, 1e-5
# from_timm.py does not translate this schedule, so it is set by hand: it decays in the last 2 of 5 epochs.
WSD, OUR_WSD = "--sched wsd --decay-epochs 2", ["TRAIN.LR_SCHEDULER.NAME=wsd", "TRAIN.LR_SCHEDULER.DECAY_FRACTION=0.4"]
RECIPES = {  # 6 updates per epoch and 5 epochs, unless a recipe says otherwise
    "RMSprop, step every 2.4 epochs, "
    "EMA": "--model test_efficientnet --opt rmsproptf --opt-eps .001 --sched step --decay-epochs 2.4 --decay-rate .97 "
    "--lr 1e-4 --model-ema --model-ema-decay .99",
    "SGD, multistep after the "
    "warm-up": "--model test_resnet --sched multistep --decay-milestones 1 3 --warmup-prefix --epochs 3 "
    "--warmup-epochs 2 --lr .01",
    "NAdamW, step per update, "
    "prefix": "--model test_vit --opt nadamw --sched step --decay-epochs 1.5 --warmup-prefix --epochs 4 "
    "--warmup-epochs 1 --sched-on-updates --lr 1e-3",
    "Lion with AdamW's betas, "
    "wsd": f"--model test_vit2 --opt lion --opt-betas .9 .999 {WSD} --warmup-epochs 1 --lr 1e-5",
    "LAMB with eps 1e-8, "
    "cool-down": "--model test_vit --opt lamb --opt-eps 1e-8 --epochs 4 --cooldown-epochs 1 --warmup-epochs 1 "
    "--sched-on-updates --lr 2e-3 --min-lr 1e-5",
    "accumulation with remaining batches, "
    "EMA": "--model test_vit3 --opt adamw --grad-accum-steps 4 --epochs 15 --model-ema --model-ema-decay .9 --lr 1e-3",
    "plain momentum, constant": "--model test_resnet --opt momentum --momentum .8 --sched constant --warmup-epochs 0 "
    "--lr .01 --weight-decay 0",
    "AdaBelief, scaled rate": "--model test_convnext --opt adabelief --lr-base .01 --lr-base-size 64 --warmup-epochs 0",
    "BCE without smoothing or "
    "mixing": "--model test_vit --opt adamw --bce-loss --smoothing 0 --lr 1e-3 --warmup-epochs 2",
    "Adafactor, constant, clipping by "
    "value": "--model test_resnet --opt adafactor --sched constant --clip-grad .01 --clip-mode value --lr 1e-3",
    "Muon, layer decay": "--model test_vit --opt muon --layer-decay .7 --lr 3e-4 --warmup-epochs 1",
    "LARS, BCE with threshold and "
    "smoothing": "--model test_convnext --opt lars --bce-loss --bce-target-thresh .3 --smoothing .1 --lr .1",
    "Adan, AGC, EMA": "--model test_convnext2 --opt adan --clip-grad .05 --clip-mode agc --model-ema --model-ema-decay "
    ".95 --lr 1e-3",
    "plain Adam, weight decay, BatchNorm momentum of "
    "0.05": "--model test_efficientnet --opt adam --weight-decay .1 --bn-momentum .05 --lr 1e-4",
}


class Trained(NamedTuple):
    """The losses and learning rates of one program's run, its final weights and their EMA."""

    losses: list[float]
    rates: list[list[float]]  # for each update, the learning rates of the parameter groups in ascending order
    weights: dict[str, Tensor]
    ema: dict[str, Tensor]


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "-train_py", required=True, type=local_path, metavar="FILE", help="train.py of timm's repository"
    )
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="arguments of train.py, added to all recipes")
    arguments = parser.parse_args(argv)
    rows, largest = [], 0.0
    for name, recipe in RECIPES.items():
        common = f"--warmup-epochs 1 --epochs 5 -b {BATCH} --num-classes 10 --device cpu"
        translated = f"{common} {recipe.replace(WSD, '')}".split() + arguments.words
        start, batches, own_run = train_ours(translated, OUR_WSD if WSD in recipe else [])
        words = f"{common} {recipe}".split() + arguments.words
        timm_run = train_theirs(arguments.train_py, words, start, batches)
        loss = max(abs(a / b - 1) for a, b in zip(own_run.losses, timm_run.losses, strict=True))
        pairs = [pair for each in zip(own_run.rates, timm_run.rates, strict=True) for pair in zip(*each, strict=True)]
        rate = max(abs(a - b) / max(b, 1e-9) for a, b in pairs)
        largest = max(largest, loss)
        apart = [
            distance(own_run.weights, timm_run.weights),
            distance(own_run.ema, timm_run.ema) if own_run.ema else None,
        ]
        figures = ["-" if each is None else f"{each:.1e}" for each in (loss, rate, *apart)]
        rows.append([name, str(len(own_run.losses)), *figures])
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(machine("cpu"), ["recipe", "updates", "loss", "rate", "weights", "EMA"], rows))
    return int(largest > LIMIT)


def distance(weights: dict[str, Tensor], timm_weights: dict[str, Tensor]) -> float:
    """Return the norm of the difference of the weights, relative to the norm of timm's weights."""
    one, other = (
        torch.cat([side[name].flatten().double() for name in timm_weights]) for side in (weights, timm_weights)
    )
    return ((one - other).norm() / other.norm()).item()


def train_ours(words: list[str], settings: list[str]) -> tuple[dict[str, Tensor], list[list[tuple]], Trained]:
    """Train with halfstep, with the settings of a command of timm and others.

    Return the initial weights, the images and targets of each epoch's batches, and the result.
    """
    from scripts.from_timm import translate

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "my.yaml")
        file.write_text(translate(words).yaml)
        data = ["DATA.DATASET=synthetic", f"DATA.SYNTHETIC_SIZE={6 * BATCH}", "DATA.NUM_WORKERS=0", f"SAVE={folder}"]
        worker = TrainerWorker(["-cfg", str(file), "-opts", *data, *settings])
    trainer, batches, losses, rates = worker.trainer, [], [], []
    start = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    prepare, per_epoch = trainer.prepare, trainer.data.steps_per_epoch

    def keep(batch, dtype):
        images, targets = prepare(batch, dtype)
        batches[-1].append((images.clone(), targets.clone()))
        return images, targets

    trainer.prepare = keep
    for step in range(trainer.config.TRAIN.NUM_EPOCHS * per_epoch):
        if step % per_epoch == 0:
            batches.append([])
        worker.update(1)
        losses.append(trainer.report().loss)
        rates.append(sorted({group["lr"] for group in trainer.optimizer.param_groups}))
    ema = trainer.ema.model.state_dict() if trainer.ema else {}
    return start, batches, Trained(losses, rates, trainer.model.state_dict(), ema)


class Loader(list):
    """A loader that gives train.py the recorded batches, epoch by epoch."""

    dataset = sampler = batch_sampler = None

    def __init__(self, epochs: list):
        super().__init__(epochs[0])
        self.epochs = iter(epochs)

    def __iter__(self):
        return iter(next(self.epochs))


def train_theirs(path: Path, words: list[str], start: dict[str, Tensor], batches: list) -> Trained:
    """Run train.py's main with its own model, loss, optimizer, schedule and EMA, from weights `start` on `batches`."""
    spec = importlib.util.spec_from_file_location("timms_train", path)
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    losses: list[float] = []
    rates, tasks = [], []
    create_model, create_optimizer, base = script.create_model, script.create_optimizer_v2, script.ClassificationTask

    def make_model(*args, **options):
        model = create_model(*args, **options)
        model.load_state_dict(start)
        return model

    def make_optimizer(*args, **options):
        optimizer = create_optimizer(*args, **options)
        optimizer.register_step_pre_hook(note_rates)
        return optimizer

    def note_rates(optimizer, *arguments):
        rates.append(sorted({group["lr"] for group in optimizer.param_groups}))

    def make_dataset(*args, **options):
        return None

    def make_loader(*args, **options):
        return Loader(batches)

    class Task(base):
        def forward(self, *args):
            tasks[:] = [self]
            result = super().forward(*args)
            losses.append(result["loss"].item())
            return result

    script.create_model, script.create_optimizer_v2, script.ClassificationTask = make_model, make_optimizer, Task
    script.create_dataset, script.create_loader = make_dataset, make_loader
    from scripts.from_timm import read_arguments

    arguments = read_arguments(words)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["train.py", *words, "--no-prefetcher", "--val-split", "", "--output", folder]
        logging.disable(logging.WARNING)
        script.main()
    task, several = tasks[0], arguments["grad-accum-steps"]
    epochs = [losses[at : at + len(batches[0])] for at in range(0, len(losses), len(batches[0]))]
    windows = [each[at : at + several] for each in epochs for at in range(0, len(each), several)]
    ema = task.get_trainable_module(ema=True).module.state_dict() if task.has_ema() else {}
    return Trained([sum(each) / len(each) for each in windows], rates, task.get_trainable_module().state_dict(), ema)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
