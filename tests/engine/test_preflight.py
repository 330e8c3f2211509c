"""-check finds each mistake that is planted, in its own row, and leaves nothing behind."""

import contextlib
import dataclasses
import fcntl
import gc
import io
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import main_multi_gpu
import main_single_gpu
from configs.load import load
from datasets import CacheProgress, cache_image_sets, load_image_sets
from engine.check import quick_checks
from engine.check.cache import check_cache
from engine.check.images import (
    check_classes,
    check_duplicates,
    check_images,
    check_readable,
    check_sizes,
    scan_images,
)
from engine.check.memory import check_memory
from engine.check.quick_checks import check_disk, check_output, check_rate, check_shared_memory, loader_processes
from engine.memory.estimate import fixed_bytes, saved_bytes
from engine.precision.policy import Precision
from models import build_model
from scripts import make_shards
from tests.support.configs import CPU, SMALL, replaced, small_config
from tests.support.refusals import assert_names, refused
from tests.support.runs import ROOT, rows, run
from utils.distributed import Process
from utils.errors import ConfigError, DataError
from utils.findings import OK, WARN, WRONG
from utils.program import exit_code

# Nothing is to be said about a run with these.
CLEAN = SMALL.replace("digits", "imagefolder").replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3").replace("1e-3", "5e-4")


