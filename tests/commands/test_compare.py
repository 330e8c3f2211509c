"""halfstep compare: groups over seeds compared with numpy's values, the limits of noise, and refused input."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from engine.compare import statistics
from engine.compare.runs import Group, find_runs, group_runs, image_test, other_data
from engine.compare.tables import to_markdown
from engine.record.saved_run import SavedRun
from tests.support.cases import assert_cases, cases_of, names_of
from tests.support.configs import yaml_of
from tests.support.properties import examples
from tests.support.refusals import assert_names
from tests.support.runs import typed
from utils.runs import FACTS_OF_IMAGES

pytestmark = pytest.mark.slow

DATA = {fact: "1 2 3" for fact in FACTS_OF_IMAGES} | {"training images": 80, "validation images": 20}
ABOUT = {"classes": 10, "data_path": "/here", "data": DATA}


def make_run(
    folder: Path, values: Sequence[float], settings: str = "", status: dict | None = None, metric: str = "top1"
) -> SavedRun:
    """`values`: the metric of each epoch. `settings`: further lines of SECTION.KEY: value."""
    folder.mkdir(parents=True)
    defaults = {"TRAIN.NUM_EPOCHS": len(values), "DATA.DATASET": "digits"}
    given = dict(line.split(": ", 1) for line in settings.splitlines())
    (folder / "config.yaml").write_text(yaml_of(defaults | given))
    os.utime(folder / "config.yaml", (0, 0))  # equal start times, so that the names decide the order
    rows = [
        {"epoch": epoch, "train_loss": 2.0 - value / 100, "eval_loss": 1 - value / 100, f"eval_{metric}": value}
        | {"images_per_s": 100.0 + epoch, "memory_mb": 500 + epoch, "train_seconds": 10.0, "eval_seconds": 1.0}
        for epoch, value in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = {"state": "done", "about": ABOUT} | (status or {})
    (folder / "status.json").write_text(json.dumps(status))
    return SavedRun.open(folder)


OF_RATE = {"1e-3": (97.0, 96.0, 98.0), "3e-3": (90.0, 91.0, 95.0)}  # best top-1 by seed


@pytest.fixture
def folder(tmp_path):
    """Make runs with two rates and three seeds each. The last epoch is not the best."""
    for rate, values in OF_RATE.items():
        for seed, value in enumerate(values):
            settings = f"SEED: {seed}\nTRAIN.BASE_LR: {rate}\nSAVE: {tmp_path}/{seed}"
            make_run(tmp_path / "runs" / f"{rate}-{seed}", [50.0, value, value - 1], settings)
    return tmp_path / "runs"


def type_in(*words, exit_with=0):
    """Run the script and return its stdout and stderr. `exit_with`: the exit code; None: any."""
    ended = typed("scripts/compare.py", *words)
    assert exit_with in (None, ended.returncode), ended.printed
    return ended.stdout, ended.stderr


def groups_in(folder, metric=None):
    return group_runs(find_runs([str(folder)])[0], metric)


def table(markdown: str, title: str) -> list[dict[str, str]]:
    """Return the rows of a table in the Markdown by column name."""
    lines = markdown.partition(f"## {title}\n\n")[2].partition("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip(" *") for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_runs_differing_only_in_seed_form_a_group(folder):
    groups = groups_in(folder.parent)  # in one folder, like a sweep's trials
    assert [list(group.settings) for group in groups] == [["TRAIN.BASE_LR"]] * 2
    assert [len(group.runs) for group in groups] == [3, 3]
    out, _ = type_in(folder)
    for row, values in zip(table(out, "Results"), OF_RATE.values(), strict=True):
        assert row["best top-1, %"] == f"{numpy.mean(values):.2f} ± {numpy.std(values, ddof=1):.2f}"
        assert (row["images/s"], row["time"]) == ("101 ± 0", "33.0 s")
    assert "SAVE" not in out and "TAG" not in out


def test_smallest_value_of_another_metric_is_the_best_if_smaller_is_better(folder):
    losses = [list(group.best.values()) for group in groups_in(folder.parent, "loss")]
    assert losses == [[1 - best / 100 for best in each] for each in OF_RATE.values()]


def test_differences_are_paired_when_the_seeds_match():
    one, other = {0: 97.0, 1: 96.0, 2: 98.0}, {0: 90.0, 1: 91.0, 2: 95.0}
    gaps = numpy.array(list(other.values())) - numpy.array(list(one.values()))
    found = statistics.difference(other, one)
    assert found.is_paired and found.value == pytest.approx(gaps.mean())
    assert found.error == pytest.approx(gaps.std(ddof=1) / math.sqrt(3))
    assert found.half_width == pytest.approx(4.303 * found.error) and found.is_noise is False


def test_unpaired_differences_use_welchs_test():
    # From scipy.stats.ttest_ind([90, 91, 95, 94], [97, 96, 98], equal_var=False): t -3.4017, 4.23 degrees, p 0.025.
    found = statistics.difference({3: 90.0, 4: 91.0, 5: 95.0, 6: 94.0}, {0: 97.0, 1: 96.0, 2: 98.0})
    assert not found.is_paired and found.value / found.error == pytest.approx(-3.40168, abs=1e-5)
    assert found.half_width == pytest.approx(2.776 * found.error), "t for 4 degrees of freedom, rounded down"
    assert found.is_noise is False
    assert statistics.difference({3: 90.0, 4: 99.0}, {0: 97.0, 1: 96.0}).is_noise is True
    assert statistics.difference({3: 90.0}, {0: 97.0, 1: 96.0}).is_noise is None, "one run says nothing about noise"
    for value, is_noise in ((97.0, True), (97.5, False)):  # without noise
        assert statistics.difference({3: value, 4: value}, {0: 97.0, 1: 97.0}).is_noise is is_noise


def test_folds_of_cross_validation_count_as_repetitions(tmp_path):
    for fold in range(2):
        for rate in ("1e-3", "3e-3"):
            about = ABOUT | {"data": DATA | {"training images": 80 + fold, "names of the training images": f"{fold}"}}
            settings = f"DATA.FOLD: {fold}/2\nTRAIN.BASE_LR: {rate}"
            make_run(tmp_path / f"{rate}-{fold}", [90.0 + fold], settings, {"about": about})
    runs, _ = find_runs([str(tmp_path)])
    assert other_data(runs) == []
    groups = group_runs(runs, None)
    assert [len(group.runs) for group in groups] == [2, 2]
    seeds = [row["seed"] for row in table(type_in(tmp_path)[0], "Runs")]
    assert seeds == ["0, fold 0/2", "0, fold 1/2"] * 2


def make_run_of_part(folder, fold, right):
    """Make a run with this DATA.FOLD, whose validation images are those of `right`."""
    digest = f"{sorted(right)}"
    facts = about_data("/here", names_of_the_validation_images=digest, names_of_the_training_images=digest)
    settings = f"DATA.FOLD: {fold}" if fold else ""
    return write_predictions(make_run(folder, [100 * sum(right.values()) / len(right)], settings, facts), right)


def test_run_and_fold_are_compared_on_their_common_images(tmp_path):
    make_run_of_part(tmp_path / "run", None, {f"{number}.jpg": number < 19 for number in range(20)})
    make_run_of_part(tmp_path / "fold", "0/3", {f"{number}.jpg": number < 18 for number in range(10, 70)})
    found = json.loads(type_in(tmp_path / "run", tmp_path / "fold", "-json", exit_with=5)[0])
    assert (found["images"], found["difference"]) == (10, -10.0)
    out, _ = type_in(tmp_path / "run", tmp_path / "fold")
    assert "10 of 60 images that all have scored" in out
    rows = table(out, "Results")
    assert [row["best top-1 of common images, %"] for row in rows] == ["90.00", "80.00"]
    assert rows[1]["against group 1"].startswith("-10.00") and "0/3" in rows[1]["group"]
    assert [row["DATA.FOLD"] for row in table(out, "Settings that differ")] == ["null", "0/3"]


def test_folds_stay_together_beside_a_run_with_other_validation_images(tmp_path):
    for fold in range(3):
        images = {f"{number}.jpg": True for number in range(20 * fold, 20 * fold + 20)}
        make_run_of_part(tmp_path / f"fold{fold}", f"{fold}/3", images)
    make_run_of_part(tmp_path / "all", None, {f"{number}.jpg": True for number in range(10)})
    out, _ = type_in(tmp_path)
    assert [row["seed"] for row in table(out, "Runs")] == [f"0, fold {fold}/3" for fold in range(3)]
    assert "left out" in out and str(tmp_path / "all") in out


@pytest.mark.parametrize("change", cases_of("mistakes-of_other_data"))
def test_runs_on_different_data_need_the_any_data_flag(tmp_path, change):
    about = json.loads(change) if change.startswith("{") else {}
    make_run(tmp_path / "a", [90.0])
    make_run(tmp_path / "b", [90.0], "" if about else change, {"about": ABOUT | about})
    out, err = type_in(tmp_path / "a", tmp_path / "b", exit_with=2)
    assert not out
    assert_names(err, *names_of("mistakes-of_other_data", change))
    out, _ = type_in(tmp_path / "a", tmp_path / "b", "-any_data")
    assert out.index("Warning") < out.index("## Results")


def write_predictions(run: SavedRun, right: dict[str, bool]) -> SavedRun:
    """`right`: {image: whether it is classified correctly}. All images have one label."""
    rows = "".join(f"{name},cat,{'cat' if is_right else 'dog'},0.9,0.1\n" for name, is_right in right.items())
    (run.folder / "predictions.csv").write_text(f"image,label,prediction,probability,label_probability\n{rows}")
    (run.folder / "results.json").write_text("{}")
    return run


def about_data(path: str, **changed: str) -> dict:
    """Return status entries about a run's data in this folder."""
    facts = {key.replace("_", " "): value for key, value in changed.items()}
    return {"about": ABOUT | {"data_path": path, "data": DATA | facts}}


