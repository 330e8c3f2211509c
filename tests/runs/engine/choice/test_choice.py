"""Weights that the images choose: scores of candidates, their comparison, kept results, and candidates that fail."""

import json
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression

from datasets.split.together import joined
from engine.catalogue import best_of, figures, find_names
from engine.choice.candidates import Candidate, candidates_of, with_newest_run
from engine.choice.choose import best_of as best_candidate
from engine.choice.choose import choose, compare, interval_of, is_result
from engine.choice.measure import file_of, measure, plan_candidate
from engine.choice.scoring import FOLDS, Scored, fold_of_each, images_of
from engine.evaluation.scores import wilson_interval
from engine.features.linear import PENALTY
from engine.record.saved_files import read_object
from engine.report.choice import notes_of
from engine.settings import candidate_names_in, load_settings
from engine.train.forecast import RunTimes
from tests.support import number_rows, several_labels
from tests.support.image_sets import draw_patches
from tests.support.refusals import refused
from tests.support.run_hash import run_hash
from tests.support.runs import run, typed
from tests.support.weight_files import write_run_weights
from utils.distributed import Process
from utils.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

FOLDER = TemporaryDirectory()
WEIGHTS = str(Path(FOLDER.name).resolve() / "vit.safetensors")
BEST, WORSE = f"{WEIGHTS}@8", f"{WEIGHTS}@16"  # random weights see digits best in their own size
ROW = {"exceeds_budget": False}
DIGITS = ["-dataset", "digits", "-epochs", "1", "-opts", "DATA.HFLIP=0", "DATA.BATCH_SIZE=100", "DATA.NUM_WORKERS=0"]
FASTER = {"judge_no_labels": []}  # faults, for forks too


def process() -> Process:
    return Process(torch.device("cpu"))


def chosen(folder, *words, arguments=DIGITS, say=print, **more) -> dict:
    return choose(arguments, words, folder, process(), say, **more)


def without_times(record: dict) -> dict:
    """Return a record without what differs between two measurements."""
    measured = ("seconds", "shortest_seconds", "train_images_per_s", "predict_images_per_s")
    rows = [{name: value for name, value in row.items() if name not in measured} for row in record["candidates"]]
    return record | {"candidates": rows}


