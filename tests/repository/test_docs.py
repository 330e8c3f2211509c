"""The targets of links and names in the documents exist: files, folders, headings, modules, and commands of figures."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts.maintenance import pictures
from tests.support.configs import small_config
from tests.support.trainers import Reports, make_trainer, train

ROOT = Path(__file__).parents[2]
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


def test_chart_has_the_figures_of_the_benchmarks():
    benchmarks = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    chart = pictures.CHART.read_text(encoding="utf-8")
    assert chart == pictures.draw_benchmarks(benchmarks), "run python scripts/maintenance/pictures.py benchmarks"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (description,) = re.findall(r"!\[(.*?)\]\(docs/images/benchmarks.svg\)", readme, re.S)
    figures = re.findall(r">([\d.]+)<", chart)
    assert len(figures) == 6 and {*figures} - {"1.00"} <= {*re.findall(r"\d+\.\d+", description)}


def test_pictures_script_names_missing_photos_and_writes_nothing(tmp_path):
    (tmp_path / "coffee.png").touch()
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "docs/images").iterdir()}
    command = [sys.executable, ROOT / "scripts/maintenance/pictures.py", "augmentation", "-photos", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"-photos: {tmp_path} has no astronaut, chelsea, china, flower, rocket; ")
    assert ended.stderr.count("\n") == 1
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "docs/images").iterdir()}
