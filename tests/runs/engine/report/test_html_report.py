"""report.html shows the contents of a run's folder, runs and loads nothing, and never harms the run."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.predict.pictures import Tile, contact_sheet, write_picture
from engine.quick_checks import WARN
from engine.record.saved_run import SavedRun
from engine.report.report import as_text, write_at_end, write_report
from tests.runs.engine.check.small_photos import CLEAN
from tests.support.cases import cases_of, value_of
from tests.support.configs import SMALL
from tests.support.image_sets import draw_photos
from tests.support.runs import rows, run_folder, status_of, typed
from tests.support.saved_runs import write_json, write_results, write_run

pytestmark = pytest.mark.slow

REPORT = "scripts/report.py"


class Page(HTMLParser):
    """The elements, headings and text of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.headings: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data
        if self._open[-1:] == ["h2"]:
            self.headings.append(data)

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(folder: Path) -> Page:
    path = folder / "report.html"
    write_report(SavedRun.open(folder), path)
    return Page(path)


def change_status(folder: Path, **facts) -> None:
    status = status_of(folder)
    write_json(folder / "status.json", status | facts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a real run that writes its report."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "small.yaml").write_text(SMALL.replace("REPORT: false", "REPORT: true"))
    words = ["-cfg", str(folder / "small.yaml"), "-epochs", "1", "-amp", "-output", str(folder / "o p's")]
    typed("main_single_gpu.py", *words).done()
    return run_folder(folder / "o p's")


@pytest.mark.long
def test_resume_writes_the_report_of_a_killed_run(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    (folder / "report.html").unlink()
    assert typed("main_single_gpu.py", "-resume", str(folder)).returncode == 0
    assert "How it was trained" in Page(folder / "report.html").headings


def run_with(folder: Path, text: str) -> Path:
    """Write a run with this text wherever a user or a file can put text."""
    write_run(folder, names=[text, "dog", "cat"], torch=text, device_name=text, precision=text, command=[text, text])
    config = (folder / "config.yaml").read_text().replace("imagefolder", json.dumps(text))
    config = config.replace("vit_small ", f"{json.dumps(text)} ").replace("# flag -amp", f"# {text}")
    config += f"SAVE: https://me:secret@server/x\nTAG: {json.dumps(text)}\nNAME: {json.dumps(text)}  # {text}\n"
    (folder / "config.yaml").write_text(config)
    change_status(folder, state="failed", reason=text + "\ud800", host=text, started=text)
    return folder


@pytest.mark.parametrize("text", cases_of("report-texts_in_a_report"))
def test_report_escapes_names_and_settings_as_text(tmp_path, text):
    folders = tmp_path / "plain", tmp_path / "evil" / text.replace("/", "_")
    plain, page = (page_of(run_with(*each)) for each in zip(folders, ("plain text", text), strict=True))
    assert page.elements == plain.elements, "no element or attribute may come from the data"
    assert page.text.count(text) >= 6 and "secret" not in page.text
    assert f"<p>{as_text(text)}</p>" == value_of("report-texts_in_a_report", text)


def test_report_escapes_control_characters_in_names(tmp_path):
    name = "owl\x1b[2J\x07\x9b31m\u202e"
    folder = write_run(tmp_path / name, names=[name, "dog", "cat"])
    write_picture(contact_sheet([Tile(None, [f"photos/{name}.jpg"])]), folder / "mistakes.png")
    text, shown = page_of(folder).text, r"owl\x1b[2J\x07\x9b31m\u202e"
    assert f"photos/{shown}.jpg" in text and text.count(shown) >= 4
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", (folder / "report.html").read_text(encoding="utf-8")
    )


def test_report_loads_no_other_files_and_runs_no_scripts(tmp_path):
    page = page_of(write_run(tmp_path / "run", names=[f"class {number}" for number in range(40)], skipped=2))
    (policy,) = (each["content"] for each in page.all("meta") if each.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    sources = [attributes["src"] for _, attributes in page.elements if "src" in attributes]
    assert len(sources) == 3 and all(source.startswith("data:image/") for source in sources)
    assert all(each["alt"] for each in page.all("img"))
    assert {"name": "referrer", "content": "no-referrer"} in page.all("meta")
    assert not {"script", "link", "iframe", "object", "base", "form", "a"} & {tag for tag, _ in page.elements}
    assert not any("style" in attributes for _, attributes in page.elements), "the policy blocks inline styles"
    assert not re.search(r"url\(|@import", (tmp_path / "run" / "report.html").read_text())


def test_report_of_a_run_with_a_task_of_another_version_is_written(tmp_path):
    folder = write_run(tmp_path / "run", names=["bird", "cat"])
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text() + "TRAIN: {OBJECTIVE: ranks}\n")
    assert "ranks" in page_of(folder).text


def test_report_lists_the_worst_classes_that_have_images(tmp_path):
    folder = write_run(tmp_path / "run", names=[f"class {number}" for number in range(20)])
    rows = (folder / "per_class.csv").read_text()
    (folder / "per_class.csv").write_text(re.sub(r"\nclass 3,.*", "\nclass 3,,,,0,0,,,,,,", rows))
    assert "15 of 19 classes" in page_of(folder).text


def test_classes_without_validation_images_are_named_by_run_and_report(tmp_path):
    draw_photos(tmp_path / "photos/train", "bird", "cat", "dog", "zebra")
    draw_photos(tmp_path / "photos/val", "bird", "dog")
    (tmp_path / "small.yaml").write_text(CLEAN.replace("REPORT: false", "REPORT: true"))
    words = ["-cfg", str(tmp_path / "small.yaml"), "-data_path", str(tmp_path / "photos"), "-epochs", "1"]
    found = rows(typed("main_single_gpu.py", *words, "-check").stdout)
    assert found["data set"][0] == WARN and found["data set"][1].endswith("cat, zebra")
    ended = typed("main_single_gpu.py", *words, "-output", str(tmp_path / "runs")).done()
    assert [line for line in ended.stdout.splitlines() if line.startswith("warning: ") and line.endswith("cat, zebra")]
    folder = run_folder(tmp_path / "runs")
    facts = status_of(folder)["about"]
    assert (facts["classes"], facts["validation_classes"]) == (4, 2)
    assert "2 of 4 classes" in Page(folder / "report.html").text


@pytest.mark.parametrize("number", [0, 4])
def test_report_of_complete_or_older_run_counts_only_all_classes(tmp_path, number):
    about = {"validation_classes": number} if number else {}
    text = page_of(write_run(tmp_path / "run", names=["bird", "cat", "dog", "zebra"], **about)).text
    assert "of 4 classes" not in text and re.search("Classes4\\s*Image size", text)


@pytest.mark.parametrize(("number", "has_top5"), [(10, False), (11, True)])
def test_report_says_what_the_model_can_do_then_its_errors_use_and_training(tmp_path, number, has_top5):
    folder = write_run(tmp_path / "a b", names=[f"class {each}" for each in range(number)])
    rows = (folder / "metrics.jsonl").read_text().replace('"eval_top5": 100.0', '"eval_top5": 99.0')
    (folder / "metrics.jsonl").write_text(rows.replace('"eval_seconds": 0.5', '"eval_seconds": null', 3))
    table = (folder / "per_class.csv").read_text()
    (folder / "per_class.csv").write_text(re.sub(r"\nclass 2,[^,]*,", "\nclass 2,,", table))
    page = page_of(folder)
    assert page.headings == ["What it gets wrong", "How to use it", "How it was trained"]
    assert (
        "94.20% of 359 validation images their right class. On other images like these, expect 91.3 to 96.2%"
        in page.text
    )
    assert "-: undefined; a precision needs images that were predicted as the class" in page.text
    assert f"halfstep predict '{folder}' new_images" in page.text
    assert f"halfstep export '{folder}' -output model.safetensors" in page.text
    assert "classifies" not in page.text, "models of several labels and of numbers have this section, too"
    assert "0.77 MiB" in page.text and "at least 718 images/s" in page.text, (
        "202,954 weights; 359 images in half a second"
    )
    assert ("validation top-5" in page.text) == has_top5
    assert "most often mistaken for" in page.text
    (folder / "per_class.csv").write_text(re.sub(r"class \d+,\d+,(\d\.\d+,)", r",,\1", table))
    assert "most often mistaken for" not in page_of(folder).text, "as with several labels per image"
    (folder / "best.pth").unlink()
    (folder / "last.pth").unlink()
    assert "How to use it" not in page_of(folder).headings


def test_curves_fit_on_a_phone_and_show_the_extremes_of_long_lines(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [
        "step,lr,loss,grad_norm",
        *(f"{step},0.1,1,{900 if step == 777 else 1 + step % 2}" for step in range(5000)),
    ]
    (folder / "steps.csv").write_text("\n".join(lines) + "\n")
    page = page_of(folder)
    charts = page.all("svg")
    assert len(charts) == 4 and all(int(chart["width"]) <= 328 for chart in charts)
    lines = [each["d"] for each in page.all("path") if each["class"].startswith("line ")]
    points = [[tuple(map(float, point.split())) for point in line[1:].split("L")] for line in lines]
    assert max(map(len, points)) <= 600
    (spike,) = (point for point in points[-1] if point[1] < 50)
    assert spike[0] == pytest.approx(60 + (318 - 60) * (0.04 + 777 / 4999) / 1.08, abs=0.2)
    assert all(0 <= x <= 328 and 0 <= y <= 200 for line in points for x, y in line)


@pytest.mark.parametrize(
    ("counts", "num_images", "has_chart", "has_table"),
    [((1, 2, 40), 43, False, False), ((1, 2, 57), 60, False, True), ((5, 6, 7, 40), 58, True, True)],
)
def test_calibration_is_shown_as_far_as_there_are_images(tmp_path, counts, num_images, has_chart, has_table):
    folder = write_run(tmp_path / "run")
    bins = [[0.5 + 0.1 * place, 0.5, count] for place, count in enumerate(counts)]
    figures = {"temperature": 1.5, "num_images": num_images, "ece_before": 0.1, "ece_after": 0.05}
    results = json.loads((folder / "results.json").read_text())
    figures |= {"bins_before": bins, "bins_after": bins}
    write_json(folder / "results.json", results | {"calibration": figures})
    page = page_of(folder)
    assert ("share of right answers" in page.text) == has_chart
    assert (f"50%{counts[0]}50% (" in page.text) == has_table
    assert ("too few images for a reliability diagram" in page.text) == (not has_table)


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ("DATA: {HFLIP: 0}", "cropped."),
        ("DATA: {VFLIP: 0.5}\nTRAIN: {CUTMIX_ALPHA: 1}", "cropped, flipped and mixed."),
        ("TRAIN: {COLOR_JITTER: 0.4, RANDOM_ERASE_PROB: 0.2}", "cropped, flipped, augmented and partly erased."),
    ],
)
def test_report_names_the_changes_of_training_images_in_this_run(tmp_path, settings, changes):
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text(f"{settings}\nMODEL: {{NAME: vit_small}}\n")
    assert f"randomly {changes}" in page_of(folder).text


