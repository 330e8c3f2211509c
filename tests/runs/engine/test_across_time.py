"""A run meets changed data, settings and files: classes by name, splits, checkpoints without their YAML file."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from PIL import Image

from configs.load import load as read_settings
from datasets.split.trained_on import holds_out_no_more
from engine.plan import TrainPlan
from engine.quick_checks import OK, WARN
from engine.record.saved_files import read_table
from engine.record.saved_run import SavedRun
from engine.report.plot import Plotter
from engine.settings import load_settings
from engine.weights_lines import warn_of_overlap
from scripts import export
from tests.runs.engine.check.small_photos import CLEAN
from tests.support.cases import cases_of, names_of, value_of
from tests.support.configs import replaced
from tests.support.image_sets import draw_photos
from tests.support.refusals import assert_names
from tests.support.runs import rows, run, run_folder, status_of, typed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signal_handlers")]


def halfstep(*flags: str | Path, exit_with: int = 0) -> str:
    """Return the output of main_single_gpu.py, which draws no curves."""
    with mock.patch.object(Plotter, "draw"):
        ended = typed("main_single_gpu.py", *flags)
    assert ended.returncode == exit_with, ended.printed
    return ended.printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with clean.yaml, photos/{train,val}/{bird,cat,dog} and the output of a run on them."""
    folder = tmp_path_factory.mktemp("trained")
    for part in ("train", "val"):
        draw_photos(folder / "photos" / part, "bird", "cat", "dog")
    (folder / "clean.yaml").write_text(CLEAN)
    halfstep(*settings(folder), "-output", folder / "output", "-epochs", "4")
    return folder


def settings(folder: Path) -> list:
    more = ["TRAIN.WARMUP_EPOCHS=0", "TRAIN.BASE_LR=1e-2", "DATA.BATCH_SIZE=6"]
    return ["-cfg", folder / "clean.yaml", "-data_path", folder / "photos", "-opts", *more]


@pytest.fixture
def again(trained, tmp_path) -> Path:
    """Return a copy of `trained` that a test may change."""
    shutil.copytree(trained, tmp_path / "again")
    return tmp_path / "again"


def rename(folder: Path, old: str, new: str) -> None:
    for part in ("train", "val"):
        (folder / "photos" / part / old).rename(folder / "photos" / part / new)


@pytest.mark.long
def test_resume_refuses_renamed_class_unless_allowed(again):
    rename(again, "cat", "zcat")  # sorts last
    resume = [*settings(again), "-output", again / "output", "-epochs", "5", "-resume", "auto"]
    before = (run_folder(again / "output") / "last.pth").read_bytes()
    for more in ((), ("-check",)):
        said = halfstep(*resume, *more, exit_with=2)
        assert_names(
            said, "DATA.DATA_PATH", "new: zcat", "gone: cat", "-pretrained", "RESUME.ALLOW_CHANGED=[CLASS_NAMES]"
        )
    assert (run_folder(again / "output") / "last.pth").read_bytes() == before
    allowed = ["-opts", "RESUME.ALLOW_CHANGED=[CLASS_NAMES]"]
    said = halfstep(*resume, *allowed, "TRAIN.SMOOTHING=0.1", "-check", exit_with=2)
    assert_names(rows(said)["resume"][1], "RESUME.ALLOW_CHANGED=[CLASS_NAMES,TRAIN.SMOOTHING]")
    halfstep(*resume, *allowed)
    state = torch.load(run_folder(again / "output") / "last.pth", weights_only=True)
    assert state["class_names"] == ["bird", "zcat", "dog"]
    assert state["progress"]["best"][0] == 100, "the labels were permuted"


@pytest.mark.long
@pytest.mark.parametrize("words", cases_of("mistakes-of_a_checkpoint"))
def test_error_for_checkpoint_mismatch_names_the_setting(trained, tmp_path, words):
    where = trained / "output" if "auto" in words else tmp_path
    given = *settings(trained), *words.format(last=checkpoint(trained)).split(), "-output", where, "-epochs", "5"
    typed("main_single_gpu.py", *given).refused(*names_of("mistakes-of_a_checkpoint", words))


def test_finished_run_can_be_extended_with_allowed_changes(again):
    resume = [*settings(again), "-output", again / "output", "-resume", "auto"]
    said = halfstep(*resume, "-epochs", "6")
    assert "Epoch[004/006]" not in said and "Epoch[006/006]" in said
    assert_names(said, "6 epochs instead of 4")
    changed = ["-opts", "TRAIN.SMOOTHING=0.1", "TRAIN.CLASS_WEIGHTS=auto"]
    changed += ["RESUME.ALLOW_CHANGED=[TRAIN.SMOOTHING,TRAIN.CLASS_WEIGHTS]"]
    words = map(str, [*resume, "-epochs", "5", *changed])
    said = run("main_multi_gpu.py", *words, processes=2).done().printed
    assert "Epoch[" not in said
    assert_names(said, "6 epochs", "TRAIN.SMOOTHING: 0.0 -> 0.1", "warning: resume: TRAIN.CLASS_WEIGHTS")
    assert said.count("resume: TRAIN.CLASS_WEIGHTS") == 1, "only the first process says it"


