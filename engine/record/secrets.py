"""Takes keys and passwords out of what is said about a tracker."""

import os
import re

from utils.text import redacted

IS_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET", re.I)
SHORTEST = 6  # characters; a shorter value may be part of any word


def without_secrets(text: str) -> str:
    """The text without credentials in URLs, and without values of environment variables that hold some."""
    for name, value in os.environ.items():
        if IS_SECRET.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, "***")
    return redacted(text)
