"""A run stores statistics of its validation images with its calibration; -unknown rejects photos that do not fit."""

import json
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from sklearn.covariance import LedoitWolf
from torch.nn import functional

from configs.load import load
from engine.confidence import fit
from engine.confidence.known import KnownScore, Tap, TappedFeatures, middle_of, to_plain
from engine.confidence.stored import from_plain
from engine.predict.output import UNKNOWN, UNSURE, Mark
from engine.predict.predictor import Guess, Prediction
from engine.tasks.classes import ClassTally
from models.weights.torch_files import read_torch
from tests.support.configs import CONVOLUTIONS, beginning_with_weights
from tests.support.refusals import assert_names
from tests.support.run_hash import state_hash
from tests.support.runs import run_folder, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow


def drawn(count: int, seed: int, place: float = 0.0) -> TappedFeatures:
    """Return features of `count` images of 3 classes. `place`: the mean of the features of the middle."""
    rng = np.random.default_rng(seed)
    classes = np.eye(3)[np.arange(count) % 3]
    read = np.concatenate([5 + rng.normal(size=(count, 30)), 20 * classes], 1)
    middle = rng.normal(place, 1, (count, 8)) * np.arange(1, 9)
    logits = 4 * classes + rng.normal(size=(count, 3))
    return TappedFeatures(*(torch.from_numpy(each.astype(np.float32)) for each in (read, middle, logits)))


def fitted(count: int = 600) -> KnownScore:
    return fit.fit_known(drawn(count, 0), 1.0)


@pytest.mark.parametrize("count", [12, 300])
def test_spread_is_mahalanobis_distance_with_covariance_of_ledoit_and_wolf(count):
    images, others = drawn(count, 0).middle.double(), drawn(50, 1).middle
    wide = torch.cat([images, images.square(), images.roll(1, 1) * images], 1)
    wide_others = torch.cat([others, others.square(), others.roll(1, 1) * others], 1)
    inverse = LedoitWolf().fit(wide.numpy()).get_precision()
    between = wide_others.numpy() - wide.mean(0).numpy()
    expected = np.sqrt(np.einsum("nd,de,ne->n", between, inverse, between))
    assert fit.fit_spread(wide)[0](wide_others).numpy() == pytest.approx(expected, rel=2e-3)


def test_distance_of_each_image_is_its_distance_to_the_others():
    read, middle, _ = (each.double() for each in drawn(30, 0))
    shrinkage = LedoitWolf().fit(middle.numpy()).shrinkage_
    usual = middle.var(0, correction=0).mean()
    nearest, outlying = fit.fit_neighbours(read)[1], fit.fit_spread(middle)[1]
    for index in range(30):
        left = torch.arange(30) != index
        others = functional.normalize(read[left])
        distances = (others - functional.normalize(read[index], dim=0)).norm(dim=1)
        assert nearest[index].item() == pytest.approx(distances.min().item(), rel=5e-3)
        rest = middle[left] - middle[left].mean(0)
        covariance = (1 - shrinkage) * rest.T @ rest / 30 + shrinkage * usual * torch.eye(8)
        away = middle[index] - middle[left].mean(0)
        assert outlying[index].item() == pytest.approx((away @ covariance.inverse() @ away).sqrt().item(), rel=5e-3)


def test_95_percent_of_new_images_fit_and_strangers_of_both_kinds_do_not():
    known = fitted()
    new = known(drawn(2000, 2))
    assert new.median() == pytest.approx(1, abs=0.15)
    assert 0.9 < (new >= 0).float().mean() < 0.98
    usual, other_picture = drawn(100, 3), drawn(100, 3, place=4.0)
    other_class = usual._replace(read=-usual.read)
    assert (known(other_picture) < 0).all() and (known(other_class) < 0).all()
    unsure = usual._replace(logits=torch.zeros(100, 3))
    assert (known(unsure) < known(usual)).float().mean() > 0.9


def test_confidence_counts_more_with_fewer_validation_images():
    for place, seed in ((0.7, 4), (1.0, 5)):
        strange = drawn(200, seed, place)
        doubted = strange._replace(logits=strange.logits / 3)
        lost = [
            (each(strange) - each(doubted)).mean() / (each(drawn(200, 6)) - each(strange)).mean()
            for each in map(fitted, (20, 900))
        ]
        assert lost[0] > 2 * lost[1] > 0


def test_temperature_changes_no_score_of_the_distances():
    images = drawn(100, 0)
    cool, warm = fit.fit_known(images, 1.0), fit.fit_known(images._replace(logits=3 * images.logits), 3.0)
    other = drawn(50, 1)
    assert torch.allclose(cool(other), warm(other._replace(logits=3 * other.logits)), atol=1e-5)