def test_images_with_equal_names_in_different_data_stay_unpaired(tmp_path):
    right = {f"{number}.jpg": number >= 12 for number in range(40)}
    runs = {
        "a": about_data("/here"),
        "copy": about_data("/there"),
        "other": about_data("/there", sizes_of_the_validation_files="4 5 6"),
        "grown": about_data("/here", names_of_the_validation_images="7"),
    }
    for name, status in runs.items():
        write_predictions(make_run(tmp_path / name, [70.0], "", status), right)
    type_in(tmp_path / "a", tmp_path / "copy", "-json", exit_with=5)
    assert json.loads(type_in(tmp_path / "a", tmp_path / "grown", "-json", exit_with=5)[0])["images"] == 40
    for more in ((), ("-json",), (tmp_path / "grown",)):
        _, err = type_in(tmp_path / "a", tmp_path / "other", *more, exit_with=2)
        assert_names(err, "sizes of the validation files", "-any_data")
    out, _ = type_in(tmp_path / "a", tmp_path / "other", "-any_data")
    assert "images, p" not in out, "different images must not be tested together"
    assert {"DATA.DATA_PATH", "sizes of the validation files"} <= table(out, "Settings that differ")[0].keys()


def make_runs_on_two_data_sets(folder: Path, gaps: tuple[float, float] = (-5.0, 5.0)) -> None:
    """Make two seeds with each of two rates on each of two data sets, and one run on a third data set.

    `gaps`: on each data set, the top-1 of the second rate minus that of the first.
    """
    for data, gap in zip(("pets", "birds"), gaps, strict=True):
        status = about_data(f"/data/{data}", names_of_the_validation_images=data)
        for rate, change in (("1e-3", 0.0), ("3e-3", gap)):
            for seed in range(2):
                settings = f"SEED: {seed}\nTRAIN.BASE_LR: {rate}"
                make_run(folder / f"{data}-{rate}-{seed}", [80.0 + change + seed / 10], settings, status)
    make_run(folder / "alone", [50.0], "", about_data("/data/cars", names_of_the_validation_images="cars"))


