"""Runs with DATA.GROUP_BY: the last line, the report, results.json, -eval and compare count groups."""

import json
from pathlib import Path

import pytest

from tests.runs.engine.check.small_photos import CLEAN
from tests.support.image_sets import draw_patches
from tests.support.runs import last_sentence, rows_of, run_folder, typed

pytestmark = pytest.mark.slow


@pytest.fixture
def persons(tmp_path, monkeypatch):
    """Return the flags of runs on six photos of each of 30 persons."""
    monkeypatch.chdir(tmp_path)
    rows = ["image_path,target,person"]
    for number in range(180):
        draw_patches(tmp_path / f"{number:03d}.png", seed=number)
        rows.append(f"{number:03d}.png,{'ant' if number % 2 else 'bee'},p{number // 6}")
    (tmp_path / "a.csv").write_text("\n".join([*rows, ""]))
    (tmp_path / "small.yaml").write_text(CLEAN)
    return [
        "-cfg",
        "small.yaml",
        "-dataset",
        "csv",
        "-data_path",
        "a.csv",
        "-epochs",
        1,
        "-opts",
        "DATA.GROUP_BY=person",
        "REPORT=true",
    ]


@pytest.mark.long
def test_scores_and_comparisons_of_runs_count_groups(persons):
    folders = []
    for seed in (0, 1):
        said = typed("main_single_gpu.py", "-output", f"run{seed}", *persons, f"SEED={seed}", "DATA.VAL_FRACTION=0.3")
        folders.append(run_folder(Path(f"run{seed}")))
        results = json.loads((folders[-1] / "results.json").read_text())
        number, (low, high) = results["num_groups"], results["interval"]
        images = f"{results['num_images']} images in {number} groups"
        assert 5 <= number < 20 and results["num_images"] == 6 * number
        sentence = last_sentence(said.done().stdout)
        assert f"95%: {low:.0f} to {high:.0f}%, {images}" in sentence.facts
        assert "held out by a hash of each person" in sentence.rest
        assert len({row["group_number"] for row in rows_of(folders[-1] / "predictions.csv")}) == number
        page = (folders[-1] / "report.html").read_text()
        assert f"They are of {number} groups." in page and f"expect {low:.0f} to {high:.0f}%" in page
    scored = typed("main_single_gpu.py", "-eval", "-resume", folders[1], "-output", "scored").done().stdout
    assert f"95%: {low:.0f} to {high:.0f}%, {images})" in scored
    verdict = json.loads(typed("scripts/compare.py", *folders, "-json").stdout)
    assert verdict["test"] == "paired, with signs, over groups" and verdict["groups"] == number


def test_few_groups_have_no_interval_in_a_run(persons):
    said = typed("main_single_gpu.py", "-output", "run", *persons, "DATA.VAL_FRACTION=0.05").done().stdout
    results = json.loads((run_folder(Path("run")) / "results.json").read_text())
    assert results["num_groups"] < 5 and "interval" not in results
    assert "groups, too few for an interval" in said
    assert "too few to say what to expect on images of others" in (run_folder(Path("run")) / "report.html").read_text()