def test_unsure_does_not_mark_strangers():
    stranger = Prediction(0, "x.png", [Guess(0, "a", 0.9)], known=-1.0)
    assert Mark(UNKNOWN, 0.5).reasons(stranger) == (False, True)
    assert Mark(UNSURE, 0.5).reasons(stranger) == (False, False)


def tally(num_images: int, width: int = 6) -> fit.FeatureTally:
    """Return a tally of so many images, whose features are their numbers in the order of the batches."""
    numbers = iter(range(0, 10**9, 4))

    def take() -> TappedFeatures:
        first = next(numbers)
        rows = torch.arange(first, first + 4.0)[:, None]
        return TappedFeatures(rows.expand(4, width), rows.expand(4, 8), torch.rand(4, 3))

    return fit.FeatureTally(
        SimpleNamespace(take=take), ClassTally(torch.device("cpu"), torch.float64, num_images), num_images
    )


def test_padded_rows_of_a_batch_are_left_out():
    counted = tally(7)
    for num_images in (4, 3, 0):
        counted.add(torch.rand(4, 3), torch.zeros(num_images, dtype=torch.int64), 0)
    assert torch.cat([read[:, 0] for _, read, *_ in counted.per_image.features]).tolist() == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.long
@pytest.mark.parametrize(("width", "every"), [(6, 4), (5992, 14)])
def test_evenly_spaced_images_are_kept_so_that_statistics_stay_small(width, every):
    counted = tally(4000, width)
    for _ in range(1000):
        counted.add(torch.rand(4, 3), torch.zeros(4, dtype=torch.int64), 0)
    kept = torch.cat([read[:, 0] for _, read, *_ in counted.per_image.features])
    assert kept.tolist() == list(range(0, 4000, every)) and len(kept) * (width + 8) <= fit.MOST_VALUES


def test_statistics_take_at_most_5_megabytes_of_text():
    count = fit.MOST_VALUES // (2048 + 1024)
    images = TappedFeatures(torch.rand(count, 2048), torch.rand(count, 1024), torch.rand(count, 10))
    assert 2e6 < len(json.dumps(to_plain(fit.fit_known(images, 1.0)))) < 5e6


@pytest.mark.long
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
    read, middle, found = tap.take()
    head = model.get_classifier()
    head = head[0] if isinstance(head, tuple) else head
    assert torch.allclose(head(read), found, atol=1e-5)
    if "distilled" not in name:  # whose logits are the mean of two classifiers
        assert torch.equal(found, logits)
    assert read.shape == (2, head.in_features) and middle.ndim == 2
    layers = list(model.feature_info)
    assert middle.shape[1] == layers[middle_of(len(layers))]["num_chs"] and (middle[0] != middle[1]).any()
    with pytest.raises(ConfigError):
        tap.take()
    tap.close()
    model(images)
    with pytest.raises(ConfigError):
        tap.take()


@pytest.mark.parametrize("name", ["twins_pcpvt_small", "coat_lite_tiny"])
@torch.no_grad()
def test_model_without_a_known_layer_in_the_middle_is_refused(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=4).eval()
    with pytest.raises(ConfigError, match=r"does not (name the layers|show)"):
        tap = Tap(model)
        model(torch.zeros(2, 3, 224, 224, device="meta"))
        tap.take()


def test_compiled_model_stores_the_reason_for_no_features():
    assert "COMPILE" in fit.why_no_features(timm.create_model("resnet10t"), SimpleNamespace(COMPILE="blocks"))
    assert fit.summarize(None, 1.0, "COMPILE") == {"reason": "COMPILE"}


def test_too_few_validation_images_are_the_reason():
    assert "19 validation images, fewer than 20" in fit.summarize(drawn(19, 0), 1.0, "")["reason"]
    assert "statistics" in fit.summarize(drawn(20, 0), 1.0, "")


def test_images_whose_scores_are_decided_by_rounding_store_the_reason():
    images = drawn(24, 0)
    alike = TappedFeatures(*(each[:3].repeat(8, 1) for each in images))  # all images of a class are equal
    assert "rounding" in fit.summarize(alike, 1.0, "")["reason"]


def test_features_that_are_not_finite_store_the_reason():
    images = drawn(20, 1)
    images.middle[3, 2] = np.inf
    assert "not finite" in fit.summarize(images, 1.0, "")["reason"]


# --- whole runs ---

QUICK = {"judge_no_labels": []}


def without_statistics(calibrated, folder):
    """Copy a run, without the statistics in its best.pth."""
    shutil.copytree(calibrated, folder)
    state = read_torch(folder / "best.pth")
    del state["calibration"]["known"]
    (folder / "best.pth").unlink()  # a hard link to last.pth
    torch.save(state, folder / "best.pth")
    return folder