@pytest.fixture(scope="module", autouse=True)
def weights():
    yield write_run_weights(Path(WEIGHTS))
    FOLDER.cleanup()


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Return the folder of a choice between two image sizes, and its record."""
    folder = tmp_path_factory.mktemp("choice")
    return folder, chosen(folder, BEST, WORSE)


@pytest.mark.long
def test_own_size_of_digits_is_chosen_with_score_and_interval(kept):
    _, record = kept
    best, other = record["candidates"]
    assert record["best"] == best["word"] == BEST and record["failed"] == []
    assert (other["name"], other["image_size"]) == (WEIGHTS, 16)
    assert best["score"] > other["score"] + 5 and not best["is_worse"] and other["is_worse"]
    for row in (best, other):
        low, high = row["interval"]
        assert low < row["score"] < high and row["train_images_per_s"] > 0 and row["seconds"] > 0
    assert 400_000 < best["parameters"] < other["parameters"]  # fewer positions
    assert "360 of 360 training images" in record["images"]


@pytest.mark.long
def test_score_agrees_with_logistic_regression_of_scikit_learn(kept, monkeypatch):
    folder, record = kept
    computed = []
    monkeypatch.setattr(
        "engine.choice.measure.Scored", lambda plan, found: computed.extend(found) or Scored(plan, found)
    )
    plan = plan_candidate(DIGITS, Candidate(WEIGHTS, 8), process())
    scored, _ = measure(plan, Candidate(WEIGHTS, 8), 0.0)
    (images,), (found,) = images_of(plan), computed
    folds, features, targets = fold_of_each(images), found.joined, found.targets
    right, expected = [], []
    for fold in range(FOLDS):
        rows = folds != fold
        mean, deviation = features[rows].mean(0), features[rows].std(0) + 1e-6
        model = LogisticRegression(C=1 / (PENALTY * rows.sum()), max_iter=2_000, tol=1e-6)
        model.fit((features[rows] - mean) / deviation, targets[rows])
        right.append(model.predict((features[~rows] - mean) / deviation) == targets[~rows])
        expected.append(model.predict_log_proba((features[~rows] - mean) / deviation))
    assert record["candidates"][0]["score"] == pytest.approx(100 * np.concatenate(right).mean(), abs=0.5)
    logarithms = scored.outputs.log_softmax(1).numpy()
    np.testing.assert_allclose(logarithms, np.concatenate(expected), rtol=0, atol=0.03)


def test_each_image_is_in_one_fold():
    plan = plan_candidate(DIGITS, Candidate(WEIGHTS, 16), process())
    (images,) = images_of(plan)
    for split in (images.split, images.split | {"rule": "all"}):  # the latter: of a run that holds out nothing
        sizes = np.bincount(fold_of_each(replace(images, split=split)), minlength=FOLDS)
        assert sizes.sum() == len(images) and sizes.min() > len(images) / FOLDS / 2


def test_second_call_measures_only_new_candidates(kept, monkeypatch):
    folder, record = kept
    built = []
    monkeypatch.setattr("engine.choice.measure.build", lambda plan, log: built.append(plan) or 1 / 0)
    again = chosen(folder, BEST, WORSE)
    assert built == [] and again == record
    with pytest.raises(ZeroDivisionError):
        chosen(folder, BEST, f"{WEIGHTS}@24")
    assert len(built) == 1


@pytest.mark.parametrize("name", ["VERSION", "RESULTS"])
def test_result_of_another_version_is_not_used(name, monkeypatch):
    plan = plan_candidate(DIGITS, Candidate(WEIGHTS, 16), process())
    before = file_of(plan, Candidate(WEIGHTS, 16))
    assert before == file_of(plan, Candidate(WEIGHTS, 16))
    monkeypatch.setattr(f"engine.choice.measure.{name}", "other")
    assert before != file_of(plan, Candidate(WEIGHTS, 16))


@pytest.mark.long
def test_forecast_counts_all_updates_of_the_run(kept, monkeypatch):
    """The updates of the trial that times them belong to the run too."""
    asked = []
    monkeypatch.setattr(RunTimes, "until_end", lambda times, *steps: asked.append(steps) or 1.0)
    plan = plan_candidate(DIGITS, Candidate(WEIGHTS, 8), process())
    measure(plan, Candidate(WEIGHTS, 8), 0.0)
    assert asked[-1] == (0, plan.num_updates)


@pytest.mark.long
def test_choice_that_was_killed_continues_to_the_same_table(kept, tmp_path):
    folder, record = kept
    first, second = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    shutil.copy(first, tmp_path)
    text = json.loads(second.read_text())
    damaged = tmp_path / second.name
    damaged.write_bytes(second.read_bytes()[:500])
    wrong = [text | {"row": text["row"] | {"score": "70"}}, text | {"row": 5}, text | {"draws": ["a"]}]
    assert is_result(text) and not any(map(is_result, [read_object(damaged), {}, *wrong]))
    damaged.write_text(json.dumps(wrong[-1]))  # it counts as none
    assert without_times(chosen(tmp_path, BEST, WORSE)) == without_times(record)
    assert (tmp_path / first.name).read_bytes() == first.read_bytes()
    assert is_result(json.loads((tmp_path / second.name).read_text()))


def test_candidate_that_fails_does_not_end_the_others(kept, tmp_path):
    folder, record = kept
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no weights")
    found = chosen(folder, str(broken), BEST)
    assert [each["name"] for each in found["failed"]] == [str(broken)]
    assert found["candidates"] == record["candidates"][:1]
    with refused(ConfigError, str(broken)):
        chosen(folder, str(broken))


def test_budget_excludes_only_what_its_shortest_run_exceeds(kept):
    folder, record = kept
    shortest = [row["shortest_seconds"] for row in record["candidates"]]
    none = chosen(folder, BEST, WORSE, left=lambda: min(shortest) / 2)
    assert all(row["exceeds_budget"] for row in none["candidates"])
    fastest = min(none["candidates"], key=lambda row: row["shortest_seconds"])
    assert none["best"] == fastest["word"]
    with refused(ConfigError, "TRAIN.BUDGET", "the choice"):
        chosen(folder, BEST, WORSE, left=lambda: -1.0)
    enough = chosen(folder, BEST, WORSE, left=lambda: max(shortest) * 2)
    assert not any(row["exceeds_budget"] for row in enough["candidates"]) and enough["best"] == record["best"]


def test_best_candidate_that_a_budget_shortens_is_chosen():
    rows = [
        {"word": "best", "score": 100.0, "seconds": 58.0, "shortest_seconds": 14.0},
        {"word": "fast", "score": 80.0, "seconds": 12.0, "shortest_seconds": 6.0},
    ]
    results = {
        row["word"]: {"draws": [row["score"] + number % 2 for number in range(200)], "images": "a"} for row in rows
    }
    compare(rows, results, "top1", 36.0)
    assert best_candidate(rows)["word"] == "best"
    assert [(row["is_shortened"], row["exceeds_budget"]) for row in rows] == [(True, False), (False, False)]
    compare(rows, results, "top1", 10.0)
    assert best_candidate(rows)["word"] == "fast"


@pytest.mark.long
def test_few_of_six_equal_candidates_are_called_worse():
    """In 6% of 400 tables; by the noise of two candidates, in more than 30%."""
    rng, num_worse, num_tables = np.random.default_rng(0), 0, 60
    for _ in range(num_tables):
        right = np.where(rng.random((100, 1)) < 0.6, rng.random((100, 1)), rng.random((100, 6))) < 0.8
        times = rng.multinomial(100, np.full(100, 0.01), 200)  # [draws, images]
        rows, results = [], {}
        for number in range(6):
            score = 100 * float(right[:, number].mean())
            rows.append({"word": f"{number}", "score": score, "seconds": 1.0, "shortest_seconds": 1.0})
            results[f"{number}"] = {"draws": (times @ right[:, number]).tolist(), "images": "the same"}
        compare(rows, results, "top1", None)
        num_worse += any(row["is_worse"] for row in rows)
    assert num_worse <= 0.15 * num_tables


def test_weights_with_and_without_their_own_size_are_one_candidate(kept, tmp_path):
    candidate = Candidate(WEIGHTS)
    plan = plan_candidate(DIGITS, candidate, process())
    size = plan.config.DATA.IMAGE_SIZE
    result = json.loads(next(kept[0].glob("*.json")).read_text())
    result["row"]["word"] = WEIGHTS
    (tmp_path / file_of(plan, candidate)).write_text(json.dumps(result))  # a measurement would take seconds
    found = chosen(tmp_path, WEIGHTS, f"{WEIGHTS}@{size}")
    assert [row["word"] for row in found["candidates"]] == [WEIGHTS]
    assert any(f"{WEIGHTS}@{size}" in note for note in found["notes"])


def test_candidates_that_fail_alike_share_a_line():
    reason = "the weights of {} cannot be fetched"
    failed = [{"name": f"{name}@16", "reason": reason.format(name)} for name in "xyz"] + [
        {"name": "w", "reason": "other"}
    ]
    lines = [line for line in notes_of({"failed": failed, "notes": [], "images": "", "best": "", "candidates": [ROW]})]
    assert [line for line in lines if "cannot be used" in line] == [
        "cannot be used: x@16, y@16, z@16: the weights of x cannot be fetched",
        "cannot be used: w: other",
    ]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_labels_and_numbers_are_scored_by_their_own_metric(kind, tmp_path):
    if kind == "labels":
        file = several_labels.write_digits(tmp_path, 150)[0]
        options = ["DATA.LABEL_SEPARATOR='|'"]
    else:
        file = number_rows.write_digits(tmp_path, 150)[0]
        options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,'*']"]
    arguments = ["-dataset", "csv", "-data_path", str(file), "-epochs", "1", "-opts", "DATA.HFLIP=0", *options]
    record = chosen(tmp_path / "out", WORSE, BEST, arguments=arguments)
    best, other = record["candidates"]
    if kind == "labels":
        assert (best["word"], other["word"]) == (BEST, WORSE)
        assert record["metric"] == "map" and 100 > best["score"] > other["score"] > 60
    else:  # numbers are seen better in larger images
        assert (best["word"], other["word"]) == (WORSE, BEST)
        assert record["metric"] == "mae" and 0 < best["score"] < other["score"] < 40
    assert best["interval"][0] < best["score"] < best["interval"][1]


@pytest.mark.long
def test_images_of_a_group_are_scored_together(tmp_path):
    file, _ = number_rows.write_digits(tmp_path, 100)
    header, *rows = file.read_text().splitlines()
    copies = [f"{row},{number}" for number, row in enumerate(rows) for _ in range(4)]
    (tmp_path / "groups.csv").write_text("\n".join([f"{header},owner", *copies]) + "\n")
    options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit]", "DATA.GROUP_BY=owner"]
    arguments = ["-dataset", "csv", "-data_path", str(tmp_path / "groups.csv"), "-epochs", "1", "-opts", *options]
    plan = plan_candidate(arguments, Candidate(WEIGHTS, 8), process())
    (images,) = images_of(plan)
    folds, names = fold_of_each(images), [images.table_name(row) for row in range(len(images))]
    assert len({(name, fold) for name, fold in zip(names, folds.tolist(), strict=True)}) == len(set(names))
    scored, _ = measure(plan, Candidate(WEIGHTS, 8), 0.0)
    # Two digits that look the same are in one group too.
    assert (
        scored.num_groups == int(joined(images.copies, np.unique(names, return_inverse=True)[1]).max()) + 1 < len(names)
    )


def test_changed_groups_are_scored_again(tmp_path):
    file, _ = number_rows.write_digits(tmp_path, 100)
    header, *rows = file.read_text().splitlines()
    options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit]", "DATA.GROUP_BY=owner"]
    arguments = ["-dataset", "csv", "-data_path", str(tmp_path), "-epochs", "1", "-opts", *options]
    names = []
    for owners in ("ab", "ba"):
        for part, chosen_rows, owner in (("train", rows[:80], "a"), ("val", rows[80:], owners)):
            lines = [f"{row},{part}{owner[number % len(owner)]}" for number, row in enumerate(chosen_rows)]
            (tmp_path / f"{part}.csv").write_text("\n".join([f"{header},owner", *lines]) + "\n")
        names.append(file_of(plan_candidate(arguments, Candidate(WEIGHTS, 8), process()), Candidate(WEIGHTS, 8)))
    assert names[0] != names[1]


@pytest.mark.long
def test_choice_stopped_by_a_signal_and_repeated_gives_the_same_run(tmp_path):
    folders = []
    for name, faults in (("whole", {}), ("stopped", {"tell": [0, "choice", signal.SIGTERM]})):
        words = ["-pretrained", f"choose:{BEST},{WORSE}", "-output", str(tmp_path / name), "-resume", "auto", *DIGITS]
        faults |= FASTER
        ended = typed("main_single_gpu.py", *words, "REPORT=false", faults=faults)
        if "tell" in faults:
            assert ended.returncode == 128 + signal.SIGTERM, ended.printed
            assert [each.name for each in (tmp_path / name).iterdir()] == ["choice"], (
                "the result of the first candidate"
            )
            ended = run("main_single_gpu.py", *words, "REPORT=false", faults=faults | {"tell": [0, "choice", 0]})
        ended.done()
        folders += (tmp_path / name).glob("train-*")
    whole, stopped = folders
    assert run_hash(whole) == run_hash(stopped)


@pytest.mark.long
def test_weights_that_have_learned_these_images_are_no_candidate(kept, tmp_path):
    folder, record = kept
    words = ["-pretrained", WEIGHTS, "-image_size", "8", "-output", tmp_path, "-name", "run"]
    typed("main_single_gpu.py", "-cfg", "finetune", *words, *DIGITS, "REPORT=false", faults=FASTER).done()
    found = chosen(folder, str(tmp_path / "run"), BEST)
    assert found["candidates"] == record["candidates"][:1]
    assert "learned the labels of these images" in found["failed"][0]["reason"]


def test_weights_of_a_run_may_have_seen_validation_images_and_say_so(tmp_path):
    for number in range(32):
        part, label = "train" if number < 24 else "val", f"kind {number % 2}"
        draw_patches(tmp_path / "drawn" / part / label / f"{number}.png", number)
    arguments = ["-data_path", str(tmp_path / "drawn"), "-epochs", "1", "-opts", "DATA.BATCH_SIZE=8"]
    split = {"rule": "none", "training": "elsewhere", "validation": "elsewhere"}
    weights = write_run_weights(tmp_path / "run.safetensors", split=split)
    record = chosen(tmp_path / "out", f"{weights}@8", arguments=arguments)
    assert "may be among the training images" in "".join(record["notes"])


def test_weights_of_a_run_are_trained_as_all_candidates():
    """Without a choice, a run from these weights has the settings of their run."""
    candidate, data = Candidate(WEIGHTS, 16), ["-dataset", "digits"]
    config = plan_candidate(data, candidate, process()).config
    words = [*data, "-cfg", "finetune", "-pretrained", WEIGHTS, "-image_size", "16"]
    assert config == load_settings(words).config
    alone = load_settings([*data, "-pretrained", WEIGHTS, "-image_size", "16"]).config
    assert config.TRAIN != alone.TRAIN


@pytest.fixture
def photos(tmp_path):
    """Return the arguments of a fine-tuning on 60 digits in files, and the files."""
    file, _ = number_rows.write_digits(tmp_path, 60)
    options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit]"]
    return ["-dataset", "csv", "-data_path", str(file), "-epochs", "1", "-opts", *options], sorted(
        tmp_path.glob("*.png")
    )


def test_too_many_unreadable_images_end_the_choice_before_a_candidate_is_measured(photos, tmp_path, monkeypatch):
    arguments, files = photos
    for file in files[::4]:
        file.write_bytes(b"no image")
    monkeypatch.setattr("engine.choice.measure.build", lambda plan, log: 1 / 0)
    with refused(DataError, "cannot be read", "DATA.MAX_BAD_FRACTION"):
        chosen(tmp_path / "out", WORSE, arguments=arguments)


def test_results_with_an_unreadable_image_are_kept(photos, tmp_path, monkeypatch):
    arguments, files = photos
    files[30].write_bytes(b"no image")
    before = chosen(tmp_path / "out", WORSE, arguments=arguments)
    monkeypatch.setattr("engine.choice.measure.build", lambda plan, log: 1 / 0)
    assert chosen(tmp_path / "out", WORSE, arguments=arguments) == before
    assert "50 of 51 training images" in before["images"]


@pytest.mark.parametrize("images, is_worse", [("the same", True), ("others", False)])
def test_draws_of_other_images_are_no_pairs(images, is_worse):
    """The difference of both is 1 in each draw. Its noise is 0 only if the draws are those of the same images."""
    times = {"seconds": 1.0, "shortest_seconds": 1.0}
    rows = [{"word": word, "score": 70.0 + number} | times for number, word in enumerate("ab")]
    draws = np.random.default_rng(0).normal(70, 10, 200)
    results = {
        "a": {"draws": draws.tolist(), "images": "the same"},
        "b": {"draws": (draws + 1).tolist(), "images": images},
    }
    compare(rows, results, "top1", None)
    assert [row["word"] for row in rows] == ["b", "a"]
    assert [row["is_worse"] for row in rows] == [False, is_worse]


@pytest.mark.parametrize(
    ("metric", "value", "spread", "num_groups", "interval"),
    [
        ("top1", 75.0, 3.0, 20, wilson_interval(75, 20)),
        ("top1", 75.0, 20.0, 10, (75 - 1.96 * 20, 100)),  # groups of images
        ("macro_recall", 5.0, 10.0, 20, (0, 5 + 19.6)),
        ("macro_recall", 100.0, 0.0, 20, wilson_interval(100, 20)),
        ("mae", 1.0, 2.0, 20, (0, 1 + 3.92)),
        ("r2", 0.9, 0.1, 20, (0.9 - 0.196, 1)),
    ],
)
def test_interval_has_possible_values(metric, value, spread, num_groups, interval):
    draws = value + spread * np.array([-1.0, 1.0] * 100) * np.sqrt(199 / 200)
    scored = SimpleNamespace(value=value, num_groups=num_groups, targets=range(20))
    assert interval_of(metric, scored, draws) == pytest.approx(interval)


def test_few_images_are_counted_as_they_are(tmp_path, monkeypatch):
    """Each class has one training image, so no model knows the class that it scores.

    One update has all three images.
    """
    for number in range(6):
        draw_patches(tmp_path / "drawn" / f"class {number % 3}" / f"{number}.png", number)
    times = SimpleNamespace(update=2.0, evaluation=1.0, until_end=lambda *steps: 9.0)
    monkeypatch.setattr("engine.choice.measure.forecast_run", lambda *given: SimpleNamespace(times=times))
    arguments = ["-data_path", str(tmp_path / "drawn"), "-epochs", "1", "-opts", "DATA.BATCH_SIZE=100"]
    record = chosen(tmp_path / "out", WORSE, arguments=arguments)
    row = record["candidates"][0]
    assert record["images"].endswith("images of a class that their model was not fitted to: 3") and row["score"] == 0
    assert "3 of 3 training images" in record["images"] and row["train_images_per_s"] == 3 / 2


@pytest.mark.long
def test_changed_photos_are_measured_again(tmp_path):
    file, _ = number_rows.write_digits(tmp_path, 60)
    options = ["TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit]"]
    arguments = ["-dataset", "csv", "-data_path", str(file), "-epochs", "1", "-opts", *options]
    before = chosen(tmp_path / "out", WORSE, arguments=arguments)
    for number in range(60):  # a file of the same size, which the facts of a plan do not tell apart
        photo = tmp_path / f"{number}.png"
        content = photo.read_bytes()
        photo.unlink()
        photo.write_bytes(content)
    assert without_times(chosen(tmp_path / "out", WORSE, arguments=arguments)) == without_times(before)
    assert len([*(tmp_path / "out").iterdir()]) == 2


# --- candidates ---


def test_words_name_files_timm_weights_and_patterns_with_sizes():
    notes = []
    found = candidates_of([WORSE, "vit_tiny_patch16_224@160", "vit_small*"], notes)
    assert found[:2] == [Candidate(WEIGHTS, 16), Candidate("vit_tiny_patch16_224", 160)]
    assert len(found) == 8 and "vit_small*: 6 of 25 matches" in notes[0]
    assert len(candidates_of([], notes)) == 6
    other_path = f"{Path(WEIGHTS).parent}/../{Path(WEIGHTS).parent.name}/vit"
    assert candidates_of([WORSE, f"{other_path}@16", WORSE], notes) == [Candidate(WEIGHTS, 16)]
    with refused(ConfigError, "vit_tiny_patch16_224"):
        candidates_of(["vit_tiny_patch16_225"], notes)


def test_best_of_a_pattern_are_beaten_by_no_other_match():
    names = find_names(["convnext*"])
    found, known = best_of(names, 6), figures()
    assert len(found) == 6 == len(set(found))
    for name in found:
        mine = known[name]
        assert not any(each in known and known[each] > mine and known[each].speed > mine.speed for each in names)
    speeds = [known[name].speed for name in found]
    assert speeds == sorted(speeds)
    assert best_of(["x", "y"], 6) == ["x", "y"]


def test_words_of_choose_are_separated_by_commas():
    assert (
        candidate_names_in("choose") == []
        and candidate_names_in("choose:a,b@160") == ["a", "b@160"]
        and candidate_names_in("choosers") is None
    )
    assert candidate_names_in("choose:a,,b.pth@160, c,,,d") == ["a,b.pth@160", "c,", "d"], (
        "two commas are one of a name"
    )
    with refused(ConfigError, "choose:a,", "two commas"):
        candidate_names_in("choose:a,")


# --- the command, and runs ---


def test_models_writes_table_picture_and_the_next_command(kept, tmp_path):
    folder, record = kept
    shutil.copytree(folder, tmp_path / "out")
    for name in ("choice.json", "choice.png"):
        (tmp_path / f"out/.{name}.tmp").mkdir()  # another choice writes this file too
    words = [*DIGITS[:4], "-output", tmp_path / "out", "-json", tmp_path / "a.json"]
    ended = typed("scripts/models.py", BEST, WORSE, *words, *DIGITS[4:]).done()
    assert f"chosen: {BEST}" in ended.stdout and "not worse" not in ended.stdout
    command = ended.stdout.splitlines()[-1]
    assert command.startswith("train it: ") and f"-pretrained {WEIGHTS} " in command
    trained = load_settings(shlex.split(command)[shlex.split(command).index("-pretrained") :]).config
    assert trained == plan_candidate(DIGITS, Candidate(WEIGHTS, 8), process()).config
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((tmp_path / "out/choice.json").read_text())
    assert (tmp_path / "out/choice.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "a.json").unlink()
    (tmp_path / ".a.json.tmp").mkdir()
    ended = typed("scripts/models.py", BEST, WORSE, *words, *DIGITS[4:])
    ended.refused("-json", "a.json")
    assert f"chosen: {BEST}" in ended.stdout, "the table is shown although a file cannot be written"


@pytest.mark.long
def test_settings_may_name_the_model_of_weights_that_do_not(tmp_path):
    file = tmp_path / "plain.safetensors"
    save_file(timm.create_model("test_vit", img_size=32).state_dict(), file)
    named = [*DIGITS, "MODEL.NAME=test_vit"]
    ended = typed("scripts/models.py", f"{file}@16", "-output", tmp_path / "out", *named).done()
    assert f"chosen: {file}@16" in ended.stdout
    file = file.rename(tmp_path / "plain, small.safetensors")
    word = str(file).replace(",", ",,")  # as the names of candidates have it
    words = ["-pretrained", f"choose:{word}@16", "-output", tmp_path, "-name", "run", *named, "REPORT=false"]
    typed("main_single_gpu.py", *words, faults=FASTER).done()
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["MODEL"]["NAME"] == "test_vit"


@pytest.mark.long
def test_run_trains_the_chosen_weights_and_shows_the_table(kept, tmp_path):
    folder, record = kept
    shutil.copytree(folder, tmp_path / "choice")
    words = [
        "-pretrained",
        f"choose:{BEST},{WORSE}",
        "-output",
        tmp_path,
        "-name",
        "run",
        "-resume",
        "auto",
        *DIGITS,
    ]
    ended = typed("main_single_gpu.py", *words).done()
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["MODEL"]["PRETRAINED"] == WEIGHTS and settings["DATA"]["IMAGE_SIZE"] == 8
    assert f"chosen: {BEST}" in ended.stdout and f"chosen: {BEST}" in (tmp_path / "run/log.txt").read_text()
    assert json.loads((tmp_path / "run/choice.json").read_text()) == record
    page = (tmp_path / "run/report.html").read_text()
    assert "Choice of the weights" in page and f"<td>{WORSE}</td>" in page
    again = typed("main_single_gpu.py", *words).done()
    assert "already finished" in again.stdout and "chosen: " not in again.stdout


@pytest.mark.long
def test_resumed_run_keeps_the_size_of_its_candidate(kept, tmp_path):
    """On the first start the candidate's size overrides -image_size, so it does on the next."""
    shutil.copytree(kept[0], tmp_path / "choice")
    words = ["-pretrained", f"choose:{BEST},{WORSE}", "-image_size", "24", "-output", tmp_path, "-name", "run"]
    words += ["-resume", "auto", *DIGITS, "REPORT=false"]
    for sentence in (f"chosen: {BEST}", "already finished"):
        assert sentence in typed("main_single_gpu.py", *words, faults=FASTER).done().stdout
        settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
        assert settings["DATA"]["IMAGE_SIZE"] == 8
    words[1] = f"choose:{WEIGHTS}"  # without @PIXELS, -image_size applies
    typed("main_single_gpu.py", *words).refused("DATA.IMAGE_SIZE")


