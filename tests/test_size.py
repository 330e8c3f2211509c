"""Limits on what there is to learn."""

from pathlib import Path

import pytest

from configs.values import SETTINGS
from tests.support.modules import ROOT, imported

ROOMS = ("configs", "datasets", "engine", "extras", "models", "utils", "scripts")
# Options of a constructor that is not ours live under KWARGS.
CAPS = {"product": 31_400, "benchmarks": 1_490, "tests": 29_000, "settings": 146, "packages": 26, "small_files": 5}
LINES_OF_A_FOLDER = 2_600
SMALL = 80  # lines of a file that belongs into its only user
# Each file of these folders is one of many of a kind, found by its name or in a table.
KINDS = ("extras", "datasets/sources", "models/transforms", "scripts", "configs/paddlevit")


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def small_files_with_one_user() -> list[str]:
    product = [*ROOT.glob("main_*.py"), *files(*ROOMS)]
    imports = {path: imported(path) for path in product}
    return [
        str(path.relative_to(ROOT))
        for path in product
        if path.parent != ROOT
        and path.name != "__init__.py"
        and str(path.parent.relative_to(ROOT)) not in KINDS
        and lines([path]) < SMALL
        and sum(name_of(path) in names for names in imports.values()) == 1
    ]


def sizes() -> dict[str, int]:
    benchmarks = files("scripts/benchmarks")
    product = [path for path in [*ROOT.glob("main_*.py"), *files(*ROOMS)] if path not in benchmarks]
    return {
        "product": lines(product),
        "benchmarks": lines(benchmarks),
        "tests": lines(files("tests")),
        "settings": len(SETTINGS),
        "packages": sum(path.name == "__init__.py" for path in files(*ROOMS)),
        "small_files": len(small_files_with_one_user()),
    }


@pytest.mark.parametrize("what", CAPS)
def test_nothing_grows(what):
    size = sizes()[what]
    small = f": {small_files_with_one_user()}" if what == "small_files" else ""
    assert size <= CAPS[what], f"{what}: {size:,}, at most {CAPS[what]:,}; what could go out for what came in?{small}"


def test_a_folder_is_read_in_an_evening():
    """But those of which one reads a single file at a time."""
    for folder in {path.parent for path in files(*ROOMS)} - {ROOT / each for each in KINDS}:
        assert lines(sorted(folder.glob("*.py"))) <= LINES_OF_A_FOLDER, folder
