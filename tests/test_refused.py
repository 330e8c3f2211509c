"""What a newcomer mistypes and an attacker sends is refused at once, in one message with name, value and remedy."""

import contextlib
import os
import socket
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import load
from configs.values import SETTINGS, convert
from datasets import build_order, check_repeats, load_image_sets
from datasets.sources.images import FileImages
from datasets.sources.shards.index import index_path, load_index
from datasets.transforms.decode import decode
from datasets.types import ImageReadError, ImageSet
from engine.checkpoint.format import find_newest
from engine.checkpoint.rollback import find_before
from models.formats.files import find_file
from scripts import make_shards, show_augmentation
from scripts.benchmarks import loader as benchmark_loader
from scripts.benchmarks import photos
from tests.support.configs import SMALL, small_config
from tests.support.image_sets import draw, error_of, settings
from tests.support.shards import samples, write_tar
from utils.errors import ConfigError, UserError, exit_code

# --- numbers and names ---

NUMBERS = [key for key, setting in SETTINGS.items() if setting.kind in (int, float) and not setting.choices]
SEEDS = ["DATA.SPLIT_SEED", "SEED"]  # any number is as good as another


@pytest.mark.parametrize("key", [key for key in NUMBERS if key not in SEEDS])
def test_a_number_far_beyond_any_use_is_refused_with_its_name(key):
    text = str(10**18) if SETTINGS[key].kind is int else "1e308"
    with pytest.raises(ConfigError) as caught:
        convert(SETTINGS[key], text, "-opts")
    assert str(caught.value).startswith(f"-opts: {key} is '{text}'; it must be ") and " to " in str(caught.value)


@pytest.mark.parametrize("key", NUMBERS)
def test_the_default_of_a_number_is_within_its_bounds(key):
    setting = SETTINGS[key]
    values = setting.default if setting.many else [setting.default]
    high = float("inf") if setting.high is None else setting.high
    assert all(value is None or setting.low <= value <= high for value in values)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["MODEL.EMBED_DIM=100000", "MODEL.DEPTH=1000"], "makes 1.2e+14 weights, more than 1e+11; lower one of them"),
        (["TAG=../../x"], "TAG, ../../x (-opts), becomes part of a folder's name: it must have no / in it"),
        ([f"TAG={'x' * 201}"], "at most 200 bytes"),
        ([f"RUN.MAX_TIME={'9' * 400}"], "must be a time above 0, such as 3h30m"),
    ],
)
def test_settings_that_cannot_be_are_told_before_anything_is_made(tmp_path, options, told):
    with pytest.raises(ConfigError) as caught:
        small_config(tmp_path, *options)
    assert told in str(caught.value)


def test_a_text_with_a_zero_byte_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text('SAVE: "a\\0b"')
    with pytest.raises(ConfigError, match="SAVE is .*; it must be text"):
        load(["-cfg", str(tmp_path / "x.yaml")])


def test_an_image_cannot_be_repeated_more_often_than_an_update_has_images(tmp_path):
    config = small_config(tmp_path, "TRAIN.REPEATED_AUG=9", "DATA.BATCH_SIZE=4", "TRAIN.ACCUM_ITER=2")
    check_repeats(build_order(config, ImageSet(np.zeros(99), ["a"]), world_size=2))
    with pytest.raises(ConfigError, match="TRAIN.REPEATED_AUG is 9, but an update has only 8 images"):
        check_repeats(build_order(config, ImageSet(np.zeros(99), ["a"]), world_size=1))


