"""The settings of a run: those given beside its file, and all of them; and how to repeat it."""

import shlex
from collections.abc import Iterator

from configs.arguments import argument_to_text
from configs.schema import RECORD
from configs.values import of_role, to_text
from engine.record.page import Markup, element, scrolling, section, table
from engine.record.saved_run import SavedRun, written_date
from utils.text import redacted


def settings(run: SavedRun) -> Markup:
    """The settings whose origin is no file (flags, -opts, what followed from the data), and all of them."""
    origins = run.origins
    given = [key for key in run.settings if not _is_of_file(origins[key]) and key not in of_role(RECORD)]
    rows = [(element("code", key), element("code", written(run.settings[key])), origins[key]) for key in given]
    files = ", ".join(dict.fromkeys(each for each in origins.values() if _is_of_file(each) and each != "default"))
    parts = []
    if rows:
        parts.append(element("p", f"Given beside {files or 'the defaults'}:"))
        parts.append(table(("setting", "value", "from"), rows, "Settings given on the command line"))
    elif files:
        parts.append(element("p", f"As in {files}."))
    body = [
        element(
            "tr",
            element("td", element("code", key)),
            element("td", element("code", written(value))),
            element("td", origins[key], class_="soft"),
            class_="chosen" if origins[key] != "default" else None,
        )
        for key, value in run.settings.items()
    ]
    everything = scrolling(element("table", element("tbody", *body)), "All settings")
    return section("Settings", *parts, element("details", element("summary", f"All {len(body)} settings"), everything))


def _is_of_file(origin: str) -> bool:
    return origin == "default" or origin.endswith((".yaml", ".yml"))


def written(value: object) -> str:
    """A value as in config.yaml."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {argument_to_text(each)}" for name, each in value.items()) or "{}"
    return redacted(to_text(value))


def repeat(run: SavedRun) -> Markup:
    """Command lines, and by which versions, where and when it ran."""
    lines = [
        element("div", element("h3", title), element("pre", element("code", line))) for title, line in _commands(run)
    ]
    rows = [
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in _versions(run).items()
        if value
    ]
    versions = scrolling(element("table", element("tbody", *rows)), "Versions, place and dates")
    return section("How to repeat it", *lines, versions)


def _commands(run: SavedRun) -> Iterator[tuple[str, str]]:
    folder, about = str(run.folder), run.about
    processes = about.get("processes")
    several = isinstance(processes, int) and processes > 1
    program = f"python main_multi_gpu.py -ngpus {processes}" if several else "python main_single_gpu.py"
    quoted = shlex.quote(folder)
    if isinstance(about.get("command"), list):
        yield (
            "It was started with",
            f"{program.partition(' -ngpus')[0]} {redacted(shlex.join(map(str, about['command'])))}",
        )
    yield "Repeat it", f"{program} -cfg {shlex.quote(str(run.folder / 'config.yaml'))}"
    if run.file("last.pth"):
        more = run.settings["TRAIN.NUM_EPOCHS"] + (run.settings["TRAIN.NUM_EPOCHS"] + 1) // 2
        is_done = run.epochs[-1]["epoch"] + 1 >= run.settings["TRAIN.NUM_EPOCHS"]
        longer = f" -epochs {more}" if is_done else ""
        yield "Train it longer" if is_done else "Go on with it", f"{program} -resume {quoted}{longer}"
    if run.file("best.pth"):
        best = shlex.quote(str(run.folder / "best.pth"))
        weights = shlex.quote(str(run.folder / "best.safetensors"))
        yield "Evaluate its best weights", f"python main_single_gpu.py -eval -pretrained {best}"
        yield "Classify images", f"python scripts/predict.py {quoted} photo.jpg"
        yield "Take the weights elsewhere", f"python scripts/export.py {best} -output {weights}"


def _versions(run: SavedRun) -> dict[str, str]:
    about, status = run.about, run.status
    versions = {"halfstep": about.get("halfstep"), "torch": about.get("torch"), "timm": about.get("timm")}
    return {
        **{name: str(version) for name, version in versions.items() if version},
        "Python": about.get("python") or "",
        "host": status.get("host") or "",
        "started": written_date(run.started),
        "ended": written_date(run.ended),
        "folder": str(run.folder.resolve()),
    }
