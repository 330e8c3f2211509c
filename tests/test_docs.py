"""The targets of links and names in the documents exist: files, folders, headings, modules, and commands of figures."""

import importlib.util
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.configs import small_config
from tests.support.trainers import Reports, make_trainer, train

ROOT = Path(__file__).parent.parent
PAGES = [
    path
    for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "tests/README.md"]
    if path.name != "CHANGELOG.md"
]
OURS = r"(?:configs|datasets|docs|engine|models|scripts|tests|utils)"
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page's headings, and the anchors that precede Chinese headings."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    marked = re.findall(r'<a id="([^"]+)"></a>', text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(marked)


@pytest.mark.parametrize("name", NAMES)
def test_docs_links_lead_to_existing_files_and_headings(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in [link for link in links if not re.match(r"https?:", link)]:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("name", NAMES)
def test_project_paths_in_docs_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    paths = re.findall(rf"(?<![\w/.-])({OURS}/[\w./*-]*[\w*/])", text)
    paths += [] if "paddlevit" in name else re.findall(r"(?<![\w/.-])(main_\w+\.py)", text)
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("/")))]


@pytest.mark.parametrize("name", NAMES)
def test_project_modules_in_docs_can_be_imported(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for module, names in re.findall(rf"from ({OURS}[\w.]*) import ([\w, ]+)", text):
        found = importlib.import_module(module)
        assert not [member for member in names.split(",") if not hasattr(found, member.strip())]


def test_tests_named_in_reliability_page_exist():
    text = (ROOT / "RELIABILITY.md").read_text(encoding="utf-8")
    tests = re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)`", text)
    assert tests and not [test for test in tests if not list((ROOT / "tests").glob(f"**/{test}"))]


def test_package_map_in_contributing_names_every_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rooms = ("configs", "datasets", "engine", "models", "scripts", "utils")
    packages = {str(path.parent.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("__init__.py")}
    named = {name.rstrip("/") for name in re.findall(r"^\| `([\w/]+)/`", text, re.M)}
    assert packages - named == set()


def test_contributing_callback_runs_as_printed(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S).group(1)
    (tmp_path / "loss_spike.py").write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loss_spike", tmp_path / "loss_spike.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    reports, strict, lenient = Reports(), Mock(), Mock()
    callbacks = [reports, example.LossSpike(strict, factor=0.01), example.LossSpike(lenient, factor=1000.0)]
    train(make_trainer(small_config(tmp_path), callbacks=callbacks))
    assert len(strict.warn.call_args_list) == len(reports.seen) > 0
    assert f"step {reports.seen[0].step}: loss {reports.seen[0].loss:.3f}" in strict.warn.call_args_list[0].args[0]
    lenient.warn.assert_not_called()


README = (ROOT / "README.md").read_text(encoding="utf-8")


def section_of_readme(title: str) -> str:
    assert f"\n## {title}\n" in README
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_readme_opens_with_a_command_its_output_and_a_picture():
    opening = README.partition("\n## ")[0]
    command, printed = re.findall(r"```(?:bash)?\n(.*?)```", opening, re.S)
    assert command == "bash scripts/quickstart.sh\n" and "done; best validation top-1" in printed
    (picture,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", opening)
    assert 10_000 < (ROOT / picture).stat().st_size < 150_000
    assert opening.index("git clone <URL of this repository> halfstep && cd halfstep") < opening.index("quickstart.sh")


def test_readme_opening_names_test_command_and_its_time():
    opening = README.partition("\n## ")[0]
    assert re.search(r"`bash scripts/test\.sh`[^.]+\d+ to \d+ minutes on two cores", opening)
    assert re.search(r"`-quick`[^.]+at most \d+ (minutes|seconds)", opening)


def test_readme_states_licence_then_limits_then_alternatives_last():
    opening = README.partition("\n## ")[0]
    for what in ("(LICENSE)", "docs/comparison.md", "timm", "Ultralytics", "LightlyTrain", "AGPL-3.0"):
        assert what in opening.partition("quickstart.sh")[0]
    text = section_of_readme("Systems and limits")
    for what in ("Linux", "macOS", "Python 3.11", "WSL2", "No GPU has been measured"):
        assert what in text
    problems = text.partition("**Problems**")[2]
    for what in ("status.json", "log.txt", "python main_single_gpu.py -version"):
        assert what in problems
    alternatives = section_of_readme("Use something else")
    for what in ("detection", "Ultralytics", "TPUs", "timm"):
        assert what in alternatives
    assert README.endswith(alternatives)
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_readme_links_every_docs_page_in_small_groups():
    groups = re.findall(r"^- \*\*([\w ]+)\*\*: (.*)$", section_of_readme("Documentation"), re.M)
    links = [re.findall(r"\]\(([^)]+)\)", text) for _, text in groups]
    assert [name for name, _ in groups] == ["Start", "Data", "Training", "Results", "Clusters", "Reference"]
    assert max(map(len, links)) <= 7
    pages = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]} - {"README.md"}
    assert sorted(sum(links, [])) == sorted(pages), "each page must be listed once"