@pytest.mark.parametrize(
    "ask", [lambda: torch.empty(2**60, dtype=torch.uint8), lambda: np.empty(2**60, np.uint8)], ids=["torch", "numpy"]
)
def test_memory_that_runs_out_is_told_with_what_to_lower(ask, capsys):
    assert exit_code(lambda arguments: ask(), []) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: memory ran out (") and "lower DATA.BATCH_SIZE" in said and "Traceback" not in said


# --- settings without effect ---

AMP_OFF, NO_CACHE = "AMP is off; -amp switches it on", "DATA.CACHE is none; set it to disk or ram"


@pytest.mark.parametrize(
    ("idle", "beside", "why"),
    [
        ("PRECISION.RESIDUAL=half", "", AMP_OFF),
        ("PRECISION.MODE=float8", "", AMP_OFF),
        ("PRECISION.MODE=naive", "", AMP_OFF),
        ("PRECISION.CUSTOM_BLACK_LIST=[head]", "", AMP_OFF),
        ("PRECISION.REDUCE=half", "", AMP_OFF),
        ("PRECISION.RESIDUAL=half", "PRECISION.MODE=naive AMP=true", "with PRECISION.MODE naive"),
        ("PRECISION.SHADOW_LOSS=0.5", "", "PRECISION.SHADOW_STEPS is not set"),
        ("PROFILE=3", "EVAL=true", "they are about training, and EVAL is on"),
        ("DIST.STRATEGY=fsdp2", "EVAL=true", "they are about training, and EVAL is on"),
        ("COMPILE_SCOPE=blocks", "", "COMPILE is off; -compile switches it on"),
        ("DATA.CACHE_SIDE=9 DATA.CACHE_PATH=x", "", NO_CACHE),
        ("DATA.CACHE_QUALITY=80", "DATA.CACHE=disk", "DATA.CACHE_FORM is decoded; set it to jpeg"),
        ("DATA.CACHE_PATH=x", "DATA.CACHE=ram", "DATA.CACHE is ram"),
        ("DATA.SHUFFLE_BUFFER=9", "", "DATA.DATASET is not shards"),
        ("DATA.SYNTHETIC_SIZE=9", "", "DATA.DATASET is not synthetic"),
        ("TRAIN.RAND_AUGMENT_LAYERS=3", "", "TRAIN.RAND_AUGMENT is off"),
        ("TRAIN.AUTO_AUGMENT=svhn", "TRAIN.RAND_AUGMENT=true", "TRAIN.RAND_AUGMENT takes its place"),
        ("TRAIN.MIXUP_MODE=elem", "", "TRAIN.MIXUP_ALPHA and TRAIN.CUTMIX_ALPHA are 0"),
        ("TRAIN.RANDOM_ERASE_COUNT=3", "", "TRAIN.RANDOM_ERASE_PROB is 0"),
        ("TRAIN.MODEL_EMA_DECAY=0.9", "", "TRAIN.MODEL_EMA is off"),
        ("TRAIN.LR_SCHEDULER.DECAY_EPOCHS=3", "", "TRAIN.LR_SCHEDULER.NAME is not step"),
    ],
)
def test_settings_without_effect_are_told_in_one_line_with_the_reason(tmp_path, idle, beside, why):
    (tmp_path / "small.yaml").write_text(SMALL)
    (note,) = load(["-cfg", str(tmp_path / "small.yaml"), "-opts", *idle.split(), *beside.split()]).notes
    told = idle.replace(" ", ", ").replace("=", " ")
    assert note.startswith(f"note: without effect: {told}, as {why}")


def test_settings_that_take_effect_are_not_spoken_of(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    options = "AMP=true PRECISION.RESIDUAL=half PRECISION.CUSTOM_BLACK_LIST=[head] PRECISION.SHADOW_STEPS=5"
    options += (
        " PRECISION.SHADOW_LOSS=0.5 PROFILE=3 COMPILE=true COMPILE_SCOPE=blocks DATA.CACHE=disk DATA.CACHE_FORM=jpeg"
    )
    options += " DATA.CACHE_QUALITY=80 DATA.CACHE_PATH=x TRAIN.RAND_AUGMENT=true TRAIN.RAND_AUGMENT_LAYERS=3"
    options += " TRAIN.CUTMIX_MINMAX=0.2,0.8 TRAIN.MIXUP_MODE=elem TRAIN.MODEL_EMA=true TRAIN.MODEL_EMA_DECAY=0.9"
    assert load(["-cfg", str(tmp_path / "small.yaml"), "-opts", *options.split()]).notes == []


# --- what is no file ---


WAITED: list[Path] = []  # pipes that somebody waited for


@pytest.fixture(autouse=True)
def nobody_waits():
    WAITED.clear()
    yield
    assert not WAITED


def make_pipe(path: Path) -> None:
    os.mkfifo(path)
    threading.Thread(target=let_go, args=(path,), daemon=True).start()


def let_go(path: Path) -> None:
    """Free whoever waits for the pipe, so that the test fails in place of waiting for ever."""
    while path.exists():
        threading.Event().wait(3)
        with contextlib.suppress(OSError):  # there is nobody
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            is_pipe = stat.S_ISFIFO(os.fstat(writer).st_mode)
            os.close(writer)
            if not is_pipe:  # replaced by a file, which anybody can open at any time
                return
            WAITED.append(path)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path may be longer than a socket's may be
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "a pipe": make_pipe,
    "a socket": make_socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


def read_base(path: Path) -> None:
    (path.parent / "x.yaml").write_text(f"BASE: {path.name}")
    load(["-cfg", str(path.parent / "x.yaml")])


READERS = {
    "settings.yaml": lambda path: load(["-cfg", str(path)]),
    "base.yaml": read_base,
    "train-000000.tar": lambda path: load_image_sets(settings("shards", path.parent)),
    "weights.pth": find_file,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_by_its_name_and_kind(tmp_path, name, kind):
    KINDS[kind](tmp_path / name)
    with pytest.raises(UserError) as caught:
        READERS[name](tmp_path / name)
    assert name in str(caught.value) and kind in str(caught.value)


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
@pytest.mark.parametrize("data_set", ["csv", "imagefolder", "imagenet2012", "shards"])
def test_a_data_path_that_is_neither_file_nor_folder_is_refused(tmp_path, data_set, kind):
    KINDS[kind](tmp_path / "data")
    assert f"DATA.DATA_PATH: {tmp_path / 'data'} is {kind}" in error_of(data_set, tmp_path / "data")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("a pipe", "a pipe"), ("a device", "a device"), ("a socket", "OSError"), ("a folder", "IsADirectoryError")],
)
def test_an_image_that_is_no_file_cannot_be_read(tmp_path, kind, reason):
    KINDS[kind](tmp_path / "0.png")
    with pytest.raises(ImageReadError, match=reason):
        FileImages(tmp_path, ["0.png"], [0], ["a"], 3).read(0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_checkpoint_is_passed_over_where_one_is_looked_for(tmp_path, kind):
    run = tmp_path / "train-20260102-03-04-05"
    run.mkdir()
    KINDS[kind](run / "last.pth")
    assert find_newest(str(tmp_path), "", print) is None and find_before(run, 0, print) is None


def test_a_pipe_in_place_of_an_index_is_replaced(tmp_path):
    path = write_tar(tmp_path / "train-0.tar", samples(0, 6))
    make_pipe(index_path(path))
    assert load_index(path) is None
    load_image_sets(settings("shards", tmp_path))
    assert index_path(path).is_file()


# --- data ---


def test_an_image_of_an_unknown_kind_is_not_called_by_an_address():
    with pytest.raises(ImageReadError) as caught:
        decode(b"<html>", 3)
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("a.png," + "x" * 140_000, "photos.csv, line 3: field larger than field limit"),
        ("a.png," + "7" * 5000, f"photos.csv, line 3: label {'7' * 40}... (5,000 characters) is no class number"),
        ("a.png,-" + "7" * 5000, "photos.csv, line 3: label '-777"),
        ("a.png,999999", "photos.csv, line 3: label 999999 makes 1,000,000 classes, of which 2 images fill 2;"),
    ],
)
def test_an_absurd_row_of_a_csv_is_told_with_file_and_line(tmp_path, row, told):
    draw(tmp_path / "a.png")
    (tmp_path / "photos.csv").write_text(f"image_path,target\na.png,0\n{row}\n")
    message = error_of("csv", tmp_path / "photos.csv")
    assert f"{tmp_path}/{told}" in message and len(message) < 500


