"""A clock that jumps: names and times of day are all it is asked for."""

import ast
import re

from tests.support.run_hash import run_hash
from tests.support.runs import ROOT, run_folder


def test_a_clock_that_jumps_a_day_to_and_fro_changes_nothing_but_names(tmp_path, start):
    assert start(tmp_path / "right").returncode == 0
    jumping = start(tmp_path / "jumping", jump=[1])
    assert jumping.returncode == 0
    assert run_hash(run_folder(tmp_path / "jumping")) == run_hash(run_folder(tmp_path / "right"))
    seconds = [float(each) for each in re.findall(r"time: (-?[\d.]+)$", jumping.printed, re.MULTILINE)]
    assert len(seconds) == 4 and all(0 <= each < 3600 for each in seconds)
    (lasted,) = re.findall(r"; (-?[\d:.]+)(?: s)?; weights", jumping.printed)
    assert re.fullmatch(r"[\d.]+|\d+:\d\d", lasted), lasted  # under an hour


def test_no_duration_is_taken_from_the_clock_that_people_set():
    # MLflow wants a time of day with each figure; another machine's heartbeat has one.
    times_of_day = {ROOT / "engine/record/trackers.py", ROOT / "engine/record/saved_run.py"}
    for path in set(ROOT.rglob("*.py")) - times_of_day:
        if path.relative_to(ROOT).parts[0] in ("configs", "datasets", "engine", "models", "scripts", "utils"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    assert ast.unparse(node) not in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow"), (
                        path
                    )
