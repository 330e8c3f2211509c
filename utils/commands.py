"""The form in which messages name commands and pages: python scripts/predict.py in a clone, halfstep predict if installed."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from utils.files import HALFSTEP

# Environment variable with the program that started this one, as users type it: halfstep, or python -m halfstep.
TYPED = "HALFSTEP_TYPED"
NAMES = "models|report|predict|labels|embed|export|compare|sweep|doctor|make_shards|from_timm|completion"
PROGRAM = re.compile(rf"(?<![\w/.-])(?:python )?(main_(?:single|multi)_gpu|(?:scripts/)?(?:{NAMES}))\.py\b")
FILE = re.compile(r"(?<![\w/.-])(?:docs/[\w-]+\.md|requirements\.txt)\b")
PIP = re.compile(r"\bpip (install|uninstall)\b")


def command(script: str, *words: str | int | Path) -> str:
    """Return a command to copy into the shell that started this program. `script`: path of a program from the root."""
    texts = [path_word(each) if isinstance(each, Path) else str(each) for each in words]
    if TYPED in os.environ:
        return shlex.join([*shlex.split(os.environ[TYPED]), name_of(script), *texts])
    return shlex.join([python(), shorter(str(HALFSTEP / script)), *texts])


def as_typed(text: str) -> str:
    """Return a message with its commands, pages and `pip install` in the form in which this program was started."""
    text = PIP.sub(lambda found: pip(found[1]), text)
    if TYPED not in os.environ:
        return text
    text = PROGRAM.sub(lambda found: f"{os.environ[TYPED]} {name_of(found[1])}", text)
    return FILE.sub(lambda found: str(HALFSTEP / found[0]), text)


def of_launcher(script: str) -> str:
    """Return the words that start a program in each process of torchrun."""
    return f"--no-python {os.environ[TYPED]} {name_of(script)}" if TYPED in os.environ else script


def name_of(script: str) -> str:
    """Return the name of a program's command: train for main_single_gpu.py, make-shards for scripts/make_shards.py."""
    name = Path(script).name.removesuffix(".py")
    return "train" if name.startswith("main_") else name.replace("_", "-")


def usage_name() -> str | None:
    """Return the name of this program in its usage line; None: the name of its file."""
    return f"{os.environ[TYPED]} {name_of(sys.argv[0])}" if TYPED in os.environ else None


def pip(action: str) -> str:
    """Return the command that installs or uninstalls packages in this environment, whichever tool made it."""
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx runpip halfstep {action}"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {action} --python {shlex.quote(sys.executable)}"
    if TYPED in os.environ:  # the environment of this program may not be active
        return f"{shlex.quote(python())} -m pip {action}"
    return f"pip {action}"


def python() -> str:
    return "python" if shutil.which("python") == sys.executable else shorter(sys.executable)


def shorter(path: str) -> str:
    """Return the path, relative to the working directory if it lies inside that directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def path_word(path: Path) -> str:
    """Return the path as a word that no program mistakes for a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)
