"""Classes of unequal size: the images of a balanced epoch, and class weights."""

import numpy as np
import pytest

from datasets import ImageSet, build_order, class_weights
from datasets.balance import describe_balance
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import replaced
from tests.support.image_sets import targets_only
from tests.support.loading import settings
from tests.support.refusals import refused
from utils.errors import ConfigError, DataError

COUNTS = [900, 60, 36, 4]  # images per class


def uneven(counts: list[int] = COUNTS) -> ImageSet:
    targets = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))
    return targets_only(targets, [f"class {number}" for number in range(len(counts))])


def balanced(**data):
    return settings(SAMPLER="balanced", DROP_LAST=False, **data)


def epoch_of(image_set: ImageSet, epoch: int = 0, seed: int = 0) -> np.ndarray:
    return build_order(balanced(), image_set, world_size=1).epoch_order(seed, epoch)


def test_balanced_order_differs_by_epoch_and_seed():
    images = uneven()
    orders = [epoch_of(images, epoch=epoch, seed=seed) for seed in (0, 1) for epoch in range(6)]
    assert len({tuple(each) for each in orders}) == 12 and (orders[7] == epoch_of(images, epoch=1, seed=1)).all()
    assert len({index for each in orders for index in each if images.targets[index] == 0}) > 800
    assert orders[1][:5].tolist() == [80, 212, 232, 702, 303], "must equal earlier versions"


def test_balanced_epochs_rotate_leftover_draws_among_classes():
    images = uneven([1] * 20 + [5])  # 25 / 21 places per class
    drawn = np.concatenate([epoch_of(images, epoch=epoch) for epoch in range(100)])
    times = np.bincount(images.targets[drawn])
    assert times.min() > 105 and times.max() < 135
    twice = np.flatnonzero(np.bincount(images.targets[drawn[25:50]]) == 2)
    assert twice.tolist() == [0, 5, 11, 16], "must equal earlier versions"


def test_update_may_have_as_many_images_as_repeats_but_not_fewer():
    config = settings(BATCH_SIZE=3)
    assert build_order(replaced(config, TRAIN={"REPEATED_AUG": 3}), uneven([9]), 1).num_repeats == 3
    with refused(ConfigError, "TRAIN.REPEATED_AUG", 4, "3 images"):
        build_order(replaced(config, TRAIN={"REPEATED_AUG": 4}), uneven([9]), 1)


def test_balancing_refuses_a_class_without_images():
    images = uneven([3, 0, 2])
    with refused(DataError, "DATA.SAMPLER", "class 1"):
        build_order(balanced(), images, 1)
    with refused(DataError, "TRAIN.CLASS_WEIGHTS", "class 1"):
        class_weights(weighted("auto"), images)


def weighted(value: str, num_classes: int | None = None):
    return replaced(settings(), TRAIN={"CLASS_WEIGHTS": value}, MODEL={"NUM_CLASSES": num_classes})


def test_automatic_class_weights_average_to_one_over_all_images():
    images = uneven()
    weights = class_weights(weighted("auto"), images)
    np.testing.assert_allclose(weights, [1000 / (4 * count) for count in COUNTS])
    np.testing.assert_allclose(np.array(weights)[images.targets].mean(), 1)
    assert class_weights(weighted("auto", num_classes=6), images) == [*weights, 1.0, 1.0]
    assert class_weights(settings(), images) is None
    told = describe_balance(replaced(weighted("auto"), DATA={"SAMPLER": "balanced"}), images, [*weights, 1.0])
    assert ["from 0.278 (class 0) to 62.5 (class 3)" in each for each in told] == [True, True, False]
    assert len(describe_balance(replaced(weighted("x.csv"), DATA={"SAMPLER": "balanced"}), images, weights)) == 2


@pytest.mark.parametrize(
    "text", ["class,Weights\nclass 1,2.5\n\n0, 1\nclass 2,3e-1\n", "class 0,1\nclass 2,0.3\nclass 1,2.5"]
)
def test_class_weights_file_accepts_names_or_numbers(tmp_path, text):
    (tmp_path / "weights.csv").write_text(text)
    assert class_weights(weighted(str(tmp_path / "weights.csv")), uneven([3, 2, 1])) == [1.0, 2.5, 0.3]


@pytest.mark.parametrize("text", cases_of("mistakes-of_class_weights"))
def test_mismatched_class_weights_file_is_refused(tmp_path, text):
    if text != "(no file)":
        (tmp_path / "weights.csv").write_text(content_of(text))
    with refused(ConfigError, *names_of("mistakes-of_class_weights", text)):
        class_weights(weighted(str(tmp_path / "weights.csv")), uneven([3, 2]))


@pytest.mark.parametrize("name, near", [("animations", ""), ("action", "; did you mean actions?")])
def test_only_a_similar_class_is_suggested(tmp_path, name, near):
    (tmp_path / "weights.csv").write_text(f"actions,1\n{name},2\n")
    with pytest.raises(ConfigError) as caught:
        class_weights(weighted(str(tmp_path / "weights.csv")), targets_only(np.zeros(2, int), ["actions", "objects"]))
    assert str(caught.value).endswith(f"no class '{name}'{near}")
