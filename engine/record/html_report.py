"""Writes report.html of a run's folder."""

import os
from pathlib import Path

from engine.record.html import element
from engine.record.page import write_page
from engine.record.page_album import album
from engine.record.page_classes import classes
from engine.record.page_curves import curves
from engine.record.page_precision import precision
from engine.record.page_result import date, head, title_of
from engine.record.page_settings import repeat, settings
from engine.record.page_times import times
from engine.record.saved_run import SavedRun
from utils import VERSION
from utils.errors import ConfigError, cause_of
from utils.log import Log

REPORT = "report.html"


def write_report(run: SavedRun, path: Path) -> None:
    """Write the page. OSError if there is no room."""
    foot = element("footer", f"halfstep {VERSION}", f", {date(run.ended)}" if run.ended else None)
    body = [
        head(run),
        curves(run),
        *classes(run),
        *album(run),
        precision(run),
        times(run),
        settings(run),
        repeat(run),
        foot,
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
