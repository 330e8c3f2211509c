"""Plants known mistakes in a copy of the project, one by one, and lists those that no test detects.

    python tests/mistakes/plant.py               all: about an hour on two cores
    python tests/mistakes/plant.py D03 N22       only these
    python tests/mistakes/plant.py -places       only check whether each can still be planted

A row of catalogue.jsonl has an id, a file, a text in it, the text with the mistake, the claim that the mistake
violates, and the closest tests, which are run. The exit code is 1 if a mistake is not detected, or if its text is gone.
Then update the row, or remove it together with its code.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).with_name("catalogue.jsonl")
MOST_SECONDS = 600  # timeout for the tests of one mistake; some mistakes are detected because a run hangs


class Mistake(NamedTuple):
    """A row of the catalogue."""

    id: str
    file: str
    old: str
    new: str
    claim: str
    tests: list[str]

    def can_be_planted(self, root: Path) -> bool:
        path = root / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1


def read_catalogue(ids: set[str]) -> list[Mistake]:
    rows = [Mistake(**json.loads(line)) for line in CATALOGUE.read_text(encoding="utf-8").splitlines()]
    if unknown := ids - {each.id for each in rows}:
        sys.exit(f"no such mistake: {', '.join(sorted(unknown))}")
    return [each for each in rows if not ids or each.id in ids]


def copy_project(target: Path) -> None:
    """Copy the files that git knows or would add, in their current state."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def is_noticed(mistake: Mistake, root: Path) -> bool:
    """Return whether a test fails or hangs with the mistake in the copy at `root`. Restore the copy afterwards."""
    path = root / mistake.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"--basetemp={root / '.tmp'}", *mistake.tests]
    try:
        # Python would use stored byte code for a text of the same length that was written within the same second.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, encoding="utf-8")
    if ended.returncode not in (0, 1):  # the tests did not fail, but could not be found
        sys.exit(f"{mistake.id}: pytest ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.returncode == 1


def main(words: list[str]) -> int:
    mistakes = read_catalogue(set(words) - {"-places"})
    gone = [each for each in mistakes if not each.can_be_planted(ROOT)]
    for each in gone:
        print(f"{each.id}: its text is not in {each.file}, or not once")
    lives = []
    if "-places" not in words:
        with tempfile.TemporaryDirectory() as folder:
            copy_project(Path(folder))
            for each in mistakes:
                if each not in gone:
                    noticed = is_noticed(each, Path(folder))
                    lives += [] if noticed else [each]
                    print(f"{each.id} {'noticed' if noticed else 'LIVES'}: {each.claim}", flush=True)
    print(f"{len(mistakes)} mistakes: {len(gone)} cannot be planted, {len(lives)} live")
    return 1 if gone or lives else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
