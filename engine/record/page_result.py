"""The head of the page: the result in a sentence, how the run ended, and its key facts."""

import math
import time
from collections.abc import Iterator

from engine.evaluation.scores import TITLES, confidence, format_value
from engine.record.html import Markup, element, joined
from engine.record.saved_run import SavedRun
from utils.text import counted, format_duration


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
    told = {
        "stopped": f"The run was stopped{after}"
        + (f" by signal {run.status['signal']}" if "signal" in run.status else ""),
        "failed": f"The run ended with an error{after}",
        "save_failed": "The last checkpoint could not be saved",
        "running": f"The run is still going; this is the state{after}",
        "killed": f"The run was killed; this is the state{after}",
    }.get(run.state, "")
    told = f"{told}: {reason}" if told and reason else told
    return told and told.rstrip(".") + "."


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


def date(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
