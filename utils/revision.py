"""The version of halfstep and its commit."""

import os
import subprocess
from pathlib import Path

from utils import VERSION


def revision(folder: Path = Path(__file__).parent.parent) -> str:
    """Return the version of halfstep. In a git checkout, add the commit, with `dirty` if files were changed."""
    if not (folder / ".git").exists():
        return VERSION
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        # git takes no lock here, so that no git command of the user fails in the meantime.
        options = {"env": os.environ | {"GIT_OPTIONAL_LOCKS": "0"}, "timeout": 10, "check": True}
        commit = subprocess.run(command, capture_output=True, text=True, **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # git is missing, or refuses a folder of another user
        return f"{VERSION}, commit unknown"
    return f"{VERSION}, commit {commit}"