def test_runs_of_a_folder_get_a_table_for_each_data_set(tmp_path):
    make_runs_on_two_data_sets(tmp_path / "runs")
    pages = type_in(tmp_path / "runs")[0].split("\n# ")
    assert len(pages) == 2
    for page, data, gap in zip(pages, ("birds", "pets"), ("+5.00", "-5.00"), strict=True):
        assert f"/data/{data}" in page.splitlines()[0]
        rows = table(page, "Results")
        assert [row["runs"] for row in rows] == ["2", "2"] and rows[1]["against group 1"].startswith(gap)
        assert all(f"/{data}-" in row["folder"] for row in table(page, "Runs"))
        assert table(page, "Settings that differ")[0].keys() == {"group", "TRAIN.BASE_LR"}
    assert "left out" in pages[1] and str(tmp_path / "runs/alone") in pages[1]
    named = [tmp_path / "runs" / name for name in ("pets-1e-3-0", "pets-3e-3-0", "birds-1e-3-0")]
    assert "-any_data" in type_in(*named, exit_with=2)[1]


@pytest.mark.parametrize(
    "gaps, verdict, code",
    [((-5.0, 5.0), "inconclusive", 5), ((5.0, 3.0), "better", 0), ((-5.0, -3.0), "worse", 4)],
)
def test_json_has_a_verdict_for_each_data_set_and_a_common_one(tmp_path, gaps, verdict, code):
    make_runs_on_two_data_sets(tmp_path, gaps)
    found = json.loads(type_in(tmp_path / "*-1e-3-*", tmp_path / "*-3e-3-*", "-json", exit_with=code)[0])
    assert found["verdict"] == verdict
    differences = {each["data"].split(",")[0]: each["difference"] for each in found["data_sets"]}
    assert differences == pytest.approx({"/data/pets": gaps[0], "/data/birds": gaps[1]})
    words = [each["verdict"] for each in found["data_sets"]]
    assert words == ["better" if each["difference"] > 0 else "worse" for each in found["data_sets"]]
    of_pets = json.loads(type_in(tmp_path / "pets-1e-3-*", tmp_path / "pets-3e-3-*", "-json", exit_with=None)[0])
    (same,) = [each for each in found["data_sets"] if "pets" in each["data"]]
    assert of_pets == {key: value for key, value in same.items() if key != "data"}
    _, err = type_in(tmp_path / "pets-1e-3-*", tmp_path / "*-3e-3-*", "-json", exit_with=2)
    assert "-any_data" in err, "one side has no run on the other data set"


