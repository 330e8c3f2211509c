"""report.html: a run on one page that needs nothing beside itself, no network and no script."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engine.evaluation.scores import TITLES, confidence, format_value
from engine.record.page import Markup, element, embedded, joined, picture, scrolling, section, table, write_page
from engine.record.plot import Plot, plots_of, points_of, to_png
from engine.record.report_settings import repeat, settings
from engine.record.saved_run import SavedRun, written_date
from utils import VERSION
from utils.errors import ConfigError, cause_of
from utils.log import Log
from utils.text import counted, format_duration

REPORT = "report.html"
PICTURES = {
    "confusion.png": (
        "What is taken for what",
        "Rows are labels, columns predictions; what is not on the diagonal is wrong.",
    ),
    "mistakes.png": (
        "Mistakes it is surest of",
        "Validation images with label, prediction and its probability. Some may be labelled wrongly.",
    ),
    "train_batch.png": (
        "What it is trained with",
        "Training images as the model gets them, cropped, augmented and mixed.",
    ),
}
FEW_CLASSES, MOST_ROWS = 12, 15  # classes that are all shown; rows of a table with more, or of types of operations
PHASES = {"data": "waiting for data", "copy": "copying to the device"}  # whose names say too little
LEAST_SHARE = 0.05  # percent of the time that are shown


def write_report(run: SavedRun, path: Path) -> None:
    """Write the page. OSError if there is no room."""
    foot = element("footer", f"halfstep {VERSION}", f", {written_date(run.ended)}" if run.ended else None)
    of_images = pictures(run)
    body = [
        *(head(run), curves(run), of_images.get("confusion.png"), class_table(run), of_images.get("mistakes.png")),
        *(of_images.get("train_batch.png"), precision(run), times(run), settings(run), repeat(run), foot),
    ]
    write_page(path, title_of(run), body)


def write_at_end(folder: str | os.PathLike, log: Log) -> Path | None:
    """Write the report of a run that has just ended, and return its path; None if there is nothing to report.

    Nothing that goes wrong here may harm the run, whose weights are saved: it is said, and the exit code stays.
    """
    path = Path(folder) / REPORT
    try:
        write_report(SavedRun.open(folder), path)
    except ConfigError as error:  # not one epoch was finished
        log.note(f"no {REPORT}: {error}")
    except OSError as error:
        log.warn(f"cannot write {path} ({cause_of(error)}); scripts/report.py writes it later")
    except Exception as error:  # a mistake of ours must not turn a finished run into a failed one
        log.warn(f"cannot write {path} ({type(error).__name__}: {error})")
    else:
        return path
    return None


def head(run: SavedRun) -> Markup:
    title = element("h1", title_of(run))
    return element(
        "header", title, element("p", run.folder.resolve().name, class_="path soft"), *_result(run), _facts(run)
    )


def title_of(run: SavedRun) -> str:
    return f"{run.settings['MODEL.NAME']} on {run.settings['DATA.DATASET']}"


def _result(run: SavedRun) -> Iterator[Markup]:
    best = run.best
    if best.epoch:
        value, name = format_value(best.metric, best.value), TITLES.get(best.metric, best.metric)
        yield element("p", value, " ", element("small", f"validation {name}"), class_="figure")
        weights = ", with the EMA weights" if best.suffix else ", with the raw weights" if len(run.suffixes) > 1 else ""
        interval = confidence(best.value, best.num_images) if best.metric == "top1" else ""
        sure = (
            f" On other images like these, expect {interval.removeprefix('95%: ').partition(',')[0]} (95% interval)."
            if interval
            else ""
        )
        yield element(
            "p",
            f"The best of {_epochs(run)} was epoch {best.epoch}{weights}{_of_images(run)}.{sure}{_cost(run)}",
            class_="lead",
        )
    else:
        loss = run.epochs[-1].get("train_loss")
        ended = f" to a training loss of {loss:.4f}" if loss is not None else ""
        yield element("p", f"Trained for {_epochs(run)}{ended}; never evaluated.{_cost(run)}", class_="lead")
    if notice := _notice(run):
        yield element("p", notice, class_="notice")


def _epochs(run: SavedRun) -> str:
    planned, done = run.settings["TRAIN.NUM_EPOCHS"], run.epochs[-1]["epoch"] + 1
    return counted(done, "epoch") if done >= planned else f"the first {done:,} of {counted(planned, 'epoch')}"


def _of_images(run: SavedRun) -> str:
    images = run.about.get("validation_images")
    return f", on {counted(images, 'validation image')}" if isinstance(images, int) else ""


def _cost(run: SavedRun) -> str:
    where = describe_device(run)
    on = f" on {where}" if where else ""
    return f" Training and evaluation took {format_duration(run.seconds)}{on}." if run.seconds else ""


def _notice(run: SavedRun) -> str:
    """How the run ended, if not as planned."""
    last, reason = run.epochs[-1]["epoch"] + 1, run.status.get("reason")
    after = f" after epoch {last}"
    if run.state == "done":
        return (
            f"It ended early{after}: no new best epoch for long enough (TRAIN.EARLY_STOP)."
            if reason == "early stop"
            else ""
        )
    text = {
        "stopped": f"The run was stopped{after}"
        + (f" by signal {run.status['signal']}" if "signal" in run.status else ""),
        "failed": f"The run ended with an error{after}",
        "save_failed": "The last checkpoint could not be saved",
        "running": f"The run is still going; this is the state{after}",
        "killed": f"The run was killed; this is the state{after}",
    }.get(run.state, "")
    text = f"{text}: {reason}" if text and reason else text
    return text and text.rstrip(".") + "."


def describe_device(run: SavedRun) -> str:
    """1 process on NVIDIA H200, or nothing in older versions."""
    about = run.about
    name, processes = about.get("device_name"), about.get("processes")
    if not name:
        return ""
    return f"{processes} x {name}" if isinstance(processes, int) and processes > 1 else str(name)


def _facts(run: SavedRun) -> Markup:
    about, settings = run.about, run.settings
    update = about.get("images_per_update")
    facts = {
        "Model": _number(about.get("parameters"), "parameter", start=f"{settings['MODEL.NAME']}, "),
        "Pretrained weights": settings["MODEL.PRETRAINED"],
        "Training images": _number(about.get("training_images"), ""),
        "Validation images": _number(about.get("validation_images"), ""),
        "Classes": _number(about.get("classes"), ""),
        "Image size": f"{settings['DATA.IMAGE_SIZE']} x {settings['DATA.IMAGE_SIZE']}",
        "Images per update": _number(update, ""),
        "Optimizer": f"{settings['TRAIN.OPTIMIZER.NAME']}, rate {settings['TRAIN.BASE_LR']:g}",
        "Precision": about.get("precision") or ("-amp" if settings["AMP"] else "float32"),
        "Device": describe_device(run),
        "Time": format_duration(run.seconds) if run.seconds else "",
        "Speed": _speed(run),
        "Memory, at most": _memory(run),
    }
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in facts.items() if value]
    return element("dl", joined(rows), class_="facts")


def _number(value: object, noun: str, start: str = "") -> str:
    if not isinstance(value, int):
        return ""
    return start + (counted(value, noun) if noun else f"{value:,}")


def _speed(run: SavedRun) -> str:
    rates = sorted(row["images_per_s"] for row in run.epochs if row.get("images_per_s"))
    return f"{_three_digits(rates[len(rates) // 2])} images/s" if rates else ""


def _memory(run: SavedRun) -> str:
    peak = max((row.get("memory_mb") or 0 for row in run.epochs), default=0)
    return f"{peak / 1024:.1f} GiB" if peak >= 1024 else f"{peak:.0f} MiB" if peak else ""


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{digits}f}"


def curves(run: SavedRun) -> Markup | None:
    """The pictures that the run draws into its folder, of all that is in its tables now, and some more."""
    found = [_figure(plot) for plot in plots_of(run.epochs, run.steps, run.metric) if plot.file != "loss_scale.png"]
    return section("Course of training", element("div", *found, class_="grid")) if found else None


def _figure(plot: Plot) -> Markup:
    return element("figure", picture(to_png(plot, plot.title), "png", plot.text, "sheet"))


def pictures(run: SavedRun) -> dict[str, Markup]:
    """{file: its section}, of the pictures in the folder. Those of an evaluation only where they are of one."""
    found = {}
    for name, (title, text) in PICTURES.items():
        path = run.file(name) if name == "train_batch.png" or run.json("results.json") else None
        sheet = path and embedded(path, alt=f"{title}: {text}", class_="sheet")
        if sheet:
            found[name] = section(title, element("p", text, class_="soft"), scrolling(sheet, title))
    return found


def class_table(run: SavedRun) -> Markup | None:
    """The classes with the smallest F1; all if there are few. None without results that belong together."""
    record = run.json("results.json")
    rows = run.table("per_class.csv") if record else []
    rated = [row for row in rows if row.get("count", "0") not in ("", "0")]
    if len(rated) < 2:
        return None
    rated.sort(key=lambda row: share_of(row, "f1") or 0)
    shown = rated if len(rated) <= FEW_CLASSES else rated[:MOST_ROWS]
    cells = []
    for row in shown:
        taken = row.get("taken_for") or ""
        often = f" ({row['times_taken_for']} of {row['count']})" if taken and row.get("times_taken_for") else ""
        shares = (share_of(row, name) for name in ("f1", "recall", "precision"))
        percents = ("" if share is None else f"{100 * share:.1f}%" for share in shares)
        cells.append((row.get("class", ""), *percents, row["count"], taken + often))
    columns = ["class", "F1", "recall", "precision", "images", "most often taken for"]
    if not any(row[-1] for row in cells):
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    notes = []
    if record.get("epoch") != run.best.epoch and isinstance(record.get("epoch"), int):
        notes.append(f"Results of epoch {record['epoch']}, the best one when these figures were written.")
    if len(shown) < len(rated):
        notes.append(f"Of {counted(len(rated), 'class')} with images; all: per_class.csv.")
    title = "Classes, the worst first" if len(shown) == len(rated) else "The worst classes"
    soft = [element("p", note, class_="soft") for note in notes]
    return section(title, *soft, table(columns, cells, title, numbers=range(1, 5)))


def share_of(row: dict[str, str], name: str) -> float | None:
    try:
        return float(row[name])
    except (KeyError, ValueError):  # it is undefined, or the file damaged
        return None


def precision(run: SavedRun) -> Markup | None:
    """What became of half precision. None where nothing happened: the scale stayed and all updates counted."""
    parts = [*_scale(run), *_doctor(run), *_comparison(run), *_types(run)]
    return section("Precision", *parts) if parts else None


def _scale(run: SavedRun) -> Iterator[Markup]:
    skipped = sum(run.skipped.values())
    updates = run.steps[-1]["step"] + 1 if run.steps else run.epochs[-1].get("step")
    if skipped:
        of = f" of {updates:,.0f}" if updates else ""
        yield element("p", f"{counted(skipped, 'update')}{of} skipped, because gradients were not finite.")
    for first, last in run.left_out:
        yield element("p", f"Updates {first:,} to {last:,} were left out after a rollback; see bad_batches.jsonl.")
    yield from (_figure(plot) for plot in plots_of(run.epochs, run.steps, run.metric) if plot.file == "loss_scale.png")


def _doctor(run: SavedRun) -> Iterator[Markup]:
    """The doctor's lines in the log, and the settings that it wrote."""
    lines = re.findall(r"^[\d-]{10} [\d:]{8} (?:warning: )?doctor: (.*)$", run.text("log.txt"), re.M)
    settings = run.text("doctor.yaml")
    if lines or settings:
        yield element("h3", "The doctor's finding")
        yield from (element("p", line) for line in dict.fromkeys(lines[-4:]))
    if settings:
        yield element("p", "doctor.yaml, for -cfg:")
        yield element("pre", element("code", settings))


