"""The journal of corrections in the data folder: each change is on disk before it is made, so it can be undone.

The journal is a file of JSON lines. A line {"entry": N, ...} announces a change, {"undone": N} and {"skipped": N} say
that change N was taken back or not made. {"apply": N} and {"applied": N} mark the start and the end of an -apply.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from configs.schema import Config
from extras.labels.data import Origin
from utils.errors import ConfigError, cause_of
from utils.files import check_writable, content_of, locked, replacing, sync, sync_folder
from utils.runs import utc_now

NAME, VERSION, TITLE = ".halfstep-labels.jsonl", 1, "halfstep corrections of labels"  # the data ignores hidden files
MOST_BYTES = 2**30
DONE, NOT_DONE, HALF_DONE, LOST = "done", "not done", "half done", "lost"  # states of a change on disk


def path_of_journal(config: Config) -> Path:
    """Return the path of the journal: in the data folder, or next to the list that DATA.DATA_PATH names."""
    path = Path(config.DATA.DATA_PATH).expanduser()
    return path.with_name(f".{path.name}{NAME}") if path.is_file() else path / NAME


@dataclass
class Journal:
    """The lines of a journal, and the file to which further lines are written."""

    path: Path
    lines: list[dict[str, Any]]
    file: IO[bytes] | None = None
    size: int = 0  # bytes of the complete lines
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)  # {number: change}
    closed: set[int] = field(default_factory=set)  # numbers of changes that were undone or not made
    starts: list[int] = field(default_factory=list)  # the number of the first change of each -apply
    is_open: bool = False  # whether an -apply or -undo was interrupted

    @classmethod
    def read(cls, path: Path, file: IO[bytes] | None = None) -> "Journal":
        """Read a journal. Ignore a last line that a kill cut off. `file`: the locked journal, if it will be written."""
        try:
            content = file.read() if file else content_of(path, MOST_BYTES) if path.exists() else b""
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({cause_of(error)}); check its permissions") from None
        complete = content[: content.rfind(b"\n") + 1]
        journal = cls(path, [], file, len(complete))
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                journal._add(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ConfigError(
                    f"{path}, line {number}: the line is damaged, so no correction can be undone; restore the file "
                    "from a backup"
                ) from None
        if journal.lines and (journal.lines[0].get("journal"), journal.lines[0].get("version")) != (TITLE, VERSION):
            raise ConfigError(
                f"{path}: this journal was written by another version of halfstep; use that version, or move the file away"
            )
        return journal

    @property
    def id(self) -> str | None:
        return self.lines[0]["id"] if self.lines else None

    def _add(self, line: dict[str, Any]) -> None:
        paths = [*line.get("move", ()), *(line[word] for word in ("folder", "edit", "copy") if word in line)]
        if any(os.path.isabs(path) or ".." in path.split("/") for path in paths):
            raise ValueError("a path leads out of the data folder")
        self.lines.append(line)
        if "entry" in line:
            self.entries[int(line["entry"])] = line
        for word in ("undone", "skipped"):
            if word in line:
                self.closed.add(int(line[word]))
        if "apply" in line:
            self.starts.append(len(self.entries) + 1)
        if "apply" in line or "undone" in line:
            self.is_open = True
        if "applied" in line:
            self.is_open = False

    def write(self, **line: Any) -> None:
        """Append a line, and return once it is on disk."""
        if not self.lines:
            self._append({"journal": TITLE, "version": VERSION, "id": secrets.token_hex(8), "time": utc_now()})
        self._append(line)

    def _append(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        self.file.seek(self.size)
        self.file.truncate()  # removes a line that a kill cut off
        self.file.write(data)
        sync(self.file)
        if not self.lines:
            sync_folder(self.path.parent)
        self.size += len(data)
        self._add(line)

    def announce(self, **change: Any) -> int:
        """Write the entry of a change that is about to be made, and return its number."""
        number = len(self.entries) + 1
        self.write(entry=number, **change)
        return number

    def in_effect(self, since: int = 1) -> list[tuple[int, dict[str, Any]]]:
        """Return the number and entry of each change that was not taken back, starting at number `since`."""
        return [
            (number, each) for number, each in self.entries.items() if number >= since and number not in self.closed
        ]

    def states(self) -> list[dict[str, Origin]]:
        """Return the corrections since the start of each -apply, the newest first: {name now: origin}."""
        return [self.origins(start) for start in reversed(self.starts)]

    def origins(self, since: int = 1) -> dict[str, Origin]:
        """Return {name now: name and label before change `since` and all later ones}."""
        found: dict[str, Origin] = {}
        for _, entry in self.in_effect(since):
            for name, new_name, label, new_label in corrections_of(entry):
                origin = found.pop(name, Origin(name, label))
                if origin != (new_name, new_label):
                    found[new_name] = origin
        return found

    def leftovers(self, root: Path) -> set[Path]:
        """Return the copies of edited files, and temporary files that a kill may have left."""
        lines = [line for line in self.lines if "copy" in line]
        copies = {root / line["copy"] for line in lines}
        files = copies | {(root / line["edit"]).resolve() for line in lines}
        return copies | {file.with_name(f".{file.name}.tmp") for file in files}

    def settle(self, root: Path) -> None:
        """Complete the journal of an interrupted command, whose last change was announced but perhaps not made.

        Changes are made in order: if a change was made, all earlier changes were made too.
        """
        for number, entry in reversed(self.in_effect()) if self.is_open else ():
            state = state_of(root, entry)
            if state == HALF_DONE:
                os.unlink(root / entry["move"][0])
            if state != NOT_DONE:
                return
            self.write(skipped=number)


@contextlib.contextmanager
def locked_journal(config: Config, flag: str) -> Iterator[Journal]:
    """Yield the journal of the data, locked against other processes. It is created when its first line is written."""
    path = path_of_journal(config)
    try:
        check_writable(path.parent)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write to {path.parent} ({cause_of(error)}); check its permissions") from None
    with locked(path) as file:
        if file is None:
            raise ConfigError(f"{flag}: another labels.py is changing {path.parent}; wait until it ends")
        journal = Journal.read(path, file)
        try:
            yield journal
        finally:
            if not journal.lines:
                path.unlink(missing_ok=True)


def corrections_of(entry: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield old name, new name, old label and new label of each image that a change corrects."""
    if "move" in entry:
        yield (*entry["move"], *entry["labels"])
    for name, label, new_label in entry.get("rows", ()):
        yield name, name, label, new_label


