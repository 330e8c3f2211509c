"""The page of halfstep export -to web, in a real browser, answers as halfstep predict."""

import base64
import contextlib
import hashlib
import http.server
import os
import subprocess
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from engine.export.web import RUNTIME, VERSION
from tests.support.browser import CHROMIUM, HOW_TO_GET, Browser
from tests.support.configs import beginning_with_weights
from tests.support.runs import rows_of, run, run_folder, typed, wait_until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET)
# The heading, and the name and the percentage of each class, of each photo, the first photo first
SHOWN = """
[...document.querySelectorAll("#photos > li")].reverse().map((item) => ({
  name: item.querySelector("small").textContent,
  heading: item.querySelector("h2")?.textContent ?? "",
  bars: [...item.querySelectorAll(".bar")].map((bar) => [...bar.querySelectorAll("span")].map((x) => x.innerText)),
}))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory) -> Path:
    """Return the folder of the installed version of onnxruntime-web whose checksums halfstep has."""
    if "ONNXRUNTIME_WEB" in os.environ:
        return Path(os.environ["ONNXRUNTIME_WEB"])
    folder = tmp_path_factory.mktemp("npm")
    words = ["npm", "install", "--ignore-scripts", "--prefix", str(folder), f"onnxruntime-web@{VERSION}"]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(
            f"needs npm and a network, or onnxruntime-web {VERSION} in the folder that ONNXRUNTIME_WEB names: {error}"
        )
    return folder / "node_modules/onnxruntime-web"


@pytest.fixture(scope="module")
def page(runtime, small_yaml, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    words = ["-cfg", str(beginning_with_weights(small_yaml)), "-output", str(folder / "runs"), "-epochs", "40"]
    words += ["-opts", "TRAIN.BASE_LR=1e-2", "DATA.EXIF=apply"]
    run("main_single_gpu.py", *words).done()
    words = (run_folder(folder / "runs"), "-to", "web", "-output", folder / "page", "-runtime", runtime)
    typed("scripts/export.py", *words).done()
    return folder / "page"


@pytest.fixture
def photos(tmp_path) -> list[Path]:
    """Make five photos: a digit, one that is turned, one with transparent pixels, a large one, and one of colours."""
    folder = tmp_path / "photos"
    folder.mkdir()
    paths = [folder / f"{number}.{kind}" for number, kind in enumerate(("png", "png", "png", "jpg", "webp"))]
    grey = (load_digits().images[:4] * 15).astype(np.uint8)
    turned = Image.Exif()
    turned[0x112] = 6
    colours = np.random.default_rng(0).integers(256, size=(9, 9, 3), dtype=np.uint8)
    Image.fromarray(grey[0]).save(paths[0])
    Image.fromarray(grey[1]).save(paths[1], exif=turned)
    Image.fromarray(np.dstack([255 - grey[2], grey[2], grey[2] // 2, 255 - grey[2]])).save(paths[2])
    Image.fromarray(grey[3]).resize((400, 300), Image.Resampling.BICUBIC).save(paths[3], quality=95)
    Image.fromarray(colours).save(paths[4], lossless=True)
    return paths


def as_a_canvas_keeps(path: Path, folder: Path) -> Path:
    """Write the photo as a canvas keeps it, which multiplies colours by their opacity, and rounds them to 8 bits."""
    pixels = np.asarray(Image.open(path)).astype(float)
    opacity = pixels[..., 3:] / 255
    pixels[..., :3] = np.round(np.round(pixels[..., :3] * opacity) / opacity)
    Image.fromarray(pixels.astype(np.uint8)).save(folder / path.name)
    return folder / path.name


@contextlib.contextmanager
def served(folder: Path):
    """Serve a folder as python -m http.server does, and yield its address."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_page_in_a_browser_answers_as_predict_and_asks_no_other_place(page, photos, tmp_path):
    (tmp_path / "profile").mkdir()
    with served(page) as address, contextlib.closing(Browser(tmp_path / "profile")) as browser:
        browser.open(address)
        wait_until(lambda: browser.value('/^(Ready|The model)/.test(document.getElementById("status")?.textContent)'))
        assert browser.value('document.getElementById("status").textContent') == "Ready: 10 classes."
        browser.choose_files("#choose", photos)
        wait_until(lambda: browser.value('document.querySelectorAll("#photos .bar").length') >= 5 * len(photos))
        shown = browser.value(SHOWN)
        assert all(url.startswith((address, f"blob:{address}", "data:")) for url in browser.requested())
    photos[2] = as_a_canvas_keeps(photos[2], tmp_path)
    words = ("-top", 5, "-unknown", 0.95, "-csv", tmp_path / "a.csv")
    typed("scripts/predict.py", page / "model.onnx", *photos, *words).done()
    rows = rows_of(tmp_path / "a.csv")
    assert {bool(row["unknown"]) for row in rows} == {True, False}, "both kinds of answers are compared"
    assert [each["name"] for each in shown] == [path.name for path in photos]
    for photo, row in zip(shown, rows, strict=True):
        ends = ["", *(f"_{number}" for number in range(2, 6))]
        expected = {row[f"class{end}"]: 100 * float(row[f"probability{end}"]) for end in ends}
        probabilities = {name: float(percent.removesuffix("%")) for name, percent in photo["bars"]}
        assert probabilities == pytest.approx(expected, abs=0.06), row["image_path"]
        assert photo["heading"].startswith("unknown: " if row["unknown"] else row["class"]), (photo, row)


def test_checksums_are_those_of_the_published_runtime(runtime):
    for name, digest in RUNTIME.items():
        content = (runtime / "dist" / name).read_bytes()
        assert base64.b64encode(hashlib.sha384(content).digest()).decode() == digest, name