def test_a_list_with_an_absurd_label_is_told_with_its_line_unless_the_number_of_classes_is_set(tmp_path):
    draw(tmp_path / "a.png")
    (tmp_path / "train_list.txt").write_text("a.png 0\na.png 0\na.png 1\na.png 9999\n")
    (tmp_path / "val_list.txt").write_text("a.png 0\n")
    message = error_of("imagenet2012", tmp_path)
    assert "train_list.txt, line 4: label 9999" in message and "set -num_classes 10000" in message
    assert len(load_image_sets(settings("imagenet2012", tmp_path, num_classes=10_000))[0].classes) == 10_000
    for lines in (["a.png 999\n"], [f"a.png {number}\n" for number in range(1, 2000, 2)]):  # few of ImageNet's; half
        (tmp_path / "train_list.txt").write_text("".join(["a.png 0\n", *lines]))
        assert len(load_image_sets(settings("imagenet2012", tmp_path))[0].classes) == int(lines[-1][6:]) + 1


def test_an_absurd_label_in_a_shard_is_told_with_file_and_member(tmp_path):
    write_tar(tmp_path / "train-0.tar", samples(0, 6) | {"x.cls": b"999999", "x.png": b"x"})
    write_tar(tmp_path / "val-0.tar", samples(0, 3))
    message = error_of("shards", tmp_path)
    assert f"{tmp_path}/train-0.tar: x.png: label 999999 makes 1,000,000 classes, of which 10 images fill 4" in message
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(1_000_000))))
    assert len(load_image_sets(settings("shards", tmp_path))[1].classes) == 1_000_000


