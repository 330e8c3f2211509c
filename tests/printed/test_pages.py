"""Every page belongs to a test that names it."""

from pathlib import Path

from tests.support.modules import ROOT
from tests.support.printed import PAGES, page_of_refusals, path_of, read_messages


def test_every_printed_page_belongs_to_an_existing_test():
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    folders = {path.parent for path in sources}
    refusals = {path_of(page_of_refusals(within_tests(folder))): folder for folder in folders}
    pages = {*PAGES.rglob("*.txt"), *(ROOT / "tests/extras").glob("*/printed/*.txt")}
    for path in pages - refusals.keys():
        assert any(f'"{name_of(path)}"' in source for source in sources.values()), f"{path}: no test compares it"
    for path in pages & refusals.keys():
        for title in read_messages(path):
            file, _, test = title.partition("::")
            assert f"def {test}(" in sources.get(refusals[path] / file, ""), f"{path}: no test {title}"


def within_tests(folder: Path) -> str:
    inside = folder.relative_to(ROOT / "tests").as_posix()
    return "" if inside == "." else inside


def name_of(page: Path) -> str:
    """Return the name of a page in tests. For an extra's page it is extras/EXTRA/PAGE."""
    if page.is_relative_to(PAGES):
        return page.relative_to(PAGES).with_suffix("").as_posix()
    return f"extras/{page.parent.parent.name}/{page.stem}"
