"""-check reports how much fits into a budget."""

import re
import time

from engine.quick_checks import WRONG
from tests.runs.engine.check.small_photos import trouble


def test_budget_includes_program_start_time(check, monkeypatch):
    now = time.clock_gettime
    monkeypatch.setattr("utils.program.time.clock_gettime", lambda clock: now(clock) + 200)  # as if imports took this
    found = check("-budget", "3m")
    assert trouble(found) == {"time": WRONG}
    assert int(re.search(r"about (\d+)m", found["time"][1])[1]) >= 5  # includes the report, which takes half of it
    assert trouble(check("-budget", "200h")) == {}  # enough on any machine
