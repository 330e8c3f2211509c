"""Command lines of the scripts: the parser that they share, and types and checks of its arguments."""

import argparse
import difflib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from configs.flags import FLAGS
from configs.removed import REMOVED_FLAGS
from configs.schema import MAX_SIDE, SIZE
from utils.errors import SIMILAR, ConfigError, cause_of
from utils.files import refuse_special
from utils.runs import EMPTY_NAME
from utils.text import is_url

RUN_HELP = "a run's folder (for its best weights), a checkpoint in the folder, or latest (the newest run in output)"
CHECKPOINT_HELP = f"{RUN_HELP}; or a .safetensors file from halfstep export"
MAX_NUMBER = 10**12
VALUES_OF_AMP = ("true", "false", "auto")  # a folder may be called on or off


class Parser(argparse.ArgumentParser):
    """Shows the script's docstring with -h, and raises ConfigError for a mistake on the command line."""

    def __init__(self, description: str = "", command: str | None = None, **options):
        """`command`: the name of the command of halfstep, such as predict, or None for the name of the file."""
        form = argparse.RawDescriptionHelpFormatter
        if command:
            options["prog"] = f"halfstep {command}"
        super().__init__(description=description, formatter_class=form, allow_abbrev=False, **options)
        self.register("type", Path, local_path)

    def parse_known_args(self, args: Sequence[str], namespace: argparse.Namespace | None = None):
        """Parse a command line. Photos may follow -amp, which takes true, false or auto, and the settings of -opts."""
        has_opts = "-opts" in self._option_string_actions
        words = separate_settings(args) if has_opts else args
        words = [
            "-amp=true" if word == "-amp" and following.lower() not in VALUES_OF_AMP else word
            for word, following in pairwise([*words, ""])
        ]
        return super().parse_known_args(words, namespace)

    def error(self, message: str):
        words = [word.partition("=")[0] for word in message.split()]
        remedies = [f"{flag} was removed; {REMOVED_FLAGS[flag]}" for flag in sorted(REMOVED_FLAGS.keys() & set(words))]
        unknown = next((word for word in words if message.startswith("unrecognized") and word.startswith("-")), None)
        near = self._suggest(unknown) if unknown else ""
        raise ConfigError("; ".join(remedies) or f"{message}{near}; -h shows the flags of this script")

    def _suggest(self, flag: str) -> str:
        """Return '; did you mean -csv?' for a misspelt flag, or for the name that another trainer gives to a flag."""
        from configs.typed_names import setting_meant  # local: only a mistake needs it

        known, setting = self._option_string_actions, setting_meant(flag)
        own_name = next((each for group in FLAGS.values() for each, (key, _) in group.items() if key == setting), None)
        meant = [each for each in (own_name, f"-{own_name}") if each in known]
        meant = meant or difflib.get_close_matches(flag, known, 1, SIMILAR)
        return f"; did you mean {meant[0]}?" if meant else ""

    def add_output(self, metavar: str, help: str) -> None:
        """Add the required flag -output, also called -o and -out: the path that the script writes to."""
        self.add_argument("-output", "-o", "-out", required=True, type=Path, metavar=metavar, help=help)


def separate_settings(words: Sequence[str]) -> list[str]:
    """Return a command line with -opts=KEY=VALUE for each setting, so that argparse gives -opts no photo after them.

    A word without = is a photo if it exists; otherwise it stays with -opts, which refuses it.
    """
    separated, in_settings = [], False
    for word, following in pairwise([*words, ""]):
        if word.startswith("-"):
            in_settings = word == "-opts" and is_setting(following)
            separated += [] if in_settings else [word]
        elif in_settings and is_setting(word):
            separated.append(f"-opts={word}")
        else:
            in_settings = False
            separated.append(word)
    return separated


def is_setting(word: str) -> bool:
    """Return whether a word after -opts belongs to it."""
    return bool(word) and not word.startswith("-") and ("=" in word or not os.path.exists(word))


def local_path(text: str) -> Path:
    """Convert text to a Path. This is the argparse type of all path arguments.

    Refuse URLs and empty text: Path turns a URL into a folder called `s3:`, and empty text into the current folder.
    """
    if not text.strip():
        raise ConfigError(EMPTY_NAME)
    if is_url(text):
        raise ConfigError(f"{text} is a URL; name a file or folder on this machine")
    return Path(text)


def at_least(low: int) -> Callable[[str], int]:
    """Return the argparse type of a whole number with this lower bound."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= MAX_NUMBER:
            raise argparse.ArgumentTypeError(f"{value} is out of range; give a number from {low} to {MAX_NUMBER}")
        return value

    return number


def image_size(text: str) -> int | str:
    """Convert the size of images as DATA.IMAGE_SIZE does. Raise an error of argparse for other text."""
    from configs.image_size import to_image_size

    try:
        return to_image_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be {SIZE.requirement} from 1 to {MAX_SIDE:,}") from None


def check_writable(flag: str, path: Path) -> None:
    """Raise ConfigError if the file cannot be written. Call this before computing its content."""
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{flag}: cannot write to the folder {path.parent}; create it or choose another")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder; name a file in it")
    try:
        refuse_special(path)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path} ({cause_of(error)})") from None


def check_no_input(flag: str, path: Path, inputs: Iterable[str | Path]) -> None:
    """Raise ConfigError if the output is one of the inputs."""
    for source in inputs:
        if os.path.exists(source) and path.exists() and os.path.samefile(path, source):
            raise ConfigError(f"{flag}: {path} is an input too and would be overwritten; choose another name")


def refuse_among_photos(photos: Path, outputs: dict[str, Path | None]) -> None:
    """Raise ConfigError if an output {flag: path} is inside the folder of the photos."""
    root = os.path.realpath(photos)
    for flag, path in outputs.items():
        if path and os.path.commonpath([root, os.path.realpath(path)]) == root:
            raise ConfigError(
                f"{flag}: {path} would put pictures among the photos, and the next call would read them; name another "
                "place"
            )