@pytest.fixture(scope="module")
def two_scored(tmp_path_factory):
    """Make two runs that scored 40 images with the same names. Only the second run is right on the last ten."""
    folder, runs = tmp_path_factory.mktemp("scored"), []
    for name, num_right in (("a", 30), ("b", 40)):
        right = {f"{number}.jpg": number < num_right for number in range(40)}
        runs.append(write_predictions(make_run(folder / name, [70.0]), right))
    return runs


@given(changed=st.sets(st.sampled_from(FACTS_OF_IMAGES)), path=st.sampled_from(["/here", "/there"]))
@examples(40)
def test_images_are_paired_if_the_validation_images_or_the_folder_are_equal(two_scored, changed, path):
    facts = {fact.replace(" ", "_"): "4 5 6" for fact in changed}
    about = about_data("/here"), about_data(path, **facts)
    one, two = (replace(run, status=status) for run, status in zip(two_scored, about, strict=True))
    test = image_test(one, two)
    if path == "/here" or not any("validation" in fact for fact in changed):
        assert (test.num_images, test.only_first, test.only_second) == (40, 0, 10)
    else:
        assert test is None


def test_images_with_several_labels_are_not_paired(two_scored, tmp_path):
    runs = [replace(run, folder=shutil.copytree(run.folder, tmp_path / run.folder.name)) for run in two_scored]
    for run in runs:
        text = (run.folder / "predictions.csv").read_text().replace(",0.9,", ",0.9|0.8,")
        (run.folder / "predictions.csv").write_text(text)
    assert image_test(*two_scored) and image_test(*runs) is None