@pytest.mark.long
def test_latest_run_is_that_of_the_output_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train = ["main_single_gpu.py", "-output", "mine", *DIGITS[:4]]
    options = [*DIGITS[4:], "REPORT=false"]
    words = ["-cfg", "finetune", "-pretrained", WEIGHTS, "-image_size", "8", "-name", "first"]
    typed(*train, *words, *options, faults=FASTER).done()
    assert with_newest_run(["latest", "latest@8", "later"], "mine") == ["mine/first", "mine/first@8", "later"]
    words = ["latest@8", WORSE, *DIGITS[:4], "-output", "mine/choice"]  # the run below finds its results there
    ended = typed("scripts/models.py", *words, *options, "SAVE=mine").done()
    assert "mine/first@8: " in ended.stdout
    ended = typed(*train, "-pretrained", f"choose:latest@8,{WORSE}", *options, faults=FASTER).done()
    assert "mine/first@8: " in ended.stdout and f"chosen: {WORSE}" in ended.stdout


@pytest.mark.long
def test_two_processes_and_check_make_the_choice_once_and_check_keeps_nothing(tmp_path):
    words = ["-pretrained", f"choose:{WORSE}", "-output", str(tmp_path), *DIGITS]
    checked = typed("main_single_gpu.py", "-check", "-check_images", "10", *words, faults=FASTER)
    assert f"chosen: {WORSE}" in checked.done().stdout and not (tmp_path / "choice").exists()
    ended = typed("main_multi_gpu.py", *words, "REPORT=false", processes=2, faults=FASTER).done()
    assert ended.stdout.count(f"chosen: {WORSE}") == 1 and len([*(tmp_path / "choice").iterdir()]) == 1
    (folder,) = tmp_path.glob("train-*")
    assert yaml.safe_load((folder / "config.yaml").read_text())["DATA"]["IMAGE_SIZE"] == 16


