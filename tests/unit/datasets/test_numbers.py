"""Numbers of images: read from CSV files, standardized by the training images, in batches, and divided by a split."""

import math
import statistics
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datasets import PriorFacts, SavedData, open_data, validation_facts, write_split
from datasets.fingerprint import data_facts
from datasets.split import new_record
from datasets.targets.numbers import NumberTargets, mean_and_deviation
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import replaced
from tests.support.image_sets import divided_by, keys_of
from tests.support.number_rows import (
    COLUMNS,
    images_with,
    number_settings,
    numbers_of,
    standardize,
    write_digits,
    write_rows,
)
from tests.support.opened import open_sets
from tests.support.properties import examples
from tests.support.refusals import assert_names, refused
from utils.errors import DataError

NAN = math.nan


def load(file, saved=None, **data):
    return open_sets(number_settings(file, **data), saved=saved)


def read(file, **data) -> np.ndarray:
    """Return the numbers of all images of a file."""
    return numbers_of(load(file, evaluate=True, **data)[1])


# --- reading ---


@pytest.mark.parametrize(
    "data, named",
    [({}, ["Group", "patient_id"]), ({"GROUP_BY": "group"}, []), ({"COLUMNS": ("path", "group")}, ["patient_id"])],
)
def test_unused_columns_of_groups_are_named(tmp_path, data, named):
    rows = [f"{age},{age % 7},{age % 5},{age % 3}" for age in range(60)]
    table = write_rows(tmp_path / "ages.csv", rows, "path,age,Group,patient_id,grouping")
    notes = load(table, **{"COLUMNS": ("path", "age")} | data)[1].notes
    assert [note.partition("DATA.GROUP_BY=")[2] for note in notes if "is not used" in note] == named


@pytest.mark.parametrize(
    "given, names",
    [
        ({"COLUMNS": ("path", "ink")}, ["ink"]),
        ({"COLUMNS": ("path", "ink", "age")}, ["ink", "age"]),
        ({"COLUMNS": ("path", "*"), "GROUP_BY": "person"}, ["age", "ink"]),
    ],
    ids=["one", "several", "all others"],
)
def test_numbers_are_read_from_the_named_columns(tmp_path, given, names):
    columns = {"age": [3.0, NAN, -5.0, 20.0], "ink": [0.5, 0.25, 2e6, NAN]}
    cells = ["3,anna,0.5", ",bo,.25", "-5,anna,2E6", "+20.0,bo,"]
    file = write_rows(tmp_path / "a.csv", cells, "path,age,person,ink")
    _, images = load(file, evaluate=True, **given)
    assert images.classes == names
    np.testing.assert_array_equal(numbers_of(images), np.array([columns[name] for name in names]).T)
    assert_names("\n".join(images.notes), "ink: 0.25 to 2e+06", "missing for 1 image")


def test_default_columns_are_image_path_and_target(tmp_path):
    file = write_rows(tmp_path / "a.csv", ["3", "4"], "image_path,target")
    assert read(file, COLUMNS=()).tolist() == [[3], [4]]


FORMATS = ("{!r}", "{:e}", "{:.3f}", " {!r} ", "{:+g}", "{:.0f}")


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.sampled_from(FORMATS)), min_size=1, max_size=20))
@examples(40)
def test_every_spelling_of_a_number_is_read_exactly(tmp_path, drawn):
    cells = [form.format(value) for value, form in drawn]
    assert read(write_rows(tmp_path / "a.csv", cells)).tolist() == [[float(cell)] for cell in cells]


def test_empty_and_nan_cells_are_missing_numbers(tmp_path):
    file = write_rows(tmp_path / "a.csv", ["1,2", ",3", "nan, ", "NaN,4", "NA,null", "None,NULL"], "path,age,ink")
    file.write_text(file.read_text() + "0.png\n")  # a row that ends early
    expected = [[1, 2], [NAN, 3], [NAN, NAN], [NAN, 4], [NAN, NAN], [NAN, NAN], [NAN, NAN]]
    np.testing.assert_array_equal(read(file), expected)


