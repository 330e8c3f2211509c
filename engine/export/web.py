"""Writes a folder with a web page that predicts with an exported graph, on the device that opens the page."""

import base64
import hashlib
import html
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from configs.values import flatten
from engine.record.saved_files import name_of_data
from utils.errors import ConfigError

if TYPE_CHECKING:
    from engine.export.photo_subject import PhotoSubject

PAGE = Path(__file__).with_name("page")
GRAPH, FACTS = "model.onnx", "model.json"
# The files of onnxruntime-web that the page loads, with the checksums of the version that is loaded from the network.
VERSION, PLACE = "1.30.0", "https://cdn.jsdelivr.net"
RUNTIME = {
    "ort.wasm.bundle.min.mjs": "PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
    "ort-wasm-simd-threaded.wasm": "vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
}


def write(folder: Path, subject: "PhotoSubject") -> None:
    """Write the page of a graph into a folder. The name of the data is the title of the page."""
    place = f" {PLACE}"
    runtime = pinned()
    if subject.runtime:
        place, runtime = "", copied(folder, subject.runtime)
    title = html.escape(name_of_data(flatten(subject.config)))
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8")
        text = text.replace("PAGE_TITLE", title).replace("RUNTIME_PLACE", place)
        (folder / path.name).write_text(text, encoding="utf-8")
    task = subject.config.task
    facts = {  # what the page needs to know about photos and answers
        "classes": subject.labels,
        "numbers": not task.has_classes,
        "interval": subject.calibration.get("interval"),
        "limits": subject.calibration.get("limits"),
        "several": task.has_several_classes,
        "threshold": subject.threshold,
        "turns": subject.pixels.applies_exif,
        "max_pixels": subject.pixels.max_pixels,
        "runtime": runtime,
    }
    (folder / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def pinned() -> list[dict[str, str]]:
    """Return addresses and checksums of the runtime's files in the network."""
    folder = f"{PLACE}/npm/onnxruntime-web@{VERSION}/dist"
    return [{"url": f"{folder}/{name}", "integrity": f"sha384-{digest}"} for name, digest in RUNTIME.items()]


def copied(folder: Path, runtime: Path) -> list[dict[str, str]]:
    """Copy the runtime's files from an installed package. Return their addresses and checksums."""
    (folder / "runtime").mkdir()
    files = []
    for name in RUNTIME:
        source = next((place / name for place in (runtime / "dist", runtime) if (place / name).is_file()), None)
        if source is None:
            raise ConfigError(
                f"-runtime: {runtime} has no {name}; name the folder of an installed package: npm install "
                f"onnxruntime-web@{VERSION}, then -runtime node_modules/onnxruntime-web"
            )
        shutil.copyfile(source, folder / "runtime" / name)
        digest = base64.b64encode(hashlib.sha384(source.read_bytes()).digest()).decode()
        files.append({"url": f"runtime/{name}", "integrity": f"sha384-{digest}"})
    return files