@pytest.fixture
def photos(tmp_path) -> Path:
    """{train,val}/{cat,dog}/N.png, no two alike."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(256, size=(10, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def check(tmp_path, photos, capsys):
    """Types -check; returns {row: (verdict, its text)}, and holds that the exit code follows and nothing is left."""

    def type_in(*flags, main=main_single_gpu.main) -> dict[str, tuple[str, str]]:
        (tmp_path / "clean.yaml").write_text(CLEAN)
        given = ["-cfg", str(tmp_path / "clean.yaml"), "-data_path", str(photos)]
        output = [] if "-output" in flags else ["-output", str(tmp_path / "output")]
        code = exit_code(main, [*given, *output, "-check", *flags])
        said = capsys.readouterr()
        assert said.err == "" and not (tmp_path / "output").exists()
        found = rows(said.out)
        assert code == (2 if WRONG in {verdict for verdict, _ in found.values()} else 0)
        return found

    return type_in


def trouble(found: dict) -> dict[str, str]:
    return {what: verdict for what, (verdict, _) in found.items() if verdict != OK}


def sets_of(photos, *options, data_set="imagefolder"):
    (photos.parent / "clean.yaml").write_text(CLEAN)
    flags = ["-cfg", str(photos.parent / "clean.yaml"), "-data_path", str(photos), "-dataset", data_set]
    config = load([*flags, *(["-opts", *options] if options else [])]).config
    return config, *load_image_sets(config)


def test_of_a_clean_run_nothing_is_said_but_ok(check):
    found = check()
    assert trouble(found) == {}
    names = "device,data,classes,training images,training sizes,validation images,validation sizes,duplicates"
    names += ",learning rate,warm-up,shared memory,output,model,precision,memory,disk"
    assert set(found) == set(names.split(","))
    assert_names(found["data"][1], "12 training", "6 validation")


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["-data_path", "nowhere"], {"data": WRONG, "weights, memory": WARN}),
        (["-data_path", "nowhere", "-num_classes", "2"], {"data": WRONG}),
        (["-pretrained", "nothing.pth"], {"pretrained": WRONG}),
        (["-resume", "nothing.pth"], {"resume": WRONG}),
        (["-eval"], {"weights": WRONG}),
        (["-opts", "TRAIN.WARMUP_EPOCHS=3"], {"warm-up": WARN}),
        (["-opts", "TRAIN.BASE_LR=0.01"], {"learning rate": WARN}),
        (["-opts", "PRECISION.MATMUL=tf32"], {"precision": WRONG, "weights, memory": WARN}),
        (["-amp", "-opts", "PRECISION.CUSTOM_BLACK_LIST=[nothing]"], {"precision": WRONG}),
        (["-opts", "MODEL.FREEZE=[nothing]"], {"model": WRONG, "weights, memory": WARN}),
        (["-output", "/proc/halfstep"], {"output": WRONG}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_in_the_settings_is_told_in_its_own_row(check, flags, expected):
    if torch.cuda.is_available() and "PRECISION.MATMUL=tf32" in flags:
        pytest.skip("not a mistake on a GPU")
    assert trouble(check(*flags)) == expected


def test_a_device_that_is_not_there_keeps_the_data_from_being_looked_at_no_more_than_other_mistakes(check):
    if torch.cuda.is_available():
        pytest.skip("it is there")
    found = check("-opts", "DEVICE=cuda")
    assert trouble(found) == {"device": WRONG} and "training images" in found


def test_unreadable_images_are_named_and_weighed(check, photos):
    (photos / "train/dog/1.png").write_bytes(b"no picture")
    found = check()
    assert trouble(found) == {"training images": WRONG}
    assert str(photos / "train/dog/1.png") in found["training images"][1]
    assert trouble(check("-opts", "DATA.MAX_BAD_FRACTION=0.1")) == {"training images": WARN}


def test_of_many_unreadable_images_ten_are_named(photos):
    for path in (photos / "train").rglob("*.png"):
        path.write_bytes(b"no picture")
    config, train, _ = sets_of(photos)
    scan = scan_images(train, "")
    finding = check_readable("training", scan, 1.0)
    assert finding.found.count("\n") == 10 and "2 more" in finding.found and finding.verdict == WARN
    assert not re.search(r"\d", check_sizes("training", scan, 8).found), "the size of no image"


def test_an_image_with_too_many_pixels_counts_as_unreadable(photos, monkeypatch):
    config, train, _ = sets_of(photos)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert len(scan_images(train, "").reasons) == len(train)


def test_a_label_out_of_range_is_told_with_its_line(check, photos):
    for part in ("train", "val"):
        (photos / f"{part}_list.txt").write_text(f"{part}/cat/0.png 0\n{part}/dog/0.png 7\n")
    found = check("-dataset", "imagenet2012", "-num_classes", "2")
    assert trouble(found) == {"data": WRONG}
    assert_names(found["data"][1], "train_list.txt", "line 2")


def test_a_link_out_of_the_listed_folder_is_told(check, photos, tmp_path):
    (photos / "train/cat/0.png").rename(tmp_path / "elsewhere.png")
    (photos / "train/cat/0.png").symlink_to(tmp_path / "elsewhere.png")
    for part in ("train", "val"):
        (photos / f"{part}.csv").write_text(f"image_path,target\n{part}/cat/0.png,0\n{part}/cat/1.png,0\n")
    with refused(DataError, photos / "train/cat/0.png"):
        list(check_images(*sets_of(photos, data_set="csv")))


def test_classes_without_images_and_uneven_ones(photos):
    (photos / "train_list.txt").write_text("".join(f"train/cat/{n}.png 0\n" for n in range(6)) + "train/dog/0.png 2\n")
    (photos / "val_list.txt").write_text("val/cat/0.png 0\n")
    finding = check_classes(*sets_of(photos, data_set="imagenet2012"))
    assert finding.verdict == WARN and "without training images: 1" in finding.found
    assert "without validation images: 2" in finding.found and "uneven" not in finding.found
    (photos / "train_list.txt").write_text("train/cat/0.png 0\n" * 11 + "train/dog/0.png 1\n")
    finding = check_classes(*sets_of(photos, data_set="imagenet2012"))
    assert finding.verdict == OK and "1 to 11" in finding.found and "uneven: 0 " in finding.found


def test_validation_images_that_are_trained_on_are_named_by_pairs(check, photos):
    Image.open(photos / "train/cat/4.png").save(photos / "val/cat/again.bmp")  # other bytes, the same pixels
    for path in (photos / "train/dog/0.png", photos / "val/dog/0.png"):
        path.write_bytes(b"no picture")  # which are not the same image
    found = check("-opts", "DATA.MAX_BAD_FRACTION=0.5")
    assert found["duplicates"][0] == WARN and "1 of 7" in found["duplicates"][1]
    assert f"{photos / 'val/cat/again.bmp'} = {photos / 'train/cat/4.png'}" in found["duplicates"][1]
    scan = scan_images(sets_of(photos)[1], "")
    assert check_duplicates(scan, scan).found.count(" = ") == 10


def test_image_sizes_and_how_many_are_too_small(photos):
    Image.new("RGB", (40, 30)).save(photos / "train/cat/large.png")
    scan = scan_images(sets_of(photos)[1], "")
    told = check_sizes("training", scan, 11).found
    assert_names(told, "12 x 10", "median 12 x 10", "40 x 30", "92.3%", "DATA.IMAGE_SIZE 11")
    assert "DATA.IMAGE_SIZE" not in check_sizes("training", scan, 10).found


@pytest.mark.parametrize(
    "name, rate, batch, scaled_for, verdict",
    [
        ("AdamW", 3e-3, 4096, None, OK),
        ("AdamW", 3e-3, 32, None, WARN),
        ("AdamW", 3e-3, 32, 4096, OK),  # as the batch is smaller, so is the rate
        ("AdamW", 0.0, 256, None, WARN),
        ("SGD", 0.1, 256, None, OK),
        ("SGD", 1e-5, 256, None, WARN),
    ],
)
def test_a_learning_rate_far_from_what_is_customary(tmp_path, name, rate, batch, scaled_for, verdict):
    options = [f"TRAIN.BASE_LR={rate}", f"TRAIN.OPTIMIZER.NAME={name}", f"TRAIN.LINEAR_SCALED_LR={scaled_for}"]
    finding = check_rate(small_config(tmp_path, *options).TRAIN, batch)
    assert finding.verdict == verdict and f"for {batch} images" in finding.found
    assert (f"{batch} / {scaled_for}" in finding.found) is bool(scaled_for)


def test_room_for_checkpoints(tmp_path, monkeypatch):
    config = small_config(tmp_path, "KEEP_CHECKPOINTS=3", "SAVE_FREQ=1", "TRAIN.NUM_EPOCHS=2")

    def verdict(free: int, path: Path) -> str:
        monkeypatch.setattr(quick_checks, "free_bytes", lambda folder: free)
        return check_disk(config, path, 1000).verdict

    assert [verdict(free, tmp_path / "not/yet") for free in (5999, 6000, 7500)] == [WRONG, WARN, OK]  # 2 kept, 4 more
    (tmp_path / "last.pth").write_bytes(bytes(1000))
    (tmp_path / "best.pth").hardlink_to(tmp_path / "last.pth")
    assert [verdict(free, tmp_path) for free in (4999, 5000)] == [WRONG, WARN], "one of them lies there already"


def test_an_output_that_is_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    assert check_output(str(tmp_path / "file/output")).verdict == WRONG
    assert check_output(str(tmp_path / "new/output")).verdict == OK
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_room_in_shared_memory(tmp_path, monkeypatch):
    config = small_config(tmp_path, "DATA.BATCH_SIZE_EVAL=8")
    need = 3 * 2 * (32 + 8) * 8 * 8
    monkeypatch.setattr(quick_checks, "SHARED", tmp_path)
    verdicts = []
    for free in (need - 1, need, 2 * need):
        monkeypatch.setattr(quick_checks, "free_bytes", lambda folder, free=free: free)
        verdicts.append(check_shared_memory(config, 3).verdict)
    assert verdicts == [WRONG, WARN, OK]
    assert check_shared_memory(config, 0).found == "not needed"
    more = replaced(config, DATA={"PREFETCH": 9})
    assert check_shared_memory(more, 3).verdict == WRONG
    assert_names(check_shared_memory(more, 3).found, "9 batches")


def test_only_loader_processes_take_shared_memory_and_those_of_all_training_processes(photos):
    config, train, _ = sets_of(photos, "DATA.NUM_WORKERS=3")
    process = Process(CPU, world_size=4, local_size=2)
    assert loader_processes(config, train, process) == 0
    assert loader_processes(replaced(config, DATA={"WORKERS": "processes"}), train, process) == 6


def test_memory_is_weighed_against_what_is_free(tmp_path):
    config = small_config(tmp_path, "DATA.BATCH_SIZE=64")
    precision, model = Precision(config, CPU), build_model(config, 10)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert fixed_bytes(config, model, precision) == 4 * weights  # and gradients, and two of Adam's
    assert fixed_bytes(replaced(config, TRAIN={"MODEL_EMA": True}), model, precision) == 6 * weights
    few, more, most = (saved_bytes(config, model, precision, count) for count in (2, 4, 8))
    assert most - more == 2 * (more - few) > 0
    need = 4 * weights + 64 * 1.2 * (more - few) / 2
    found = [check_memory(config, model, precision, int(need * share), Process(CPU)) for share in (0.6, 1.0, 1.2)]
    assert [finding.verdict for finding in found] == [WRONG, WARN, OK]
    assert re.search(r"about \d+ images fit", found[0].remedy)
    assert (
        check_memory(config, model, precision, int(need * 1.2), Process(CPU, world_size=2, local_size=2)).verdict
        == WRONG
    ), "two share it"
    assert check_memory(config, model, precision, weights, Process(CPU)).verdict == WRONG


def test_memory_of_shards_is_a_part_of_the_weights_and_two_whole_blocks(tmp_path):
    config = small_config(tmp_path, "MODEL.DEPTH=8", "DIST.STRATEGY=fsdp2")
    precision, model = Precision(config, CPU), build_model(config, 10)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    process = Process(CPU, world_size=4, local_size=1)
    for accumulated, need in ((1, weights + 4 * block), (2, 2 * weights + 4 * block)):  # 4 * weights / 4 processes
        options = replaced(config, TRAIN={"ACCUM_ITER": accumulated})
        found = [check_memory(options, model, precision, int(need / 1.5) + one, process).found for one in (-1, 1)]
        assert ["without activations" in line for line in found] == [True, False]


def test_of_a_frozen_model_the_estimate_says_that_it_is_low(check):
    assert check()["memory"][1].startswith("about ")
    assert check("-opts", "MODEL.FREEZE=[*,!head]")["memory"][1].startswith("at least ")


def test_what_a_layer_keeps_for_its_backward_is_counted_once(tmp_path):
    config = small_config(tmp_path)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 1000), torch.nn.Sigmoid(), torch.nn.Linear(1000, 10)
    )
    kept = saved_bytes(config, model, Precision(config, CPU), 50)
    # The images, the sigmoid's output (of two layers), the logarithms of the probabilities, the targets; small change.
    assert kept == pytest.approx(50 * (4 * (64 + 1000 + 10) + 8), abs=64)


def test_weights_to_start_from_are_tried(check, tmp_path):
    def saved(name: str, num_classes: int, depth: int) -> str:
        config = dataclasses.replace(small_config(tmp_path), DATA=sets_of(tmp_path / "photos")[0].DATA)
        torch.save(build_model(replaced(config, MODEL={"DEPTH": depth}), num_classes).state_dict(), tmp_path / name)
        return str(tmp_path / name)

    other, same, head = saved("other.pth", 2, 3), saved("same.pth", 2, 2), saved("head.pth", 3, 2)
    found = check("-pretrained", other)
    assert trouble(found) == {"pretrained": WRONG} and "blocks.2." in found["pretrained"][1]
    found = check("-pretrained", head)
    assert trouble(found) == {}
    assert_names(found["pretrained"][1], "3 classes")
    assert trouble(check("-resume", same)) == {}
    assert trouble(check("-eval", "-pretrained", head)) == {"weights": WRONG}
    assert trouble(check("-resume", "auto")) == {}


def test_a_run_to_go_on_with_is_compared_with_the_settings(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    flags = ["-cfg", str(tmp_path / "small.yaml"), "-output", str(tmp_path / "o")]
    assert run("main_single_gpu.py", *flags).returncode == 0
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    found = rows(captured(*flags, "-resume", "auto", "-check"))
    assert found["resume"][0] == OK
    assert_names(found["resume"][1], "epoch 2", "step 88")
    found = rows(captured(*flags, "-resume", "auto", "-check", "-epochs", "3"))
    assert found["resume"][0] == WRONG and "TRAIN.NUM_EPOCHS: 2 -> 3" in found["resume"][1]
    deeper = ["-opts", "MODEL.DEPTH=3", "RESUME.ALLOW_CHANGED=true"]
    found = rows(captured(*flags, "-resume", "auto", "-check", *deeper))
    assert found["resume"][0] == WRONG and "blocks.2." in found["resume"][1]
    found = rows(captured(*flags, "-resume", "auto", "-check", "-eval"))
    assert found["weights"][0] == OK
    assert_names(found["weights"][1], "raw")
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def captured(*flags: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exit_code(main_single_gpu.main, list(flags))
    return said.getvalue()


def test_of_several_processes_one_looks_and_says_for_how_many(check):
    found = check("-ngpus", "3", main=main_multi_gpu.main)
    assert trouble(found) == {}
    assert_names(found["device"][1], "processes: 3")
    assert_names(found["learning rate"][1], "96 images")
    assert_names(found["memory"][1], 3)


def test_under_torchrun_there_is_one_table_and_nobody_waits(photos):
    (photos.parent / "clean.yaml").write_text(CLEAN)
    flags = ["-cfg", str(photos.parent / "clean.yaml"), "-data_path", str(photos), "-check"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    result = subprocess.run(
        [*launcher, str(ROOT / "main_multi_gpu.py"), *flags, "-output", str(photos / "o")],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert_names(rows(result.stdout)["device"][1], "processes: 2")
    assert result.stdout.count("check: 0 wrong") == 1


def test_the_command_ends_with_2_when_something_is_wrong(photos):
    (photos / "val/cat/0.png").write_bytes(b"no picture")
    (photos.parent / "clean.yaml").write_text(CLEAN)
    flags = ["-cfg", str(photos.parent / "clean.yaml"), "-data_path", str(photos), "-output", str(photos / "o")]
    result = run("main_single_gpu.py", *flags, "-check")
    assert result.returncode == 2 and result.stderr == "" and not (photos / "o").exists()
    assert trouble(rows(result.stdout)) == {"validation images": WRONG}
    assert_names(result.stdout.splitlines()[-1], "1 wrong", 0)


def test_a_misspelt_policy_of_augmentation_is_named(check):
    found = check("-opts", "TRAIN.AUTO_AUGMENT=rnd-m9")
    assert trouble(found) == {"augmentation": WRONG}
    assert_names(found["augmentation"][1], "TRAIN.AUTO_AUGMENT", "rnd", "rand?")


def test_what_a_data_set_has_to_say_is_a_row(check, photos):
    flags = ["-dataset", "imagefolder", "-data_path", str(photos), "-out", str(photos.parent / "shards")]
    assert make_shards.main([*flags, "-samples_per_shard", "8"]) == 0
    tar = photos.parent / "shards" / "train-000001.tar"
    tar.write_bytes(tar.read_bytes()[:-9000])
    given = ["-dataset", "shards", "-data_path", str(tar.parent), "-opts"]
    assert check(*given, "DATA.CUT_SHARDS=refuse")["data"][0] == WRONG
    verdict, told = check(*given, "DATA.CUT_SHARDS=read")["data set"]
    assert verdict == WARN
    assert_names(told, tar)


def test_a_cache_that_is_to_be_made_one_that_fits_and_one_that_cannot_be(check, photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    options = ["-opts", "DATA.CACHE=disk", f"DATA.CACHE_PATH={folder}"]
    verdict, told = check(*options)["cache"]
    assert verdict == OK and not folder.exists()
    assert "training images: about 1 MiB will be written to" in told and "iB are free" in told

    config, *sets = sets_of(photos, *options[1:])
    cache_image_sets(config, sets, CacheProgress(print, print))
    verdict, told = check(*options)["cache"]
    assert verdict == OK and f"training images: 1 MiB in {folder}" in told and "will be" not in told
    (index,) = folder.glob("*training*.index")
    index.write_bytes(b"")
    verdict, told = check(*options)["cache"]
    assert str(index) in told and "training images: about" in told

    (tmp_path / "file").write_text("")
    found = check("-opts", "DATA.CACHE=disk", f"DATA.CACHE_PATH={tmp_path}/file/cache")["cache"]
    assert found[0] == WARN and "DATA.CACHE_PATH" in found[1]
    monkeypatch.setattr("engine.check.cache.free_bytes", lambda place: 100)
    found = check(*options)["cache"]
    assert found[0] == WARN and "DATA.CACHE_SIDE" in found[1]


def test_looking_at_a_cache_in_memory_does_not_remove_it(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.cache.cached_images.SHARED_MEMORY", tmp_path / "memory")
    (tmp_path / "memory").mkdir()
    config, *sets = sets_of(photos, "DATA.CACHE=ram")
    parts = list(zip(("training", "validation"), sets, strict=True))
    assert "will be written" in check_cache(config, parts).found
    cached = cache_image_sets(config, sets, CacheProgress(print, print))
    # As if a kill -9 had left it there: nobody holds it.
    for image_set in cached:
        fcntl.flock(image_set.cache.locked_file, fcntl.LOCK_UN)
    assert "will be written" not in check_cache(config, parts).found
    gc.collect()
    assert len(list((tmp_path / "memory").rglob("*.data"))) == 2


def test_sets_without_a_cache_and_machines_without_memory_for_one(photos, tmp_path, monkeypatch):
    config = small_config(tmp_path, "DATA.CACHE=ram")
    parts = list(zip(("training", "validation"), load_image_sets(config), strict=True))
    assert "none of the training images, which are in memory already" in check_cache(config, parts).found
    monkeypatch.setattr("datasets.cache.cached_images.SHARED_MEMORY", tmp_path / "nowhere")
    with refused(ConfigError, "DATA.CACHE", "ram"):
        check_cache(config, parts)


def test_what_is_compiled_is_looked_for_in_the_model(check):
    options = ["-opts", "COMPILE=true", "COMPILE_SCOPE=blocks"]
    verdict, told = check(*options)["compile"]
    assert verdict == OK
    assert_names(told, "COMPILE_SCOPE blocks", "COMPILE_MODE default", 2)
    resnet = (
        "MODEL.TYPE=timm MODEL.NAME=resnet18 MODEL.PATCH_SIZE=16 MODEL.EMBED_DIM=768 MODEL.DEPTH=12 MODEL.NUM_HEADS=12"
    )
    verdict, told = check(*options, *resnet.split(), "DATA.IMAGE_SIZE=32")["compile"]
    assert verdict == WRONG
    assert_names(told, "COMPILE_SCOPE", "blocks")


def test_images_repeated_more_often_than_an_update_has_them(check):
    assert trouble(check("-opts", "TRAIN.REPEATED_AUG=64")) == {"repeats": WRONG}
