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
from tests.support.cases import cases_of, names_of
from tests.support.describers import describe, describe_arrays
from tests.support.forks import MARK, find_processes
from tests.support.output_table import difference, files_in, make_root
from tests.support.refusals import assert_names
from tests.support.runs import typed

pytestmark = pytest.mark.slow

TRAIN = "-epochs 1 -name new -opts TRAIN.BASE_LR=0 TRAIN.WARMUP_START_LR=0 TRAIN.END_LR=0 REPORT=false"
BEGUN = {"evaluation": ".lock config.yaml log.txt status.json".split()}
BEGUN["training"] = [*BEGUN["evaluation"], *"split.csv steps.csv metrics.csv metrics.jsonl last.pth".split()]


class Pass(NamedTuple):
    """A line of tests/cases/passes.txt. In its command, {main} is the program of one or of several processes."""

    command: str
    broken: str  # an image, which becomes unreadable
    counts: str  # part of the message about the number of images that are read or not
    files: str = ""  # patterns of the files with its answers
    lines: str = "$"  # pattern of the printed lines with its answers
    code: str = "0"  # the exit code, also with unreadable images
    full: str = "2"  # the exit code if the disk is full
    remedy: str = "disk full; free some space"
    nth: str = "5"  # signal and full disk come before this image is read
    begun: str = ""  # which files a stopped pass may leave; "": it keeps the files of an earlier call
    alone: str = ""  # the reason against two processes


PASSES = {name: Pass(**dict(each.split(" ", 1) for each in names_of("passes", name))) for name in cases_of("passes")}
EACH = pytest.mark.parametrize("name", PASSES)


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """Return a folder with photos, the same photos in classes of other names, and stored runs."""
    root = make_root(tmp_path_factory.mktemp("passes") / "root")
    (root / "disk").mkdir()
    (root / "photos/zebra/broken.png").unlink()
    for folder in [*(root / "photos").iterdir()]:
        shutil.copytree(folder, root / "others" / f"new {folder.name}")
    (root / "photos/猫/54.png").unlink()  # two processes cannot share the rest equally
    return root


def start(name: str, here: Path, code: int | str, *more: str, processes: int = 1, **faults: list) -> str:
    """Run the pass in this folder, and return what it prints.

    Its processes must have this exit code and must be gone.
    """
    main = "main_single_gpu.py" if processes == 1 else "main_multi_gpu.py"
    script, *words = PASSES[name].command.format(main=main, train=TRAIN).split()
    options = {"faults": {"judge_no_labels": []} | faults, "environment": {MARK: str(here)}}
    ended = typed(script, *words, *more, processes=processes, cwd=here, **options)
    assert set(ended.codes) == {int(code)} and "Traceback" not in ended.printed, ended.printed
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


@pytest.mark.long
@EACH
def test_two_processes_have_the_answers_of_one(here, undisturbed, name):
    if PASSES[name].alone:
        assert PASSES[name].alone in start(name, here, 2, "-ngpus", "2")
        return
    found = answers(name, here, start(name, here, PASSES[name].code, processes=2))
    changed = difference("\n".join(undisturbed(name)[1]), "\n".join(found))
    assert not changed, changed


@pytest.mark.long
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


def stop(name: str, here: Path, code: int | str, **faults: list) -> str:
    """Run the pass with a fault that stops it.

    It may leave no part of a file, and must keep the files of an earlier call.
    """
    disk, before = here / "disk", files_of(here / "disk")
    printed, after = start(name, here, code, **faults), files_of(disk)
    assert {path: after.get(path) for path in before} == before
    assert {Path(path).name for path in after.keys() - before.keys()} <= {*BEGUN.get(PASSES[name].begun, [])}
    for path in disk.rglob("*.pth"):
        read_torch(path)
    return printed


@pytest.mark.long
@EACH
def test_full_disk_is_named_with_a_remedy_and_leaves_no_part_of_a_file(here, small_disk, name):
    fault = {"fill_disk_at_image": [int(PASSES[name].nth), str(small_disk / "filler")]}
    assert PASSES[name].remedy in stop(name, here, PASSES[name].full, **fault)


def test_full_disk_of_process_0_ends_all_processes_with_its_exit_code(here, small_disk):
    fault = {"fill_disk_at_image": [5, str(small_disk / "filler")]}
    ended = typed("scripts/predict.py", "runs/vit", "new", "-csv", "disk/a.csv", processes=2, cwd=here, faults=fault)
    assert ended.codes == [2, 2] and ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.long
@EACH
def test_sigterm_ends_a_pass_without_parts_of_files_or_processes(here, undisturbed, name):
    if not PASSES[name].begun:
        shutil.copytree(undisturbed(name)[0] / "disk", here / "disk", dirs_exist_ok=True)
    stop(name, here, 128 + signal.SIGTERM, signal_at_image=[int(PASSES[name].nth), signal.SIGTERM])
