"""The choice of -resume: the newest complete checkpoint of several runs, with its own settings, or foreign weights."""

import contextlib
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from configs.load import load
from configs.schema import Config
from engine.checkpoint.compare import changes, refuse_changes
from engine.checkpoint.find import find_newest, newest_in, read_checkpoint
from engine.checkpoint.format import numbered, remove_old, save_checkpoint
from engine.checkpoint.resume import bad_images_of, comparable, drop_tensors, find_checkpoint
from tests.support.cases import cases_of, names_of
from tests.support.configs import replaced, small_config
from tests.support.image_sets import draw
from tests.support.loading import order
from tests.support.refusals import assert_names, flip, refused
from tests.support.run_hash import run_hash
from tests.support.runs import Ended, run_folder, typed
from tests.support.trainers import make_trainer, update
from utils.errors import ConfigError
from utils.log import Log

pytestmark = pytest.mark.slow

SPLIT = {"rule": "hash"}


def start(output: Path, *words: str, **options) -> Ended:
    """Run two short epochs, with the settings file next to the output folder."""
    return typed(
        "main_single_gpu.py", "-cfg", str(output.parent / "small.yaml"), "-output", str(output), *words, **options
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml) -> Path:
    """Return the output of a run of two epochs, with a checkpoint for each."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(small_yaml.read_text().replace("BATCH_SIZE: 32", "BATCH_SIZE: 80"))
    ended = start(folder / "o", "-resume", "auto", "-opts", "SAVE_FREQ=1").done()
    assert_names(ended.stdout, "resume", folder / "o")  # there was nothing to resume
    return folder / "o"


@pytest.fixture
def again(trained, tmp_path) -> Path:
    """Return a copy of it that a test may change."""
    shutil.copytree(trained.parent, tmp_path / "again")
    return tmp_path / "again/o"


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def test_saved_settings_do_not_contain_the_resume_flag(trained):
    assert load(["-cfg", str(run_folder(trained) / "config.yaml")]).config.MODEL.RESUME is None
    assert "-resume" not in (run_folder(trained) / "config.yaml").read_text()


def test_resume_auto_skips_a_damaged_checkpoint(again):
    last = run_folder(again) / "last.pth"
    before = run_hash(last.parent)
    flip(last, last.stat().st_size // 2)
    ended = start(again, "-resume", "auto").done()
    assert_names(ended.stdout, last, "previous.pth", "epoch 1")
    assert run_hash(last.parent) == before


@pytest.mark.usefixtures("here")
def test_resume_error_names_the_missing_run():
    Path("output/empty").mkdir(parents=True)
    for name in ("output/nothere", "output/empty"):
        found = typed("main_single_gpu.py", "-resume", name).refused("-resume", name, "-resume auto")
        assert "-cfg" not in found.printed
    Path("output/empty/last.pth").write_bytes(b"weights")
    typed("main_single_gpu.py", "-resume", "output/empty").refused("-resume", "last.pth", "none of its 1 checkpoints")


def test_refused_resume_logs_the_reason(again):
    log, words = run_folder(again) / "log.txt", ["-resume", str(run_folder(again)), "-opts"]
    before = log.read_text()
    refused = typed("main_single_gpu.py", *words, "TRAIN.OPTIMIZER.NAME=SGD").refused("TRAIN.OPTIMIZER.NAME")
    started = [line[20:] for line in log.read_text().removeprefix(before).splitlines()]
    assert started[-len(refused.stderr.splitlines()) :] == refused.stderr.splitlines()
    ended = typed("main_single_gpu.py", *words, "TRAIN.NUM_EPOCHS=2").done()
    assert log.read_text().splitlines()[-1][20:] in ended.stdout.splitlines(), "a start without a mistake logs none"


@pytest.mark.parametrize(
    ("name", "words"), [("weights.safetensors", ["weights", "-last_epoch", "2"]), ("timm.pth.tar", ["timm.pth.tar"])]
)
def test_resume_from_foreign_weights_continues_after_their_last_epoch(again, name, words):
    """Like PaddleViT's -resume weights -last_epoch N. timm's files contain the epoch, counted from 0."""
    weights, path = read(run_folder(again) / "last.pth")["state_dict"], again.parent / name
    if name.endswith(".tar"):
        torch.save({"epoch": 1, "arch": "vit", "state_dict": weights}, path)
    else:
        save_file(weights, path)
    ended = start(again.parent / "other", "-epochs", "3", "-resume", str(again.parent / words[0]), *words[1:]).done()
    assert "Epoch[003/003]" in ended.stdout and "Epoch[002/003]" not in ended.stdout
    assert_names(ended.stdout, "epoch 3", "optimizer")


def test_last_epoch_flag_must_match_the_checkpoint(again):
    assert [start(again, "-resume", "auto", "-last_epoch", epoch).returncode for epoch in "12"] == [2, 0]


@pytest.mark.parametrize("before, now", [("none", "disk"), ("none", 64), (64, "none"), (64, 48)])
def test_only_caches_with_the_same_pixels_replace_each_other(before, now):
    found = changes({"DATA.CACHE": before}, {"DATA.CACHE": now})
    assert list(found) == ([] if now == "disk" else ["DATA.CACHE"])


@pytest.mark.parametrize("case", cases_of("changes_on_resume"))
def test_allowed_changes_on_resume_are_reported(case):
    changed, now = map(yaml.safe_load, case.split(" now "))
    allowed = {"ALLOW_CHANGED": ("GLOBAL_BATCH", "AUGMENTATION")}
    config = replaced(Config(), TRAIN=now | {"LAST_EPOCH": 2}, RESUME=allowed)
    saved = comparable(replaced(config, TRAIN={"NUM_EPOCHS": 300}), order()) | changed
    state = {"epoch": 1, "step": 30, "config": saved, "split": SPLIT, "progress": {"choices": []}}
    found = refuse_changes(config, order(), SPLIT, state, Path("last.pth"))
    assert_names("\n".join(found) or "(nothing)", *names_of("changes_on_resume", case))
    state["progress"]["choices"] = [[20, 40]]
    with contextlib.nullcontext() if "GLOBAL_BATCH" not in changed else refused(ConfigError, "TRAIN.BUDGET"):
        refuse_changes(config, order(), SPLIT, state, Path("last.pth"))


def test_advice_to_allow_changes_names_those_that_are_already_allowed():
    changed = {"TRAIN.SMOOTHING": 0.3, "TRAIN.GRAD_CLIP": 7.0}
    state = {"epoch": 1, "step": 30, "config": comparable(Config(), order()) | changed, "split": SPLIT, "progress": {}}
    config = replaced(Config(), RESUME={"ALLOW_CHANGED": ("TRAIN.SMOOTHING",)})
    with refused(ConfigError, "TRAIN.GRAD_CLIP", "TRAIN.SMOOTHING"):
        refuse_changes(config, order(), SPLIT, state, Path("last.pth"))


def test_resume_refuses_unknown_saved_setting():
    state = {"epoch": 1, "step": 30, "config": comparable(Config(), order()) | {"DATA.LATER": 5}, "progress": {}}
    with refused(ConfigError, "last.pth", "DATA.LATER", "does not know", "-pretrained"):
        refuse_changes(Config(), order(), SPLIT, state, Path("last.pth"))


def test_saved_indices_of_bad_images_are_ignored_for_changed_images():
    saved = {"config": {"NUM_IMAGES": 5}, "bad_images": [3]}
    assert [bad_images_of(saved, 5), bad_images_of(saved, 6), bad_images_of({}, 5)] == [[3], [], []]
    names = "names of the training images"
    known = [bad_images_of(saved | {"trained_on": {names: "aa"}}, 5, {names: digest}) for digest in ("aa", "bb")]
    assert known == [[3], []]


def test_last_epoch_gets_a_numbered_checkpoint_despite_save_freq(again):
    start(again.parent / "other", "-epochs", "3", "-opts", "SAVE_FREQ=2").done()
    names = [path.name for path in numbered(run_folder(again.parent / "other"))]
    assert names == ["checkpoint-3.pth", "checkpoint-2.pth"]


@pytest.mark.long
def test_resume_ignores_pretrained_file_and_evaluation_ignores_training_settings(again):
    weights, second = run_folder(again) / "best.pth", again.parent / "second"
    words = ["-pretrained", str(weights)]
    begun = start(second, *words, faults={"signal_at": [2, signal.SIGTERM, [0]]})
    assert begun.returncode == 128 + signal.SIGTERM, begun.stderr
    weights.unlink()
    start(second, *words, "-resume", "auto").done()
    training_only = ["-opts", "DIST.STRATEGY=fsdp2", "PRECISION.MODE=naive"]
    start(second, "-amp", "-eval", "-resume", str(run_folder(second) / "last.pth"), *training_only).done()


CHECK = ("-check", "-check_images", "10")
USES = {  # {command: (its words, and the checkpoint in the run whose weights it uses)}
    "predict": ("scripts/predict.py", ["RUN", "digit.png", "-json", "found.json"], "best.pth"),
    "export": ("scripts/export.py", ["RUN", "-output", "found.safetensors"], "best.pth"),
    "report": ("scripts/report.py", ["RUN", "-output", "found.html"], ""),
    "compare": ("scripts/compare.py", ["RUN", "other"], ""),
    "doctor": ("scripts/doctor.py", ["RUN", "-amp_dtype", "bfloat16"], ""),
    "-pretrained": ("main_single_gpu.py", ["-pretrained", "RUN", *CHECK], "best.pth"),
    "-eval": ("main_single_gpu.py", ["-eval", "-pretrained", "RUN", *CHECK], "best.pth"),
    "-eval -resume": ("main_single_gpu.py", ["-eval", "-resume", "RUN", *CHECK], "best.pth"),
    "-resume": ("main_single_gpu.py", ["-resume", "RUN", "-epochs", "3", *CHECK], "last.pth"),
}


@pytest.mark.parametrize("use", USES)
def test_every_command_accepts_run_folder_weights_file_or_latest(again, use, monkeypatch):
    program, words, weights = USES[use]
    monkeypatch.chdir(again.parent)
    again.rename("output")
    newest = run_folder(Path("output"))
    shutil.copytree(newest, "other")
    older = shutil.copytree(newest, Path("output/train-29991231-00-00-00"))  # newer by its name, which does not count
    os.utime(older / "config.yaml", (1, 1))
    Path("output/eval-1").mkdir()
    Path("output/eval-1/config.yaml").write_text("EVAL: true")  # has no checkpoint
    draw(Path("digit.png"))
    for given in (str(newest), str(newest / "best.pth"), "latest"):
        said = typed(program, *(given if word == "RUN" else word for word in words)).done().printed
        is_file = given.endswith("best.pth")
        assert str(newest / ("best.pth" if is_file else weights)) in said if weights else str(older) not in said


def save(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        torch.save({"step": 1}, folder / name)
    return folder


def test_numbered_checkpoints_are_sorted_numerically(tmp_path):
    save(tmp_path, *(f"checkpoint-{number}.pth" for number in (8, 9, 10, 11)))
    assert newest_in(tmp_path, pytest.fail).name == "checkpoint-11.pth"
    remove_old(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10.pth", "checkpoint-11.pth"}


def test_resume_auto_picks_newest_run_by_name(tmp_path):
    """Clocks jump, so file dates do not count. A copy may have a suffix after its date."""
    newest, copy = "train-20260103-00-00-00", "train-20260104-00-00-00-backup"
    for name in (newest, "train-20260102-23-59-59", "eval-20260105-00-00-00", "thesis"):
        save(tmp_path / name, "last.pth")
    for number in (2, 3, 10):  # numbers of runs that started in the same second
        save(tmp_path / f"{newest}.{number}", "last.pth")
    assert find_newest(str(tmp_path), pytest.fail) == tmp_path / f"{newest}.10" / "last.pth"
    save(tmp_path / copy, "last.pth")
    assert find_newest(str(tmp_path), pytest.fail) == tmp_path / copy / "last.pth"
    assert find_newest(str(tmp_path / "nothing"), pytest.fail) is None


@pytest.mark.parametrize(("evaluates", "file"), [(False, "last.pth"), (True, "best.pth")])
def test_resume_takes_newest_checkpoint_but_evaluation_takes_best_weights(tmp_path, evaluates, file):
    dated, named = (save(tmp_path / name, "last.pth", "best.pth") for name in ("train-20260103-00-00-00", "mine"))
    for resume, name, folder in (("auto", "", dated), ("auto", "mine", named), (str(named), "", named)):
        config = replaced(small_config(tmp_path), MODEL={"RESUME": resume})
        config = replace(config, SAVE=str(tmp_path), EVAL=evaluates, NAME=name)
        assert find_checkpoint(config, Log(1)) == folder / file


@pytest.mark.parametrize("name", ["AdamW", "SGD", "lamb"])
def test_checkpoint_file_is_unmapped_after_its_state_is_loaded(tmp_path, name):
    trainer = make_trainer(small_config(tmp_path, "TRAIN.MODEL_EMA=true", f"TRAIN.OPTIMIZER.NAME={name}"))
    update(trainer, 2)
    save_checkpoint(tmp_path / "last.pth", trainer.state_dict())
    is_mapped = lambda: str(tmp_path / "last.pth") in Path("/proc/self/maps").read_text()  # noqa: E731
    state = read_checkpoint(tmp_path / "last.pth", lazily=True)
    assert is_mapped(), "processes of a machine share the pages of the file"
    trainer.load_state_dict(state)
    drop_tensors(state)
    assert not is_mapped()
