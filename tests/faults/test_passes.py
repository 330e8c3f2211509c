"""The table of passes over images: a row for each pass, a column for each fault. All passes end in the same ways.

The passes read small photos with the weights of stored runs (tests/support/output_table.py), and write to `disk`.
"""

import functools
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from engine.confidence.stored import from_plain
from models.weights.torch_files import read_torch
from tests.support.forks import MARK, find_processes
from tests.support.output_table import describe, describe_arrays, difference, files_in, make_root
from tests.support.refusals import assert_names
from tests.support.run_hash import state_hash
from tests.support.runs import Ended, rows, rows_of, run, status_of

pytestmark = pytest.mark.slow

TRAIN = "TRAIN.BASE_LR=0 TRAIN.WARMUP_START_LR=0 TRAIN.END_LR=0 REPORT=false DATA.DROP_LAST=false"
QUICK = {"draw_no_curves": []}
OF_EVERY_RUN = {".lock", "config.yaml", "log.txt", "status.json"}
OF_TRAINING = OF_EVERY_RUN | {"split.csv", "steps.csv", "metrics.csv", "metrics.jsonl"}
STOPPED, FULL = 128 + signal.SIGTERM, "disk full; free some space"
Answers = Callable[[Path, str], list[str]]


def lines_of(*names: str) -> Answers:
    """Return the lines of these tables in `disk`."""
    return lambda disk, printed: [str(row) for name in names for row in rows_of(disk / name)]


def predictions(disk: Path, printed: str) -> list[str]:
    """Return the printed lines, and each file as text."""
    return [*printed.splitlines(), *(f"{path.name} {describe(path)}" for path in files_in(disk))]


def embeddings(disk: Path, printed: str) -> list[str]:
    with np.load(disk / "f.npz") as file:
        rows = zip(file["paths"], file["sizes"], file["features"], strict=True)
        return [*(f"{path} {size} {features.tolist()}" for path, size, features in rows), *printed.splitlines()]


def of_images(disk: Path, printed: str) -> list[str]:
    """Return the rows of -check about the images."""
    return [f"{title} {row}" for title, row in rows(printed).items() if title.split()[0] in CHECKED]


CHECKED = ("data", "classes", "training", "validation", "duplicates")


def similarities(disk: Path, printed: str) -> list[str]:
    status = status_of(disk / "new")
    return [json.dumps(status["raw"]), json.dumps(status["ema"])]


def measured(disk: Path, printed: str) -> list[str]:
    """Return the settings that keep the statistics of the pixels."""
    names = ("RANGE:", "IMAGENET_MEAN:", "IMAGENET_STD:")
    return [line for line in (disk / "new/config.yaml").read_text().splitlines() if line.strip().startswith(names)]


def calibrated(disk: Path, printed: str) -> list[str]:
    """Return the features, the temperature and the statistics for -unknown, all before the first update."""
    state = read_torch(disk / "new/best.pth")["calibration"]
    known = from_plain(state["known"]["statistics"], state["temperature"]).state_dict()
    arrays = {name: known[name].numpy() for name in ("read.images", "middle.mean", "scales")}
    return [describe(disk / "new/features.npz"), describe_arrays(arrays), str(state["figures"])]


class Pass(NamedTuple):
    """A pass over images. In its command, {main} stands for the program of one or of several processes."""

    command: str
    answers: Answers
    broken: str  # an image, which becomes unreadable
    counts: str  # part of the message about the number of images that are left
    code: int = 0  # the exit code if an image is unreadable
    full: int = 2  # the exit code if the disk is full
    begun: set[str] = frozenset()  # the files that a stopped pass leaves
    nth: int = 5  # the fault comes before this image is read
    why_alone: str = ""  # why the pass takes no second process: a part of the message


