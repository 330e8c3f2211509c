"""Runs that learn features (FeatureTask): their evaluation, and the use of their weights."""

import functools
import math
import re

import pytest
import timm
import torch

from configs.values import unflatten
from datasets import Normalize, build_eval_data
from engine.tasks.feature_training import licence_of, read_labelled
from engine.tasks.features import knn_accuracy
from engine.train.distillation import Teacher
from models import build_model
from models.features import features_of
from models.weights.torch_files import read_torch
from tests.engine.tasks.features.support import NUM_PHOTOS, SMALL, draw_photos, teacher_of
from tests.support.configs import CPU
from tests.support.opened import open_sets
from tests.support.refusals import assert_names
from tests.support.runs import epochs_of, rows_of, run, run_folder, status_of, typed
from utils.distributed import Process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Return start(output, options, fault=arguments), which runs the small settings."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "features.yaml").write_text(SMALL)
    photos, labelled = draw_photos(folder / "photos"), draw_photos(folder / "labelled", 24, labelled=True)
    (photos / "trip 0" / "broken.png").write_bytes(b"no picture")
    teacher = teacher_of(folder)

    def words(output, options="", *flags):
        words = ["-cfg", folder / "features.yaml", "-data_path", photos, "-resume", "auto", "-output", output, *flags]
        words += ["-opts", f"TRAIN.TEACHER_MODEL={teacher}", f"DATA.LABELLED_PATH={labelled}", *options.split()]
        return [str(word) for word in words]

    def start(output, options="", *flags, **faults):
        return run("main_single_gpu.py", *words(output, options, *flags), faults={"draw_nothing": []} | faults)

    start.folder, start.words = folder, words
    return start


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, start):
    """Return a function that trains without interruption and returns the folder of the run."""

    @functools.cache
    def train(options=""):
        output = tmp_path_factory.mktemp("unbroken")
        start(output, options).done()
        return run_folder(output)

    return train


def scored_by_hand(start, state, suffix) -> tuple[float, float, int]:
    """Return the similarity on held-out photos, the k-NN accuracy, and the number of held-out photos.

    `state`: a checkpoint; `suffix`: "" for its raw weights, "_ema" for its EMA weights.
    """
    config = unflatten(state["config"] | {"DATA.DATA_PATH": str(start.folder / "photos")})
    teacher_state = torch.load(start.folder / "teacher.pth", weights_only=True)
    own = unflatten(teacher_state["config"])
    teacher, student = build_model(own, 3), build_model(config, 0)
    teacher.load_state_dict(teacher_state["state_dict"])
    key = f"state_dict{suffix}"
    maps = {name: each for name, each in state[key].items() if name.startswith("feature_maps.")}
    student.load_state_dict({name: each for name, each in state[key].items() if name not in maps})
    renormalized = Teacher(torch.nn.Identity(), config.DATA, own.DATA)
    renormalized.model.register_parameter("dtype", torch.nn.Parameter(torch.zeros(1)))

    def cosines(pixels):
        images = Normalize(config.DATA)(pixels)
        ours, theirs = features_of(student.eval(), images), features_of(teacher.eval(), renormalized(images))
        found = []
        for part in ("pooled", "patches"):
            mapped = torch.nn.functional.linear(
                getattr(ours, part), maps[f"feature_maps.{part}.weight"], maps[f"feature_maps.{part}.bias"]
            )
            found.append(
                torch.cosine_similarity(mapped, getattr(theirs, part), dim=-1).reshape(len(images), -1).mean(1)
            )
        return torch.stack(found).mean(0), ours.pooled

    with torch.no_grad():
        _, held_out = open_sets(config)
        found = torch.cat([cosines(each.images)[0] for each in build_eval_data(config, held_out, Process(CPU))])
        labelled = read_labelled(config)
        data = build_eval_data(config, labelled, Process(CPU))
        pooled = torch.cat([cosines(each.images)[1] for each in data]).numpy()
    return 100 * found.mean().item(), knn_accuracy(pooled, labelled.targets), len(found)


def test_knn_accuracies_of_raw_and_ema_weights_equal_those_computed_by_hand(tmp_path, start):
    """The colours of the labelled photos are faint, so that the accuracies of the two sets of weights differ."""
    faint = draw_photos(tmp_path / "faint", 120, labelled=True, strength=4)
    start(
        tmp_path / "output",
        f"DATA.LABELLED_PATH={faint} TRAIN.MODEL_EMA_WARMUP=false TRAIN.MODEL_EMA_DECAY=0.9 TRAIN.BASE_LR=0.1",
    ).done()
    folder = run_folder(tmp_path / "output")
    state, row = read_torch(folder / "last.pth"), epochs_of(folder)[-1]
    assert row["eval_knn"] != row["eval_knn_ema"]
    for suffix in ("", "_ema"):
        similarity, knn, count = scored_by_hand(start, state, suffix)
        assert row[f"eval_knn{suffix}"] == pytest.approx(knn)
        assert row[f"eval_similarity{suffix}"] == pytest.approx(similarity, abs=1e-3)
    value, epoch, loss, suffix, num_images, metric = state["progress"]["best"]
    row = epochs_of(folder)[epoch - 1]
    assert (metric, num_images) == ("knn", count) and value == pytest.approx(row[f"eval_knn{suffix}"])
    # The mean of two cosines, and the sum of two losses.
    assert loss == pytest.approx(2 - 2 * row[f"eval_similarity{suffix}"] / 100, abs=1e-5)


