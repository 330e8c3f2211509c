"""A few photographs, and -check as it is typed."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.check.quick_checks import WRONG
from tests.engine.check.small_photos import CLEAN
from tests.support.runs import rows, typed


@pytest.fixture
def photos(tmp_path) -> Path:
    """{train,val}/{cat,dog}/N.png, no two alike."""
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
    """Types -check; returns {row: (verdict, its text)}, and holds that the exit code follows and nothing is left."""

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
