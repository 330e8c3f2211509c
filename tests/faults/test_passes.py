"""The table of passes over images: a row for each pass, a column for each fault. All passes end in the same ways.

The passes read small photos with the weights of stored runs (tests/support/output_table.py), and write to `disk`.
"""

import functools
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.confidence.stored import from_plain
from models.weights.torch_files import read_torch
from tests.support.forks import MARK, find_processes
from tests.support.output_table import describe, describe_arrays, difference, files_in, make_root
from tests.support.refusals import assert_names
from tests.support.runs import run

pytestmark = pytest.mark.slow

TRAIN = "-epochs 1 -output disk -name new -opts TRAIN.BASE_LR=0 TRAIN.WARMUP_START_LR=0 TRAIN.END_LR=0 REPORT=false"
OF_EVALUATION = ".lock config.yaml log.txt status.json"
OF_TRAINING = f"{OF_EVALUATION} split.csv steps.csv metrics.csv metrics.jsonl last.pth"
WITHOUT_NGPUS = "-ngpus: {} uses one process"


class Pass(NamedTuple):
    """A pass over images. In its command, {main} stands for the program of one or of several processes."""

    command: str
    broken: str  # an image, which becomes unreadable
    counts: str  # part of the message about the number of images that are read or not
    files: str = ""  # patterns of the files with its answers
    lines: str = "$"  # pattern of the printed lines with its answers
    code: int = 0  # the exit code, also with unreadable images
    full: int = 2  # the exit code if the disk is full
    remedy: str = "disk full; free some space"
    nth: int = 5  # signal and full disk come before this image is read
    begun: str = ""  # files that a stopped pass may leave; "": the files of an earlier call stay unchanged
    alone: str = ""  # the reason against two processes


