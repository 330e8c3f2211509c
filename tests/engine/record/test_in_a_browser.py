"""The report as a browser shows it: nothing sticks out, nothing is fetched, and all text can be read."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.record.report import write_report
from engine.record.saved_run import SavedRun
from tests.support.browser import Tab, browser
from tests.support.saved_runs import write_run

NAMES = [f"class with a long name {number}" for number in range(12)]
OUTSIDE = "http://127.0.0.1:9/x.png"

# Of each element with text of its own: its contrast with what is behind it, by WCAG's formula; the lowest ones.
CONTRASTS = """
(() => {
  const numbers = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const over = (top, below) => {
    const alpha = top.length > 3 ? top[3] : 1;
    return [0, 1, 2].map(i => alpha * top[i] + (1 - alpha) * below[i]);
  };
  const behind = node => {
    const layers = [];
    for (let each = node; each; each = each.parentElement) layers.push(numbers(getComputedStyle(each).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const light = color => {
    const [r, g, b] = color.map(each => each / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (node.tagName === "title") continue;  // a hint, which the browser draws
    if (![...node.childNodes].some(each => each.nodeType === 3 && each.data.trim())) continue;
    const style = getComputedStyle(node);
    const color = numbers(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    if (color[3] === 0) continue;
    const below = behind(node), [one, other] = [light(over(color, below)), light(below)];
    found.push([(Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05), node.tagName + "." + node.className.toString()]);
  }
  return found.sort((a, b) => a[0] - b[0]).slice(0, 5).concat([[found.length, "count"]]);
})()
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("page") / ("a-long-name-of-a-run" * 8), names=NAMES, skipped=1)
    (folder / "doctor.yaml").write_text("PRECISION: {CUSTOM_BLACK_LIST: [" + "blocks.3.mlp.fc2, " * 20 + "]}\n")
    write_report(SavedRun.open(folder), folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1600, "dark")])
def test_nothing_sticks_out_nothing_is_fetched_and_all_text_can_be_read(tab, page, width, scheme):
    tab.open(page, width, scheme)
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert tab.evaluate("innerWidth") == width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelectorAll('section').length") == 9
    assert {url.partition(":")[0] for url in tab.requested} == {"file", "data"}
    assert [url for url in tab.requested if url.startswith("file")] == [page.as_uri()]
    assert not tab.told, "the style sheet is the one that the policy allows"
    *lowest, (number, _) = tab.evaluate(CONTRASTS)
    assert number > 400 and lowest[0][0] >= 4.5, lowest
    is_dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 25, 29)"
    assert is_dark == (scheme == "dark")


def test_a_picture_from_elsewhere_is_refused_and_without_the_policy_it_would_be_seen_here(tab, page):
    planted = page.read_text().replace("<header>", f'<header><img src="{OUTSIDE}"><b onclick="x()">x</b>', 1)
    wide = planted.replace("<header>", '<header><svg width="3000"></svg>', 1)
    for name, text in (
        ("kept", planted),
        ("gone", re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", wide)),
    ):
        path = page.with_name(f"{name}.html")
        path.write_text(text)
        tab.open(path, 400, "light")
        if name == "kept":
            assert any(OUTSIDE in each for each in tab.told) and any("event handler" in each for each in tab.told)
            assert tab.evaluate(f"document.querySelector('img[src=\"{OUTSIDE}\"]').naturalWidth") == 0
        else:
            assert OUTSIDE in tab.requested
            assert tab.evaluate("document.documentElement.scrollWidth") > 400
