"""Writes report.html: a run on one page that needs no other files, no network and no scripts."""

import base64
import hashlib
import html
import io
import math
import os
import shlex
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from configs.schema import RECORD, Config
from configs.tables import METRICS, TASKS, TaskRow
from configs.values import of_role, unflatten
from engine.evaluation.scores import format_value, interval_of
from engine.predict.pictures import tiles_of
from engine.record.saved_files import PICTURES, read_json, read_table, title_of, to_number
from engine.record.saved_run import SavedRun, written
from engine.report.chart import Series, chart, chart_of
from engine.report.plot import Plot, plots_of
from engine.tasks.class_tables import GROUP, PREDICTIONS
from utils import VERSION
from utils.commands import command
from utils.errors import ConfigError, cause_of, naming_damage
from utils.files import Kind, content_of, write_text
from utils.log import Log
from utils.runs import CHOICE, weights_in
from utils.text import counted, escape_controls, format_bytes, format_duration, redacted

# --- the page and its pictures ---

# The first bytes of the page. Pages of other programs start differently.
PAGE = Kind("a report of a run", (b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',), b"style-src")
FOLDER = Path(__file__).parent
MOST_BYTES = 160_000  # a picture up to this size is embedded unchanged
LARGEST = 2**26  # bytes; a larger file is not read as a run's picture
WIDTH, QUALITY = 1000, 60  # width in pixels of a larger picture, and JPEG quality of photos
MOST_COLORS = 256  # an image with more colors is a photo


def as_text(value: object) -> Markup:
    """Return a value as HTML text with control characters escaped. Halves of surrogate pairs become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(escape_controls(str(value).encode("utf-8", "replace").decode())))


TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER),
    autoescape=True,
    finalize=as_text,
    undefined=StrictUndefined,
    trim_blocks=True,
)


def write_page(path: Path, facts: dict[str, Any]) -> None:
    """Write a page with a security policy that allows only the page's style sheet and embedded pictures."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    page = TEMPLATES.get_template("page.html")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    write_text(path, page.render(facts, style=Markup(style), policy=policy) + "\n")


def embedded(content: bytes, kind: str) -> str:
    """Return the address of a picture inside the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def tiles(path: Path) -> list[tuple[str, list[str]]]:
    """Return the images of a sheet one by one, with captions as text. A row has as many images as fit into the window.

    Return [] if the file is not a sheet.
    """
    try:
        with Image.open(io.BytesIO(content_of(path, LARGEST)), formats=("PNG",)) as image:
            named_tiles = tiles_of(image)
    except (OSError, ValueError, TypeError, RecursionError, Image.DecompressionBombError):
        return []
    return [(embedded(*smallest(pixels)), caption) for pixels, caption in named_tiles]


def smallest(image: Image.Image) -> tuple[bytes, str]:
    """Return the encoded image and its format: PNG if that is smaller, which is likely for drawings, otherwise JPEG."""
    image = image.convert("RGB")
    kinds = {"jpeg": {"quality": QUALITY, "optimize": True}}
    if image.getcolors(MOST_COLORS):  # PNG is never smaller for photos, and encoding 240 x 240 pixels takes 20 ms
        kinds["png"] = {"optimize": True}
    encoded = []
    for kind, options in kinds.items():
        target = io.BytesIO()
        image.save(target, kind, **options)
        encoded.append((target.getvalue(), kind))
    return min(encoded, key=lambda pair: len(pair[0]))


def whole(path: Path) -> str | None:
    """Return a picture of the run, smaller if it is large. Return None if the file is not a picture."""
    try:
        content, kind = content_of(path, LARGEST), "png"
        if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG"):
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                image.thumbnail((WIDTH, 4 * WIDTH))
                content, kind = smallest(image)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return embedded(content, kind)


# --- the report ---


REPORT, RESULTS = "report.html", "results.json"
MOST_WITHOUT_TOP5 = 10  # classes; with so few, almost every image is right by top-5
# The table of classes shows at most this many, those with the lowest F1.
MOST_ROWS = 15
# With fewer images or points, no reliability diagram; with fewer images in a bin, no point in the diagram.
FEWEST_IMAGES, FEWEST_POINTS, FEWEST_IN_BIN = 50, 4, 5


def write_report(run: SavedRun, path: Path) -> None:
    """Write the report of a run to `path`. Raise OSError if the disk is full."""
    config = unflatten(run.settings)
    task = config.task if config.TRAIN.OBJECTIVE in TASKS else None  # None: a task of another version
    score, outputs = numbers(run, task)
    facts = {
        "title": title_of(run.settings),
        "version": VERSION,
        "run": run,
        "config": config,
        "task": task,
        "metric": METRICS[run.best.metric],
        "score": score,
        "right": None if run.best.metric == "top1" else exactly_right(run),
        "interval": interval(run),
        "rate": max(
            row.get("lr") or 0 for row in [*run.steps, *run.epochs]
        ),  # unlike BASE_LR, scaled with the batch size
        "eval_speed": eval_speed(run),
        "has_weights": weights_in(run.folder) is not None,
        "changes": changes_of(config),
        "pictures": pictures(run),
        "classes": class_table(run),
        "outputs": outputs,
        "choice": choice(run),
        "calibration": calibration(run),
        "curves": {plot.file: chart_of(plot) for plot in plots(run)},
        "settings": settings(run),
        "commands": commands(run),
    }
    write_page(path, facts | FORMATS)


def write_at_end(folder: str | os.PathLike, log: Log) -> None:
    """Write the report of a run that has just ended. An error does not change its exit code: the weights are saved."""
    path = Path(folder) / REPORT
    try:
        write_report(SavedRun.open(folder), path)
    except ConfigError as error:  # no epoch was finished
        log.note(f"{REPORT} was not written: {error}")
    except Exception as error:  # a full disk, or a bug, which must not turn a finished run into a failed one
        log.warn(f"cannot write {path} ({cause_of(error)}); run halfstep report to write it later")


def format_speed(speed: float) -> str:
    """Return images per second with three significant digits."""
    return f"{speed:,.{max(0, 2 - math.floor(math.log10(speed)))}f} images/s"


def format_date(text: str | None) -> str:
    """Return a date from status.json in the form 2026-01-02 03:04."""
    return (text or "")[:16].replace("T", " ")


def thousands(number: float) -> str:
    return f"{number:,}"


# The functions that page.html calls
FORMATS = {
    "counted": counted,
    "format_bytes": format_bytes,
    "format_date": format_date,
    "format_duration": format_duration,
    "format_speed": format_speed,
    "format_value": format_value,
    "quote": shlex.quote,
    "thousands": thousands,
}


def interval(run: SavedRun) -> str:
    """Return the 95% interval of the best accuracy, or "" for other metrics and for too few groups."""
    best = run.best
    if best.metric != "top1":
        return ""
    return interval_of(best.value, best.num_images, math.inf, best.by_groups)


def exactly_right(run: SavedRun) -> dict[str, Any] | None:
    """Return the percentage of images with only right answers, and its interval. None: unknown, or too high."""
    rows = [row for row in read_table(run.folder / PREDICTIONS) if "prediction" in row and "label" in row]
    is_old = read_json(run.folder / RESULTS).get("epoch") != run.best.epoch
    if not rows or is_old or run.run_facts.get("validation_images_in_training"):
        return None
    are_right, by_groups = [row["label"] == row["prediction"] for row in rows], None
    percent, groups = 100 * sum(are_right) / len(rows), [row.get(GROUP, "") for row in rows]
    if all(groups):
        from engine.evaluation.groups import accuracy_interval

        by_groups = accuracy_interval(np.array(are_right), np.unique(groups, return_inverse=True)[1])
    return {"percent": percent, "interval": interval_of(percent, len(rows), math.inf, by_groups)}


def eval_speed(run: SavedRun) -> float:
    """Return the images per second of the run's evaluations, or 0. It includes reading, and both kinds of weights."""
    seconds = [row["eval_seconds"] for row in run.epochs if (row.get("eval_seconds") or 0) > 0]
    return run.run_facts.get("validation_images", 0) / statistics.median(seconds) if seconds else 0


def plots(run: SavedRun) -> Iterator[Plot]:
    """Yield the curves of the run. Top-5 says little if there are few classes."""
    left_out = {"eval_top5"} if run.run_facts.get("classes", 0) <= MOST_WITHOUT_TOP5 else set()
    epochs = [{key: value for key, value in row.items() if key not in left_out} for row in run.epochs]
    return plots_of(epochs, run.steps, run.metric, run.best)


def pictures(run: SavedRun) -> dict[str, dict[str, Any]]:
    """Return {file: its picture} for the pictures in the run's folder, without pictures of an incomplete evaluation.

    Sheets are shown image by image. Other pictures keep their size, so that their text can be read, and scroll.
    """
    shown, has_results = {}, bool(read_json(run.folder / RESULTS))
    for path in (run.folder / name for name in PICTURES):
        if path.is_file() and (has_results or path.name == "train_batch.png"):
            if images := tiles(path):
                has_names = any(len(caption) > 1 for _, caption in images)
                shown[path.name] = {"tiles": images, "class": "tiles" if has_names else "small tiles"}
            elif source := whole(path):
                shown[path.name] = {"whole": source, "class": "drawing" if path.name == "confusion.png" else "sheet"}
    return shown


def changes_of(config: Config) -> str:
    """Return what a run does to its training images, such as 'cropped, flipped and mixed'."""
    data, train = config.DATA, config.TRAIN
    changes = {
        "flipped": data.HFLIP or data.VFLIP,
        "augmented": train.augments,
        "partly erased": train.RANDOM_ERASE_PROB,
        "mixed": train.mixes,
    }
    names = ["cropped", *(name for name, is_on in changes.items() if is_on)]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def class_table(run: SavedRun) -> dict[str, Any] | None:
    """Return the table of the classes with the lowest F1, or of all if they are few; None if at most one has images."""
    record = read_json(run.folder / RESULTS)
    rows = read_table(run.folder / "per_class.csv") if record else []
    rated = [row for row in rows if row.get("count", "0") not in ("", "0")]
    if len(rated) < 2:
        return None
    rated.sort(key=lambda row: to_number(row.get("f1", "")) or 0)
    shown = rated[:MOST_ROWS]
    cells = []
    for row in shown:
        taken = row.get("taken_for", "")
        often = f" ({row.get('times_taken_for')} of {row['count']})" if taken else ""
        names = ("f1", "recall", "precision", "specificity", "auc")
        shares = (to_number(row.get(name, "")) for name in names)
        percents = ["-" if share is None else f"{share:.1%}" for share in shares]
        cells.append((row.get("class", ""), *percents, row["count"], taken + often))
    notes = (
        ["-: undefined; a precision needs images that were predicted as the class."]
        if any("-" in row for row in cells)
        else []
    )
    if record.get("epoch") != run.best.epoch:
        notes.append(f"Results of epoch {record.get('epoch')}, which was the best when these figures were written.")
    if len(shown) < len(rated):
        notes.append(f"{len(shown)} of {counted(len(rated), 'class')} with images; per_class.csv has all of them.")
    title = "Classes, lowest F1 first" if len(shown) == len(rated) else "Classes with the lowest F1"
    columns = ("class", "F1", "recall", "precision", "specificity", "AUC", "images", "most often mistaken for")
    num_columns = 7 + any(row[7] for row in cells)  # with several labels, no class is mistaken for another
    cells = [row[:num_columns] for row in cells]
    return {"title": title, "notes": notes, "columns": columns[:num_columns], "rows": cells, "numeric": range(1, 7)}


def numbers(run: SavedRun, task: TaskRow | None) -> tuple[str, dict[str, Any] | None]:
    """Return a sentence on the best score and the section on numbers, for a run that predicts them."""
    if task is None or task.has_classes:
        return "", None
    from engine.report.numbers import describe_score, number_section

    with naming_damage(run.folder / RESULTS):
        return describe_score(run), number_section(run)


def calibration(run: SavedRun) -> dict[str, Any] | None:
    """Return the section on calibration, or None if the results are incomplete or have no calibration."""
    path = run.folder / RESULTS
    record = read_json(path).get("calibration")
    if not record or "bins_before" not in record:  # intervals of numbers are in their section
        return None
    with naming_damage(path):
        bins = {name: record[f"bins_{name}"] for name in ("before", "after")}
        curves = {name: [each[:2] for each in found if each[2] >= FEWEST_IN_BIN] for name, found in bins.items()}
        one = isinstance(record["temperature"], float)
        temperature = (
            f"The temperature is {record['temperature']:.2f}." if one else "Each label has its own temperature."
        )
        text = (
            f"Expected calibration error on {counted(record['num_images'], 'validation image')}: "
            f"{record['ece_before']:.1%} before the calibration, {record['ece_after']:.1%} after it. {temperature}"
        )
        if record["num_images"] < FEWEST_IMAGES:
            return {"text": text, "charts": [], "rows": []}
        rows = [
            (f"{mean:.0%}", f"{number:,}", f"{right:.0%} ({interval_of(100 * right, number, math.inf)})")
            for mean, right, number in bins["after"]
        ]
        charts = []
        if len(curves["after"]) >= FEWEST_POINTS:
            marks = [Series("guide", "", [(0, 0), (1, 1)])] + [Series("line", *each) for each in curves.items()]
            description = f"share of right answers by probability; each point has at least {FEWEST_IN_BIN} images"
            charts = [chart("share of right answers", "probability", marks, description, ends=(0, 1))]
    columns = ("probability", "images" if one else "images x labels", "right")
    return {"text": text, "charts": charts, "columns": columns, "rows": rows}


def choice(run: SavedRun) -> dict[str, Any] | None:
    """Return the section on the choice of the weights, if the images have chosen them."""
    path = run.folder / CHOICE
    if not (record := read_json(path)):
        return None
    from engine.report.choice import section_of

    with naming_damage(path):
        section = section_of(record)
        if not all(isinstance(text, str) for row in [section["notes"], *section["rows"]] for text in row):
            raise TypeError("a name or a note is no text")
        return section


def settings(run: SavedRun) -> dict[str, Any]:
    """Return the settings from flags, -opts or the data, and all settings, each with its value and origin."""
    rows = {key: (key, written(value), run.origins[key]) for key, value in run.settings.items()}
    origins = {key: row[2] for key, row in rows.items() if row[2] != "default"}
    of_file = {key: origin for key, origin in origins.items() if origin.endswith((".yaml", ".yml"))}
    chosen = [rows[key] for key in origins if key not in of_file and key not in of_role(RECORD)]
    files = ", ".join(dict.fromkeys(of_file.values())) or "the defaults"
    return {"files": files, "given": chosen, "all": list(rows.values())}


def commands(run: SavedRun) -> dict[str, str]:
    """Return the command lines that started and repeat the run."""
    processes = run.run_facts.get("processes", 1)
    several = ["-ngpus", processes] if processes > 1 else []
    lines = {"Repeat it": command("train", *several, "-cfg", run.folder / "config.yaml")}
    if started := run.run_facts.get("command"):
        return {"It was started with": redacted(command("train", *started))} | lines
    return lines
