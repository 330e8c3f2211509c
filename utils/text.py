"""Text in messages: quantities, tables, safe printing, and checks of URLs."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from urllib.parse import urlsplit

# The schemes of URLs from which data can be read, and where their credentials belong.
SCHEMES = {
    "http": "the file ~/.netrc",
    "https": "the file ~/.netrc",
    "s3": "the environment (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
    "gs": "the environment (GOOGLE_APPLICATION_CREDENTIALS)",
    "hf": "the environment (HF_TOKEN)",
}
# File names can contain these characters: control characters, which a terminal obeys; marks of the writing direction,
# which make the following text look different; and halves of surrogate pairs for invalid UTF-8, which text files cannot
# contain.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]|[\u200e\u200f\u2028-\u202e\u2066-\u2069]|[\ud800-\udfff]")


def printable(text: str) -> str:
    """Return the text as it is safe to print: with control characters escaped and without credentials in URLs."""
    return redacted(escape_controls(text))


def escape_controls(text: str) -> str:
    """Escape control characters, except tab and newline, as Python does: \\x1b."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(name: str) -> str:
    """Return the name in a printable form that fits on one line, with newlines and tabs escaped."""
    return printable(name).replace("\n", "\\n").replace("\t", "\\t")


FORMULA_SIGNS = tuple("=+-@＝＋－＠")  # spreadsheets also read the full-width ones


def csv_cell(value: object) -> object:
    """Return a cell that a spreadsheet does not evaluate: text that starts like a formula gets an apostrophe."""
    if not isinstance(value, str):
        return value
    is_formula = value.startswith(("\t", "\r", "\n")) or value.lstrip().startswith(FORMULA_SIGNS)
    return f"'{value}" if is_formula else value


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return the rows as CSV text. A cell of None is empty."""
    text = io.StringIO()
    # csv quotes cells that contain "\r" or "\n" because it ends lines with "\r\n". This text ends lines with "\n".
    lines = SimpleNamespace(write=lambda line: text.write(line.removesuffix("\r\n") + "\n"))
    csv.writer(lines).writerows(rows)
    return text.getvalue()


def cut(text: str, limit: int = 8_000) -> str:
    """Return the text, cut to a readable length because it may contain a whole file."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit:,} more characters)"


def format_bytes(count: float) -> str:
    """Return a size such as 1.5 GiB or 12 MiB. Sizes below 1 GiB are rounded up to whole MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{math.ceil(count / 2**20):,} MiB"


def format_bytes_apart(one: float, other: float) -> tuple[str, str]:
    """Return two sizes for a message that compares them, as strings that differ if the sizes do: 2.3 MiB, 2.0 MiB."""
    texts = format_bytes(one), format_bytes(other)
    if texts[0] != texts[1] or one == other:
        return texts
    unit, name = (2**30, "GiB") if min(one, other) >= 2**30 else (2**20, "MiB")
    for digits in (1, 2) if min(one, other) >= unit else ():
        texts = f"{one / unit:,.{digits}f} {name}", f"{other / unit:,.{digits}f} {name}"
        if texts[0] != texts[1]:
            return texts
    return f"{math.ceil(one):,} bytes", f"{math.ceil(other):,} bytes"


def first_of(names: Sequence[str], separator: str = ", ", limit: int = 10, total: int | None = None) -> str:
    """Return the first names as text, and how many more there are. `total`: the number of all names, if larger."""
    total = len(names) if total is None else total
    more = f" and {total - limit:,} more" if total > limit else ""
    return separator.join(names[:limit]) + more


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("s", "x", "tch")) else "s")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 image, 1,437 images, 2 processes."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def format_ranks(ranks: list[int]) -> str:
    """Return the ranks as text: process 1, or processes 1, 2."""
    noun = "processes" if len(ranks) > 1 else "process"
    return f"{noun} {', '.join(str(rank) for rank in ranks)}"


def format_duration(seconds: float) -> str:
    """Return a duration as text: 11.7 s, 5 min 12 s, 3 h 20 min, 2 d 4 h."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if seconds < 60:
        return f"{seconds:.1f} s"
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minute} min" if hours else f"{minute} min {rest} s"


def format_time(seconds: float) -> str:
    """Return a time for a running clock: 0:07, 12:40, 2:03:12, 3 d 2 h."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h"
    return f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line per row, with columns two spaces apart. Cells that start with a digit are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if cell[:1].isdigit() and index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table that is also easy to read as plain text."""
    lines = [header, *rows]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def is_url(path: str) -> bool:
    """Return whether a path is a URL, even a mistyped URL (https:/server), which may contain a password."""
    return re.match(rf"[a-z][a-z0-9+.-]+:/|({'|'.join(SCHEMES)}):", path, re.IGNORECASE) is not None


def problem_of(url: str) -> str | None:
    """Return why data cannot be read from this URL, without quoting the URL, or None if reading is possible."""
    try:
        parts = urlsplit(url)
        user, host = parts.username or parts.password, parts.hostname
        _ = parts.port
    except ValueError:
        return "is not a valid URL"
    if url.partition("://")[0] not in SCHEMES:
        return f"must start with one of {', '.join(f'{each}://' for each in SCHEMES)}; or name a folder instead"
    remedy = SCHEMES[parts.scheme]
    if user:
        return f"contains a user or password, which would be written to the run's files; put them into {remedy}"
    if parts.query or parts.fragment:
        return (
            "contains a query (the part after ? or #), such as the signature of a signed URL, which would be written "
            f"to the run's files; leave it out, and put credentials into {remedy}"
        )
    return None if host else "names no server or bucket; add one after ://"


def redacted(text: str) -> str:
    """Return the text without possible credentials in URLs and without AWS keys."""
    text = re.sub(r"\b(\w{1,20}://)[^/\s'\"]*@", r"\1***@", text)
    text = re.sub(r"\b(\w{1,20}://[^\s'\"?#]*)[?#][^\s'\")]*", r"\1?***", text)
    return re.sub(r"\b(AKIA|ASIA)[0-9A-Z]{12,}", r"\1***", text)


WARNING = "warning: "


def warning(text: str) -> str:
    """Return a line for the log that warns of something. -check marks its row."""
    return f"{WARNING}{text}"
