"""Folders of runs of which only settings and the scores of epochs matter."""

import json
from collections.abc import Sequence
from pathlib import Path

from engine.record.saved_run import SavedRun


def make_run(
    folder: Path, values: Sequence[float], settings: str = "", status: dict | None = None, metric: str = "top1"
) -> SavedRun:
    """`values`: of the metric, one for each epoch. `settings`: lines of SECTION.KEY: value, besides those that all have."""
    folder.mkdir(parents=True)
    defaults = {"TRAIN.NUM_EPOCHS": len(values), "DATA.DATASET": "digits"}
    given = dict(line.split(": ", 1) for line in settings.splitlines())
    (folder / "config.yaml").write_text(nested(defaults | given))
    rows = [
        {"epoch": epoch, "train_loss": 2.0 - value / 100, "eval_loss": 1 - value / 100, f"eval_{metric}": value}
        | {"images_per_s": 100.0 + epoch, "memory_mb": 500 + epoch, "train_seconds": 10.0, "eval_seconds": 1.0}
        for epoch, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {"classes": 10, "training_images": 80, "validation_images": 20, "validation_digest": "aa"}
    status = {"state": "done", "about": about} | (status or {})
    (folder / "status.json").write_text(json.dumps(status))
    return SavedRun.open(folder)


def nested(settings: dict[str, object]) -> str:
    """YAML of settings by their full names."""
    lines = []
    for section in dict.fromkeys(key.rpartition(".")[0] for key in settings):
        inside = [
            f"{key.rpartition('.')[2]}: {value}" for key, value in settings.items() if key.rpartition(".")[0] == section
        ]
        lines += [f"{section}:", *(f"    {line}" for line in inside)] if section else inside
    return "\n".join(lines) + "\n"
