"""The commands of README.md work in an environment that has only the packages of requirements.txt."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.support.forks import DEADLINE, ROOT
from tests.support.image_sets import draw_photos
from tests.support.pages import script_of

# {part of a command: why the test does not type it}
NOT_TYPED = {"pip install": "it installs packages", "/data/": "it reads data that the reader has"}
# {words: those that the test types, because it has little time}
REPLACED = {
    "bash scripts/quickstart.sh": "halfstep train -cfg vit_digits -epochs 1",
    "halfstep train photos": "halfstep train photos -epochs 1",
}


def readme_commands() -> list[str]:
    """Return the commands of README.md, with the files of the commands of halfstep."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    text = re.sub(r"(^|\s)#.*", "", "".join(blocks).replace("\\\n", ""), flags=re.M)
    for words, others in REPLACED.items():
        assert words in text, "remove old entries of REPLACED"
        text = text.replace(words, others)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    assert all(any(part in line for line in lines) for part in NOT_TYPED), "remove old entries of NOT_TYPED"
    typed = [script_of(shlex.split(line)) for line in lines if not any(part in line for part in NOT_TYPED)]
    return [shlex.join(["python", script, *words]) for script, words in typed]


@pytest.mark.long
def test_readme_commands_need_no_package_beyond_requirements(tmp_path):
    for name in ("configs", "weights"):
        (tmp_path / name).symlink_to(ROOT / name)
    draw_photos(tmp_path / "photos", "cat", "dog", count=20)
    draw_photos(tmp_path / "new_photos", "cat", "dog", count=2)
    typed = readme_commands()
    assert len(typed) == 3
    program = [sys.executable, "-m", "tests.support.programs.newcomer", str(tmp_path / "codes.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*program, *typed],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    assert json.loads((tmp_path / "codes.json").read_text()) == [0, 0, 0], ended.stdout
    assert (tmp_path / "classes.jpg").exists()