def test_resume_refuses_a_different_validation_split(again):
    photos = again / "photos"
    shutil.move(photos / "train", again / "flat")
    shutil.rmtree(photos)
    (again / "flat").rename(photos)
    resume = [*settings(again), "-output", again / "output", "-resume", "auto"]
    for words, names in (([], ["RESUME.ALLOW_CHANGED"]), (["DATA.VAL_FRACTION=0.2"], ["DATA.VAL_FRACTION: 0.1"])):
        said = halfstep(*resume, "-opts", "DATA.CROP_PCT=0.875", *words, "-check", exit_with=2)
        assert_names(said, "SPLIT: folders", *names)


def test_start_without_cfg_is_refused_and_error_names_weights_or_run(tmp_path):
    foreign = {"state_dict": {"head.weight": torch.ones(2, 2)}, "config": {"depth": 2}, "class_names": {0: "cat"}}
    torch.save(foreign, tmp_path / "foreign.pth")
    for flags in (["-eval", "-pretrained"], ["-resume"], ["-pretrained"]):
        for name in ("foreign.pth", "nothing.pth"):
            said = halfstep(*flags, tmp_path / name, exit_with=2)
            is_missing_run = flags == ["-resume"] and name == "nothing.pth"
            wanted = "-resume" if is_missing_run else "-cfg" if name == "foreign.pth" else "MODEL"
            assert_names(said, wanted, tmp_path / name)
    for flags in (["-resume", "auto"], ["-eval", "-resume", "auto"]):
        said = halfstep(*flags, "-output", tmp_path / "none", "-name", "mine", exit_with=2)
        assert_names(said, "-resume auto", tmp_path / "none/mine", "-cfg")


def test_renamed_class_folder_keeps_its_validation_split(tmp_path):
    draw_photos(tmp_path / "photos", "bird", "cat", "dog", count=20)
    (tmp_path / "clean.yaml").write_text(CLEAN)
    flags = [*settings(tmp_path), "DATA.VAL_FRACTION=0.3", "-output", tmp_path / "output", "-epochs", "1"]
    halfstep(*flags)
    best, allowed = checkpoint(tmp_path, "best.pth"), ["-opts", "RESUME.ALLOW_CHANGED=[CLASS_NAMES]"]
    (tmp_path / "photos/cat").rename(tmp_path / "photos/tomcat")
    for row, words in {
        "overlap": ["-pretrained", best, "-output", tmp_path / "new"],
        "evaluation": ["-eval", "-pretrained", best, *allowed],
        "resume": ["-resume", best.with_name("last.pth"), *allowed],
    }.items():
        verdict, _ = rows(halfstep(*flags, *words, "-check")).get(row, (OK, ""))
        assert verdict == OK, row


def checkpoint(folder: Path, name: str = "last.pth") -> Path:
    return run_folder(folder / "output") / name


def top1(said: str) -> float:
    (found,) = re.findall(r"^top-1 (\S+)%", said, re.M)
    return float(found)


@pytest.mark.long
def test_evaluation_maps_classes_by_name_to_the_checkpoint(again):
    said = halfstep(*settings(again), "-output", again / "o", "-eval", "-resume", checkpoint(again))
    assert top1(said) == 100
    for number, part in enumerate(("val", "train")):  # images of a class added after the training
        draw_photos(again / "photos" / part, "zebra", count=5 + number)
    said = halfstep(*settings(again), "-output", again / "more", "-eval", "-pretrained", checkpoint(again))
    assert top1(said) == 100 and "warning: 5 images" in said and "zebra" in said
    assert json.loads((run_folder(again / "more") / "results.json").read_text())["left_out"] == {"zebra": 5}
    shutil.rmtree(again / "photos" / "val" / "zebra")
    shutil.rmtree(again / "photos" / "train")
    shutil.rmtree(again / "photos" / "val" / "bird")
    said = halfstep(*settings(again), "-output", again / "o", "-eval", "-pretrained", checkpoint(again))
    assert top1(said) == 100, said
    assert_names(said, "2", "3")
    (again / "photos" / "val" / "dog").rename(again / "photos" / "val" / "hound")
    for more in ((), ("-check",)):
        flags = [*settings(again), "-output", again / "o", "-eval", "-pretrained", checkpoint(again), *more]
        assert_names(halfstep(*flags, exit_with=2), "new: hound", "DATA.DATA_PATH")


