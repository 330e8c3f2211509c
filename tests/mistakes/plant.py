"""Plants mistakes in copies of the project, one by one, and lists those that no test notices.

    python tests/mistakes/plant.py                    the known mistakes of catalogue.jsonl: 6 minutes on two cores
    python tests/mistakes/plant.py B02 B19            only these
    python tests/mistakes/plant.py -places            only check whether each can still be planted
    python tests/mistakes/plant.py -drawn 150 -seed 7 -output FOLDER   mistakes on lines that the seed draws
    python tests/mistakes/plant.py -since COMMIT -minutes 15 -output FOLDER   the same, on lines changed since a commit

A row of catalogue.jsonl has an id, a file, a text in it, the text with the mistake, the claim that the mistake
violates, and the closest tests, which are run. The exit code is 1 if a mistake is not noticed, or if its text is gone.
Then update the row, or remove it together with its code.

A drawn mistake is tried with all tests that execute its line, the cheapest first, for at most 120 seconds. The command
first records the lines of each test into FOLDER/lines, which takes as long as the whole suite, unless -lines names the
record of an earlier call. It writes results.jsonl, which it continues when it is called again, and prints the rate of
noticed mistakes with its 95% interval, a table by folder, and the others as diffs. equivalent.jsonl lists mistakes
that change nothing, each with the reason; they do not count.
"""

import argparse
import difflib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mistakes import lines, trying  # noqa: E402
from tests.mistakes.mutants import Mutant, apply, find_mutants, is_python  # noqa: E402

CATALOGUE, EQUIVALENT = (Path(__file__).with_name(name) for name in ("catalogue.jsonl", "equivalent.jsonl"))
MOST_SECONDS, MOST_SECONDS_OF_CATALOGUE = 120, 600  # for the tests of one mistake


class Mistake(NamedTuple):
    """A mistake to plant: `old` in a file becomes `new`. In a row of the catalogue, `old` occurs once in the file."""

    id: str
    file: str
    old: str
    new: str
    claim: str
    tests: list[str]

    def can_be_planted(self, root: Path) -> bool:
        path = root / self.file
        return path.is_file() and path.read_text(encoding="utf-8").count(self.old) == 1


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="ID", help="rows of the catalogue (default: all)")
    parser.add_argument("-places", action="store_true", help="only check whether the rows can be planted")
    parser.add_argument("-drawn", type=int, metavar="N", help="number of mistakes to draw")
    parser.add_argument("-since", metavar="COMMIT", help="draw only from lines changed since this commit")
    parser.add_argument("-seed", type=int, default=0, metavar="N", help="seed of the drawing [0]")
    parser.add_argument("-minutes", type=float, metavar="M", help="stop after this time")
    parser.add_argument("-workers", type=int, default=2, metavar="N", help="number of mistakes tried at once [2]")
    parser.add_argument("-output", type=Path, metavar="FOLDER", help="folder for the results of drawn mistakes")
    parser.add_argument("-lines", type=Path, metavar="FOLDER", help="recorded lines of tests [-output FOLDER/lines]")
    arguments = parser.parse_args(argv)
    if arguments.drawn or arguments.since:
        if not arguments.output:
            parser.error("-output: a folder is needed for the results of drawn mistakes")
        return plant_drawn(arguments)
    return plant_known({*arguments.ids}, arguments.places, arguments.workers)


# --- known mistakes ---


def plant_known(ids: set[str], only_places: bool, num_workers: int) -> int:
    mistakes = [Mistake(**json.loads(line)) for line in CATALOGUE.read_text(encoding="utf-8").splitlines()]
    if unknown := ids - {each.id for each in mistakes}:
        sys.exit(f"no such mistake: {', '.join(sorted(unknown))}")
    mistakes = [each for each in mistakes if not ids or each.id in ids]
    gone = [each for each in mistakes if not each.can_be_planted(ROOT)]
    for each in gone:
        print(f"{each.id}: its text is not in {each.file}, or not once")
    lives = []
    jobs = {each.id: each for each in mistakes if each not in gone and not only_places}
    planting = [trying.Job(each.id, each.file, planted(each), each.tests, {}) for each in jobs.values()]
    for name, tried in trying.try_all(planting, MOST_SECONDS_OF_CATALOGUE, num_workers):
        lives += [] if tried.outcome == "noticed" else [name]
        print(f"{name} {tried.outcome if tried.outcome == 'noticed' else 'LIVES'}: {jobs[name].claim}", flush=True)
    print(f"{len(mistakes)} mistakes: {len(gone)} cannot be planted, {len(lives)} live")
    return 1 if gone or lives else 0