PASSES = {
    "eval": Pass(
        "{main} -eval -resume runs/vit -output disk -name new -opts DATA.NUM_WORKERS=2 DATA.WORKERS=processes",
        lines_of("new/predictions.csv"),
        broken="photos/Apple/14.png",
        counts="21 images",
        full=1,
        begun=OF_EVERY_RUN,
    ),
    "predict": Pass(
        "scripts/predict.py runs/vit new -batch_size 7 -top 2 -csv disk/a.csv -json disk/a.json -sheet disk/a.png -into disk",
        predictions,
        broken="new/4.png",
        counts="1 of 18 images could not be read",
        code=2,
    ),
    "embed": Pass(
        "scripts/embed.py runs/vit new -output disk/f.npz -examples photos -csv disk/a.csv",
        embeddings,
        broken="new/4.png",
        counts="1 of 18 images could not be read",
        code=2,
        nth=70,
        why_alone="-ngpus",
    ),
    "labels": Pass(
        "scripts/labels.py runs/vit/best.pth -data_path others -output disk/found -opts DATA.VAL_FRACTION=0.4",
        lines_of("found/labels.csv"),
        broken="others/new zebra/3.png",
        counts="57 of 58 images",
        why_alone="-ngpus",
    ),
    "check": Pass(
        "{main} -cfg base.yaml -check -output disk",
        of_images,
        broken="photos/Apple/14.png",
        counts="1 of 22 ",
    ),
    "cache": Pass(
        f"{{main}} -pretrained runs/vit/best.pth -epochs 1 -output new -opts DATA.CACHE=disk DATA.CACHE_PATH=disk {TRAIN}",
        lambda disk, printed: [state_hash(path.read_bytes()) for path in sorted(disk.glob("*.data"))],
        broken="photos/Apple/14.png",
        counts="photos/Apple/14.png",
        full=0,
        nth=50,  # 36 images are read before, to estimate the size
    ),
    "features": Pass(
        "{main} -eval -resume features/run -output disk -name new",
        similarities,
        broken="photos/Apple/14.png",
        counts="of 22 images",
        begun=OF_EVERY_RUN,
        full=0,
    ),
    "pixel statistics": Pass(
        f"{{main}} -cfg base.yaml -epochs 1 -output disk -name new -opts DATA.PIXELS=native {TRAIN}",
        measured,
        broken="photos/Apple/9.png",
        counts="1 of 36",
        begun=OF_TRAINING,
        full=1,
    ),
    "new classifier, calibration": Pass(
        f"{{main}} -pretrained runs/vit/best.pth -data_path others -epochs 1 -output disk -name new -opts {TRAIN}"
        " MODEL.NEW_CLASSIFIER=linear",
        calibrated,
        broken="others/new Apple/9.png",
        counts="1 of 36",
        begun=OF_TRAINING,
        full=1,
    ),
}
EACH = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Return a folder with photos, the same photos in classes of other names, stored runs and a run that learns features."""
    root = make_root(tmp_path_factory.mktemp("passes") / "root")
    for path in root.rglob("broken.png"):
        path.unlink()
    for folder in [*(root / "photos").iterdir()]:
        shutil.copytree(folder, root / "others" / f"new {folder.name}")
    words = "-cfg base.yaml -dataset images -epochs 1 -output features -name run -opts TRAIN.OBJECTIVE=features REPORT=false"
    words += " TRAIN.TEACHER_MODEL=runs/vit/best.pth DATA.LABELLED_PATH=photos"
    run("main_single_gpu.py", *words.split(), cwd=root).done()
    (root / "disk").mkdir()
    return root


def start(name: str, here: Path, *more: str, processes: int = 1, **faults: list) -> Ended:
    """Run the pass in this folder to its end. No process may be left."""
    main = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    script, *words = PASSES[name].command.format(main=main).split()
    options = {"environment": {MARK: str(here)}, "faults": QUICK | faults}
    ended = run(script, *words, *more, processes=processes, cwd=here, **options)
    assert "Traceback" not in ended.printed and not find_processes(here), ended.printed
    return ended


@pytest.fixture(scope="session")
def undisturbed(root, tmp_path_factory) -> Callable[[str], tuple[Path, list[str]]]:
    """Return a function that runs a pass once without a fault. It returns what is then in `disk`, and the answers."""

    @functools.cache
    def undisturbed(name: str) -> tuple[Path, list[str]]:
        here = Path(shutil.copytree(root, tmp_path_factory.mktemp("undisturbed"), dirs_exist_ok=True))
        ended = start(name, here).done()
        return here / "disk", PASSES[name].answers(here / "disk", ended.stdout)

    return undisturbed


@pytest.fixture
def here(root, tmp_path) -> Path:
    return Path(shutil.copytree(root, tmp_path, dirs_exist_ok=True))


@EACH
def test_two_processes_have_the_answers_of_one(here, undisturbed, name):
    if PASSES[name].why_alone:
        start(name, here, "-ngpus", "2").refused(PASSES[name].why_alone)
        return
    ended = start(name, here, processes=2).done()
    answers = PASSES[name].answers(here / "disk", ended.stdout)
    changed = difference("\n".join(undisturbed(name)[1]), "\n".join(answers))
    assert not changed, changed


@EACH
def test_unreadable_image_is_named_counted_and_left_out(here, undisturbed, name):
    each = PASSES[name]
    (here / each.broken).write_bytes(b"no picture")
    ended = start(name, here)
    assert ended.returncode == each.code, ended.printed
    assert_names(ended.printed, each.broken, each.counts)
    assert not any(each.broken in line for line in each.answers(here / "disk", ended.stdout))


def files_of(disk: Path) -> dict[Path, bytes]:
    return {path.relative_to(disk): path.read_bytes() for path in files_in(disk)}


def put_earlier_output(name: str, disk: Path, undisturbed: Callable) -> dict[Path, bytes]:
    """Copy the output of an earlier call, unless the pass would refuse to replace it. Return its files."""
    if "-name" not in PASSES[name].command:
        shutil.copytree(undisturbed(name)[0], disk, dirs_exist_ok=True)
    return files_of(disk)


def assert_whole(name: str, disk: Path, before: dict[Path, bytes]) -> None:
    """Assert that the earlier files are unchanged, and that a stopped pass has left no others but those that it may."""
    found = files_of(disk)
    assert before.items() <= found.items()
    assert {path.name for path in found.keys() - before.keys()} <= PASSES[name].begun
    if (status := disk / "new/status.json").exists():
        json.loads(status.read_text())


@EACH
def test_full_disk_is_named_with_a_remedy_and_leaves_no_part_of_a_file(here, small_disk, undisturbed, name):
    before = put_earlier_output(name, small_disk, undisturbed)
    ended = start(name, here, fill_disk_at_image=[PASSES[name].nth, str(small_disk / "filler")])
    (small_disk / "filler").unlink()
    assert ended.returncode == PASSES[name].full, ended.printed
    assert_whole(name, small_disk, before)
    assert FULL in ended.printed, ended.printed


@EACH
def test_sigterm_ends_a_pass_without_parts_of_files_or_processes(here, undisturbed, name):
    before = put_earlier_output(name, here / "disk", undisturbed)
    ended = start(name, here, signal_at_image=[PASSES[name].nth, signal.SIGTERM])
    assert ended.returncode == STOPPED, ended.printed
    assert_whole(name, here / "disk", before)
