"""The commands on the pages for users run as printed, in order, on a small folder of photos.

tests/commands/test_photos_page.py does this for docs/photos.md and docs/numbers.md, tests/repository/test_readme.py for
README.md.
"""

import csv
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine.export.web import RUNTIME
from scripts.compare import EXIT_CODES
from tests.support.configs import SMALL
from tests.support.forks import DEADLINE, ROOT
from tests.support.image_sets import draw_photos
from tests.support.pages import FENCE, script_of, text_of
from tests.support.runs import Ended, rows_of, run, run_folder, typed
from tests.support.small_sources import MAKERS

PAGES = ("how", "errors", "data", "results", "exporting", "fine-tuning")
STARTS = re.compile(r"(?:[A-Z_]+=\S+ )?(?:halfstep|torchrun|python|pip|npm|source|grep|awk) |\(?cd ")
# {part of a command: why the test does not type it}
NOT_TYPED = {
    "http.server": "it serves until somebody stops it",
    "pip install": "it installs packages",
    "npm install": "it installs packages",
    "source <(": "it changes the shell of a person; tests/commands/test_completion.py runs the completions",
    "cd /dataset/imagenet": "it sorts the 50,000 validation images of Kaggle's archive",
    "from torchvision.datasets import ImageNet": "it unpacks the archives of ImageNet",
    "LOC_val_solution.csv": "it sorts the 50,000 validation images of Kaggle's archive",
    "torchvision/Flowers102": "it downloads the data set",
    "vit_cifar10": "it downloads the data set",
    "https://": "the reader's server; tests/faults/remote has servers",
    "s3://": "the reader's server",
    "hf://": "the reader's server",
    "NAME_OR_FILE": "the page has other commands with these settings",
}
# {part of a command: its exit code, if it is not 0}
CODES = {"-json": EXIT_CODES["inconclusive"]}
# {words of a page: shorter or smaller ones of this test}
SMALLER = {
    r"vit_small_patch16_224(?=[ @])": "tiny.pth",
    r"@160 ": "@16 ",
    r"halfstep models -data_path photos( -budget 20m)?$": r"\g<0> tiny.pth mine.safetensors",  # six need a network
    r"-pretrained choose": "-pretrained choose:tiny.pth,mine.safetensors",
    r"halfstep doctor latest": r"\g<0> -amp_dtype float16",  # the last run of the page was one in float32
    r"halfstep (train|sweep)(?! -cfg configs/vit_digits)": r"halfstep \1 -epochs 1",
    r"-epochs (5|60)\b": "-epochs 2",
    r"-image_size 64": "-image_size 32",
    r"-folds 5": "-folds 2",
    r"-int8$": "-int8 -accept",  # a few photos cannot show that the accuracy is the same
    r"-output pets (?=-runtime)": "-output pets_without_network ",  # the page has both ways to the same folder
    r"(-ngpus|--nproc_per_node) [48]": r"\1 2",
    r"/dataset/": "dataset/",
    r"(?<=-data_path )data\b": "dataset",
    r"-cfg configs/vit_digits\.yaml": r"\g<0> -epochs 1",
}
# Options that make the models of shipped settings small.
SMALL_VIT = "MODEL.DEPTH=1 MODEL.EMBED_DIM=24 MODEL.NUM_HEADS=2 DATA.IMAGE_SIZE=32 DATA.BATCH_SIZE=4".split()
SMALL_RESNET = "MODEL.NAME=test_resnet MODEL.PRETRAINED=None DATA.IMAGE_SIZE=32 DATA.BATCH_SIZE=4".split()
OF_SETTINGS = {r"configs/vit_(base|caltech|cifar)": SMALL_VIT, r"configs/resnet50": SMALL_RESNET}


def write_cells(folder: Path) -> None:
    """Write microscope images of 16 bits in two classes."""
    rng = np.random.default_rng(0)
    for label, shade in (("full", 9_000), ("empty", 1_000)):
        (folder / "cells" / label).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(shade, 2 * shade, size=(16, 16), dtype=np.uint16)
            Image.fromarray(pixels).save(folder / "cells" / label / f"{number}.png")


def write_table(name: str, header: str, values: tuple[str, ...]) -> Callable[[Path], None]:
    """Return a function that writes a table with these values for the photos."""

    def write(folder: Path) -> None:
        photos = sorted((folder / "photos").rglob("*.png"))
        parent = (folder / name).parent
        rows = [f"{path.relative_to(parent)},{values[number % len(values)]}" for number, path in enumerate(photos)]
        (folder / name).write_text("\n".join([header, *rows, ""]))

    return write


def write_set(name: str, place: str) -> Callable[[Path], object]:
    return lambda folder: MAKERS[name](folder / place)


def confirm_labels(name: str) -> Callable[[Path], None]:
    """Return a function that confirms the first suggestion of a table, as a person would."""

    def write(folder: Path) -> None:
        first, *others = rows_of(folder / name)
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, first)
            table.writeheader()
            table.writerows([first | {"confirmed": "yes"}, *others])

    return write


def write_copies(folder: Path) -> None:
    """Divide the photos into two parts with an equal photo, and list the copies."""
    shutil.rmtree(folder / "photos")
    for part in ("train", "val"):
        draw_photos(folder / "photos" / part, "cat", "dog", count=20)
    run("scripts/labels.py", "tiny.pth", "-data_path", "photos", cwd=folder).done()


