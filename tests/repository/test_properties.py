"""The examples of property tests: the same in each run, or drawn from a seed that a failed test names."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.forks import ROOT

# Run the same tests with several seeds, and write what was drawn. The first seed is that of the environment.
PROGRAM = '''
import json, sys
from pathlib import Path
import pytest
from tests.support import properties

TESTS = """
from hypothesis import given, strategies
from tests.support.properties import examples

DRAWN = []

@given(strategies.integers())
@examples(5)
def test_right_property(number):
    DRAWN.append(number)

@given(strategies.integers())
@examples(5)
def test_wrong_property(number):
    assert number is None
"""
drawn = []
for number, seed in enumerate([properties.SEED, 7, 8, None, None]):
    properties.SEED = seed
    Path(f"test_{number}.py").write_text(TESTS)
    pytest.main(["-p", "no:cacheprovider", f"test_{number}.py"], plugins=[properties])
    drawn.append(sys.modules[f"test_{number}"].DRAWN)
Path("drawn.json").write_text(json.dumps(drawn))
'''


@pytest.mark.slow
def test_examples_follow_from_the_seed_that_a_failure_names(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "EXAMPLES_SEED": "7"}
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    of_environment, seven, eight, usual, again = json.loads((tmp_path / "drawn.json").read_text())
    assert of_environment == seven != eight and len(seven) == len(eight) == 20 * 5
    assert usual == again and len(usual) == 5
    named = [f"EXAMPLES_SEED={seed} bash scripts/test.sh test_{number}.py" for number, seed in enumerate([7, 7, 8])]
    assert all(f"{command}::test_wrong_property" in ended.stdout for command in named), ended.stdout
    assert ended.stdout.count("EXAMPLES_SEED") == len(named)