@pytest.mark.parametrize("text", cases_of("numbers-mistakes_in_a_table"))
def test_wrong_cell_is_refused_with_its_place_and_value(here, text):
    write_rows(here / "b.csv", ["1", "2"])  # draws the images
    (here / "a.csv").write_text(content_of(text))
    columns = ("path", "age", "ink") if "Age" in text else ("path", "*")
    with refused(DataError, *names_of("numbers-mistakes_in_a_table", text)):
        load("a.csv", COLUMNS=columns)


@pytest.mark.parametrize(
    "numbers, is_warned",
    [
        (range(20), True),
        (range(1000, 0, -50), True),
        ([*range(5), "", *range(5, 15)], True),  # as in the file, without the missing number
        (range(9), False),  # too few rows
        ([0, 1, 2, *range(4, 20)], False),
        ([0, 1] * 10, False),
    ],
    ids=["up", "down", "with a gap", "few", "uneven", "alternating"],
)
def test_column_that_counts_the_rows_is_warned_of(tmp_path, numbers, is_warned):
    file = write_rows(tmp_path / "a.csv", [str(number) for number in numbers])
    notes = [note for note in load(file, evaluate=True)[1].notes if note.startswith("warning")]
    assert bool(notes) is is_warned
    if is_warned:
        assert_names(notes[0], "age", "DATA.COLUMNS")


# --- equal numbers, and other ones ---


def test_spelling_of_numbers_changes_neither_facts_nor_measurements(tmp_path):
    cells = ([f"{number % 7}" for number in range(60)], [f"{number % 7:.{number % 3}e}" for number in range(60)])
    found = []
    for written in cells:
        config = number_settings(write_rows(tmp_path / "a.csv", written))
        train, val = open_sets(config)
        found.append((data_facts(train, val), validation_facts(val), mean_and_deviation(config, train), val.split))
    assert found[0] == found[1]


def test_facts_of_many_numbers_are_found_without_a_text_for_each():
    """A text and its number in a dictionary take 200 bytes."""
    images = images_with(np.random.default_rng(0).standard_normal((50_000, 2)))
    tracemalloc.start()
    data_facts(None, images)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(images)


@pytest.mark.parametrize(
    "changed, name", [("train", "labels of the training images"), ("val", "labels of the validation images")]
)
def test_fingerprint_changes_with_one_number(tmp_path, changed, name):
    found = []
    for number in ("5.0,3", "5.0,3.001"):
        for part in ("train", "val"):
            cells = [f"{row % 7},{row**2}" for row in range(9)] + [number if part == changed else "1,2"]
            write_rows(tmp_path / f"{part}.csv", cells, "path,age,ink", prefix=part)
        train, val = load(tmp_path)
        found.append((data_facts(train, val), validation_facts(val)))
    (facts, of_val), (other_facts, of_other_val) = found
    assert {fact for fact in facts if facts[fact] != other_facts[fact]} == {name}
    assert (of_val == of_other_val) is (changed == "train")


# --- standardization ---


