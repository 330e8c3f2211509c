"""A small student with few labels, alone and taught by a model that was fine-tuned with the same labels.

    python scripts/benchmarks/studies/distillation.py                        20 digits of each class, 5 seeds

A seed draws the digits to train on. The teacher is weights/vit_fractals.safetensors, fine-tuned with them as
configs/finetune.yaml says. The student is a ViT of 0.07 M parameters from random weights: alone, with the teacher's
probabilities (soft, DeiT's temperature 3) and with its class (hard), both at the default weight of 0.5. All ways have the same
images, epochs, rate and label smoothing. RATE is the best of 1e-3, 3e-3 and 1e-2 for the student alone, with 50 labels of each
class and a seed that is not reported. Accuracy is that of the last weights on the 359 held-out digits. Exit code 1 if soft
distillation does not raise the mean by more than two standard errors of its differences, seed against seed.
"""

import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that the script runs from any folder

from main_single_gpu import main as run_entry
from scripts.benchmarks.parts.common import ROOT, Table, machine
from scripts.benchmarks.studies.fine_tuning import DATA, FINETUNE, MODEL, SCRATCH, WEIGHTS, write_digits
from scripts.command_line import Parser, at_least
from utils.program import exit_code

RATE = "1e-2"
STUDENT = f"MODEL.TYPE=vit MODEL.PATCH_SIZE=8 MODEL.EMBED_DIM=48 MODEL.DEPTH=2 MODEL.NUM_HEADS=3 {SCRATCH}"
WAYS = {
    "alone": "TRAIN.DISTILLATION_TYPE=none",
    "soft": "TRAIN.DISTILLATION_TYPE=soft TRAIN.DISTILLATION_TAU=3",
    "hard": "TRAIN.DISTILLATION_TYPE=hard",
}


def main(argv: list[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("-labels", type=at_least(1), default=20, metavar="N", help="of each class [20]")
    parser.add_argument("-seeds", type=at_least(2), default=5, metavar="N", help="how many, from 0; at least 2 [5]")
    parser.add_argument("-epochs", type=at_least(1), default=100, metavar="N", help="of each student [100]")
    arguments = parser.parse_args(argv)
    found: dict[str, list[float]] = {name: [] for name in ("teacher", *WAYS)}
    for seed in range(arguments.seeds):
        with tempfile.TemporaryDirectory() as folder:
            write_digits(Path(folder), arguments.labels, seed)
            record = compare(Path(folder), seed, arguments.epochs)
        for name, accuracy in record.items():
            found[name].append(accuracy)
        print(f"seed {seed}: {record}", file=sys.stderr, flush=True)
    title = f"{arguments.labels} labels of each class, {arguments.epochs} epochs. {machine('cpu')}"
    print(tabulate(found, title).markdown())
    mean, error = gain(found, "soft")
    return int(mean <= 2 * error)


def compare(data: Path, seed: int, epochs: int) -> dict[str, float]:
    """Accuracies of the teacher and of each student, per cent."""
    last, teacher = train(data, "teacher", seed, f"{MODEL} {WEIGHTS} VALIDATE_FREQ=30")
    found = {"teacher": last["eval_top1_ema"]}  # the weights that a student is taught by
    for name, options in WAYS.items():
        taught = "" if name == "alone" else f"TRAIN.TEACHER_MODEL={teacher}"
        words = f"{STUDENT} {options} {taught} TRAIN.BASE_LR={RATE} TRAIN.NUM_EPOCHS={epochs} VALIDATE_FREQ={epochs}"
        found[name] = train(data, name, seed, words)[0]["eval_top1"]
    return found


def train(data: Path, name: str, seed: int, words: str) -> tuple[dict, Path]:
    """One run by the entry script, in this process to save the start of others: its last figures, and its checkpoint."""
    command = ["-cfg", ROOT / FINETUNE, "-data_path", data, "-seed", seed, "-output", data / name, "-amp"]
    words = f"{DATA} DATA.NUM_WORKERS=0 DATA.BATCH_SIZE_EVAL=359 TENSORBOARD=false DEVICE=cpu {words}"
    with contextlib.redirect_stdout(io.StringIO()):
        code = run_entry([str(each) for each in (*command, "-opts", *words.split())])
    assert code == 0, f"a run ended with exit code {code}"
    (folder,) = (data / name).iterdir()
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]), folder / "last.pth"


def gain(found: dict[str, list[float]], name: str) -> tuple[float, float]:
    """What a way gains on the student alone, seed against seed: mean and standard error."""
    differences = [own - alone for own, alone in zip(found[name], found["alone"], strict=True)]
    return statistics.mean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def tabulate(found: dict[str, list[float]], title: str) -> Table:
    rows = []
    for name, values in found.items():
        each_seed = " ".join(f"{value:.1f}" for value in values)
        figures = f"{statistics.mean(values):.1f} +- {statistics.stdev(values):.1f}"
        gained = "{:+.1f} +- {:.1f}".format(*gain(found, name)) if name in ("soft", "hard") else "-"
        rows.append([name, each_seed, figures, gained])
    return Table(title, ["", "top-1 of each seed, %", "mean, standard deviation", "gain, standard error"], rows)


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
