"""Processes started one by one are refused if their settings, images or source files differ from process 0's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.image_sets import make_folders, noise
from tests.support.refusals import assert_names
from tests.support.runs import ROOT, Ended, Run, as_ranks, command, run, run_folder

pytestmark = pytest.mark.slow

CODE = ("configs", "datasets", "engine", "models", "utils")


@pytest.fixture
def photos(tmp_path) -> Path:
    """Return two copies of a data set: `photos`, and `copy`, which a test may change."""
    for part, count in (("train", 12), ("val", 4)):
        make_folders(tmp_path / "photos" / part, {"ant": count, "bee": count})
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    return tmp_path / "photos"


def flags_of(tiny: Path, photos: Path, *more: str) -> list[str]:
    given = f"-cfg {tiny} -output {photos.parent / 'o'} -epochs 1 -dataset imagefolder -data_path {photos}".split()
    return [*given, *more, "-opts", "DATA.NUM_WORKERS=0"]


def start_two(one: list[str], other: list[str], folders: tuple[Path, Path] = (ROOT, ROOT)) -> list[Ended]:
    """Run two processes of a run, each with its own flags and working folder, and return their results."""
    started = [
        Run("main_multi_gpu.py", *flags, environment=rank, cwd=folder)
        for flags, rank, folder in zip((one, other), as_ranks(2), folders, strict=True)
    ]
    return [each.wait() for each in started]


def refused_for(ended: list[Ended], *names: str) -> None:
    assert [each.returncode for each in ended] == [2, 2], [each.printed for each in ended]
    assert_names(ended[0].stderr, "process 1 of 2", *names)
    assert not any("Traceback" in each.printed or "Epoch[" in each.printed for each in ended)


@pytest.mark.parametrize("flag, setting", [("-seed 3", "SEED: 0 -> 3"), ("-batch_size 4", "DATA.BATCH_SIZE: 8 -> 4")])
def test_process_with_another_setting_is_refused_before_training(tiny, photos, flag, setting):
    refused_for(start_two(flags_of(tiny, photos), flags_of(tiny, photos, *flag.split())), setting)


def move(copy: Path) -> list[str]:
    (copy / "train/ant/03.JPEG").rename(copy / "train/bee/ant 03.JPEG")
    return ["names of the training images", "labels of the training images"]


def add(copy: Path) -> list[str]:
    shutil.copy(copy / "val/ant/03.JPEG", copy / "val/ant/more.JPEG")
    return ["validation images: 8 -> 9"]


def draw_others(copy: Path) -> list[str]:
    for number, path in enumerate(sorted(copy.rglob("*.JPEG"))):
        noise(20 + number, 20).save(path, format="PNG")
    return ["sizes of the training files: 24 of 24 differ", "sizes of the validation files"]


@pytest.mark.long
@pytest.mark.parametrize("change", [move, add, draw_others])
def test_process_with_other_images_is_refused_before_training(tiny, photos, change):
    names = change(photos.parent / "copy")
    refused_for(start_two(flags_of(tiny, photos), flags_of(tiny, photos.parent / "copy")), *names)


def test_process_with_other_class_numbers_is_refused(tiny, photos):
    lists = [photos.parent / name for name in ("one.txt", "other.txt")]
    for path, names in zip(lists, ("ant\nbee\n", "bee\nant\n"), strict=True):
        path.write_text(names)
    words = [["DATA.NUM_WORKERS=0", f"DATA.CLASSES={path}"] for path in lists]
    refused_for(start_two(*([*flags_of(tiny, photos), *each] for each in words)), "classes and their order")


def test_process_with_other_class_weights_is_refused(tiny, photos):
    words = []
    for folder, weight in (("one", 2), ("other", 3)):
        (photos.parent / folder).mkdir()
        (photos.parent / folder / "weights.csv").write_text(f"ant,{weight}\n")
        words.append(["DATA.NUM_WORKERS=0", f"TRAIN.CLASS_WEIGHTS={photos.parent / folder}/weights.csv"])
    ended = start_two(*([*flags_of(tiny, photos), *each] for each in words))
    refused_for(ended, "TRAIN.CLASS_WEIGHTS", "weights.csv")
    assert str(photos.parent) not in ended[0].stderr


@pytest.mark.long
@pytest.mark.parametrize("flag", ["-pretrained", "-resume"])
def test_process_with_different_checkpoint_file_is_refused(tiny, photos, flag):
    folders = photos.parent / "one", photos.parent / "other"
    for seed, folder in enumerate(folders):
        folder.mkdir()
        words = [*flags_of(tiny, photos, "-seed", str(seed)), "DATA.NUM_WORKERS=0"]
        run("main_single_gpu.py", *words).done()
        made = max((photos.parent / "o").iterdir(), key=lambda each: each.stat().st_mtime_ns)
        shutil.copy(made / "last.pth", folder / "w.pth")
    more = (flag, "w.pth", "-epochs", "2")
    ended = start_two(flags_of(tiny, photos, *more), flags_of(tiny, photos, *more), folders)
    refused_for(ended, {"-pretrained": "MODEL.PRETRAINED", "-resume": "RESUME"}[flag])


@pytest.mark.long
def test_processes_may_read_images_from_different_folders(tiny, photos):
    ended = start_two(flags_of(tiny, photos), flags_of(tiny, photos.parent / "copy", "-num_workers", "0"))
    assert [each.returncode for each in ended] == [0, 0], [each.printed for each in ended]
    assert (run_folder(photos.parent / "o") / "last.pth").exists()


@pytest.mark.long
def test_process_with_different_code_is_refused_naming_the_file(tiny, photos, tmp_path):
    checkout = tmp_path / "checkout"
    for name in CODE:
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main_multi_gpu.py", checkout)
    shutil.copy(ROOT / "main_single_gpu.py", checkout)
    older = ["engine/train/loss.py", "models/lora.py"]
    for name in older:
        (checkout / name).open("a").write("# an older version\n")
    flags, (first, second) = flags_of(tiny, photos), as_ranks(2)
    here = Run("main_multi_gpu.py", *flags, environment=first)
    words = command(str(checkout / "main_multi_gpu.py"), *flags)
    there = subprocess.run(words, env=os.environ | second, capture_output=True, text=True, timeout=600)
    refused_for([here.wait(), Ended([there.returncode], there.stdout, there.stderr)], *older)
