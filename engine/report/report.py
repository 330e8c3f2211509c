"""Writes report.html: a run on one page that needs no other files, no network and no scripts."""

import base64
import hashlib
import html
import io
import math
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from PIL import Image

from configs.schema import RECORD, Config
from configs.tables import METRICS, TASKS
from configs.values import of_role, unflatten
from engine.evaluation.scores import format_value, interval_of
from engine.predict.pictures import tiles_of
from engine.record.saved_files import PICTURES, read_json, read_table, title_of, to_number
from engine.record.saved_run import SavedRun, written
from engine.report.plot import Plot, plots_of, to_png
from utils import VERSION
from utils.errors import ConfigError, cause_of, naming_damage
from utils.files import Kind, content_of, write_text
from utils.log import Log
from utils.text import counted, escape_controls, format_bytes, format_duration, redacted

# --- the page and its pictures ---

# The first bytes of the page. Pages of other programs start differently.
PAGE = Kind("a report of a run", (b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',), b"style-src")
TEMPLATE, STYLE = (Path(__file__).parent / name for name in ("page.html", "style.css"))
MOST_BYTES = 160_000  # a picture up to this size is embedded unchanged
LARGEST = 2**26  # bytes; a larger file is not read as a run's picture
WIDTH, QUALITY = 1000, 60  # width in pixels of a larger picture, and JPEG quality of photos
MOST_COLORS = 256  # an image with more colors is a photo


def as_text(value: object) -> Markup:
    """Return a value as HTML text with control characters escaped. Halves of surrogate pairs become question marks."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(escape_controls(str(value).encode("utf-8", "replace").decode())))


def write_page(path: Path, facts: dict[str, Any]) -> None:
    """Write a page with a security policy that allows only the page's style sheet and embedded pictures."""
    style = STYLE.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    environment = Environment(autoescape=True, finalize=as_text, undefined=StrictUndefined, trim_blocks=True)
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    write_text(path, page.render(facts, style=Markup(style), policy=policy) + "\n")


class Picture(NamedTuple):
    """A picture inside the page."""

    source: str
    alt: str

    @classmethod
    def of(cls, content: bytes, kind: str, alt: str) -> "Picture":
        return cls(f"data:image/{kind};base64,{base64.b64encode(content).decode()}", alt)


def tiles(path: Path, alt: str) -> list[tuple[Picture, list[str]]]:
    """Return the images of a sheet one by one, with captions as text. A row has as many images as fit into the window.

    Return [] if the file is not a sheet.
    """
    try:
        with Image.open(io.BytesIO(content_of(path, LARGEST)), formats=("PNG",)) as image:
            found = tiles_of(image)
    except (OSError, ValueError, TypeError, RecursionError, Image.DecompressionBombError):
        return []
    return [(Picture.of(*smallest(pixels), alt), caption) for pixels, caption in found]


def smallest(image: Image.Image) -> tuple[bytes, str]:
    """Return the encoded image and its format: PNG if that is smaller, which is likely for drawings, otherwise JPEG."""
    image = image.convert("RGB")
    kinds = {"jpeg": {"quality": QUALITY, "optimize": True}}
    if image.getcolors(MOST_COLORS):  # PNG is never smaller for photos, and encoding 240 x 240 pixels takes 20 ms
        kinds["png"] = {"optimize": True}
    found = []
    for kind, options in kinds.items():
        target = io.BytesIO()
        image.save(target, kind, **options)
        found.append((target.getvalue(), kind))
    return min(found, key=lambda each: len(each[0]))


def embedded(path: Path, alt: str) -> Picture | None:
    """Return a picture of the run, smaller if it is large. Return None if the file is not a picture."""
    try:
        content, kind = content_of(path, LARGEST), "png"
        if len(content) > MOST_BYTES or not content.startswith(b"\x89PNG"):
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as image:
                image.thumbnail((WIDTH, 4 * WIDTH))
                content, kind = smallest(image)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return Picture.of(content, kind, alt)


# --- the report ---


REPORT = "report.html"
CAPTIONS = {
    "confusion.png": (
        "Confusion matrix",
        "Rows are labels, columns are predictions. Everything off the diagonal is wrong.",
    ),
    "mistakes.png": (
        "Most confident mistakes",
        "Validation images with the label, the prediction and their probabilities. Some labels may be wrong.",
    ),
    "numbers": ("Largest errors", "Validation images with their true and predicted numbers. Some may be mistaken."),
    "train_batch.png": (
        "Training images",
        "Images of the first update as the model gets them: randomly {changes}.",
    ),
}
# The table of classes shows at most this many, those with the lowest F1.
MOST_ROWS = 15
FEWEST_IMAGES, FEWEST_IN_BIN = 50, 5  # with fewer images, no reliability diagram; in a bin, no point in the diagram


def write_report(run: SavedRun, path: Path) -> None:
    """Write the report of a run to `path`. Raise OSError if the disk is full."""
    facts = {
        "title": title_of(run.settings),
        "folder": run.folder.resolve().name,
        **result(run),
        "facts": facts_of(run),
        "curves": curves(run),
        "pictures": pictures(run),
        "classes": class_table(run),
        "numbers": numbers(run),
        "calibration": calibration(run),
        "precision": precision(run),
        "settings": settings(run),
        "repeat": repeat(run),
        "version": VERSION,
        "written": written_date(run.status.get("time")),
    }
    write_page(path, facts)


def write_at_end(folder: str | os.PathLike, log: Log) -> None:
    """Write the report of a run that has just ended. An error does not change its exit code: the weights are saved."""
    path = Path(folder) / REPORT
    try:
        write_report(SavedRun.open(folder), path)
    except ConfigError as error:  # no epoch was finished
        log.note(f"{REPORT} was not written: {error}")
    except Exception as error:  # a full disk, or a bug, which must not turn a finished run into a failed one
        log.warn(f"cannot write {path} ({cause_of(error)}); run scripts/report.py to write it later")


def result(run: SavedRun) -> dict[str, Any]:
    """Return the best score, how it was reached, and how the run ended if it did not end as planned."""
    best, planned, done = run.best, run.planned_epochs, run.num_epochs
    epochs = counted(done, "epoch") if done >= planned else f"the first {done:,} of {counted(planned, 'epoch')}"
    found = {"best": None}
    if best.exists:
        found["best"] = {"value": format_value(best.metric, best.value), "name": METRICS[best.metric].title}
        text = describe_best(run, epochs)
    else:
        loss = run.epochs[-1].get("train_loss")
        reached = f" to a training loss of {loss:.4f}" if loss is not None else ""
        text = f"Trained for {epochs}{reached}; never evaluated"
    if run.seconds:
        text += f". Training and evaluation took {format_duration(run.seconds)}"
    notices = describe_unmeasured(run) if best.exists else "", describe_overlap(run), describe_end(run, done)
    return found | {"lead": f"{text}.", "notices": [*filter(None, notices)]}


def describe_best(run: SavedRun, epochs: str) -> str:
    """Return the sentences about the best epoch and the score before training. `epochs`: the number of epochs as text."""
    best = run.best
    text = f"The best of {epochs} was epoch {best.epoch}"
    if not best.epoch:
        model = "model" if predicts_numbers(run) else "classifier"
        text = f"None of {epochs} was better than a linear {model} of the pretrained features"
    elif len(run.suffixes) > 1:
        text += f", with the {'EMA' if best.suffix else 'raw'} weights"
    if images := METRICS[best.metric].setting:
        text += f", on the images of {images}"
    elif best.num_images:
        text += f", on {counted(best.num_images, 'validation image')}"
    if best.epoch and (before := run.before.get(f"eval_{best.metric}")) is not None:
        text += f". Before training it was {format_value(best.metric, before)}"
    if describe_overlap(run):
        return text  # the score is too high, so no interval holds for other images
    if best.metric == "top1" and (interval := interval_of(best.value, best.num_images)):
        text += f". On other images like these, expect {interval} (95% interval)"
        chose = "; these also chose the weights, so it may be a little less"
        text += chose * unflatten(run.settings).compares_weights
    return text


def count_classes(run: SavedRun) -> tuple[int, int]:
    """Return the number of classes with validation images (0: unknown, in older runs), and the number of all classes."""
    return run.about.get("validation_classes", 0), run.about.get("classes", 0)


def describe_overlap(run: SavedRun) -> str:
    """Return a sentence about validation images that are also training images, or an empty string if there are none."""
    if not (number := run.about.get("validation_images_in_training")):
        return ""
    total = counted(run.about.get("validation_images", 0), "validation image")
    return f"{number:,} of {total} are also training images, so the scores are too good. -check names them."


def describe_unmeasured(run: SavedRun) -> str:
    """Return a sentence about classes without validation images, or an empty string if there are none."""
    measured, total = count_classes(run)
    if not 0 < measured < total:
        return ""
    return (
        f"The validation images have only {measured:,} of {counted(total, 'class')}, so nothing shows how well the model "
        "recognizes the others; add validation images of them."
    )


def describe_end(run: SavedRun, last: int) -> str:
    """Return how the run ended, or an empty string if it ended as planned. `last`: its last epoch."""
    state, reason = run.state, run.status.get("reason")
    if state == "done":
        return "TRAIN.EARLY_STOP ended the run: no new best epoch for long enough." if reason == "early stop" else ""
    signal = f" by signal {run.status['signal']}" if "signal" in run.status else ""
    text = {
        "stopped": f"The run was stopped after epoch {last}{signal}",
        "failed": f"The run ended with an error after epoch {last}",
        "save_failed": "The last checkpoint could not be saved",
        "running": f"The run is still going; this is the state after epoch {last}",
        "killed": f"The run was killed; this is the state after epoch {last}",
    }.get(state, "")
    return text and f"{text}: {reason}" if reason else text


def facts_of(run: SavedRun) -> dict[str, str]:
    """Return the facts at the head of the page. Those without a value are not shown."""
    about, given = run.about, run.settings
    numbers = ["training_images", "validation_images", "classes", "images_per_update"]
    task = TASKS.get(given["TRAIN.OBJECTIVE"])  # None: a task of another version
    if task and not task.has_classes:
        numbers.remove("classes")
    scored, available = run.best.num_images, about.get("validation_images", 0)
    unreadable = f"{scored:,} of {available:,}; the rest cannot be read" if 0 < scored < available else ""
    measured, total = count_classes(run)
    rate = max(row.get("lr") or 0 for row in [*run.steps, *run.epochs])  # unlike BASE_LR, scaled with the batch size
    parameters, processes = about.get("parameters"), about.get("processes", 1)
    return {
        "Model": f"{given['MODEL.NAME']}, {counted(parameters, 'parameter')}" if parameters else "",
        "Pretrained weights": given["MODEL.PRETRAINED"],
        **{key.replace("_", " ").capitalize(): f"{about[key]:,}" for key in numbers if about.get(key)},
        **({"Validation images": unreadable} if unreadable else {}),
        **({"Classes": f"{total:,}, {measured:,} of them with validation images"} if 0 < measured < total else {}),
        "Image size": unflatten(given).DATA.size_of_images,
        "Optimizer": f"{given['TRAIN.OPTIMIZER.NAME']}, learning rate up to {rate:.3g}",
        "Precision": about.get("precision") or ("-amp" if given["AMP"] else "float32"),
        "Device": f"{f'{processes} x ' if processes > 1 else ''}{about.get('device_name', '')}",
        "Time": format_duration(run.seconds) if run.seconds else "",
        "Speed": f"{run.speed:,.{max(0, 2 - math.floor(math.log10(run.speed)))}f} images/s" if run.speed else "",
        "Memory, at most": format_bytes(run.memory) if run.memory else "",
    }


def curves(run: SavedRun) -> list[Picture]:
    """Return the curves, drawn from the run's current tables."""
    return [drawing(plot) for plot in plots(run) if plot.file != "loss_scale.png"]


def plots(run: SavedRun) -> Iterator[Plot]:
    return plots_of(run.epochs, run.steps, run.metric, run.best)


def drawing(plot: Plot) -> Picture:
    return Picture.of(to_png(plot, plot.title), "png", plot.text)


def pictures(run: SavedRun) -> dict[str, dict[str, Any]]:
    """Return {file: its section} for the pictures in the run's folder, without pictures of an incomplete evaluation.

    Sheets are shown image by image. Other pictures keep their size, so that their text can be read, and scroll.
    """
    found, has_results = {}, bool(read_json(run.folder / "results.json"))
    for name in PICTURES:
        title, text = CAPTIONS["numbers" if name == "mistakes.png" and predicts_numbers(run) else name]
        path = run.folder / name
        if not (path.is_file() and (has_results or name == "train_batch.png")):
            continue
        text = text.format(changes=changes_of(unflatten(run.settings)))
        shown = {"title": title, "text": text, "tiles": tiles(path, title)}
        if shown["tiles"]:
            found[name] = shown | {"has_names": any(len(caption) > 1 for _, caption in shown["tiles"])}
        elif whole := embedded(path, f"{title}: {text}"):
            found[name] = shown | {"whole": whole, "class": "drawing" if name == "confusion.png" else "sheet"}
    return found


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
    """Return the table of the classes with the lowest F1, or of all if there are few; None if at most one has images."""
    record = read_json(run.folder / "results.json")
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
        percents = ("" if share is None else f"{share:.1%}" for share in shares)
        cells.append((row.get("class", ""), *percents, row["count"], taken + often))
    notes = []
    if record.get("epoch") != run.best.epoch:
        notes.append(f"Results of epoch {record.get('epoch')}, which was the best when these figures were written.")
    if len(shown) < len(rated):
        notes.append(f"{len(shown)} of {counted(len(rated), 'class')} with images; per_class.csv has all of them.")
    title = "Classes, lowest F1 first" if len(shown) == len(rated) else "Classes with the lowest F1"
    columns = ("class", "F1", "recall", "precision", "specificity", "AUC", "images", "most often mistaken for")
    return {"title": title, "notes": notes, "columns": columns, "rows": cells, "numbers": range(1, 7)}


def predicts_numbers(run: SavedRun) -> bool:
    return run.settings["TRAIN.OBJECTIVE"] == "numbers"


def numbers(run: SavedRun) -> dict[str, Any] | None:
    """Return the section on predicted numbers, or None for a run without numbers."""
    if not predicts_numbers(run):
        return None
    from engine.report.numbers import number_section

    path = run.folder / "results.json"
    with naming_damage(path):
        found = number_section(run)
    drawings = [Picture.of(content, "png", text) for content, text in found["drawings"]] if found else []
    return found and found | {"drawings": drawings}


def calibration(run: SavedRun) -> dict[str, Any] | None:
    """Return the section on calibration, or None if the results are incomplete or have no calibration."""
    path = run.folder / "results.json"
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
        is_enough = record["num_images"] >= FEWEST_IMAGES
    if is_enough and (shown := {name: points for name, points in curves.items() if points}):
        how = "Below the dashed line, the model is too confident. Each point is a bin with at least "
        how += f"{FEWEST_IN_BIN} images; the share of right answers of fewer images is mostly chance."
        with naming_damage(path):
            diagrams = [drawing(Plot("", "share of right answers", shown, "confidence", is_reliability=True))]
    else:
        how, diagrams = "These are too few images for a reliability diagram: its points would be mostly chance.", []
    return {"text": text, "how": how, "diagrams": diagrams}


def precision(run: SavedRun) -> dict[str, Any] | None:
    """Return the section on half precision, or None if the loss scale never changed and no update was skipped."""
    lines = []
    if skipped := run.num_skipped:
        updates = run.steps[-1]["step"] + 1 if run.steps else run.epochs[-1].get("step")
        of = f" of {updates:,.0f}" if updates else ""
        lines.append(f"Skipped updates: {skipped:,}{of}, because gradients were not finite.")
    for first, last in run.left_out:
        lines.append(f"Updates {first:,} to {last:,} were left out after a rollback; see bad_batches.jsonl.")
    found = [drawing(plot) for plot in plots(run) if plot.file == "loss_scale.png"]
    return {"lines": lines, "curves": found} if lines or found else None


def settings(run: SavedRun) -> dict[str, Any]:
    """Return the settings from flags, -opts or the data, and all settings, each with its value and origin."""
    rows = {key: (key, written(value), run.origins[key]) for key, value in run.settings.items()}
    origins = {key: row[2] for key, row in rows.items() if row[2] != "default"}
    of_file = {key: origin for key, origin in origins.items() if origin.endswith((".yaml", ".yml"))}
    given = [rows[key] for key in origins if key not in of_file and key not in of_role(RECORD)]
    files = ", ".join(dict.fromkeys(of_file.values())) or "the defaults"
    return {"files": files, "given": given, "all": list(rows.values())}


def repeat(run: SavedRun) -> dict[str, Any]:
    """Return the command lines, versions, folder and dates of the run."""
    about, status = run.about, run.status
    processes = about.get("processes", 1)
    program = ["main_multi_gpu.py", "-ngpus", str(processes)] if processes > 1 else ["main_single_gpu.py"]
    commands = {"Repeat it": shlex.join(["python", *program, "-cfg", str(run.folder / "config.yaml")])}
    if started := about.get("command"):
        commands = {"It was started with": redacted(shlex.join(["python", program[0], *started]))} | commands
    facts = {name: about.get(name.lower()) for name in ("halfstep", "torch", "timm", "Python")}
    facts |= {"host": status.get("host"), "started": written_date(status.get("started"))}
    facts |= {"ended": written_date(status.get("time")), "folder": run.folder.resolve()}
    return {"commands": commands, "facts": [(name, value) for name, value in facts.items() if value]}


def written_date(text: str | None) -> str:
    """Return a date from status.json in the form 2026-01-02 03:04."""
    return (text or "")[:16].replace("T", " ")