def test_metrics_have_similarity_and_knn_but_no_accuracy(start, unbroken):
    folder = unbroken("SAVE_STEPS=2")
    for row in rows_of(folder / "metrics.csv"):
        assert row["eval_top1"] == row["eval_top5"] == row["train_top1"] == row["eval_top1_ema"] == ""
        assert 0 < float(row["eval_similarity"]) <= 100 and 0 <= float(row["eval_knn"]) <= 100
    text = (folder / "metrics.jsonl").read_text() + (folder / "status.json").read_text()
    assert "NaN" not in text and status_of(folder)["best_metric"] == "knn"
    log = (folder / "log.txt").read_text().split("writing to")[1]
    assert not re.search(r"\bAcc\b|\bnan\b|\bclass(es)?\b", log)


def test_similarity_decides_the_best_epoch_without_labelled_photos(tmp_path, start):
    start(tmp_path, "DATA.LABELLED_PATH=none", "-budget", "30m").done()
    folder = run_folder(tmp_path)
    best, rows = status_of(folder)["best"], epochs_of(folder)
    assert rows[0]["epoch"] == -1 and rows[0]["eval_similarity"] < best["similarity"] and rows[0]["train_loss"] is None
    similarities = [max(each["eval_similarity"], each["eval_similarity_ema"]) for each in rows[1:]]
    assert best["similarity"] == pytest.approx(max(similarities), abs=1e-3) and "eval_knn" not in rows[1]


def test_evaluation_of_a_run_repeats_its_scores(tmp_path, start, unbroken):
    folder = unbroken("SAVE_STEPS=2")
    typed("main_single_gpu.py", "-eval", "-resume", folder / "last.pth", "-output", tmp_path).done()
    status, row = status_of(run_folder(tmp_path)), epochs_of(folder)[-1]
    for name, suffix in (("raw", ""), ("ema", "_ema")):
        assert status[name]["similarity"] == pytest.approx(row[f"eval_similarity{suffix}"], abs=1e-3)
        assert status[name]["knn"] == pytest.approx(row[f"eval_knn{suffix}"], abs=1e-3)
        assert status[name]["num_images"] < NUM_PHOTOS and not {"top1", "top5"} & status[name].keys()


def test_fine_tuning_loads_the_features_but_not_the_maps(tmp_path, start, unbroken):
    best = unbroken("SAVE_STEPS=2") / "best.pth"
    exported = tmp_path / "best.safetensors"
    typed("scripts/export.py", best, "-output", exported).done()
    for number, weights in enumerate((best, exported)):
        output = tmp_path / str(number)
        words = ["-cfg", "configs/finetune.yaml", "-pretrained", weights, "-data_path", start.folder / "labelled"]
        words += ["-batch_size", "4", "-epochs", "1", "-num_workers", "0", "-output", output]
        words += ["-opts", *(f"TRAIN.{name}=0" for name in ("BASE_LR", "WARMUP_START_LR", "END_LR"))]
        said = typed("main_single_gpu.py", *words).done().stdout
        assert "head starts from zeros: the file has none" in said
        tuned, state = read_torch(run_folder(output) / "last.pth")["state_dict"], read_torch(best)
        learned = state[state["preferred"]]
        same = {name for name in learned if not name.startswith("feature_maps.")}
        assert tuned.keys() == same | {"head.weight", "head.bias"}
        assert all(torch.equal(tuned[name], learned[name]) for name in same)


def test_commands_that_need_classes_refuse_a_run_of_features(tmp_path, start, unbroken):
    best = unbroken("SAVE_STEPS=2") / "best.pth"
    photo = start.folder / "photos" / "trip 0" / "000.png"
    typed("scripts/predict.py", best, photo).refused("TRAIN.OBJECTIVE", "-pretrained")
    for to in (["-output", tmp_path / "x.onnx"], ["-to", "hf", "-output", tmp_path / "x"]):
        typed("scripts/export.py", best, *to).refused("TRAIN.OBJECTIVE", "-pretrained")


def test_licence_of_the_teacher_is_printed(tmp_path, start):
    assert_names(start(tmp_path).done().stdout, "licence of the teacher's weights")
    name = "vit_base_patch14_dinov2.lvd142m"
    assert licence_of(name) == timm.get_pretrained_cfg(name).license


def test_features_of_labelled_data_ignore_the_labels(tmp_path, start):
    labelled = start.folder / "labelled"
    words = ("-dataset", "imagefolder", "-data_path", str(labelled))
    start(tmp_path, "DATA.LABELLED_PATH=none", *words).done()
    rows = epochs_of(run_folder(tmp_path))
    assert rows[-1]["eval_similarity"] > rows[0]["eval_similarity"] and rows[0]["eval_top1"] is None
    assert "classes" not in (run_folder(tmp_path) / "log.txt").read_text().split("writing to")[1]
    assert math.isfinite(rows[-1]["train_loss"])


def test_knn_accuracy_uses_features_before_the_maps(tmp_path, start, monkeypatch):
    shapes = []
    monkeypatch.setattr("engine.tasks.features.knn_accuracy", lambda each, _: shapes.append(each.shape) or 50.0)
    typed("main_single_gpu.py", *start.words(tmp_path, "TRAIN.NUM_EPOCHS=1")).done()
    assert set(shapes) == {(24, 16)}  # the width of the student; the teacher has 24