@pytest.mark.long
def test_pretrained_start_with_added_class_keeps_accuracy(again):
    for number, path in enumerate(sorted((again / "photos" / "val").rglob("*.png"))):
        Image.new("RGB", (8, 8), (number * 12,) * 3).save(path)  # some images of every class are misclassified
    old = [*settings(again), "-output", again / "o", "-eval", "-resume", checkpoint(again)]
    draw_photos(again / "photos" / "train", "zebra")
    said = halfstep(*settings(again), "-output", again / "new", "-pretrained", checkpoint(again), "-check")
    assert_names(said, "3 of 4 classes", "new: zebra")
    still = ["-opts", "TRAIN.BASE_LR=0", "TRAIN.END_LR=0", "TRAIN.WARMUP_START_LR=0"]  # keeps the initial weights
    flags = [*settings(again), "-output", again / "new", "-epochs", "1", "-pretrained", checkpoint(again), *still]
    assert_names(halfstep(*flags), "3 of 4 classes", "new: zebra")
    state = torch.load(run_folder(again / "new") / "last.pth", weights_only=True)
    assert state["class_names"] == ["bird", "cat", "dog", "zebra"]
    assert 0 < state["metric"] < 100 and f"{state['metric']:.3f}" == f"{top1(halfstep(*old)):.3f}"


@pytest.mark.long
def test_scoring_initial_weights_leaves_training_bitwise_unchanged(again, monkeypatch):
    old = top1(halfstep(*settings(again), "-output", again / "o", "-eval", "-pretrained", checkpoint(again)))
    more = ["-epochs", "1", "-pretrained", checkpoint(again), "-opts", "TRAIN.BASE_LR=2"]  # makes the weights worse
    more += ["MODEL.DROPOUT=0.1", "TRAIN.MODEL_EMA=true"]
    states = []
    for name in ("scored", "not"):
        said = halfstep(*settings(again), "-output", again / name, *more)
        run = run_folder(again / name)
        saved, status = SavedRun.open(run), status_of(run)
        states.append(torch.load(run / "last.pth", weights_only=True)["state_dict"])
        assert [row["epoch"] for row in saved.epochs] == [0]
        if name == "scored":
            assert saved.before["eval_top1"] == pytest.approx(old) and status["before"]["top1"] == pytest.approx(old)
            assert saved.best.value < old and said.count("before training") == 3, (
                "printed at the start, when it got worse, and in the last line"
            )
            assert read_table(run / "metrics.csv")[0]["epoch"] == "-1"
            said = halfstep("-resume", run, "-epochs", "2", "-opts", "RESUME.ALLOW_CHANGED=[TRAIN.NUM_EPOCHS]")
            assert said.count("before training") == 2, "in the warning and in the last line"
            assert SavedRun.open(run).before == saved.before and status_of(run)["before"] == status["before"]
            halfstep("-resume", run)  # it is finished
            assert status_of(run)["before"] == status["before"]
        else:
            assert not saved.before and "before" not in status
        monkeypatch.setattr(TrainPlan, "starts_from_its_classes", False)
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


@pytest.mark.long
def test_check_warns_if_pretraining_saw_validation_images(again):
    flags = [*settings(again), "-output", again / "new", "-pretrained", checkpoint(again), "-check"]
    assert "overlap" not in rows(halfstep(*flags))
    (again / "photos" / "val").rename(again / "photos" / "test")
    said = halfstep(*flags)
    verdict, found = rows(said)["overlap"]
    assert verdict == WARN
    assert_names(found, "MODEL.PRETRAINED", "val", "test")


def test_weights_of_a_fold_give_a_warning_if_it_was_drawn_from_other_images():
    split = {"rule": "folds", "training": "photos", "validation": "photos", "fraction": 0.5, "seed": 0}
    split |= {"folds": 2, "fold": 0}
    record = {"class_names": ["ant"], "split": split, "validation": {"num_images": 5, "digest": "0"}}
    prior = SimpleNamespace(saved=None)
    inputs = SimpleNamespace(record=record, prior=prior, source=("MODEL.PRETRAINED", "best.pth"))
    held_out = SimpleNamespace(split=split, is_listing=True, class_folders=frozenset())
    plan = SimpleNamespace(inputs=inputs, classes=["ant"], eval_set=held_out, validation=record["validation"])
    plan.is_measured = True
    assert warn_of_overlap(plan) == []
    plan.validation = {"num_images": 5, "digest": "1"}
    (found,) = warn_of_overlap(plan)
    assert_names(found, "MODEL.PRETRAINED", "best.pth", "other images")


@pytest.mark.parametrize("case", cases_of("splits_that_hold_out_no_more"))
def test_split_comparison_detects_images_no_longer_held_out(case):
    here, there = map(yaml.safe_load, case.split(" after "))
    split = {"rule": "hash", "training": "photos", "validation": "photos", "fraction": 0.1, "seed": 0}
    assert str(holds_out_no_more(split | here, split | there)) == value_of("splits_that_hold_out_no_more", case)
    assert holds_out_no_more(split | here, {}) == (here.get("rule") == "folders")