def test_pairs_weigh_missing_numbers_as_the_scores_of_runs_do(tmp_path):
    """One of ten images has the second number, whose errors count as much as all of the first."""
    runs = []
    for name, rate, errors in (("a", "1e-3", (1.0, 4.0)), ("b", "3e-3", (1.5, 6.0))):
        settings = f"TRAIN.OBJECTIVE: numbers\nTRAIN.BEST_METRIC: mae\nTRAIN.BASE_LR: {rate}"
        run = make_run(tmp_path / name, [sum(errors) / 2], settings, metric="mae")
        rows = [f"{number}.jpg,0,{errors[0]},{'' if number else 0},{errors[1]}" for number in range(10)]
        (run.folder / "predictions.csv").write_text("\n".join(["image,x,x_predicted,y,y_predicted", *rows, ""]))
        (run.folder / "results.json").write_text("{}")
        runs.append(run)
    test = image_test(*runs)
    assert (test.num_images, test.value) == (10, pytest.approx(1.25))
    assert "+1.25" in type_in(*(run.folder for run in runs))[0]


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"data_path": "/there"}, "DATA.DATA_PATH"),
        ({"images_per_update": 32}, "images_per_update"),
        ({"data": DATA | {"labels of the training images": "b"}}, "labels of the training images"),
    ],
)
def test_runs_with_different_data_labels_or_update_sizes_are_grouped_separately(tmp_path, change, column):
    same = ABOUT | {"images_per_update": 64}
    for seed, about in enumerate((same, same, same | change)):
        make_run(tmp_path / f"{seed}", [90.0 + seed], f"SEED: {seed}", {"about": about})
    groups = groups_in(tmp_path)
    assert [len(group.runs) for group in groups] == [2, 1] and list(groups[0].settings) == [column]


TIMM = "MODEL.TYPE: timm\nMODEL.NAME: efficientnet_b0"


def test_settings_without_effect_are_neither_shown_nor_separate_groups(tmp_path):
    make_run(tmp_path / "a", [90.0], "MODEL.PATCH_SIZE: 4\nTRAIN.BCE_TARGET_THRESH: 0.2")
    make_run(tmp_path / "b", [90.0], "MODEL.PATCH_SIZE: 4\nSEED: 1")
    make_run(tmp_path / "c", [90.0], f"{TIMM}\nTRAIN.LOSS: bce\nTRAIN.BCE_TARGET_THRESH: 0.2")
    make_run(tmp_path / "d", [90.0], f"{TIMM}\nTRAIN.LOSS: bce\nSEED: 1")
    groups = groups_in(tmp_path)
    columns = ["MODEL.PATCH_SIZE", "TRAIN.BCE_TARGET_THRESH"]
    assert [[group.settings[key] for key in columns] for group in groups] == [["4", "-"], ["-", "0.2"], ["-", "null"]]
    assert [len(group.runs) for group in groups] == [2, 1, 1] and "MODEL.DEPTH" not in groups[0].settings
    short = group_runs([groups[0].runs[0], make_run(tmp_path / "e", [90.0], TIMM)], None)
    assert ["PATCH_SIZE 4" in group.name for group in short] == [True, False] and "PATCH_SIZE" not in short[1].name


def test_one_changed_file_size_does_not_make_data_different(tmp_path):
    for number, sizes in enumerate(("1 2 3 4", "1 2 3 9")):
        status = about_data("/here", sizes_of_the_training_files=sizes)
        make_run(tmp_path / f"{number}", [90.0], f"SEED: {number}", status)
    runs, _ = find_runs([str(tmp_path)])
    assert not other_data(runs) and len(group_runs(runs, None)) == 1


def test_runs_are_compared_only_on_images_that_both_runs_scored(here, tmp_path):
    both = {f"{number}.jpg": number >= 12 for number in range(40)}
    write_predictions(make_run(tmp_path / "a", [70.0]), both | {f"old {number}": True for number in range(90)})
    better = {name: is_right or int(name[:-4]) > 1 for name, is_right in both.items()} | {"12.jpg": False}
    about = ABOUT | {"classes": 11, "data": DATA | {"training images": 99, "validation images": 41}}
    write_predictions(make_run(tmp_path / "b", [60.0], "", {"about": about}), better | {"new": False})
    assert_cases("compare_common_images", type_in("a", "b")[0])
    found = json.loads(type_in(tmp_path / "a", tmp_path / "b", "-json")[0])
    # from scipy.stats.binomtest(1, 11).pvalue
    assert (found["verdict"], found["seeds"], found["images"]) == ("better", [1, 1], 40)
    assert found["p"] == pytest.approx(0.01171875) and found["difference"] == pytest.approx(22.5)
    assert found["interval"][0] > 0 and found["deviation_of_seeds"] == [None, None]
    type_in(tmp_path / "b", tmp_path / "a", "-json", exit_with=4)  # worse
    assert json.loads(type_in(tmp_path / "a", tmp_path / "a", "-json", exit_with=5)[0])["verdict"] == "inconclusive"
    shutil.copytree(tmp_path / "b", tmp_path / "c", ignore=shutil.ignore_patterns("results.json"))
    _, err = type_in(tmp_path / "a", tmp_path / "c", exit_with=2)
    assert "-any_data" in err, "its table may be of another epoch"
    shutil.copytree(tmp_path / "b", tmp_path / "d")
    (tmp_path / "d/predictions.csv").write_text("image,prediction,labels\n1.jpg,cat|dog,cat\n")
    assert "-any_data" in type_in(tmp_path / "a", tmp_path / "d", exit_with=2)[1], "several labels per image"
    _, err = type_in(tmp_path / "a", tmp_path / "b", "-metric", "loss", exit_with=2)
    assert_names(err, "-metric loss", "top1")


