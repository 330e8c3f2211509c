"""A run stores statistics of its training images with its calibration, and -unknown rejects photos that do not fit them."""

import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from extras.strangers.known import MOST_BYTES, Distance, FeaturePair, Known, Tap, from_plain, to_plain, widths_within
from PIL import Image

from engine.features import compute
from engine.predict.output import UNKNOWN, UNSURE, Mark
from engine.predict.predictor import Guess, Prediction
from extras.strangers import learn
from models.weights.torch_files import read_torch
from tests.support.refusals import assert_names
from tests.support.run_hash import state_hash
from tests.support.runs import run, run_folder, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow

SAVED = Path(__file__).parents[2] / "data/strangers"  # a run of 2.1.0 on the digits, and its scores of the fours


def drawn(count: int, seed: int, place: float = 0.0) -> FeaturePair:
    """Return features of `count` images as arrays. `place`: the mean of the features of the middle."""
    rng = np.random.default_rng(seed)
    read = rng.normal(size=(count, 6)) * [1, 2, 3, 4, 5, 6] + 20 * np.eye(6)[np.arange(count) % 3]
    return FeaturePair(read.astype(np.float32), rng.normal(place, 1, (count, 8)).astype(np.float32))


def tensors(features: FeaturePair) -> FeaturePair:
    return FeaturePair(*map(torch.from_numpy, features))


def fitted(num_train: int = 600, num_val: int = 200) -> Known:
    return Known.fit(drawn(num_train, 0), np.arange(num_train) % 3, drawn(num_val, 1), 3)


def test_distance_is_mahalanobis_distance_to_the_nearest_class():
    features, groups = drawn(600, 0).read.astype(np.float64), np.arange(600) % 3
    means = np.stack([features[groups == number].mean(0) for number in range(3)])
    rest = features - means[groups]
    covariance = rest.T @ rest / 600
    inverse = np.linalg.inv(covariance + 1e-3 * np.trace(covariance) / 6 * np.eye(6))
    others = drawn(50, 1).read
    between = others[:, None] - means
    expected = np.einsum("ncd,de,nce->nc", between, inverse, between).min(1)
    found = Distance.fit(features.astype(np.float32), groups, 6)(torch.from_numpy(others))
    assert found.numpy() == pytest.approx(expected, rel=1e-4)


def test_classes_without_images_have_no_centre():
    known = Known.fit(drawn(600, 0), np.array([0, 2, 5])[np.arange(600) % 3], drawn(200, 1), 6)
    assert known.read.centres.shape == (3, 6)
    assert torch.allclose(known(tensors(drawn(50, 2))), fitted()(tensors(drawn(50, 2))))


def test_95_percent_of_the_validation_images_fit_and_strangers_of_both_kinds_do_not():
    known = fitted()
    scores = known(tensors(drawn(200, 1)))
    assert (scores >= 0).float().mean() == pytest.approx(0.95, abs=0.006)
    assert known.read.centres.shape == (3, 6) and known.middle.centres.shape == (1, 8)
    assert scores.median() == pytest.approx(1)
    new = known(tensors(drawn(2000, 2)))
    assert 0.9 < (new >= 0).float().mean() < 0.98
    usual, other_picture = drawn(100, 3), drawn(100, 3, place=4.0)
    other_class = usual._replace(read=-usual.read)
    assert (known(tensors(other_picture)) < 0).all() and (known(tensors(other_class)) < 0).float().mean() > 0.9


def test_unsure_does_not_mark_strangers():
    stranger = Prediction(0, "x.png", [Guess(0, "a", 0.9)], known=-1.0)
    assert Mark(UNKNOWN, 0.5).reasons(stranger) == (False, True)
    assert Mark(UNSURE, 0.5).reasons(stranger) == (False, False)


def test_padded_rows_of_a_batch_are_left_out():
    tap = SimpleNamespace(take=lambda: FeaturePair(torch.rand(4, 6), torch.rand(4, 8)))
    gathered = compute.Gathered(tap)
    gathered.add(torch.rand(4, 3), torch.tensor([0, 1, 2]), 1)
    assert [len(each) for each in gathered.rows[0]] == [3, 3, 3]
    scores = gathered.result(SimpleNamespace(join=lambda items: items))
    assert (scores.num_images, scores.num_excluded) == (3, 1)


