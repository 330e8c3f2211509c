"""What the command lines of the scripts share."""

import argparse
from collections.abc import Callable

from utils.errors import ConfigError

MOST = 10**12  # of a number that counts something


class Parser(argparse.ArgumentParser):
    """Shows the script's docstring with -h, and tells a mistake like any other of the user's."""

    def __init__(self, description: str):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=form, allow_abbrev=False)

    def error(self, message: str):
        raise ConfigError(f"{message}; -h shows how this script is called")


def at_least(low: int) -> Callable[[str], int]:
    """The type of an argument that is such a whole number."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{value} is more than {MOST}")
        return value

    return number
