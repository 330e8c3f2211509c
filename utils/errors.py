"""The two mistakes a user can make, how names close to a wrong one are offered, and what a program ends with."""

import difflib
import signal
import sys
import traceback
from collections.abc import Callable, Iterable


class UserError(Exception):
    """What the user can mend. Printed as one message without a traceback; the program ends with this exit code."""

    code = 2


class ConfigError(UserError):
    """A setting, flag or file name is wrong. The message names it, its value and the remedy."""


class DataError(UserError):
    """The data is not as it must be. The message names the file and the remedy."""


class ToldError(UserError):
    """A UserError of process 0, raised on the others too, which end as it does but say nothing."""

    def __init__(self, message: str, code: int = UserError.code):
        super().__init__(message)
        self.code = code


class StoppedBySignal(UserError):
    """Told to stop when there was nothing to save yet. The program ends with 128 + the signal."""

    def __init__(self, number: int, when: str):
        super().__init__(f"told to stop (signal {number}) {when}; the next start goes on from there")
        self.code = 128 + number


class LostProcess(Exception):
    """Another process of the run, or a loader process, died or hangs. Told without a traceback; the program ends with exit code 1."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean A or B?' for the known names nearest to a wrong one, or nothing."""
    by_lower_case = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower_case, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_lower_case[each] for each in nearest)}?" if nearest else ""


def exit_code(program: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a program and return what it ends with: its own code, 2 for a user's mistake, told in one message, or 1."""
    try:
        return program(arguments)
    except ToldError as error:
        return error.code
    except UserError as error:
        message, code = str(error), error.code
    except LostProcess as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if "torchvision::nms" not in str(error):
            traceback.print_exc()
            return 1
        code = UserError.code
        message = (
            "this torch and this torchvision do not fit each other (operator torchvision::nms does not exist); a +cpu build "
            "of torch has no torchvision here. Remedy: pip uninstall -y torch torchvision, then "
            "pip install -r requirements.txt; the ordinary builds run on CPUs too"
        )
    print(f"error: {message}", file=sys.stderr)
    return code
