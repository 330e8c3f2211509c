"""What people read when they mistype: the one place that holds the wording of messages to a text.

python -m tests.support.wording writes tests/data/messages.json anew, after words were improved: read its diff.
"""

import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable

import main_single_gpu
from configs.load import load
from tests.support.configs import SMALL, load_text, write
from tests.support.mistakes import IN_A_FILE, IN_A_RUN, IN_OPTS, ON_THE_COMMAND_LINE, WITHOUT_EFFECT
from tests.support.runs import ROOT
from utils.errors import UserError
from utils.program import exit_code

FILE = ROOT / "tests" / "data" / "messages.json"


def messages() -> dict[str, dict[str, str]]:
    """What was typed -> the message, by kind of mistake. Paths of this machine are left out."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write(SMALL, "small.yaml")
        write("", "file")
        unused = {
            f"{words} {beside}".strip(): ["-opts", *f"{words} {beside}".split()] for words, beside in WITHOUT_EFFECT
        }
        found = {
            "settings files": {text: message(lambda text=text: load_text(text)) for text in IN_A_FILE},
            "settings": {word: message(lambda word=word: load_text("", "-opts", word)) for word in IN_OPTS},
            "command lines": {
                words: message(lambda words=words: load_text("", *shlex.split(words))) for words in ON_THE_COMMAND_LINE
            },
            "without effect": {key: load(["-cfg", "small.yaml", *words]).notes[0] for key, words in unused.items()},
            "runs": {words: message_of_run(words) for words in IN_A_RUN},
        }
        here = os.path.realpath(folder)
    return {
        kind: {
            shortened(key): shortened(text).replace(here, "HERE").replace(str(ROOT), "HALFSTEP")
            for key, text in texts.items()
        }
        for kind, texts in found.items()
    }


def shortened(text: str) -> str:
    return re.sub(r"(.)\1{50,}", r"\1\1\1...", text)


def message(do: Callable[[], object]) -> str:
    try:
        do()
    except UserError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def message_of_run(words: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = exit_code(main_single_gpu.main, ["-cfg", "small.yaml", "-epochs", "1", *shlex.split(words)])
    assert code == UserError.code, said.getvalue()
    return said.getvalue().strip()


if __name__ == "__main__":
    FILE.write_text(json.dumps(messages(), indent=1, ensure_ascii=False), encoding="utf-8")