def test_evaluation_and_sweep_refuse_to_choose(tmp_path):
    typed("main_single_gpu.py", "-eval", "-pretrained", "choose", *DIGITS).refused("choose", "evaluated")
    words = ["-pretrained", "choose", "-output", tmp_path / "sweep", "-seeds", "0,1", *DIGITS]
    typed("scripts/sweep.py", *words).refused("MODEL.PRETRAINED", "halfstep models")
    typed("scripts/models.py", "-budget", "1h", "vit").refused("-budget", "-data_path")
    typed("scripts/models.py", "-data_path", ".", "-budget", "soon").refused("-budget", "soon")
    typed("scripts/models.py", "-dataset", "digits", "-json", tmp_path).refused("-json", tmp_path)
    for option, words in (
        ("TRAIN.BUDGET=1h", ("TRAIN.BUDGET", "-budget")),
        ("CHECK=true", ("-check",)),
        ("MODEL.RESUME=auto", ("-resume",)),
        ("TRAIN.BEST_METRIC=nonsense", ("TRAIN.BEST_METRIC", "nonsense")),
    ):
        ended = typed("scripts/models.py", "-dataset", "digits", "-opts", option)
        ended.refused(*words)
        assert "cannot be used" not in ended.stdout
    words = ["-pretrained", f"choose:{BEST}", "-output", "/proc/x", *DIGITS]
    typed("main_single_gpu.py", *words).refused("SAVE", "/proc/x")
