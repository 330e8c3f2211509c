"""The saved runs of earlier releases since 3.0.0 resume with the losses that their own release had.

Each release adds its runs: python -m tests.support.make_saved_runs
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.make_saved_runs import KINDS, SAVED, losses_of, program_of, write_data
from tests.support.runs import run, typed

EXPECTED = sorted(SAVED.glob("*/*.json"))
TOLERANCE = 2e-3  # processors round differently


@pytest.mark.skipif(not EXPECTED, reason="there are no saved runs yet (python -m tests.support.make_saved_runs)")
@pytest.mark.parametrize("expected", EXPECTED, ids=lambda path: str(path.relative_to(SAVED)))
def test_saved_run_resumes_with_the_losses_of_its_release(expected: Path, tmp_path):
    file, processes, _, _ = KINDS[expected.stem]
    shutil.copy(SAVED / file, tmp_path)
    write_data(tmp_path)
    (saved,) = expected.with_suffix("").iterdir()
    folder = shutil.copytree(saved, tmp_path / "output" / saved.name)
    words = ["-resume", str(folder), "-output", "output"]
    run(program_of(processes), *words, processes=processes, cwd=tmp_path).done()
    before, after = json.loads(expected.read_text()), losses_of(folder)
    assert after["steps"] == pytest.approx(before["steps"], rel=TOLERANCE)
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], rel=TOLERANCE)
    run(program_of(1), "-eval", "-pretrained", str(folder), "-output", "output", cwd=tmp_path).done()
    typed("scripts/compare.py", saved, folder).done()
