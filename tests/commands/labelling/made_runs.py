"""Folders of finished runs and sweeps with chosen predictions, made without training."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from configs.load import load, to_yaml
from configs.schema import Config
from datasets import SavedData
from datasets.fingerprint import data_facts
from datasets.split import write_split
from scripts.sweep import Sweep
from tests.runs.engine.check.small_photos import CLEAN
from tests.support.image_sets import draw_patches
from tests.support.opened import open_sets
from utils.text import csv_cell, csv_text

draw_image = partial(draw_patches, size=(48, 36))
SURE = 0.99  # the probability of predictions that the test does not give


def make_photos(folder: Path, counts: Mapping[str, int]) -> Path:
    """Draw different images in a folder per class. Their numbers (0.png, 1.png ...) continue over the classes."""
    number = 0
    for name, count in counts.items():
        for _ in range(count):
            draw_image(folder / name / f"{number}.png", number)
            number += 1
    return folder


def settings_of(folder: Path, data_path: Path | None, *options: str, dataset: str = "imagefolder") -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(CLEAN)
    words = ["-cfg", str(folder / "small.yaml"), "-dataset", dataset]
    words += ["-data_path", str(data_path)] if data_path else []
    return load([*words, *(["-opts", *options] if options else [])]).config


def make_run(
    folder: Path,
    data_path: Path | None,
    predictions: Mapping[str, tuple[str, float, float]] | None = None,
    *options: str,
    dataset: str = "imagefolder",
    saved: SavedData | None = None,
) -> Path:
    """Make the folder of a run. `predictions`: {image: (class, its probability, probability of the label)}.

    All other held-out images are predicted correctly, with probability SURE. `saved`: of the run before it was resumed.
    """
    config = settings_of(folder, data_path, *options, dataset=dataset)
    train, val = open_sets(config, saved=saved)
    (folder / "config.yaml").write_text(to_yaml(config, {}))
    row = {"epoch": 0, "train_loss": 1.0, "eval_loss": 1.0, "eval_top1": 90.0}
    write_split(folder / "split.csv", train, val)
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    about = {"data": data_facts(train, val), "data_path": str(data_path.resolve()) if data_path else None}
    best = {"top1": 90.0, "epoch": 1}
    status = {"state": "done", "kind": "train", "best_metric": "top1", "best": best, "about": about}
    (folder / "status.json").write_text(json.dumps(status))
    rows = [("image", "label", "prediction", "probability", "label_probability")]
    for index, target in enumerate(val.targets.tolist()):
        label, name = val.classes[target], val.table_name(index)
        rows.append((name, label, *(predictions or {}).get(name, (label, SURE, SURE))))
    table = csv_text(map(csv_cell, row) for row in rows)
    (folder / "predictions.csv").write_bytes(table.encode(errors="surrogateescape"))
    (folder / "results.json").write_text("{}")
    return folder


def make_sweep(
    folder: Path,
    data_path: Path,
    predictions: Mapping[str, tuple[str, float, float]],
    folds: int = 2,
    seeds: tuple[int, ...] = (),
    left_out: tuple[int, ...] = (),
) -> Path:
    """Make the folder of a sweep whose trials all made these predictions. The trials `left_out` are not done."""
    settings_of(folder, data_path)
    flags = ["-cfg", str(folder / "small.yaml"), "-dataset", "imagefolder", "-data_path", str(data_path)]
    sweep = Sweep(flags, {}, list(seeds), folds, points=[{}])
    sweep.save(folder)
    for trial in sweep.trials:
        if trial.index not in left_out:
            options = [f"DATA.FOLD={trial.fold}/{folds}", f"SEED={trial.seed or 0}"]
            make_run(folder / trial.name, data_path, predictions, *options)
    return folder