def test_json_verdict_by_another_metric_uses_only_its_values(tmp_path):
    """The second run is better by top-1, in all images, but worse by macro F1."""
    for name, top1, macro_f1 in (("a", 70.0, 60.0), ("b", 95.0, 50.0)):
        run = write_predictions(make_run(tmp_path / name, [top1]), {f"{image}": name == "b" for image in range(40)})
        rows = run.folder / "metrics.jsonl"
        rows.write_text(rows.read_text().replace("}", f', "eval_macro_f1": {macro_f1}}}'))
    both = (tmp_path / "a", tmp_path / "b", "-json")
    assert json.loads(type_in(*both)[0])["verdict"] == "better"
    found = json.loads(type_in(*both, "-metric", "macro_f1", exit_with=5)[0])
    assert (found["metric"], found["difference"], found["interval"]) == ("macro_f1", -10.0, None)
    assert found["verdict"] == "inconclusive", "two single runs say nothing about the noise of this metric"
    assert not {"test", "p", "images", "first_alone", "second_alone"} & found.keys()


@pytest.mark.parametrize("changed", ["", "\nTRAIN.BASE_LR: 0.1"])
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_verdict_is_about_settings_only_with_several_seeds_of_each(tmp_path, num_seeds, changed):
    for side, first, lines in (("a", 0, ""), ("b", 5, changed)):
        for seed in range(first, first + num_seeds):
            run = make_run(tmp_path / f"{side}{seed}", [70.0 + 4 * first + seed], f"SEED: {seed}{lines}")
            write_predictions(run, {f"{image}": image > 12 - 2 * first for image in range(40)})
    found = json.loads(type_in(tmp_path / "a*", tmp_path / "b*", "-json")[0])
    is_about_settings = num_seeds > 1 and bool(changed)
    assert (found["verdict"], found["about"]) == ("better", "settings" if is_about_settings else "weights")
    assert is_about_settings or "nothing about" in found["note"]
    if not changed:
        assert "has the highest" not in type_in(tmp_path)[0]


@pytest.mark.parametrize("name", "ab")
def test_run_without_evaluation_gets_no_json_verdict(tmp_path, name):
    for each in "ab":
        make_run(tmp_path / each, [90.0])
    (tmp_path / name / "metrics.jsonl").write_text('{"epoch": 0, "train_loss": 1.0}\n')
    out, err = type_in(tmp_path / "a", tmp_path / "b", "-json", exit_with=2)
    assert not out
    assert_names(err, f"-json: {tmp_path / name} was")


def test_json_verdict_on_several_seeds_uses_their_spread(folder, tmp_path):
    out, _ = type_in(folder / "1e-3-*", folder / "3e-3-*", "-json", exit_with=4)
    found, gap = json.loads(out), statistics.difference(*(dict(enumerate(OF_RATE[rate])) for rate in ("3e-3", "1e-3")))
    assert (found["verdict"], found["seeds"], "images" in found) == ("worse", [3, 3], False)
    assert found["interval"] == pytest.approx([gap.value - gap.half_width, gap.value + gap.half_width])
    assert found["deviation_of_seeds"] == pytest.approx([numpy.std(OF_RATE[rate], ddof=1) for rate in OF_RATE])
    for words in ([folder, "-json"], [folder, folder / "1e-3-0", "-json"], [*folder.glob("1e-3-*"), "-json"]):
        out, err = type_in(*words, exit_with=2)
        assert not out and "-json" in err