def test_an_empty_shard_is_told_itself_and_not_the_others(tmp_path):
    write_tar(tmp_path / "train-0.tar", {})
    write_tar(tmp_path / "val-0.tar", samples(0, 3))
    assert f"{tmp_path}/train-0.tar: there are no samples in it" in error_of("shards", tmp_path)


# --- scripts ---


def in_the_way(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "out"


PLACES = {"below a file": in_the_way, "where nobody may": lambda folder: Path("/proc/halfstep/out")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("script", ["make_shards", "photos", "show_augmentation"])
def test_a_place_that_cannot_be_written_is_told(tmp_path, capsys, script, place):
    out = PLACES[place](tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    code = {
        "make_shards": lambda: exit_code(make_shards.main, ["-dataset", "digits", "-out", str(out)]),
        "photos": lambda: exit_code(photos.main, ["-out", str(out), "-train", "1", "-val", "1"]),
        "show_augmentation": lambda: exit_code(
            show_augmentation.main, [f"{out}.png", "-cfg", str(tmp_path / "small.yaml")]
        ),
    }[script]()
    said = capsys.readouterr().err
    assert code == 2 and str(out) in said and "choose another" in said and "Traceback" not in said


def test_shards_that_are_there_already_are_counted(tmp_path, capsys):
    words = ["-dataset", "digits", "-out", str(tmp_path / "out"), "-samples_per_shard", "800"]
    for told in ("shards: 2\n", "shards: 2, 2 of them from an earlier call\n"):
        assert make_shards.main(words) == 0
        assert f"{tmp_path}/out: train images: 1438, {told}" in capsys.readouterr().out


def test_photos_are_made_from_the_command_line(tmp_path, capsys):
    assert photos.main(["-out", str(tmp_path), "-train", "2", "-val", "1"]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jpg")) == [
        "train/class0/00000.jpg", "train/class1/00001.jpg", "val/class0/00000.jpg"
    ]  # fmt: skip
    assert exit_code(photos.main, ["-out", str(tmp_path), "-train", "0"]) == 2
    assert "argument -train: 0 is less than 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("timm -photos /nowhere", "/nowhere/train holds 0 .jpg files, and 64 are needed"),
        ("pixels -count 0", "argument -count: 0 is less than 64"),
        ("timm -rounds 0", "argument -rounds: 0 is less than 1"),
        ("memory -count 0", "argument -count: 0 is less than 10"),
        ("memory -epochs x", "argument -epochs: 'x' is not a whole number"),
        (f"timm -rounds {'9' * 30}", "is more than"),
    ],
)
def test_a_benchmark_that_cannot_be_is_told(words, told, capsys):
    with pytest.raises(SystemExit) as ending:
        benchmark_loader.main(words.split())
    assert ending.value.code == 2 and told in capsys.readouterr().err
