"""A run beside another one, with the same cache and output folder, and a run where the locale is C."""

from pathlib import Path

import pytest

from tests.support.configs import SMALL
from tests.support.image_sets import draw_photos
from tests.support.run_hash import run_hash
from tests.support.runs import Run, rows_of, run, run_folder, run_fresh, wait_until

pytestmark = pytest.mark.long


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Return the flags of a run on photos whose names are not ASCII, with a cache."""
    draw_photos(tmp_path / "photos", "cat", "dog", count=12)
    (tmp_path / "photos/cat").rename(tmp_path / "photos/café 猫")
    (tmp_path / "photos/dog/0.png").rename(tmp_path / "photos/dog/ü.png")
    settings = tmp_path / "photos.yaml"
    settings.write_text(SMALL.replace("digits", "imagefolder").replace("CHANNELS: 1", "CHANNELS: 3"))
    options = ["-opts", "DATA.BATCH_SIZE=8", "DATA.CACHE=disk", f"DATA.CACHE_PATH={tmp_path / 'cache'}"]
    return ["-cfg", str(settings), "-data_path", str(tmp_path / "photos"), *options]


def test_runs_with_one_cache_and_one_output_folder_end_as_a_run_alone(flags, tmp_path):
    """The first run waits in the middle until the second has ended. A third finds the folder of the first taken."""
    run("main_single_gpu.py", *flags[:4], "-output", str(tmp_path / "alone"), *flags[4:6]).done()
    output = tmp_path / "output"
    words = ["-output", str(output), *flags]
    (tmp_path / "signs").mkdir()
    first = Run("main_single_gpu.py", "-name", "first", *words, faults={"hold": [str(tmp_path / "signs"), [3]]})
    wait_until(lambda: any((tmp_path / "signs").iterdir()), runs=[first])
    run("main_single_gpu.py", "-name", "second", *words).done()
    for resume in ([], ["-resume", "auto"]):
        run("main_single_gpu.py", "-name", "first", *resume, *words).refused(output / "first")
    (tmp_path / "signs/go").touch()
    first.wait().done()
    expected = run_hash(run_folder(tmp_path / "alone"))
    assert {path.name: run_hash(path) for path in output.iterdir()} == {"first": expected, "second": expected}
    assert len([*(tmp_path / "cache").rglob("*.data")]) == 1, "one for the folder, not for each run"


def test_run_where_the_locale_is_c_writes_all_names_as_utf8(flags, tmp_path):
    words = [*flags, "REPORT=true", "TRAIN.NUM_EPOCHS=1"]
    run_fresh("main_single_gpu.py", "-output", str(tmp_path / "output"), *words, environment={"LC_ALL": "C"}).done()
    folder = run_folder(tmp_path / "output")
    images = {row["image"] for row in rows_of(folder / "split.csv")}
    assert images == {str(path.relative_to(tmp_path / "photos")) for path in Path(tmp_path / "photos").rglob("*.png")}
    assert "café 猫" in (folder / "report.html").read_text(encoding="utf-8")
