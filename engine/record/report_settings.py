"""The settings of a run: those given beside its file, and all of them; and how to repeat it."""

import shlex
from collections.abc import Iterator

from configs.arguments import argument_to_text
from configs.schema import RECORD
from configs.values import of_role, to_text
from engine.record.page import Markup, element, section, table
from engine.record.saved_run import SavedRun
from utils.text import redacted

COLUMNS = ("setting", "value", "from")


def settings(run: SavedRun) -> Markup:
    """The settings whose origin is no file (flags, -opts, what followed from the data), and all of them."""
    rows = {
        key: (element("code", key), element("code", written(value)), run.origins[key])
        for key, value in run.settings.items()
    }
    origins = {key: row[2] for key, row in rows.items() if row[2] != "default"}
    of_file = {key: origin for key, origin in origins.items() if origin.endswith((".yaml", ".yml"))}
    given = [rows[key] for key in origins if key not in of_file and key not in of_role(RECORD)]
    files = ", ".join(dict.fromkeys(of_file.values())) or "the defaults"
    parts = [element("p", f"Given beside {files}:"), table(COLUMNS, given, "Settings given on the command line")]
    everything = table(COLUMNS, rows.values(), "All settings")
    return section(
        "Settings",
        *(parts if given else [element("p", f"As in {files}.")]),
        element("details", element("summary", f"All {len(rows)} settings"), everything),
    )


def written(value: object) -> str:
    """A value as in config.yaml."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {argument_to_text(each)}" for name, each in value.items()) or "{}"
    return redacted(to_text(value))


def repeat(run: SavedRun) -> Markup:
    """Command lines, and by which versions, where and when it ran."""
    about, status = run.about, run.status
    facts = {name: about.get(name.lower()) for name in ("halfstep", "torch", "timm", "Python")}
    facts |= {"host": status.get("host"), "started": written_date(status.get("started"))}
    facts |= {"ended": written_date(status.get("time")), "folder": run.folder.resolve()}
    lines = [
        element("div", element("h3", title), element("pre", element("code", line))) for title, line in commands(run)
    ]
    rows = [(name, value) for name, value in facts.items() if value]
    return section("How to repeat it", *lines, table(("version", ""), rows, "Versions, place and dates"))


def commands(run: SavedRun) -> Iterator[tuple[str, str]]:
    """(what it does, the line) of commands that go on from this run."""
    folder, processes, epochs = run.folder, run.about.get("processes", 1), run.settings["TRAIN.NUM_EPOCHS"]
    program = ["main_multi_gpu.py", "-ngpus", processes] if processes > 1 else ["main_single_gpu.py"]
    if started := run.about.get("command"):
        yield "It was started with", redacted(line(program[0], *started))
    yield "Repeat it", line(*program, "-cfg", folder / "config.yaml")
    if (folder / "last.pth").exists():
        is_done = run.epochs[-1]["epoch"] + 1 >= epochs
        longer = ["-epochs", epochs + (epochs + 1) // 2] if is_done else []
        yield "Train it longer" if is_done else "Go on with it", line(*program, "-resume", folder, *longer)
    if (best := folder / "best.pth").exists():
        yield "Evaluate its best weights", line("main_single_gpu.py", "-eval", "-pretrained", best)
        yield "Classify images", line("scripts/predict.py", folder, "photo.jpg")
        yield "Take the weights elsewhere", line("scripts/export.py", best, "-output", best.with_suffix(".safetensors"))


def line(*words: object) -> str:
    return shlex.join(["python", *map(str, words)])


def written_date(text: str | None) -> str:
    """2026-01-02 03:04, of a date as in status.json."""
    return (text or "")[:16].replace("T", " ")
