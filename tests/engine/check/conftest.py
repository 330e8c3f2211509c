"""A few photographs, and -check as it is typed."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import main_single_gpu
from engine.check.quick_checks import WRONG
from tests.engine.check.small_photos import CLEAN
from tests.support.runs import rows
from utils.program import exit_code


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
def check(tmp_path, photos, capsys):
    """Types -check; returns {row: (verdict, its text)}, and holds that the exit code follows and nothing is left."""

    def type_in(*flags, main=main_single_gpu.main) -> dict[str, tuple[str, str]]:
        (tmp_path / "clean.yaml").write_text(CLEAN)
        given = ["-cfg", str(tmp_path / "clean.yaml"), "-data_path", str(photos)]
        output = [] if "-output" in flags else ["-output", str(tmp_path / "output")]
        code = exit_code(main, [*given, *output, "-check", *flags])
        said = capsys.readouterr()
        assert said.err == "" and not (tmp_path / "output").exists()
        found = rows(said.out)
        assert code == (2 if WRONG in {verdict for verdict, _ in found.values()} else 0)
        return found

    return type_in
