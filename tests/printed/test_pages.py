"""No page is there in vain: each is of a test that names it."""

from tests.support.modules import ROOT
from tests.support.printed import PAGES, read_messages


def test_each_page_and_each_test_named_in_one_is_of_a_test_that_is_there():
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    for path in PAGES.rglob("*.txt"):
        if path.parent.name == "refusals":
            folder = ROOT / "tests" / path.stem.replace("-", "/").replace("tests", "")
            for title in read_messages(path):
                file, _, test = title.partition("::")
                assert f"def {test}(" in sources[folder / file], f"{path}: no test {title}"
        else:
            name = f'"{path.relative_to(PAGES).with_suffix("").as_posix()}"'
            assert any(name in source for source in sources.values()), f"{path}: no test compares it"