def planted(mistake: Mistake) -> str:
    return (ROOT / mistake.file).read_text(encoding="utf-8").replace(mistake.old, mistake.new)


# --- drawn mistakes ---


def plant_drawn(arguments: argparse.Namespace) -> int:
    folder = arguments.output
    results = folder / "results.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in lines.program_files(ROOT)}
    drawn = draw(texts, changed_lines(arguments.since) if arguments.since else None, arguments.seed, arguments.drawn)
    print(f"{len(drawn)} mistakes drawn", flush=True)
    recorded = arguments.lines or folder / "lines"
    if not recorded.exists():
        trying.copy_project(folder / "recorded")
        lines.record(folder / "recorded", recorded)
    known = lines.Lines(recorded)
    done = {row["id"] for row in read_results(results)}
    jobs, rows = [], {}
    for file, mutant in drawn:
        name = f"{file}:{mutant.line}:{mutant.start}:{mutant.operator}:{mutant.new}"
        if name not in done:
            new, tests = apply(texts[file], mutant), known.tests_of(file, texts[file], mutant)
            jobs.append(trying.Job(name, file, new, tests, {test: known.seconds[test] for test in tests}))
            rows[name] = {"id": name, "file": file, "operator": mutant.operator, "diff": diff(texts[file], new)}
    stop = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    for name, tried in trying.try_all(jobs, MOST_SECONDS, arguments.workers, stop):
        with open(results, "a", encoding="utf-8") as out:
            out.write(json.dumps(rows[name] | tried._asdict(), ensure_ascii=False) + "\n")
        print(
            f"{tried.outcome:8} {tried.seconds:5.0f} s  {name.split(':')[0]}:{name.split(':')[1]}  {tried.test}",
            flush=True,
        )
    print(report(read_results(results)))
    return 0


def draw(
    texts: dict[str, str], only: dict[str, set[int]] | None, seed: int, count: int | None
) -> list[tuple[str, Mutant]]:
    """Draw lines that can have a mistake, and a mistake for each. `only`: {file: lines to draw from}; None: all."""
    rng, by_line = random.Random(seed), defaultdict(list)
    for file, text in texts.items():
        if only is None or file in only:
            for mutant in find_mutants(text):
                if only is None or mutant.line in only[file]:
                    by_line[file, mutant.line].append(mutant)
    drawn = []
    for place in rng.sample(sorted(by_line), len(by_line)):
        mutant = rng.choice(by_line[place])
        if len(drawn) == count:
            break
        if is_python(apply(texts[place[0]], mutant)):
            drawn.append((place[0], mutant))
    return drawn


def changed_lines(commit: str) -> dict[str, set[int]]:
    """Return {file: lines that were added or changed since the commit}."""
    shown = subprocess.check_output(["git", "diff", "-U0", "--no-renames", commit, "--", "*.py"], cwd=ROOT, text=True)
    changed, file = defaultdict(set), ""
    for line in shown.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, number = int(found[1]), int(found[2] or 1)
            changed[file].update(range(first, first + number))
    return changed


def read_results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def diff(old: str, new: str) -> str:
    """Return the changed lines of a file, each with - or +."""
    _, _, *compared = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in compared if not line.startswith("@@"))


def report(rows: list[dict]) -> str:
    """Return the rate of noticed mistakes, a table by folder, and the diffs of the others."""
    from engine.evaluation.scores import wilson_interval  # late: the forks shall import the engine of their copy

    equivalent = {(row["file"], row["diff"]) for row in read_results(EQUIVALENT)}
    counted = [row for row in rows if (row["file"], row["diff"]) not in equivalent]
    folders = defaultdict(Counter)
    for row in counted:
        folders[row["file"].rsplit("/", 1)[0] if "/" in row["file"] else "."][row["outcome"]] += 1
    noticed, others = [[row for row in counted if (row["outcome"] == "noticed") is each] for each in (True, False)]
    text = [f"{folder:28} {each['noticed']:3} of {each.total():3}" for folder, each in sorted(folders.items())]
    text += [f"\n{row['file']} ({row['outcome']}, {row['operator']})\n{row['diff']}" for row in others]
    low, high = wilson_interval(100 * len(noticed) / len(counted), len(counted)) if counted else (0, 100)
    text += [
        f"\n{len(noticed)} of {len(counted)} noticed: {100 * len(noticed) / max(len(counted), 1):.1f}%, interval "
        f"{low:.1f} to {high:.1f}%"
    ]
    kinds = Counter(row["outcome"] for row in others)
    text += [f"the others: {', '.join(f'{number} {kind}' for kind, number in kinds.items()) or 'none'}"]
    return "\n".join([*text, f"equivalent, not counted: {len(rows) - len(counted)}"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
