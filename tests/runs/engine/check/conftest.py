"""A few photographs, and a function that runs -check."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.quick_checks import WRONG
from tests.runs.engine.check.small_photos import CLEAN
from tests.support.runs import rows, typed


@pytest.fixture
def photos(tmp_path) -> Path:
    """Write {train,val}/{cat,dog}/N.png, all different."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(256, size=(10, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def check(tmp_path, photos):
    """Return a function that runs -check, checks its exit code and that it leaves no files, and returns its rows."""

    def type_in(*flags, program="main_single_gpu.py") -> dict[str, tuple[str, str]]:
        (tmp_path / "clean.yaml").write_text(CLEAN)
        given = ["-cfg", tmp_path / "clean.yaml", "-data_path", photos]
        output = [] if "-output" in flags else ["-output", tmp_path / "output"]
        ended = typed(program, *given, *output, "-check", *flags)
        assert ended.stderr == "" and not (tmp_path / "output").exists()
        found = rows(ended.stdout)
        assert ended.returncode == (2 if WRONG in {verdict for verdict, _ in found.values()} else 0)
        return found

    return type_in
