"""The ranking of doubtful labels, compared with a reference that works image by image."""

import statistics

import numpy as np

from extras.labels.ranking import UNKNOWN, Doubt, Predictions, find_doubts

NUM_CLASSES = 4


def table_of(rng: np.random.Generator, labels: np.ndarray, images: np.ndarray) -> Predictions:
    shares = rng.dirichlet(np.full(NUM_CLASSES, 0.5), size=len(images))
    predicted = shares.argmax(1)
    return Predictions(images, predicted, shares.max(1), shares[np.arange(len(images)), labels[images]])


def reference(labels: np.ndarray, table: Predictions) -> list[tuple[int, int]]:
    """Return (image, suggestion) of the doubtful images of one table."""
    rows = list(zip(*(column.tolist() for column in table), strict=True))
    found = []
    for image, predicted, _, of_label in rows:
        others = [share for each, _, _, share in rows if labels[each] == labels[image] and each != image]
        usual = statistics.fmean([*others, statistics.fmean(table.of_labels)])
        if predicted != labels[image] and of_label < usual / 2:
            found.append((of_label, image, predicted))
    return [(image, predicted) for _, image, predicted in sorted(found)]


def test_ranking_equals_reference_for_one_table():
    rng = np.random.default_rng(0)
    labels = rng.integers(NUM_CLASSES, size=300)
    table = table_of(rng, labels, rng.permutation(300)[:250])
    found = find_doubts(labels, [table], NUM_CLASSES)
    assert len(found) > 40
    assert [(each.image, each.suggestion) for each in found] == reference(labels, table)
    row = table.images.tolist().index(found[0].image)
    assert (found[0].confidence, found[0].of_label) == (table.probabilities[row], table.of_labels[row])


def tables_with(*rows: tuple[int, float, float]) -> list[Predictions]:
    """Return tables for image 0 of class 0, each with one prediction. Nine confident images of class 0 follow."""
    tables = []
    for predicted, probability, of_label in rows:
        columns = [*range(10)], [predicted, *[0] * 9], [probability, *[1.0] * 9], [of_label, *[1.0] * 9]
        tables.append(Predictions(*map(np.array, columns)))
    return tables


def test_suggestion_of_several_seeds_is_most_frequent_prediction():
    labels = np.zeros(10, int)
    (found,) = find_doubts(labels, tables_with((1, 0.9, 0.0), (2, 0.6, 0.1), (2, 0.4, 0.2)), 3)
    assert found == Doubt(0, 2, 0.5, np.mean([0.0, 0.1, 0.2]))


def test_label_doubted_by_half_of_the_seeds_is_not_listed():
    labels = np.zeros(10, int)
    assert not find_doubts(labels, tables_with((1, 0.9, 0.0), (0, 0.9, 0.9)), 3)
    assert find_doubts(labels, tables_with((1, 0.9, 0.0), (1, 0.9, 0.0), (0, 0.9, 0.9)), 3)


def test_label_with_half_of_its_usual_probability_is_not_doubtful():
    assert not find_doubts(np.zeros(10, int), tables_with((1, 0.5, 0.498)), 3)
    assert find_doubts(np.zeros(10, int), tables_with((1, 0.51, 0.49)), 3)


def test_prediction_that_is_no_class_is_never_suggested():
    assert not find_doubts(np.zeros(10, int), tables_with((UNKNOWN, 0.9, 0.0)), 3)


def test_class_without_images_can_be_suggested():
    (found,) = find_doubts(np.zeros(10, int), tables_with((2, 0.9, 0.0)), 3)
    assert found.suggestion == 2


def test_all_images_of_a_small_class_can_be_doubtful():
    labels = np.array([0] * 10 + [1, 1])
    table = Predictions(np.arange(12), np.zeros(12, int), np.full(12, 0.9), np.array([0.9] * 10 + [0.1, 0.1]))
    assert [each.image for each in find_doubts(labels, [table], 2)] == [10, 11]