def state_of(root: Path, entry: dict[str, Any]) -> str:
    """Return the state of a change on disk: done, not done, half done, or lost (unknown)."""
    if "folder" in entry:
        return DONE if (root / entry["folder"]).is_dir() else NOT_DONE
    if "edit" in entry:
        digest = file_digest(root / entry["edit"])
        return {entry["before"]: NOT_DONE, entry["after"]: DONE}.get(digest, LOST)
    source, target = (root / each for each in entry["move"])
    has_source, has_target = os.path.lexists(source), os.path.lexists(target)
    if has_source and has_target:
        return HALF_DONE if os.path.samestat(os.lstat(source), os.lstat(target)) else LOST
    return DONE if has_target else NOT_DONE if has_source else LOST


def file_digest(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def undo_change(root: Path, entry: dict[str, Any]) -> str | None:
    """Undo a change, or complete an interrupted undo. Return the problem if that is not possible."""
    state = state_of(root, entry)
    if "folder" in entry:
        with contextlib.suppress(OSError):  # other files were added to it, or it is gone
            os.rmdir(root / entry["folder"])
        return None
    if "edit" in entry:
        if state == LOST:
            return f"{root / entry['edit']} was changed since -apply; its earlier content is in {root / entry['copy']}"
        if state == DONE:
            put_back(root / entry["copy"], root / entry["edit"])
        return None
    source, target = (root / each for each in entry["move"])
    if state == LOST:
        return (
            f"{target} is gone"
            if not os.path.lexists(target)
            else f"{target} cannot move back, because {source} exists"
        )
    if state == HALF_DONE:
        os.unlink(target)
    elif state == DONE:
        source.parent.mkdir(parents=True, exist_ok=True)
        move(target, source)
    return None


def put_back(copy: Path, file: Path) -> None:
    """Replace a file by the copy of its earlier content."""
    replace_content(file, content_of(copy, MOST_BYTES))


def replace_content(file: Path, content: bytes) -> None:
    """Replace the content of a file atomically, and keep its permissions."""
    file = file.resolve()  # a link stays a link
    with replacing(file) as new:
        os.fchmod(new.fileno(), file.stat().st_mode & 0o7777)
        new.write(content)


def move(source: Path, target: Path) -> None:
    """Move a file or link to a free name. Raise FileExistsError if the name is taken, so that no file is overwritten."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or a file of another user
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists") from None
        os.rename(source, target)
        return
    os.unlink(source)
