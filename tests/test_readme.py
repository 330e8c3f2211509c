"""The commands of README.md work in an environment that has only the packages of requirements.txt."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.forks import DEADLINE, ROOT

# {part of a command: why the test does not type it}
NOT_TYPED = {
    "/data/": "it reads data that the reader has",
    "scripts/sweep.py": "it trains six runs",
    "tensorboard": "it runs until it is stopped",
    "pip install": "it installs packages",
}
QUICKSTART = "bash scripts/quickstart.sh", "python main_single_gpu.py -cfg configs/vit_digits.yaml"


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    text = re.sub(r"(^|\s)#.*", "", "".join(blocks).replace("\\\n", ""), flags=re.M)
    return [line.strip().replace(*QUICKSTART) for line in text.splitlines() if line.strip()]


def shortened(command: str) -> str:
    """Return the command with one epoch for each training."""
    first, *others = command.split(" && ")
    is_training = first.startswith("python main_single_gpu.py") and not re.search(" -(eval|resume|check)", first)
    return " && ".join([first + " -epochs 1" * is_training, *others])


@pytest.mark.slow
def test_readme_commands_need_no_package_beyond_requirements(tmp_path):
    for name in ("configs", "weights", "main_single_gpu.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = [each for each in readme_commands() if not each.startswith("source ")]
    assert all(any(part in each for each in commands) for part in NOT_TYPED), "remove old entries of NOT_TYPED"
    before = dict(zip(commands[1:], commands, strict=False))
    typed = [each for each in commands if not any(part in each for part in NOT_TYPED)]
    assert len(typed) > 8
    program = [sys.executable, "-m", "tests.support.programs.newcomer", str(tmp_path / "codes.json")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*program, *map(shortened, typed)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )
    expected = [2 if before.get(each, "").startswith("pip install") else 0 for each in typed]
    assert json.loads((tmp_path / "codes.json").read_text()) == expected, ended.stdout
