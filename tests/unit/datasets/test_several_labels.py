"""CSV files with any number of labels per image: in one column with a separator, or in a 0/1 column per label."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from datasets import SavedData, build_eval_data, build_train_data, validation_facts
from datasets.pixels import Pixels
from datasets.split import new_record
from datasets.targets.label_sets import LabelSets
from engine.check.images import check_classes
from tests.support.cases import cases_of, content_of, names_of
from tests.support.configs import CPU, load_text, replaced, small_config
from tests.support.image_sets import divided_by, draw, error_of, files_with, load, settings
from tests.support.opened import open_sets
from tests.support.refusals import assert_names
from utils.distributed import Process

LABELS = ["dog|cat", "", "cat", " bird | cat ", "cat|cat", "dog", "bird|dog", "cat"]
MEANT = [{"cat", "dog"}, set(), {"cat"}, {"bird", "cat"}, {"cat"}, {"dog"}, {"bird", "dog"}, {"cat"}]
CLASSES = ["bird", "cat", "dog"]
SEPARATED, IN_COLUMNS = {"LABEL_SEPARATOR": "|"}, {"COLUMNS": ("image_path", "*")}


def write(file, rows, header="image_path,target"):
    file.write_text("\n".join([header, *rows]) + "\n")
    for name in [row.partition(",")[0] for row in rows]:
        draw(file.parent / name)


def separated(labels=LABELS, of="t"):
    return [f"{of}{number}.png,{text}" for number, text in enumerate(labels)]


def in_columns(meant=MEANT, yes="1", no="0"):
    return [
        ",".join([f"t{number}.png", *(yes if name in each else no for name in CLASSES)])
        for number, each in enumerate(meant)
    ]


def labels_of(image_set):
    return [{image_set.classes[number] for number in image_set.meaning.sets[target]} for target in image_set.targets]


@pytest.mark.parametrize("form", ["separator", "spaces", "all columns", "named columns", "words"])
def test_image_labels_are_read_from_one_cell_or_several_columns(tmp_path, here, form):
    header, rows, given = "image_path,bird,cat,dog", in_columns(), IN_COLUMNS
    if form == "separator":
        header, rows, given = "image_path,target", separated(), SEPARATED
    elif form == "spaces":
        header, rows, given = "image_path,target", separated(" ".join(each) for each in MEANT), {"LABEL_SEPARATOR": " "}
    elif form == "named columns":
        given = {"COLUMNS": ("image_path", "dog", "cat", "bird")}
    elif form == "words":  # adds a column of groups and a column without a name
        header, given = f"{header},person,", IN_COLUMNS | {"GROUP_BY": "person"}
        rows = [f"{row},p{number}," for number, row in enumerate(in_columns(yes="TRUE", no="False"))]
    write(tmp_path / "train.csv", rows, header)
    write(tmp_path / "val.csv", [f"v{row}" for row in rows[:3]], header)
    train, val = load("csv", tmp_path, **given)
    order = ["dog", "cat", "bird"] if form == "named columns" else CLASSES
    assert train.classes == val.classes == order
    assert labels_of(train) == MEANT and labels_of(val) == MEANT[:3]
    assert any("1.25 on average, 0 to 2" in note for note in val.notes)
    assert form != "words" or train.groups.chunk(0, 8) == [b"p%d" % number for number in range(8)]
    assert load_text("DATA: {DATASET: csv, LABEL_SEPARATOR: ' '}").config.DATA.LABEL_SEPARATOR == " "
    assert dict(zip(order, train.count_classes().tolist(), strict=True)) == {"bird": 2, "cat": 5, "dog": 3}


def test_multilabel_targets_have_a_zero_or_one_for_each_output(tmp_path):
    write(tmp_path / "train.csv", separated())
    write(tmp_path / "val.csv", separated(of="v"))
    words = ["DATA.DATASET=csv", f"DATA.DATA_PATH={tmp_path}", "DATA.LABEL_SEPARATOR=|", "DATA.BATCH_SIZE=8"]
    config = replaced(small_config(tmp_path, *words), MODEL={"NUM_CLASSES": 5})
    assert (config.TRAIN.LOSS, config.TRAIN.BEST_METRIC) == ("bce", "map")
    train, val = open_sets(config)
    expected = torch.tensor([[float(name in each) for name in [*CLASSES, None, None]] for each in MEANT])
    (batch,) = build_eval_data(config, val, Process(CPU))
    assert batch.targets.dtype == torch.float32 and torch.equal(batch.targets, expected)
    (batch,) = [
        each for window in build_train_data(config, train, Process(CPU)).windows(0, 1) for each in window.batches
    ]
    assert torch.equal(batch.targets, expected[torch.from_numpy(batch.piece.indices.astype(np.int64))])


def test_label_order_comes_from_checkpoint_or_classes_file(tmp_path):
    write(tmp_path / "train.csv", separated())
    write(tmp_path / "val.csv", separated(of="v"))
    (tmp_path / "classes.txt").write_text("dog\ncat\nbird\n")
    for given in ({"kept": SavedData(["dog", "cat", "bird"], {})}, {"CLASSES": str(tmp_path / "classes.txt")}):
        kept = given.pop("kept", None)
        train, val = open_sets(settings("csv", tmp_path, **SEPARATED, **given), saved=kept)
        assert train.classes == val.classes == ["dog", "cat", "bird"] and labels_of(train) == labels_of(val) == MEANT


def test_multilabel_split_leaves_training_images_of_every_class():
    targets = np.random.default_rng(0).choice(4, size=300)
    targets[0] = 4  # the only image of class d, which also has the label of another class
    images = files_with("/", [f"{number}.png" for number in range(300)], targets, list("abcd"), Pixels(3))
    images = replace(images, meaning=LabelSets([(0,), (0, 1), (1, 2), (), (1, 3)]))
    for seed in range(20):
        train, val = divided_by(images, new_record("hash", "here", 0.2, None) | {"seed": seed})
        assert train.count_classes().all() and val.count_classes()[:3].all()
        assert (train.count_classes() + val.count_classes()).tolist() == images.count_classes().tolist()
        assert len(train) + len(val) == 300 and len(val) > 30


def test_unused_separator_or_class_is_reported(tmp_path):
    write(tmp_path / "train.csv", separated())
    for separator, is_told in ((";", True), ("|", False)):
        notes = load("csv", tmp_path, LABEL_SEPARATOR=separator, VAL_FRACTION=0.3)[1].notes
        assert any("warning" in line and "';'" in line for line in notes) is is_told
    write(tmp_path / "train.csv", [f"{row},0" for row in in_columns()], "image_path,bird,cat,dog,eel")
    assert_names(
        " ".join(load("csv", tmp_path, VAL_FRACTION=0.3, **IN_COLUMNS)[1].notes), "no image has these classes: eel"
    )


def test_validation_set_identity_depends_on_labels_but_not_their_order(tmp_path):
    found = []
    for labels in (["cat|dog", "cat"], ["dog|cat", "cat"], ["dog", "cat"]):
        write(tmp_path / "train.csv", separated())
        write(tmp_path / "val.csv", separated(labels, of="v"))
        found.append(validation_facts(load("csv", tmp_path, **SEPARATED)[1]))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("text", cases_of("mistakes-of_several_labels"))
def test_wrong_multilabel_cells_are_refused_with_their_location(tmp_path, text):
    header, *rows = content_of(text).split("\n")
    write(tmp_path / "train.csv", rows, header)
    given = SEPARATED if "target" in header else IN_COLUMNS
    assert_names(error_of("csv", tmp_path, VAL_FRACTION=0.3, **given), *names_of("mistakes-of_several_labels", text))


def test_label_columns_are_numbered_as_in_training_file(tmp_path):
    write(tmp_path / "train.csv", in_columns(), "image_path,bird,cat,dog")
    write(tmp_path / "val.csv", ["v0.png,1,0,0", "v1.png,1,1,0"], "image_path,dog,cat,bird")
    train, val = load("csv", tmp_path, **IN_COLUMNS)
    assert train.classes == val.classes == CLASSES and labels_of(val) == [{"dog"}, {"cat", "dog"}]


def test_label_only_in_validation_images_is_refused(tmp_path):
    write(tmp_path / "train.csv", separated())
    write(tmp_path / "val.csv", separated(["cat", "cat|dgo"], of="v"))
    assert_names(error_of("csv", tmp_path, **SEPARATED), "v1.png", "dgo", "dog")
    write(tmp_path / "train.csv", in_columns(), "image_path,bird,cat,dog")
    write(tmp_path / "val.csv", in_columns(), "image_path,bird,cat,dgo")
    assert_names(error_of("csv", tmp_path, **IN_COLUMNS), "val.csv, line 1", "dgo", "dog")
    assert_names(error_of("csv", tmp_path, COLUMNS=("image_path", "cat", "lion")), "train.csv, line 1", "lion")


def test_multilabel_data_advice_never_suggests_a_sampler(tmp_path):
    labels = ["cat", "dog|cat", *["cat"] * 30, "dog"]
    write(tmp_path / "train.csv", separated(labels))
    config = settings("csv", tmp_path, VAL_FRACTION=0.3, **SEPARATED)
    advice = check_classes(config, *load("csv", tmp_path, VAL_FRACTION=0.3, **SEPARATED)).text
    assert "TRAIN.CLASS_WEIGHTS" in advice and "DATA.SAMPLER" not in advice
    write(tmp_path / "train.csv", separated([*labels, ""]))
    assert_names(error_of("csv", tmp_path, VAL_FRACTION=0.3), "target", "line 35", "DATA.LABEL_SEPARATOR")