@pytest.mark.long
def test_resume_writes_final_status_of_a_run_killed_after_training(again):
    folder = run_folder(again / "output")
    before = status_of(folder)
    killed = {key: value for key, value in before.items() if key != "exit_code"} | {"state": "training"}
    (folder / "status.json").write_text(json.dumps(killed))
    assert "finished" in rows(halfstep("-resume", folder, "-check"))["resume"][1]
    assert status_of(folder) == killed
    halfstep("-resume", folder)
    changing = {"time", "started", "heartbeat", "pid", "about"}
    assert {key: value for key, value in status_of(folder).items() if key not in changing} == {
        key: value for key, value in before.items() if key not in changing
    }


@pytest.mark.long
def test_resume_from_copied_finished_checkpoint_creates_no_folder(again):
    shutil.copytree(run_folder(again / "output"), again / "moved")
    said = halfstep("-resume", again / "moved", "-output", "/proc/nowhere", "-epochs", "5", "-check")
    assert_names(rows(said)["output"][1], again / "moved")
    said = halfstep("-resume", checkpoint(again).rename(again / "last.pth"), "-output", again / "new")
    assert "writing to" not in said, said
    assert not (again / "new").exists()


@pytest.mark.long
@pytest.mark.parametrize("flag", ["-pretrained", "-resume"])
def test_checkpoint_is_evaluated_without_cfg_on_another_data_path(trained, tmp_path, flag, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "photos" / "val", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "elsewhere" / "bird")
    for path in (checkpoint(trained), exported(checkpoint(trained), tmp_path)):
        said = halfstep("-eval", flag, path, "-data_path", tmp_path / "elsewhere")
        assert top1(said) == 100, said
        assert_names(said, path)
    halfstep("-eval", flag, checkpoint(trained), "-data_path", tmp_path / "elsewhere", "-check")


def exported(path: Path, folder: Path) -> Path:
    assert export.main([str(path), "-output", str(folder / "best.safetensors")]) == 0
    return folder / "best.safetensors"


@pytest.mark.long
def test_run_resumes_from_its_folder_without_cfg(again):
    folder = run_folder(again / "output")
    before = read_settings(["-cfg", str(folder / "config.yaml")]).config
    halfstep("-resume", folder, "-epochs", "5", "-check")
    said = halfstep("-resume", folder, "-epochs", "5")
    assert "Epoch[005/005]" in said, said
    assert torch.load(folder / "last.pth", weights_only=True)["epoch"] == 4
    after = read_settings(["-cfg", str(folder / "config.yaml")]).config
    assert after == replaced(before, TRAIN={"NUM_EPOCHS": 5})
    assert f"# checkpoint {folder}" in (folder / "config.yaml").read_text()


def test_new_run_from_checkpoint_takes_only_its_recipe_settings(again, monkeypatch):
    monkeypatch.chdir(again)
    draw_photos(again / "photos" / "train", "zebra")
    state = torch.load(checkpoint(again), weights_only=True)
    state["config"] |= {"MODEL.NUM_CLASSES": 3, "MODEL.FREEZE": ["patch_embed.*"]}
    torch.save(state, "three.pth")
    said = halfstep("-pretrained", "three.pth", "-data_path", "photos", "-epochs", "1", "-output", "new")
    assert_names(said, "3 of 4 classes", "new: zebra")
    made = (run_folder(again / "new") / "config.yaml").read_text()
    for line in (
        r"BATCH_SIZE: 6 +# checkpoint",
        r"NUM_EPOCHS: 1 +# flag -epochs",
        r"PATCH_SIZE: 4 +# checkpoint",
        r"FREEZE: \[\]",
    ):
        assert re.search(line, made), made


def test_only_resume_inherits_the_cache_setting(again):
    state = torch.load(checkpoint(again), weights_only=True)
    torch.save(state | {"config": state["config"] | {"DATA.CACHE": 256}}, path := again / "cached.pth")
    for flags, cache in ((["-resume"], 256), (["-eval", "-pretrained"], "none"), (["-pretrained"], "none")):
        assert load_settings([*flags, str(path), "-data_path", str(again / "photos")]).config.DATA.CACHE == cache


@pytest.mark.parametrize(
    ("known", "expected"), [(["eel", "dog", "cat"], True), (["dog", "cat"], True), (["cat", "eel"], False), ([], False)]
)
def test_start_is_scored_if_the_weights_know_all_classes_of_the_data(known, expected):
    plan = SimpleNamespace(classes=["cat", "dog"], inputs=SimpleNamespace(record={"class_names": known}))
    assert TrainPlan.starts_from_its_classes.fget(plan) is expected