PASSES = {
    "eval": Pass(
        "{main} -eval -resume runs/vit -output disk -name new -opts DATA.NUM_WORKERS=1 DATA.WORKERS=processes",
        "photos/Apple/19.png",
        "of 20 images",
        files="new/predictions.csv new/results.json",
        full=1,
        begun=OF_EVALUATION,
    ),
    "predict": Pass(
        "scripts/predict.py runs/vit new -batch_size 7 -top 2 -csv disk/a.csv -json disk/a.json -sheet disk/a.jpg"
        " -attention disk/maps -into disk/sorted",
        "new/4.png",
        "2 of 19 images could not be read",
        files="a.* maps/* sorted/*/*",
        lines="new/",
        code=2,
    ),
    "embed": Pass(
        "scripts/embed.py runs/vit new -output disk/f.npz -examples photos -csv disk/a.csv",
        "new/4.png",
        "2 of 19 images could not be read",
        files="*",
        lines="new/",
        code=2,
        nth=70,  # 57 examples are read before
        alone=WITHOUT_NGPUS.format("embed.py"),
    ),
    "labels": Pass(
        "scripts/labels.py runs/vit/best.pth -data_path others -dataset imagefolder -output disk/found",
        "others/new zebra/3.png",
        "57 of 58 images",
        files="found/*",
        alone=WITHOUT_NGPUS.format("labels.py"),
    ),
    "check": Pass(
        "{main} -cfg base.yaml -check -output disk",
        "photos/Apple/19.png",
        "1 of 21",
        lines="data|classes|training|validation|duplicates",
        remedy="free some space, set -output",
    ),
    "cache": Pass(
        f"{{main}} -pretrained runs/vit/best.pth {TRAIN} DATA.CACHE=disk DATA.CACHE_PATH=disk".replace(
            "disk", "out", 1
        ),
        "photos/Apple/19.png",
        "1 of 21",
        files="../out/new/predictions.csv",
        full=0,
        remedy="Set DATA.CACHE_PATH to a writable folder with enough space",
        nth=50,  # 36 images are read before, to estimate the size
        begun=OF_TRAINING,
    ),
    "features": Pass(
        "{main} -eval -resume features/run -output disk -name new",
        "photos/Apple/10.png",
        "of 22 images",
        lines=".*similarity .* of ",
        full=0,
        begun=OF_EVALUATION,
    ),
    "pixel statistics": Pass(
        f"{{main}} -cfg base.yaml {TRAIN} DATA.PIXELS=native",
        "photos/Apple/12.png",
        "1 of 36",
        files="new/config.yaml",
        remedy="free some space there, or choose another disk with -output",
        begun=OF_TRAINING,
    ),
    "new classifier and calibration": Pass(
        f"{{main}} -pretrained runs/vit/best.pth -data_path others {TRAIN} MODEL.NEW_CLASSIFIER=linear",
        "others/new Apple/12.png",
        "1 of 36",
        files="new/features.npz new/results.json new/best.pth",
        full=1,
        nth=30,  # 22 validation images are read before
        begun=OF_TRAINING,
    ),
}
EACH = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Return a folder with photos, the same photos in classes of other names, stored runs and a run that learns features."""
    root = make_root(tmp_path_factory.mktemp("passes") / "root")
    (root / "disk").mkdir()
    (root / "photos/zebra/broken.png").unlink()
    for folder in [*(root / "photos").iterdir()]:
        shutil.copytree(folder, root / "others" / f"new {folder.name}")
    (root / "photos/猫/54.png").unlink()  # two processes cannot share the rest equally
    words = "-cfg base.yaml -dataset images -epochs 1 -output features -name run -opts TRAIN.OBJECTIVE=features REPORT=false"
    words += " TRAIN.TEACHER_MODEL=runs/vit/best.pth DATA.LABELLED_PATH=photos"
    run("main_single_gpu.py", *words.split(), cwd=root).done()
    return root


def start(name: str, here: Path, code: int, *more: str, processes: int = 1, **faults: list) -> str:
    """Run the pass in this folder, and return what it prints. Its processes must have this exit code and must be gone."""
    main = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    script, *words = PASSES[name].command.format(main=main).split()
    options = {"faults": {"draw_no_curves": [], "judge_no_labels": []} | faults, "environment": {MARK: str(here)}}
    ended = run(script, *words, *more, processes=processes, cwd=here, **options)
    assert set(ended.codes) == {code} and "Traceback" not in ended.printed, ended.printed
    assert not find_processes(here)
    return ended.printed


def answers(name: str, here: Path, printed: str) -> list[str]:
    """Return the lines of the answers. Those of single images name the image."""
    found = [line for line in printed.splitlines() if re.match(PASSES[name].lines, line)]
    for path in (path for pattern in PASSES[name].files.split() for path in sorted((here / "disk").glob(pattern))):
        if path.name == "best.pth":
            saved = read_torch(path)["calibration"]
            known = from_plain(saved["known"]["statistics"], saved["temperature"]).state_dict()
            found.append(
                describe_arrays({each: known[each].numpy() for each in ("read.images", "middle.mean", "scales")})
            )
        elif path.is_file():
            found += [path.name, *describe(path).splitlines()]
    assert found
    return found


@pytest.fixture(scope="session")
def undisturbed(root, tmp_path_factory) -> Callable[[str], tuple[Path, list[str]]]:
    """Return a function that runs a pass once without a fault. It returns its folder and the answers."""

    @functools.cache
    def undisturbed(name: str) -> tuple[Path, list[str]]:
        here = Path(shutil.copytree(root, tmp_path_factory.mktemp("undisturbed"), dirs_exist_ok=True))
        return here, answers(name, here, start(name, here, PASSES[name].code))

    return undisturbed


@pytest.fixture
def here(root, tmp_path) -> Path:
    return Path(shutil.copytree(root, tmp_path, dirs_exist_ok=True))


@EACH
def test_two_processes_have_the_answers_of_one(here, undisturbed, name):
    if PASSES[name].alone:
        assert PASSES[name].alone in start(name, here, 2, "-ngpus", "2")
        return
    found = answers(name, here, start(name, here, PASSES[name].code, processes=2))
    changed = difference("\n".join(undisturbed(name)[1]), "\n".join(found))
    assert not changed, changed


@EACH
def test_unreadable_image_is_named_counted_and_left_out(here, undisturbed, name):
    each = PASSES[name]
    (here / each.broken).write_bytes(b"no picture")
    printed = start(name, here, each.code)
    assert_names(printed, each.broken, each.counts)
    image = each.broken.partition("/")[2]
    found, others = (
        [line for line in lines if re.match(r"[^\[]*\.png\b", line) and image not in line]
        for lines in (answers(name, here, printed), undisturbed(name)[1])
    )
    assert found == others or name == "labels", "only labels are judged by the features of the other images"


def files_of(disk: Path) -> dict[str, bytes]:
    return {str(path.relative_to(disk)): path.read_bytes() for path in files_in(disk) if path.name != "filler"}


def stop(name: str, here: Path, code: int, **faults: list) -> str:
    """Run the pass with a fault that stops it. It may leave no part of a file, and must keep the files of an earlier call."""
    disk, before = here / "disk", files_of(here / "disk")
    printed, after = start(name, here, code, **faults), files_of(disk)
    assert {path: after.get(path) for path in before} == before
    assert {Path(path).name for path in after.keys() - before.keys()} <= {*PASSES[name].begun.split()}
    for path in disk.rglob("*.pth"):
        read_torch(path)
    return printed


@EACH
def test_full_disk_is_named_with_a_remedy_and_leaves_no_part_of_a_file(here, small_disk, name):
    fault = {"fill_disk_at_image": [PASSES[name].nth, str(small_disk / "filler")]}
    assert PASSES[name].remedy in stop(name, here, PASSES[name].full, **fault)


def test_full_disk_of_process_0_ends_all_processes_with_its_exit_code(here, small_disk):
    fault = {"fill_disk_at_image": [5, str(small_disk / "filler")]}
    ended = run("scripts/predict.py", "runs/vit", "new", "-csv", "disk/a.csv", processes=2, cwd=here, faults=fault)
    assert ended.codes == [2, 2] and ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr, ended.stderr


@EACH
def test_sigterm_ends_a_pass_without_parts_of_files_or_processes(here, undisturbed, name):
    if not PASSES[name].begun:
        shutil.copytree(undisturbed(name)[0] / "disk", here / "disk", dirs_exist_ok=True)
    stop(name, here, 128 + signal.SIGTERM, signal_at_image=[PASSES[name].nth, signal.SIGTERM])