@pytest.mark.parametrize(("epochs", "chooses"), [(2, True), (1, False)])
def test_report_says_if_scored_images_chose_the_epoch(tmp_path, epochs, chooses):
    folder = write_run(tmp_path / "run")
    (folder / "config.yaml").write_text(f"TRAIN: {{NUM_EPOCHS: {epochs}}}\nMODEL: {{NAME: vit_small}}\n")
    text = page_of(folder).text
    assert "On other images like these, expect " in text
    assert ("these also chose the weights, so it may be a little less" in text) == chooses


@pytest.mark.parametrize("epoch", [3, 4])
def test_report_says_if_its_figures_are_of_an_earlier_best_epoch(tmp_path, epoch):
    folder = write_run(tmp_path / "run", epochs=5)  # the best is epoch 4
    write_results(folder, ("cat", "dog"), epoch=epoch)
    said = "Results of epoch 3, which was the best when these figures were written." in page_of(folder).text
    assert said == (epoch == 3)


def test_damaged_run_folder_gets_a_report_or_an_error_naming_it(tmp_path):
    folder = write_run(tmp_path, skipped=1)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        odd = (b"", b"\xff\x00" * 50, b'{"epoch": {}}', b"[[1]]")
        for content in (*odd, whole[: len(whole) // 2], whole.replace(b"1", b"x")):
            path.write_bytes(content)
            ended = typed(REPORT, folder, "-output", tmp_path.parent / "x.html")
            is_told = ended.returncode == 2 and str(folder) in ended.stderr
            assert ended.returncode == 0 or is_told, (path.name, content[:60], ended)
        path.write_bytes(whole)


def test_failure_to_write_the_report_only_warns(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    (folder / "report.html" / "in the way").mkdir(parents=True)
    write_at_end(folder, in_the_way := Mock())
    in_the_way.warn.assert_called_once()
    write_at_end(tmp_path, no_epoch := Mock())
    no_epoch.warn.assert_not_called()
    assert not list(folder.glob(".*.tmp"))
    monkeypatch.setattr("engine.report.report.plots", lambda run: 1 / 0)
    write_at_end(folder, ours := Mock())
    ours.warn.assert_called_once()


def test_score_on_training_images_promises_nothing_for_others(tmp_path):
    for known in (0, 3):
        folder = write_run(tmp_path / str(known), validation_images_in_training=known)
        write_at_end(folder, Mock())
        text = (folder / "report.html").read_text()
        assert ("On other images like these, expect" in text) == (known == 0)
        warning = f"{known} of 359 validation images are also training images, so the scores are too good"
        assert (warning in text) == (known > 0)