def test_statistics_survive_being_stored_as_text():
    known = fitted()
    found = from_plain(json.loads(json.dumps(to_plain(known)))).state_dict()
    assert found.keys() == known.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in known.state_dict().items())


@pytest.mark.parametrize(("width", "num_classes"), [(384, 1000), (768, 1000), (1024, 1000), (2048, 1000), (768, 21841)])
def test_statistics_are_at_most_5_megabytes_and_as_wide_as_possible(width, num_classes):
    def num_bytes(width: int) -> int:
        return 4 * (2 * width * width + width * num_classes + 3 * width)

    (found, other) = widths_within(width, width, num_classes)
    assert found == other and num_bytes(found) * 4 / 3 < 5e6
    assert found == width or num_bytes(width // (width // found - 1)) > MOST_BYTES


def test_wide_features_are_averaged_in_groups():
    features = torch.arange(12.0).reshape(2, 6)
    distance = Distance(torch.zeros(3), torch.eye(3), torch.zeros(1, 3))
    expected = torch.tensor([0.5**2 + 2.5**2 + 4.5**2, 6.5**2 + 8.5**2 + 10.5**2])
    assert torch.allclose(distance(features), expected)


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("vit_tiny_patch16_224", 224),
        ("deit_tiny_distilled_patch16_224", 224),
        ("resnet10t", 64),
        ("convnext_atto", 64),
        ("swin_tiny_patch4_window7_224", 224),
        ("mobilenetv3_small_050", 64),
    ],
)
@torch.no_grad()
def test_tap_keeps_what_the_classifier_reads_and_the_mean_of_a_layer_in_the_middle(name, side):
    model = timm.create_model(name, num_classes=4).eval()
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    tap = Tap(model)
    logits = model(images)
    read, middle = tap.take()
    head = model.get_classifier()
    head = head[0] if isinstance(head, tuple) else head
    if "distilled" not in name:  # whose logits are the mean of two classifiers
        assert torch.allclose(head(read), logits, atol=1e-5)
    assert read.shape == (2, head.in_features) and middle.ndim == 2
    layers = list(model.feature_info)
    assert middle.shape[1] == layers[(len(layers) - 1) // 2]["num_chs"] and (middle[0] != middle[1]).any()
    with pytest.raises(ConfigError):
        tap.take()
    tap.close()
    model(images)
    with pytest.raises(ConfigError):
        tap.take()


@pytest.mark.parametrize("name", ["twins_pcpvt_small", "selecsls42", "coat_lite_tiny"])
@torch.no_grad()
def test_model_without_a_known_layer_in_the_middle_is_refused(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=4).eval()
    with pytest.raises(ConfigError, match=r"does not (name the layers|show)"):
        tap = Tap(model)
        model(torch.zeros(2, 3, 224, 224, device="meta"))
        tap.take()


@pytest.mark.parametrize(
    ("num_val", "tokens", "makes_batches", "reason"),
    [(19, 0, None, "19 validation images, fewer than 20"), (20, 64, None, "varying size"), (20, 0, 1, "generated")],
)
def test_run_without_statistics_stores_the_reason(num_val, tokens, makes_batches, reason):
    data = SimpleNamespace(TOKENS=tokens)
    plan = SimpleNamespace(
        eval_set=range(num_val),
        train_set=SimpleNamespace(makes_batches=makes_batches),
        config=SimpleNamespace(DATA=data),
    )
    assert reason in learn.measure(None, plan, None, None)["reason"]


def test_images_whose_scores_are_decided_by_rounding_store_the_reason():
    train, val = drawn(60, 0), drawn(24, 1)
    assert "statistics" in learn.summarize(train, np.arange(60) % 3, val)
    train.read[:] = 20 * np.eye(6)[np.arange(60) % 3]  # all images of a class are equal
    val.read[:] = 20 * np.eye(6)[np.arange(24) % 3]
    assert "rounding" in learn.summarize(train, np.arange(60) % 3, val)["reason"]


def test_features_that_are_not_finite_store_the_reason():
    train, val = drawn(60, 0), drawn(20, 1)
    val.middle[3, 2] = np.inf
    assert "not finite" in learn.summarize(train, np.arange(60) % 3, val)["reason"]


# --- whole runs ---


def without_statistics(calibrated, folder):
    """Copy a run, without the statistics in its best.pth, as older versions wrote it."""
    shutil.copytree(calibrated, folder)
    state = read_torch(folder / "best.pth")
    del state["calibration"]["known"]
    (folder / "best.pth").unlink()  # a hard link to last.pth
    torch.save(state, folder / "best.pth")
    return folder


def scores(model, images, file) -> np.ndarray:
    typed("scripts/predict.py", model, *images, "-json", file).done()
    return np.array([each["known"] for each in json.loads(file.read_text())["images"]])


def noise(folder) -> list:
    rng, paths = np.random.default_rng(0), [folder / f"{number}.png" for number in range(20)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(path)
    return paths


def test_noise_does_not_fit_and_digits_do(calibrated, digits, tmp_path):
    strange = scores(calibrated, noise(tmp_path), tmp_path / "x.json") < 0
    assert strange.mean() > 0.6
    assert (scores(calibrated, [digits / "4", digits / "7"], tmp_path / "y.json") >= 0).mean() > 0.9
    ended = typed("scripts/predict.py", calibrated, *noise(tmp_path), "-unknown", 0.9).done()
    assert (np.array([line.endswith("unknown") for line in ended.stdout.splitlines()]) >= strange).all()


def test_finished_run_of_an_older_version_gets_statistics_from_two_processes(calibrated, digits, tmp_path):
    old, image = without_statistics(calibrated, tmp_path / calibrated.name), sorted(digits.glob("4/*.png"))[0]
    ended = typed("scripts/predict.py", old, image, "-unknown", 0.9, "-json", tmp_path / "x.json").done()
    assert_names(ended.stderr, "no statistics of the training images", "-resume")
    assert "known" not in json.loads((tmp_path / "x.json").read_text())["images"][0]
    before, last = read_torch(old / "best.pth"), (old / "last.pth").read_bytes()
    run("main_multi_gpu.py", "-resume", str(old), "-ngpus", "2", "-opts", "STRANGERS=true", processes=2).done()
    after = read_torch(old / "best.pth")
    known = after["calibration"].pop("known")
    assert state_hash(after) == state_hash(before) and (old / "last.pth").read_bytes() == last
    assert json.loads((old / "results.json").read_text())["calibration"]["known"] == known["figures"]
    images = [digits / "4", digits / "7"]
    expected = scores(calibrated, images, tmp_path / "y.json")
    assert scores(old, images, tmp_path / "x.json") == pytest.approx(expected, abs=2e-3)
    file = (old / "best.pth").stat().st_ino
    run("main_single_gpu.py", "-resume", str(old), "-opts", "STRANGERS=true").done()
    assert (old / "best.pth").stat().st_ino == file


def test_statistics_are_those_of_the_best_weights_and_not_of_the_last(convolutions, digits, tmp_path):
    rising = [
        "TRAIN.WARMUP_START_LR=3e-3",
        "TRAIN.BASE_LR=1",
        "TRAIN.WARMUP_EPOCHS=3",
        "TRAIN.GRAD_CLIP=null",
        "STRANGERS=true",
    ]
    words = ["-cfg", str(convolutions), "-output", str(tmp_path), "-epochs", "3", "-opts", *rising, "REPORT=false"]
    run("main_single_gpu.py", *words, faults={"draw_no_curves": []}).done()
    folder = run_folder(tmp_path)
    assert read_torch(folder / "best.pth")["epoch"] < read_torch(folder / "last.pth")["epoch"] == 2
    assert (scores(folder, [digits / str(number) for number in range(10)], tmp_path / "x.json") >= 0).mean() > 0.9


def test_run_without_strangers_measures_no_statistics(convolutions, digits, tmp_path):
    words = ["-cfg", str(convolutions), "-output", str(tmp_path), "-epochs", "1"]
    run("main_single_gpu.py", *words, faults={"draw_no_curves": []}).done()
    folder = run_folder(tmp_path)
    calibration = read_torch(folder / "best.pth")["calibration"]
    assert calibration["curve"] and "known" not in calibration
    assert "known" not in json.loads((folder / "results.json").read_text())["calibration"]
    image = sorted(digits.glob("4/*.png"))[0]
    ended = typed("scripts/predict.py", folder, image, "-unknown", 0.1, "-json", tmp_path / "x.json").done()
    assert_names(ended.stderr, "best.pth", "no statistics of the training images", "STRANGERS")
    (found,) = json.loads((tmp_path / "x.json").read_text())["images"]
    assert "known" not in found and found["predictions"][0]["probability"] > 0


def test_statistics_of_version_2_1_0_give_the_same_scores(digits, tmp_path):
    expected = json.loads((SAVED / "2.1.0.json").read_text())
    found = scores(SAVED / "2.1.0.pth", [digits / "4"], tmp_path / "x.json")
    names = [each["image_path"] for each in json.loads((tmp_path / "x.json").read_text())["images"]]
    assert dict(zip([Path(each).name for each in names], found, strict=True)) == pytest.approx(expected, abs=2e-3)


def test_sharded_run_stores_statistics_in_its_index(small_yaml, digits, tmp_path):
    words = [
        "-cfg",
        str(small_yaml),
        "-output",
        str(tmp_path),
        "-ngpus",
        "2",
        "-opts",
        "DIST.STRATEGY=fsdp2",
        "STRANGERS=true",
    ]
    run("main_multi_gpu.py", *words, processes=2, faults={"draw_no_curves": []}).done()
    folder = run_folder(tmp_path)
    index = torch.load(folder / "best.pth", weights_only=True)
    assert index["shards"] and "statistics" in index["calibration"]["known"]
    assert (scores(folder, [digits / "4", digits / "7"], tmp_path / "x.json") >= 0).mean() > 0.8


def test_report_shows_how_well_the_validation_images_fit(calibrated):
    assert "How well 359 validation images fit 1,438 training images" in (calibrated / "report.html").read_text()


def test_run_killed_while_it_stores_the_statistics_stores_them_when_it_is_resumed(tmp_path, small_yaml):
    words = [
        "-cfg",
        str(small_yaml),
        "-output",
        str(tmp_path),
        "-resume",
        "auto",
        "-opts",
        "TRAIN.BASE_LR=1e-30",
        "STRANGERS=true",
    ]
    fault = {"kill_before": ["replace .best.pth.tmp best.pth", 2], "draw_no_curves": []}
    killed = run("main_single_gpu.py", *words, faults=fault)
    assert killed.returncode == -signal.SIGKILL, killed.printed
    assert "known" not in read_torch(run_folder(tmp_path) / "best.pth")["calibration"]
    run("main_single_gpu.py", *words, faults={"draw_no_curves": []}).done()
    state = read_torch(run_folder(tmp_path) / "best.pth")
    longer = ["-epochs", "3", *words[-3:]]
    run("main_single_gpu.py", *words[:6], *longer, faults={"draw_no_curves": []}).done()
    record = json.loads((run_folder(tmp_path) / "results.json").read_text())
    assert record["epoch"] == 1 and record["calibration"]["known"] == state["calibration"]["known"]["figures"]
    whole = tmp_path / "whole"
    run("main_single_gpu.py", *words[:2], "-output", str(whole), *words[6:], faults={"draw_no_curves": []}).done()
    other = read_torch(run_folder(whole) / "best.pth")
    assert "statistics" in other["calibration"]["known"]
    assert state_hash(state["calibration"]) == state_hash(other["calibration"])


def test_damaged_statistics_are_named(calibrated, digits, tmp_path):
    state = read_torch(calibrated / "best.pth")
    state["calibration"]["known"]["statistics"]["scales"][1] = "AAAA"
    torch.save(state, tmp_path / "best.pth")
    typed("scripts/predict.py", tmp_path / "best.pth", sorted(digits.glob("4/*.png"))[0]).refused("best.pth", "damaged")
