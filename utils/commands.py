"""Commands, pages and packages in messages that users can copy: halfstep predict, docs/data.md, pip install."""

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

HALFSTEP = Path(__file__).resolve().parent.parent


def command(name: str, *words: str | int | Path) -> str:
    """Return a command of halfstep to copy into a shell. `name`: one of halfstep/__main__.py, such as predict."""
    texts = [path_word(word) if isinstance(word, Path) else str(word) for word in words]
    return shlex.join(["halfstep", name, *texts])


def alias() -> str | None:
    """Return the line that defines `halfstep` in a shell, or None if the shell finds a program of this name."""
    if shutil.which("halfstep"):
        return None
    program = HALFSTEP / "halfstep/__main__.py"
    if not program.exists():  # the wheel has it in its package
        program = HALFSTEP / "__main__.py"
    return f"alias halfstep={shlex.quote(shlex.join([sys.executable, str(program)]))}"


def page(name: str) -> str:
    """Return the path of a page of the documentation, such as docs/data.md."""
    return shorter(str(HALFSTEP / name))


def pip(action: str) -> str:
    """Return the command that installs or uninstalls packages in this environment, whichever tool made it."""
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx runpip halfstep {action}"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {action} --python {shlex.quote(sys.executable)}"
    if shutil.which("python") == sys.executable:
        return f"pip {action}"
    return f"{shlex.quote(sys.executable)} -m pip {action}"  # the environment of this program is not active


def shorter(path: str) -> str:
    """Return the path, relative to the working directory if it lies inside that directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def path_word(path: Path) -> str:
    """Return the path as a word that no program mistakes for a flag."""
    return f"./{path}" if str(path).startswith("-") else str(path)