def scores(model, images, file) -> np.ndarray:
    typed("scripts/predict.py", model, *images, "-json", file).done()
    return np.array([each["known"] for each in json.loads(file.read_text())["images"]])


def test_noise_does_not_fit_and_digits_do(unmoved, digits, noise, tmp_path):
    strange = scores(unmoved, noise, tmp_path / "x.json") < 0
    assert strange.mean() > 0.5
    assert (scores(unmoved, [digits / str(number) for number in range(10)], tmp_path / "y.json") >= 0).all()
    ended = typed("scripts/predict.py", unmoved, *noise, "-unknown", 0.9).done()
    assert (np.array([line.endswith("unknown") for line in ended.stdout.splitlines()]) >= strange).all()


def test_run_without_statistics_says_that_only_the_confidence_decides(calibrated, digits, tmp_path):
    old, image = without_statistics(calibrated, tmp_path / calibrated.name), sorted(digits.glob("4/*.png"))[0]
    ended = typed("scripts/predict.py", old, image, "-unknown", 0.9, "-json", tmp_path / "x.json").done()
    assert_names(ended.stderr, "best.pth", "no statistics", "only the confidence")
    (found,) = json.loads((tmp_path / "x.json").read_text())["images"]
    assert "known" not in found and found["predictions"][0]["probability"] > 0


@pytest.mark.long
def test_processes_that_share_the_model_fit_the_statistics_of_one(small_yaml, digits, tmp_path):
    found, settings = [], str(beginning_with_weights(small_yaml))
    for count, script in ((1, "main_single_gpu.py"), (2, "main_multi_gpu.py")):
        words = ["-cfg", settings, "-output", str(tmp_path / str(count)), "-batch_size", str(40 // count)]
        words += ["-ngpus", "2", "-opts", "DIST.STRATEGY=fsdp2"] if count == 2 else []
        typed(script, *words, processes=count, faults=QUICK).done()
        folder = run_folder(tmp_path / str(count))
        state = torch.load(folder / "best.pth", weights_only=True)["calibration"]  # of the index, if it has shards
        found.append(from_plain(state["known"]["statistics"], state["temperature"]))
    assert found[0].read.images.shape == found[1].read.images.shape == (90, 16)
    assert found[1].scales.numpy() == pytest.approx(found[0].scales.numpy(), rel=0.1)
    assert (scores(folder, [digits / "4", digits / "7"], tmp_path / "x.json") >= 0).mean() > 0.8


def test_statistics_are_those_of_the_best_weights_and_not_of_the_last(unmoved, digits, tmp_path):
    best, last = (read_torch(unmoved / name) for name in ("best.pth", "last.pth"))
    assert best["epoch"] < last["epoch"] == 1
    assert state_hash(best["calibration"]) == state_hash(last["calibration"])
    assert (scores(unmoved, [digits / str(number) for number in range(10)], tmp_path / "x.json") >= 0).mean() > 0.9


def test_statistics_are_those_of_a_layer_after_the_middle():
    assert [middle_of(count) for count in (1, 2, 5, 12)] == [0, 0, 3, 8]


@pytest.mark.parametrize("value", ["true", "false"])
def test_setting_of_version_2_1_0_for_statistics_still_loads(value, tmp_path):
    settings = tmp_path / "old.yaml"
    settings.write_text(CONVOLUTIONS + f"STRANGERS: {value}\n")
    assert load(["-cfg", str(settings)]).config == load(["-cfg", str(settings), "-opts", "CALIBRATE=true"]).config


@pytest.mark.long
def test_killed_run_ends_with_the_statistics_of_an_uninterrupted_one(tmp_path, small_yaml):
    found = []
    for name, fault in (("whole", {}), ("killed", {"kill_before": ["replace .best.pth.tmp best.pth", 2]})):
        words = ["-cfg", str(beginning_with_weights(small_yaml)), "-output", str(tmp_path / name), "-resume", "auto"]
        words += ["-batch_size", "16"]
        ended = typed("main_single_gpu.py", *words, faults=fault | QUICK)
        if fault:
            assert ended.returncode == -signal.SIGKILL, ended.printed
            typed("main_single_gpu.py", *words, faults=QUICK).done()
        found.append(read_torch(run_folder(tmp_path / name) / "best.pth"))
    assert "statistics" in found[0]["calibration"]["known"]
    assert state_hash(found[0]["calibration"]) == state_hash(found[1]["calibration"])


def test_damaged_statistics_are_named(calibrated, digits, tmp_path):
    state = read_torch(calibrated / "best.pth")
    state["calibration"]["known"]["statistics"]["scales"][1] = "AAAA"
    torch.save(state, tmp_path / "best.pth")
    typed("scripts/predict.py", tmp_path / "best.pth", sorted(digits.glob("4/*.png"))[0]).refused("best.pth", "damaged")
