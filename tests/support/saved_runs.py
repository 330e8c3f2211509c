"""Run folders written without training: any number of classes, epochs and failures."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from engine.train.clock import PHASES

CONFIG = """
DATA:
    DATASET: {dataset}                        # configs/x.yaml
MODEL:
    NAME: vit_small                           # configs/x.yaml
TRAIN:
    NUM_EPOCHS: {epochs}                      # flag -epochs
    BASE_LR: 0.002                            # configs/x.yaml
AMP: true                                     # flag -amp
"""


def write_run(folder: Path, names: Sequence[str] = ("cat", "dog"), epochs: int = 5, skipped: int = 0, **about) -> Path:
    """Write a finished run. `skipped`: updates per epoch with non-finite gradients. `about`: items of status.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG.format(epochs=epochs, dataset="imagefolder"))
    rows = [_epoch(number, epochs, skipped) for number in range(epochs)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = {"device_name": "a processor", "processes": 1, "precision": "autocast float16", "parameters": 202_954}
    facts |= {"training_images": 1438, "validation_images": 359, "classes": len(names), "images_per_update": 64}
    versions = {"halfstep": "3.0.0", "torch": "2.15.0", "timm": "1.0.31", "python": "3.11.7"}
    flags = ["-cfg", "configs/x.yaml", "-amp"]
    status = {
        "state": "done",
        "host": "here",
        "started": "2026-01-02T03:04:05+0000",
        "time": "2026-01-02T03:14:05+0000",
    }
    status |= {"best": {"top1": rows[-2]["eval_top1"], "epoch": epochs - 1, "file": "best.pth"}}
    write_json(folder / "status.json", {**status, "about": {**facts, **versions, "command": flags, **about}})
    _write_steps(folder, epochs, skipped)
    write_results(folder, names, epoch=epochs - 1)
    for name in ("best.pth", "last.pth"):
        (folder / name).write_bytes(b"")
    return folder


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def _epoch(number: int, epochs: int, skipped: int) -> dict:
    share = (number + 1) / epochs
    last_drops = 2.0 * (number == epochs - 1)
    return {
        "epoch": number,
        **{"train_loss": 2.3 - 2 * share, "eval_loss": 2.3 - 1.9 * share, "eval_top1": 98.5 * share**0.2 - last_drops},
        **{"eval_top5": 100.0, "lr": 0.002 * (1 - share), "train_top1": 97.0 * share**0.2, "step": 22 * (number + 1)},
        **{"images_per_s": 730.8 + number, "memory_mb": 858, "loss_scale": 65536.0 / 2**skipped, "skipped": skipped},
        **{"grad_norm": 1.5, "train_seconds": 10.0, "eval_seconds": 0.5},
    }


def _write_steps(folder: Path, epochs: int, skipped: int) -> None:
    shares = dict(zip([f"{name}_pct" for name in PHASES], (20, 0, 35, 35, 0, 7, 3), strict=True))
    with open(folder / "steps.csv", "w", newline="") as file:
        rows = [
            {
                "step": step,
                "lr": 0.002,
                "loss": 1,
                "grad_norm": 1.5 + step % 3,
                "loss_scale": 65536 / 2 ** (skipped * step % 5),
            }
            | {"seconds": 1.0, **shares}
            for step in range(0, 22 * epochs, 2)
        ]
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def write_results(folder: Path, names: Sequence[str], epoch: int) -> None:
    """Write results for 50 images per class, some of them confused with the next class, and image sheets."""
    number, rows = len(names), []
    matrix = np.diag(np.full(number, 50))
    for label in range(number):
        wrong = label * 7 % 11
        matrix[label, label] -= wrong
        matrix[label, (label + 1) % number] += wrong
        shares = [f"{1 - wrong / 50:.6f}"] * 3
        taken_for = [names[(label + 1) % number], wrong] if wrong else ["", ""]
        rows.append([names[label], *shares, 50, 50, *taken_for, shares[0], 0.97, 0.98, 0.95])
    with open(folder / "per_class.csv", "w", newline="") as file:
        columns = ["class", "precision", "recall", "f1", "count", "predicted", "taken_for", "times_taken_for"]
        columns += ["sensitivity", "specificity", "auc", "average_precision"]
        csv.writer(file).writerows([columns, *rows])
    with open(folder / "confusion.csv", "w", newline="") as file:
        cells = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]
        csv.writer(file).writerows([["label \\ prediction", *names], *cells])
    write_json(folder / "results.json", {"epoch": epoch, "weights": "raw"})
    sheet = Image.linear_gradient("L").resize((260, 300)).convert("RGB")
    for name in ("confusion.png", "mistakes.png", "train_batch.png"):
        sheet.save(folder / name)
