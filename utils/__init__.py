"""Utilities for all packages (processes, errors, log, files, seeds, text), and halfstep's version and requirements.

Each program imports this package first, because a Python that is too old could not even parse the other packages.
Therefore Python 3.8 can parse this file and the first lines of each program.
"""

import importlib.util
import os
import shlex
import sys

VERSION = "3.0.1"  # the upcoming version if CHANGELOG.md starts with "Unreleased"
PYTHON = (3, 11)
PACKAGES = ("numpy", "PIL", "yaml", "torch", "torchvision", "timm", "tqdm", "matplotlib")


def find_lack():
    """Return a message if Python is too old or packages are missing, with a command that fixes it, or None."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if sys.version_info < PYTHON:
        lack = f"Python {PYTHON[0]}.{PYTHON[1]} or newer is needed, but this is"
    elif missing:
        lack = f"{', '.join(missing)} not installed in"
    else:
        return None
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    activate = os.path.join(root, ".venv", "bin", "activate")
    is_active = os.path.realpath(sys.prefix) == os.path.realpath(os.path.join(root, ".venv"))
    quickstart = os.path.join(root, "scripts", "quickstart.sh")
    remedy = "bash " + shlex.quote(os.path.relpath(quickstart))
    if os.path.exists(activate) and not is_active:
        remedy = "source " + shlex.quote(os.path.relpath(activate))
    elif sys.version_info >= PYTHON:
        remedy += ", or pip install -r " + shlex.quote(os.path.relpath(os.path.join(root, "requirements.txt")))
    if sys.version_info >= PYTHON and not os.path.exists(quickstart):  # this is an installed halfstep
        from utils.commands import pip  # not at the top, because an older Python cannot parse it

        remedy = pip("install") + " -r " + shlex.quote(os.path.join(root, "requirements.txt"))
    version = ".".join(str(part) for part in sys.version_info[:3])
    return f"{lack} Python {version} ({sys.executable}); run: {remedy}"


if _lack := find_lack():
    sys.stderr.write(f"error: {_lack}\n")
    sys.exit(2)
