"""report.html in Chromium, on a phone and a large screen, light and dark. Skipped without Chromium."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.record.saved_run import SavedRun
from extras.report.report import write_report
from tests.engine.check.small_photos import CLEAN
from tests.support.browser import Browser, find_browser
from tests.support.image_sets import draw_photos
from tests.support.runs import rows_of, run, run_folder, status_of
from tests.support.saved_runs import write_run

pytestmark = pytest.mark.slow

PHONE, DESKTOP = (390, 844), (1280, 900)
# For each picture: its left and right edge and its natural width in pixels, and whether it is in a scrollable frame.
PICTURES = """[...document.images].map(each => {
    const place = each.getBoundingClientRect();
    return [place.left, place.right, each.naturalWidth, !!each.closest('.scroll'), each.className];
})"""


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if not program:
        pytest.skip("report.html is not tested without Chromium (apt-get install chromium)")
    with Browser(program) as opened:
        yield opened


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return the report of a real run on photos. One validation image is unreadable."""
    folder = tmp_path_factory.mktemp("looked at")
    photos = draw_photos(folder / "photos", "cat", "dog", count=20)
    draw_photos(folder / "more", "cat", count=20)
    (folder / "more" / "cat").rename(photos / "lynx")  # the same shade as cats, so that there are mistakes
    (folder / "photos.yaml").write_text(CLEAN.replace("REPORT: false", "REPORT: true"))
    flags = ["-cfg", str(folder / "photos.yaml"), "-data_path", str(folder / "photos")]
    run("main_single_gpu.py", *flags, "-epochs", "1", "-output", str(folder / "first")).done()
    held_out = [row["image"] for row in rows_of(run_folder(folder / "first") / "split.csv") if row["part"] == "val"]
    (folder / "photos" / held_out[0]).write_bytes(b"no image")
    options = ["-opts", "DATA.MAX_BAD_FRACTION=0.5"]
    run("main_single_gpu.py", *flags, "-epochs", "2", "-output", str(folder / "o"), *options).done()
    return run_folder(folder / "o") / "report.html"


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Return a report with long names in every place, and an ordinary picture instead of an image sheet."""
    folder = tmp_path_factory.mktemp("wide")
    names = ["x" * 300, "a long name " * 20, *(f"class {number}" for number in range(10))]
    write_run(folder, names=names, skipped=2, device_name="y" * 200)
    Image.new("RGB", (1000, 700), "white").save(folder / "mistakes.png")
    (folder / "doctor.yaml").write_text("PRECISION: " + "z" * 400)
    write_report(SavedRun.open(folder), folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
@pytest.mark.parametrize("page", ["trained", "wide"])
def test_report_fits_the_screen_and_never_upscales_images(browser, page, size, scheme, request):
    browser.open(request.getfixturevalue(page), *size, scheme)
    browser.value_of("document.querySelectorAll('details').forEach(each => { each.open = true })")
    needed, shown = browser.value_of("[document.documentElement.scrollWidth, innerWidth]")
    assert needed <= shown == size[0]
    pictures = browser.value_of(PICTURES)
    assert len(pictures) >= 7
    for left, right, width, scrolls, kind in pictures:
        assert 0 <= left < right and (right <= shown or scrolls), kind
        assert right - left <= width, f"{kind}: enlarged"


def brightness(browser: Browser) -> np.ndarray:
    """Return the brightness of each pixel of the page, 0 to 255."""
    with Image.open(io.BytesIO(browser.picture(whole=True))) as picture:
        return np.asarray(picture.convert("L"))


def test_report_page_follows_light_or_dark_scheme(browser, trained):
    shares = {}
    for scheme in ("light", "dark"):
        browser.open(trained, *PHONE, scheme)
        # Photos keep their colours.
        browser.value_of("document.querySelectorAll('.tiles').forEach(each => each.remove())")
        shown = brightness(browser)
        shares[scheme] = ((shown > 200).mean(), (shown < 55).mean())
    assert shares["light"][0] > 0.8 and shares["light"][1] < 0.1, shares
    assert shares["dark"][1] > 0.8 and shares["dark"][0] < 0.1, shares


def test_report_image_columns_adapt_to_phone_and_desktop(browser, trained):
    rows = {}
    for size in (PHONE, DESKTOP):
        browser.open(trained, *size)
        rows[size] = browser.value_of("getComputedStyle(document.querySelector('.tiles')).gridTemplateColumns")
    assert [len(each.split()) for each in rows.values()] == [2, 6]
    captions = browser.value_of("[...document.querySelectorAll('figcaption')].map(each => each.textContent)")
    assert any(re.match(r"label: (cat|dog|lynx) \(", each) for each in captions)


def test_report_counts_only_readable_validation_images(browser, trained):
    browser.open(trained, *PHONE)
    shown = browser.value_of("document.body.innerText")
    found, scored = (
        status_of(trained.parent)["about"]["validation_images"],
        len(rows_of(trained.parent / "predictions.csv")),
    )
    assert scored == found - 1
    assert f"on {scored} validation images" in shown and f"{scored} of {found}; the rest cannot be read" in shown
