"""Which images are to be classified: files, folders, patterns and lists, in the order in which they are given."""

import glob
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from datasets.sources.folder import FolderScan, describe_left_out
from utils.errors import ConfigError
from utils.text import first_of

STDIN = "-"


def find_images(given: Iterable[str], lists: Iterable[str], say: Callable[[str], None]) -> list[str]:
    """The images that are `given` on the command line, where @FILE is a list, then those of `lists`."""
    paths = []
    for each in given:
        paths += read_list(each[1:], say) if each.startswith("@") and not os.path.exists(each) else expand(each, say)
    for each in lists:
        paths += read_list(each, say)
    if not paths:
        raise ConfigError(
            "no images; name files, folders or patterns such as 'photos/*.jpg', or a list with -list FILE"
        )
    return paths


def expand(given: str, say: Callable[[str], None]) -> list[str]:
    """A file, the images of a folder and below it, or what a pattern matches, sorted."""
    if os.path.isdir(given):
        scan = FolderScan(Path(given), [])
        inside = scan.images_below("")
        for line in describe_left_out(Path(given), scan.left_out):
            say(line)
        return [os.path.normpath(os.path.join(given, each)) for each in inside]
    if os.path.exists(given):  # also a file whose name looks like a pattern
        return [given]
    if not glob.has_magic(given):
        raise ConfigError(f"{given}: no such image or folder")
    matches = sorted(glob.glob(given, recursive=True))
    if not matches:
        raise ConfigError(f"{given}: no file matches this pattern; check the folder and the ending in it")
    if "**" in given:  # matches folders beside the files in them
        matches = [each for each in matches if not os.path.isdir(each)]
    return [path for each in matches for path in expand(each, say)]


def read_list(name: str, say: Callable[[str], None]) -> list[str]:
    """The images that a file names, one path, folder or pattern a line, as if typed; `-` is the standard input."""
    try:
        text = sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"-list: {name} cannot be read ({error}); it must be a text file with a path a line"
        ) from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = "standard input" if name == STDIN else name
    missing = [line for line in lines if not os.path.exists(line) and not glob.has_magic(line)]
    if missing:
        raise ConfigError(
            f"-list: {len(missing)} of {len(lines)} paths in {title} do not exist: {first_of(missing, limit=3)}; they count "
            f"from the current folder, {os.getcwd()}"
        )
    if not lines:
        raise ConfigError(f"-list: {title} names no images; it must have a path a line")
    return [path for line in lines for path in expand(line, say)]