def _comparison(run: SavedRun) -> Iterator[Markup]:
    """The figures of shadow.csv."""
    points = points_of(
        [row for row in run.numbers("shadow.csv") if row.get("step") is not None], "least_cosine", "step"
    )
    if points:
        title = "smallest cosine similarity"
        yield element("h3", "Compared with float32")
        text = "The gradient that is least alike in both precisions: 1 is the same direction, 0 an unrelated one."
        yield element("p", text, class_="soft")
        yield _figure(Plot("shadow.png", title, {title: points}, "update"))


def _types(run: SavedRun) -> Iterator[Markup]:
    """How many modules compute in which type, from precision.csv."""
    columns, *rows = run.cells("precision.csv") or [[]]
    if not rows or "computes_in" not in columns:
        return
    index = columns.index("computes_in")
    found = Counter(row[index] for row in rows).most_common(MOST_ROWS)
    yield element("h3", "Types of operations")
    yield table(("computes in", "modules"), [(name, f"{count:,}") for name, count in found], "Types", numbers=(1,))


def times(run: SavedRun) -> Markup | None:
    """The time of each phase over all reports of the run."""
    rows = [row for row in run.steps if row.get("seconds")]
    total = sum(row["seconds"] for row in rows)
    names = [name for name in (rows[-1] if rows else {}) if name.endswith("_pct")]
    shares = {name: sum(row["seconds"] * (row.get(name) or 0) for row in rows) / total for name in names}
    shares = {name.removesuffix("_pct"): share for name, share in shares.items() if share >= LEAST_SHARE}
    if not shares:
        return None
    training, evaluation = (sum(row.get(f"{part}_seconds") or 0 for row in run.epochs) for part in ("train", "eval"))
    cells = [
        (PHASES.get(name, name), f"{share:.1f}%", *([format_duration(training * share / 100)] if training else []))
        for name, share in sorted(shares.items(), key=lambda item: -item[1])
    ]
    text = (
        (
            f"Training took {format_duration(training)}, evaluation {format_duration(evaluation)}, "
            f"{evaluation / (training + evaluation):.0%} of both."
        )
        if training and evaluation
        else None
    )
    columns = ("in an update", "share", *(["time"] if training else []))
    return section(
        "Where the time went",
        element("p", text) if text else None,
        table(columns, cells, "Time of each phase", numbers=(1, 2)),
    )
