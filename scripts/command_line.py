"""The command line that the scripts share: the parser, whole numbers, and where results go."""

import argparse
from collections.abc import Callable
from pathlib import Path

from utils.errors import ConfigError

MAX_NUMBER = 10**12


class Parser(argparse.ArgumentParser):
    """Shows the script's docstring with -h, and reports mistakes like any other mistake of the user."""

    def __init__(self, description: str = "", **options):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False, **options)

    def error(self, message: str):
        raise ConfigError(f"{message}; -h shows the flags of this script")

    def add_output(self, metavar: str, help: str) -> None:
        """The required path that the script writes to. -o and -out are the names it had in earlier versions."""
        self.add_argument("-output", "-o", "-out", required=True, type=Path, metavar=metavar, help=help)


def at_least(low: int) -> Callable[[str], int]:
    """The argparse type of a whole number with this lower bound."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        if value > MAX_NUMBER:
            raise argparse.ArgumentTypeError(f"{value} is more than {MAX_NUMBER}")
        return value

    return number