def test_runs_without_an_epoch_are_skipped_unless_named(folder):
    (folder / "empty").mkdir()
    (folder / "empty" / "config.yaml").write_text("SEED: 1\n")
    for source in (folder, folder / "*"):
        out, _ = type_in(source)
        assert "left out" in out and "empty" in out
    out, err = type_in(folder / "empty", *folder.glob("1e-3-*"), exit_with=2)
    assert not out
    assert_names(err, folder / "empty")


@pytest.mark.parametrize("words", cases_of("mistakes-of_compare"))
def test_compare_exits_with_2_and_one_error_line_for_each_mistake(folder, here, words):
    (here / "empty").mkdir()
    out, err = type_in(*words.replace("(nothing)", "").split(), exit_with=2)
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    assert_names(err, *names_of("mistakes-of_compare", words))


def test_run_whose_metric_is_unknown_is_compared_by_top1(tmp_path):
    assert make_run(tmp_path / "edited", [70.0], "TRAIN.BEST_METRIC: best").metric == "top1"
    assert make_run(tmp_path / "other", [70.0], "TRAIN.BEST_METRIC: loss").metric == "loss"


def test_run_names_cannot_break_out_of_their_table_cell(tmp_path):
    for name in ("a | b`<i>", "c\nd"):
        # A note mentions this setting.
        make_run(tmp_path / name, [90.0], f"TRAIN.NUM_EPOCHS: 2\nTRAIN.SMOOTHING: 0.{len(name)}")
    text = to_markdown(groups_in(tmp_path), "", [])
    rows = table(text, "Runs")
    assert [len(row) for row in rows] == [6, 6] and "<i>" not in text.replace("\\<i\\>", "")


def test_best_value_of_an_unused_metric_considers_ema_weights():
    scores = [{"eval_top1": 80.0, "eval_top1_ema": 85.0}, {"eval_top1": 81.0, "eval_top1_ema": 84.0}]
    epochs = [{"eval_loss": 1.0, "eval_loss_ema": 1.0, **each} for each in scores]
    run = SavedRun(Path(), {"TRAIN.BEST_METRIC": "loss"}, {}, {}, epochs)
    assert Group(1, {}, [run], "top1").best_of(run) == 85.0


def test_metric_measured_in_only_some_epochs_is_compared(tmp_path):
    rows = make_run(tmp_path / "a", [80.0, 90.0], metric="macro_f1").folder / "metrics.jsonl"
    rows.write_text(rows.read_text().replace('"eval_macro_f1": 80.0, ', ""))
    make_run(tmp_path / "b", [70.0, 75.0], "SEED: 1", metric="macro_f1")
    assert [*groups_in(tmp_path, "macro_f1")[0].best.values()] == [90.0, 75.0]


def test_student_quantiles_match_reference_values_for_any_degrees_of_freedom():
    expected = {0.4: 12.706, 1: 12.706, 1.9: 12.706, 2: 4.303, 30: 2.042, 31: 2.040, 100: 1.984}
    assert {degrees: statistics.student(degrees) for degrees in expected} == pytest.approx(expected, abs=0.003)
    for n in range(1, 200):
        assert statistics.student(n) == pytest.approx(scipy.stats.t.ppf(0.975, n), rel=2e-3)


def test_credentials_in_a_differing_setting_are_hidden(tmp_path):
    for name in "ab":
        make_run(tmp_path / name, [90.0], f"MODEL.PRETRAINED: https://me:secret@server/{name}.pth")
    out, err = type_in(tmp_path)
    assert "@server/b.pth" in out and "secret" not in out + err


def test_oldest_run_of_a_folder_comes_first(tmp_path):
    for name, day in (("a", "02"), ("b", "01")):
        run = {"id": name, "name": name, "began": f"2026-01-{day}T00:00:00+00:00", "saved": ""}
        make_run(tmp_path / "runs" / name, [90.0], f"SEED: {day}", {"run": run})
    assert [run.folder.name for run in find_runs([str(tmp_path / "runs")])[0]] == ["b", "a"]