def draw_again(folder: Path) -> None:
    """Draw the photos without parts again."""
    shutil.rmtree(folder / "photos")
    draw_photos(folder / "photos", "cat", "dog", count=60)
    shutil.copy(folder / "photos/dog/0.png", folder / "photos/cat/wrong.png")


# {part of a command: what its reader has}
PREPARED: dict[str, Callable[[Path], object]] = {
    "-data_path cells": write_cells,
    "DATA.COLUMNS=[path,age]": write_table("photos.csv", "path,age", ("30.5", "41", "52.5")),
    "DATA.LABEL_SEPARATOR": write_table("photos.csv", "image_path,target", ("cat", "dog|cat", "dog", "")),
    "photos/train.csv": write_table("photos/train.csv", "image_path,target", ("cat", "dog")),
    "-dataset imagenet2012": write_set("imagenet2012", "dataset/imagenet"),
    "-dataset parquet": write_set("parquet", "dataset/imagenet-1k"),
    "vit_caltech101": write_set("caltech101", "dataset"),
    "resnet50_caltech256": write_set("caltech256", "dataset"),
    "grep ' in training'": write_copies,
    "-folds 5": draw_again,
    "-apply labels/": confirm_labels("labels/labels.csv"),
    "-apply output/all": confirm_labels("output/all/labels/labels.csv"),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> Path:
    """Make the folder of a reader: photos, weights, and finished runs."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("photos", "scans"):
        draw_photos(folder / name, "cat", "dog", count=60)
    draw_again(folder)
    for name in ("new_photos", "unlabelled"):
        draw_photos(folder / name, "cat", "dog", count=4)
    (folder / "tiny.yaml").write_text(SMALL.replace("digits", "imagefolder").replace("CHANNELS: 1", "CHANNELS: 3"))
    words = "-cfg tiny.yaml -data_path photos -batch_size 8 -opts SAVE_FREQ=1 KEEP_CHECKPOINTS=2".split()
    run("main_single_gpu.py", *words, cwd=folder).done()
    first = run_folder(folder / "output").rename(folder / "output/train-20260102-03-04-05")
    others = "train-20260102-06-07-08 train-20260109-10-11-12 lr-1 lr-2 old-1 new-1".split()
    for place in [*(folder / "output" / name for name in others), *(folder / f"run{letter}" for letter in "ABC")]:
        shutil.copytree(first, place)
    draw_photos(folder / "others", "bird", "zebra", count=30)
    words = [*words[:3], "others", *words[4:]]
    run("main_single_gpu.py", *words, "-output", "earlier", cwd=folder).done()
    shutil.copy(run_folder(folder / "earlier") / "best.pth", folder / "tiny.pth")
    typed("scripts/export.py", folder / "tiny.pth", "-output", folder / "mine.safetensors").done()
    for name in RUNTIME:
        (folder / "node_modules/onnxruntime-web/dist").mkdir(parents=True, exist_ok=True)
        (folder / "node_modules/onnxruntime-web/dist" / name).write_text(name)
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


def commands_of(page: str) -> list[str]:
    """Return the commands in the blocks of a page, each on one line."""
    blocks = [code for _, language, code in FENCE.findall(text_of(f"docs/{page}.md")) if language in ("", "bash", "sh")]
    text = re.sub(r" *\\\n\s*|(?<=&&|.\|)\n\s*", " ", "\n".join(blocks))
    lines = [re.sub(r"\s+# .*", "", line.strip()) for line in text.splitlines()]
    return [line for line in lines if STARTS.match(line)]


def made_smaller(line: str) -> str:
    for pattern, words in SMALLER.items():
        line = re.sub(pattern, words, line)
    for pattern, options in OF_SETTINGS.items():
        if re.search(pattern, line):
            line = " ".join([line, *["-opts"][" -opts " in line :], *options])
    return line


def type_line(line: str, folder: Path) -> Ended:
    """Run a line as a shell does; a plain command of halfstep in a fork, which is faster."""
    environment = {"HF_HUB_OFFLINE": "1"}
    if line.startswith("halfstep ") and not re.search(r"[|&;<>*()$]", re.sub(r"'[^']*'", "", line)):
        program, words = script_of(shlex.split(line))
        return run(program, *words, cwd=folder, environment=environment, faults={"start_python_as_forks": []})
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return Ended([done.returncode], done.stdout, done.stderr)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_run_as_printed(reader, tmp_path, page):
    folder = shutil.copytree(reader, tmp_path / "reader", symlinks=True)
    lines = commands_of(page)
    failed = []
    for line in [each for each in lines if not any(part in each for part in NOT_TYPED)]:
        for part, prepare in PREPARED.items():
            if part in line:
                prepare(folder)
        ended = type_line(made_smaller(line), folder)
        expected = next((code for part, code in CODES.items() if part in line), 0)
        if ended.returncode != expected:
            failed.append(f"$ {line}\n$ {made_smaller(line)}\nexit code {ended.returncode}\n{ended.printed[-2000:]}")
    assert not failed, "\n\n".join(failed)


def test_exceptions_name_commands_of_the_pages():
    lines = [line for page in PAGES for line in commands_of(page)]
    assert len(lines) > 70
    for part in [*NOT_TYPED, *PREPARED, *CODES]:
        assert any(part in line for line in lines), f"remove this row: {part}"
    for pattern in [*SMALLER, *OF_SETTINGS]:
        assert any(re.search(pattern, line) for line in lines), f"remove this row: {pattern}"