@pytest.mark.long
def test_numbers_are_standardized_by_the_training_images_alone(tmp_path):
    file, numbers = write_digits(tmp_path, 200, missing=range(0, 200, 3))
    config = number_settings(file, VAL_FRACTION=0.3)
    train, val = open_sets(config)
    config, train_standardized, val_standardized = standardize(config, train, val)
    means, deviations = config.DATA.TARGET_MEAN, config.DATA.TARGET_STD
    rows = [int(train.key(index).removesuffix(".png")) for index in range(len(train))]
    columns = [[number for number in column if number == number] for column in numbers[rows].T.tolist()]
    assert len(columns[1]) < len(columns[0]) == len(train) < 200
    assert means == pytest.approx([statistics.fmean(column) for column in columns])
    assert deviations == pytest.approx([statistics.pstdev(column) for column in columns])
    batch = train_standardized.meaning.batch(train.targets, 2).double().numpy()
    assert np.nanmean(batch, 0) == pytest.approx(0, abs=1e-6) and np.nanstd(batch, 0) == pytest.approx(1)
    expected = (numbers_of(val) - means) / deviations
    np.testing.assert_allclose(val_standardized.meaning.batch(val.targets, 2), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(numbers_of(val_standardized), numbers_of(val))  # in the units of the data


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5))
@examples(60)
def test_repeated_numbers_count_as_often_as_they_occur(targets, values):
    """An image's target is the row of a table that has each text once."""
    values[4] = NAN
    of_images = [values[target] for target in targets if target != 4]
    rows = np.zeros(len(targets), np.uint32)
    train = replace(images_with(np.array(values)), targets=np.array(targets), rows=rows)
    if len({*of_images}) < 2:
        with refused(DataError, "DATA.DATA_PATH", "number 0", "DATA.COLUMNS"):
            mean_and_deviation(number_settings("a.csv"), train)
        return
    (mean,), (deviation,) = mean_and_deviation(number_settings("a.csv"), train)
    assert mean == pytest.approx(statistics.fmean(of_images), rel=1e-9, abs=1e-9)
    assert deviation == pytest.approx(statistics.pstdev(of_images), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("ink, named", [("0.50", "0.5"), ("", "no number")])
def test_constant_or_empty_column_of_a_file_is_refused(tmp_path, ink, named):
    file = write_rows(tmp_path / "a.csv", [f"{number % 7},{ink}" for number in range(40)], "path,age,ink")
    with refused(DataError, "DATA.DATA_PATH", file, "ink", named, "DATA.COLUMNS"):
        load(file)


SCALE = {"TARGET_MEAN": (4.0, 10.0), "TARGET_STD": (2.0, 5.0)}


@pytest.fixture
def digits(tmp_path):
    """Return a table of 40 digits, and its training and validation images."""
    file, _ = write_digits(tmp_path, 40)
    return file, *load(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, names, expected",
    [
        (True, ["digit", "weight"], (0, 1)),
        (False, [*COLUMNS], (0, 1)),
        (False, [*reversed(COLUMNS)], (1, 0)),
        (False, ["weight", "ink"], (None, 1)),
        (False, ["weight", "height"], (None, None)),
    ],
    ids=[
        "settings",
        "weights of these numbers",
        "in another order",
        "weights of one of them",
        "weights of other numbers",
    ],
)
def test_scale_is_that_of_the_settings_or_for_each_number_that_of_weights_that_predict_it(
    digits, given, names, expected
):
    """`expected`: for each column, the place in SCALE; None: it is measured."""
    file, train, val = digits
    config = number_settings(file, **(SCALE if given else {}))
    saved = {f"DATA.{name}": [*values] for name, values in SCALE.items()} | {"TRAIN.OBJECTIVE": "numbers"}
    found, train, val = standardize(config, train, val, PriorFacts(trained=saved, outputs=names))
    data, measured = found.DATA, mean_and_deviation(config, train)
    for found, own, theirs in zip((data.TARGET_MEAN, data.TARGET_STD), measured, SCALE.values(), strict=True):
        assert found == tuple(own[n] if place is None else theirs[place] for n, place in enumerate(expected))
    for part in (train, val):
        expected = torch.from_numpy((numbers_of(part) - data.TARGET_MEAN) / data.TARGET_STD).float()
        torch.testing.assert_close(part.meaning.batch(part.targets, 2), expected)


def test_resumed_run_keeps_its_scale_with_other_training_images(digits):
    file, train, val = digits
    began = {f"DATA.{name}": [*values] for name, values in SCALE.items()}
    data = standardize(number_settings(file), train, val, PriorFacts(began=began))[0].DATA
    assert (data.TARGET_MEAN, data.TARGET_STD) == (*SCALE.values(),)


def test_evaluation_without_a_scale_compares_the_plain_numbers(tmp_path):
    file, _ = write_digits(tmp_path, 40)
    opened = open_data(number_settings(file, evaluate=True), "validation")
    assert opened.train is None and not opened.settings
    found = opened.val.meaning.batch(opened.val.targets, 2)
    assert found.equal(torch.from_numpy(numbers_of(opened.val)).float())


def test_scale_of_another_number_of_columns_is_refused(digits):
    file, train, val = digits
    config = number_settings(file, TARGET_MEAN=(1.0,), TARGET_STD=(1.0,))
    for first in (train, None):
        with refused(DataError, "DATA.TARGET_MEAN", "1 number", 2, "digit", "ink", "DATA.TARGET_STD"):
            standardize(config, first, val)


def test_number_of_outputs_must_be_that_of_the_columns(digits):
    file, train, val = digits
    config = replaced(number_settings(file), MODEL={"NUM_CLASSES": 3})
    with refused(DataError, "MODEL.NUM_CLASSES", 3, "2 numbers", "digit", "ink"):
        standardize(config, train, val)
    standardize(replaced(config, MODEL={"NUM_CLASSES": 2}), train, val)


# --- targets ---


def test_batches_have_nan_for_missing_numbers_and_unused_outputs():
    values = np.array([[1.0, NAN], [3.0, 8.0]])
    with pytest.raises(AssertionError, match="no mean and deviation"):
        NumberTargets(values).batch(np.array([1, 0]), 4)
    meaning = NumberTargets(values, (np.array([1.0, 4.0]), np.array([2.0, 0.5])))
    expected = [[1, 8, NAN, NAN], [0, NAN, NAN, NAN]]
    batch, places = meaning.batch(np.array([1, 0]), 4), meaning.allocate(2, 4, pinned=False)
    for target, place in zip((1, 0), places, strict=True):
        meaning.put(target, place)
    for found in (batch, places):
        assert found.dtype == torch.float32
        np.testing.assert_array_equal(found, expected)


def test_an_image_counts_for_the_numbers_that_it_has():
    images = images_with(np.array([[1, NAN], [NAN, NAN], [3, 4], [NAN, 0]]))
    images = images.take(np.array([0, 1, 2, 2, 3]))
    assert images.count_classes().tolist() == [3, 3]
    assert images.with_any(np.array([0])).tolist() == [True, False, True, True, False]
    assert images.with_any(np.array([0, 1])).tolist() == [True, False, True, True, True]
    assert [images.meaning.classes_of(target) for target in range(4)] == [(0,), (), (0, 1), (1,)]
    assert replace(images, classes=["a", "b", "c"]).count_classes().tolist() == [3, 3, 0]


@pytest.mark.slow
def test_columns_are_numbered_as_in_the_checkpoint(tmp_path):
    file, numbers = write_digits(tmp_path, 40, missing=[5])
    plain, saved = load(file), load(file, SavedData(["ink", "digit"], {}))
    for one, other in zip(plain, saved, strict=True):
        assert (one.classes, other.classes) == ([*COLUMNS], ["ink", "digit"])
        np.testing.assert_array_equal(numbers_of(other), numbers_of(one)[:, ::-1])
        assert keys_of(one) == keys_of(other)
    with refused(DataError, "DATA.DATA_PATH", "new: ink", "gone: weight"):
        load(file, SavedData(["weight", "digit"], {}))
    wider, _ = NumberTargets(np.array([[1.0, 2.0]])).renumber(np.array([0]), np.array([2, 0]))
    np.testing.assert_array_equal(wider.values, [[2, NAN, 1]])


@pytest.mark.parametrize(
    "known",
    [
        ["age", "ink"],
        ["ink", "age"],
        ["ink", "age", "size"],
    ],
    ids=" ".join,
)
def test_evaluation_of_fewer_columns_leaves_other_outputs_without_numbers(tmp_path, known):
    file = write_rows(tmp_path / "a.csv", [str(number**2) for number in range(30)])
    means, deviations = tuple(range(len(known))), (2.0,) * len(known)
    config = number_settings(file, evaluate=True, TARGET_MEAN=means, TARGET_STD=deviations)
    _, val = open_sets(config, saved=SavedData(known, {}))
    expected = np.full((3, len(known)), NAN)
    place = known.index("age")
    expected[:, place] = (np.array([0, 1, 4]) - means[place]) / 2
    np.testing.assert_array_equal(val.meaning.batch(val.targets[:3], len(known)), expected)


def test_evaluation_ignores_an_empty_column_that_the_checkpoint_lacks(tmp_path):
    file = write_rows(tmp_path / "a.csv", [f"{number**2}," for number in range(30)], "path,age,ink")
    _, val = load(file, SavedData(["age"], {}), evaluate=True)
    assert val.meaning.batch(val.targets[:3], 1).tolist() == [[0], [1], [4]]


def test_evaluation_describes_the_numbers_of_the_validation_list(tmp_path):
    write_rows(tmp_path / "train.csv", ["500", "900"])
    write_rows(tmp_path / "val.csv", ["3", "4", "8"], prefix="v")
    _, val = load(tmp_path, evaluate=True)
    assert "age: 3 to 8, mean 5" in val.notes


def test_invented_targets_have_a_finite_number_for_each_output():
    first, second = (NumberTargets.invent(3).batch(np.array([2, 0, 1, 2]), 3) for _ in range(2))
    assert first.shape == (4, 3) and first.isfinite().all() and first.equal(second)
    assert first[0].equal(first[3]) and not first[0].equal(first[1])


# --- the split ---


def divided(values: np.ndarray, seed: int = 0, fraction: float = 0.1) -> tuple[set[int], set[int], str]:
    """Return the rows of training and validation images, and the notes of the split."""
    parts = divided_by(images_with(values), new_record("hash", "here", fraction, None) | {"seed": seed})
    train, val = ({int(key.removesuffix(".png")) for key in keys_of(part)} for part in parts)
    return train, val, "\n".join(parts[1].notes)


def tenths(column: np.ndarray, num_columns: int) -> list[set[int]]:
    """Return the rows of each tenth of the numbers in a column, or of fewer parts if a tenth had fewer than 10 images
    for each of the columns."""
    rows = np.argsort(column)[: np.count_nonzero(~np.isnan(column))]  # NaN is last
    number = max(1, min(10, len(rows) // (10 * num_columns)))
    return [{*part.tolist()} for part in np.split(rows, [part * len(rows) // number for part in range(1, number)])]


@st.composite
def columns_of_numbers(draw) -> np.ndarray:
    """Draw numbers [N, columns] without ties. The number of images with a number is a multiple of 10, or 2."""
    count = draw(st.sampled_from([20, 50, 90, 100, 200, 300]))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    values = np.exp(2 * rng.standard_normal((count, draw(st.integers(1, 2)))))
    num_present = draw(st.sampled_from([2, 10, count // 20 * 10, count]))
    values[rng.permutation(count)[num_present:], 0] = NAN
    return values


@given(columns_of_numbers(), st.integers(0, 99))
@examples(60)
def test_every_tenth_of_the_numbers_is_in_both_parts(values, seed):
    train, val, _ = divided(values, seed)
    for column in values.T:
        for tenth in tenths(column, values.shape[1]):
            assert (len(tenth) < 2 or tenth & val) and tenth & train
    assert train | val == {*range(len(values))} and not train & val


@given(st.integers(10, 300), st.integers(1, 40), st.integers(0, 999))
@examples(60)
def test_strata_of_tied_numbers_are_intervals_of_ten_parts_at_most(count, different, seed):
    values = np.random.default_rng(seed).integers(different, size=count).astype(float)
    images = images_with(values)
    strata = images.meaning.strata(images)
    numbers = [strata.meaning.classes_of(target) for target in strata.targets.tolist()]
    assert {len(each) for each in numbers} == {1} and np.count_nonzero(strata.count_classes()) <= 10
    of_images = np.array(numbers)[:, 0][np.argsort(values, kind="stable")]
    assert (np.diff(of_images) >= 0).all()  # larger numbers are never in a lower stratum
    assert len({*zip(values.tolist(), np.array(numbers)[:, 0].tolist(), strict=True)}) == len({*values.tolist()})


def test_notes_of_a_split_speak_of_ranges_and_not_of_classes():
    _, _, notes = divided(np.arange(20.0), fraction=0.001)
    assert "held out, because otherwise their range of numbers would have no validation image: " in notes
    assert "class" not in notes


@pytest.mark.slow
@given(st.integers(30, 250), st.integers(1, 60), st.integers(0, 999))
@examples(60)
def test_only_named_images_change_their_part_when_others_are_added(count, added, seed):
    """The hash decides about the others. The notes name the images held out or kept because of their stratum."""
    rng = np.random.default_rng(seed)
    values = np.append(rng.standard_normal(count), 3 * rng.standard_normal(added))
    train, val, before = divided(values[:count], seed)
    new_train, new_val, after = divided(values, seed)
    moved = (train & new_val) | (val & new_train)
    assert not [row for row in moved if f" {row}.png" not in before + after]


# --- evaluation of the data of a run ---


@pytest.fixture
def of_run(tmp_path):
    """Return the table of a run, its validation images, and what its checkpoint and its folder say about them."""
    file, numbers = write_digits(tmp_path, 120)
    train, val = load(file)
    write_split(tmp_path / "split.csv", train, val)
    facts = validation_facts(val), data_facts(train, val)
    return file, numbers, val, SavedData(val.classes, val.split, *facts, tmp_path / "best.pth")


def rewritten(file, header: str, columns) -> None:
    rows = [f"{number}.png,{','.join(map(repr, row))}" for number, row in enumerate(np.transpose(columns).tolist())]
    file.write_text("\n".join([f"path,{header}", *rows]))


@pytest.mark.long
@pytest.mark.parametrize("change", ["fewer", "corrected", "order"])
def test_evaluation_of_changed_numbers_scores_the_images_held_out_in_training(of_run, change):
    file, (digit, ink), val, saved = of_run[0], of_run[1].T, *of_run[2:]
    header, columns = {
        "fewer": ("ink", (ink,)),
        "corrected": ("digit,ink", (digit, ink.max() - ink)),
        "order": ("ink,digit", (ink, digit)),
    }[change]
    rewritten(file, header, columns)
    scored = load(file, saved, evaluate=True)[1]
    assert keys_of(scored) == keys_of(val) and any("split.csv" in note for note in scored.notes) == (change != "order")


@pytest.mark.slow
def test_copy_of_the_table_with_columns_in_another_order_is_the_same_data(of_run):
    file, numbers, val, saved = of_run
    rewritten(file.with_name("copy.csv"), "ink,digit", numbers.T[::-1])
    assert keys_of(load(file.with_name("copy.csv"), saved, evaluate=True)[1]) == keys_of(val)


@pytest.mark.slow
def test_evaluation_of_another_table_of_trained_images_warns_of_them(of_run):
    file, numbers, val, saved = of_run
    rewritten(file.with_name("copy.csv"), "ink", numbers.T[1:])
    notes = load(file.with_name("copy.csv"), saved, evaluate=True)[1].notes
    assert any(note.startswith(f"warning: DATA.DATA_PATH: {120 - len(val)} of 120 images") for note in notes)


# --- tables that contradict themselves ---


def test_validation_images_without_any_number_are_refused(tmp_path):
    write_rows(tmp_path / "train.csv", [str(number) for number in range(9)])
    write_rows(tmp_path / "val.csv", [""] * 9, prefix="v")
    config = number_settings(tmp_path)
    with refused(DataError, "DATA.DATA_PATH", "validation", "age"):
        open_sets(config)


@pytest.mark.parametrize(("other", "is_said"), [("4", True), ("3.0", False)])
def test_image_with_two_different_numbers_is_warned_of(tmp_path, other, is_said):
    file = write_rows(tmp_path / "a.csv", [str(number) for number in range(20)])
    file.write_text(file.read_text() + f"3.png,{other}\n")
    assert any("another number" in note for note in load(file)[1].notes) == is_said
