"""Runs that learn numbers: their files, and every command that uses their weights."""

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.record.saved_files import write_table
from models.weights.torch_files import read_torch
from tests.support.configs import SMALL
from tests.support.graphs import share_graph
from tests.support.number_rows import write_digits
from tests.support.pages import block_of
from tests.support.runs import ROOT, epochs_of, last_sentence, rows_of, run_folder, status_of, typed

pytestmark = pytest.mark.slow

COUNT, MISSING = 300, range(0, 300, 9)
SETTINGS = SMALL.replace("digits", "csv")
LEARNING = ("TRAIN.MODEL_EMA=true", "TRAIN.BASE_LR=3e-3")
OPTIONS = ("TRAIN.OBJECTIVE=numbers", "DATA.COLUMNS=[path,digit,ink]")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return a table of digits with their value and their ink."""
    folder = tmp_path_factory.mktemp("digits")
    (folder / "small.yaml").write_text(SETTINGS)
    return write_digits(folder, COUNT, MISSING)[0]


def started(table, data, *words: object):
    """Start a run with the small settings on this data."""
    return typed("main_single_gpu.py", "-cfg", table.with_name("small.yaml"), "-data_path", data, *words)


@pytest.fixture(scope="module")
def train(table, tmp_path_factory):
    """Return train(*options), which trains on the table and returns the folder of the run."""

    def train(*options: str, flags: tuple = (), epochs: int = 3, data=table):
        output = tmp_path_factory.mktemp("output")
        given = {word.partition("=")[0]: word for word in (*OPTIONS, "TRAIN.WARMUP_EPOCHS=0", *options)}
        started(table, data, "-output", output, "-epochs", epochs, *flags, "-opts", *given.values()).done()
        return run_folder(output)

    return train


@pytest.fixture(scope="module")
def trained(train):
    return train(*LEARNING, "REPORT=true", "TRAIN.BEST_EPOCH=highest", epochs=8)


@pytest.fixture(scope="module")
def of_times(train, table):
    """Return a half precision run with a third number: seconds since 1970, which float32 rounds to two minutes."""
    times = table.with_name("times.csv")
    rows = [f"{','.join(row.values())},{1.7e9 + 30 * int(row['digit'])}" for row in rows_of(table)]
    times.write_text("\n".join(["path,digit,ink,time", *rows]) + "\n")
    return train("DATA.COLUMNS=[path,digit,ink,time]", flags=("-amp",), data=times)


@pytest.fixture(scope="module")
def page(of_times, tmp_path_factory):
    """Return the page of the half precision run, whose graph takes photos."""
    folder = tmp_path_factory.mktemp("web") / "page"
    typed("scripts/export.py", of_times / "best.pth", "-output", folder, "-to", "web").done()
    return folder


@pytest.fixture(scope="module")
def of_classes(table, tmp_path_factory):
    """Return a run with as many classes as the table has numbers, and with their names."""
    rows = [f"{number}.png,{('digit', 'ink')[number % 2]}" for number in range(COUNT)]
    data = table.with_name("classes.csv")
    data.write_text("\n".join(["image_path,target", *rows]) + "\n")
    output = tmp_path_factory.mktemp("classes")
    started(table, data, "-epochs", 1, "-output", output).done()
    return run_folder(output)


@pytest.mark.long
def test_figures_of_a_run_are_those_of_its_predictions(trained):
    """In the log, metrics.csv, status.json, results.json and per_output.csv."""
    rows = rows_of(trained / "predictions.csv")
    true, predicted = (
        np.array([[float(row[f"{name}{end}"] or "nan") for name in ("digit", "ink")] for row in rows])
        for end in ("", "_predicted")
    )
    errors = np.nanmean(np.abs(predicted - true), 0)
    outputs = rows_of(trained / "per_output.csv")
    assert [float(row["mae"]) for row in outputs] == pytest.approx(errors, rel=1e-4)
    assert sum(int(row["images"]) for row in outputs) == (~np.isnan(true)).sum() < true.size
    best, results = status_of(trained)["best"], json.loads((trained / "results.json").read_text())
    assert best["mae"] == results["value"] == pytest.approx(errors.mean(), rel=1e-4)
    found = [row["eval_mae_ema" if results["weights"] == "ema" else "eval_mae"] for row in epochs_of(trained)]
    assert min(found) == found[results["epoch"] - 1] == pytest.approx(errors.mean(), rel=1e-3)
    sentence = last_sentence((trained / "log.txt").read_text())
    assert sentence.is_highest and sentence.score.startswith("MAE ")
    assert all(row["train_top1"] is None and row["eval_top1"] is None for row in epochs_of(trained))


@pytest.mark.long
def test_negative_numbers_are_no_formulas_in_the_tables(train, table):
    """A text that starts with a minus sign would get an apostrophe."""
    negative = table.with_name("negative.csv")
    rows = [line.rpartition(",")[0] for line in table.read_text().splitlines()]
    negative.write_text("\n".join(["path,cold", *(row.replace(",", ",-") for row in rows[1:])]) + "\n")
    folder = train("DATA.COLUMNS=[path,cold]", epochs=1, data=negative)
    cells = [row[name] for row in rows_of(folder / "predictions.csv") for name in ("cold", "cold_predicted")]
    assert min(map(float, cells)) < -1


def test_interval_has_nine_of_ten_validation_images(trained):
    rows, halves = rows_of(trained / "predictions.csv"), read_torch(trained / "best.pth")["calibration"]["interval"]
    for name, half in zip(("digit", "ink"), halves, strict=True):
        errors = [abs(float(row[name]) - float(row[f"{name}_predicted"])) for row in rows if row[name]]
        inside = sum(error <= half * 1.0001 for error in errors)
        assert inside == math.ceil(0.9 * (len(errors) + 1))
    assert read_torch(trained / "best.pth")["calibration"]["limits"] == [[0, 9], [None, None]]


def test_report_shows_the_numbers(trained):
    page = (trained / "report.html").read_text()
    for text in (
        "predicted against true numbers",
        "Largest errors",
        "Usual errors",
        "mean&#x27;s MAE",
        "ink: histogram of the errors",
        "validation MAE",
    ):
        assert text in page
    assert "accuracy, %" not in page and "Calibration" not in page
    outputs = json.loads((trained / "results.json").read_text())["per_output"].values()
    mae, low, high = (f"{np.mean([each['mae'][place] for each in outputs]):.4g}" for place in range(3))
    mean = f"{np.mean([each['mae_of_mean'][0] for each in outputs]):.4g}"
    assert f"is {mae} (95%: {low} to {high}); predicting the mean: {mean}; these images also chose" in page


def test_evaluation_of_the_run_repeats_its_figures(trained, tmp_path):
    said = typed("main_single_gpu.py", "-eval", "-pretrained", trained, "-output", tmp_path).done().stdout
    results = json.loads((trained / "results.json").read_text())
    assert f"{results['value']:.4g}" in said and "predicting the mean" in said and "2 numbers" in said
    (folder,) = tmp_path.glob("eval-*")
    assert (folder / "predictions.csv").read_text() == (trained / "predictions.csv").read_text()


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.safetensors", "a.onnx"])
def test_exports_of_a_float32_run_answer_as_its_validation_table(trained, table, tmp_path, name):
    typed("scripts/export.py", trained / "best.pth", "-output", tmp_path / name).done()
    expected = rows_of(trained / "predictions.csv")[0]
    photo = table.parent / expected["image"]
    typed("scripts/predict.py", tmp_path / name, photo, "-csv", tmp_path / "p.csv").done()
    (row,) = rows_of(tmp_path / "p.csv")
    for output in ("digit", "ink"):
        assert float(row[output]) == pytest.approx(float(expected[f"{output}_predicted"]), abs=0.05)
    assert float(row["digit_low"]) < float(expected["digit_predicted"]) < float(row["digit_high"])


def are_rounded(times: list[float], run: Path) -> bool:
    """Return whether half precision has rounded these answers of a run, and not only by chance a few."""
    config = read_torch(run / "best.pth")["config"]
    numbers = (np.array(times) - config["DATA.TARGET_MEAN"][2]) / config["DATA.TARGET_STD"][2]
    halves = torch.tensor(numbers).to(torch.bfloat16).double().numpy()
    return np.median(np.abs(numbers - halves)) < 1e-6  # the precision of a printed answer


@pytest.mark.long
def test_exports_of_a_half_precision_run_answer_as_its_validation_table(
    of_times, page, table, tmp_path, monkeypatch, capsys
):
    """Compare the weights, weights in timm's format, graphs of images and photos, and the code of the page."""
    rows = rows_of(of_times / "predictions.csv")
    files = [of_times / "best.pth", tmp_path / "a.safetensors", tmp_path / "a.onnx", page / "model.onnx"]
    for path in files[1:3]:
        typed("scripts/export.py", files[0], "-output", path).done()
    photos = [table.parent / row["image"] for row in rows]
    times = []  # for each file, the predicted times of the photos
    for path in files:
        words = (path, *photos, "-csv", tmp_path / "p.csv", "-json", tmp_path / "p.json")
        said = typed("scripts/predict.py", *words).done().stdout
        predicted = rows_of(tmp_path / "p.csv")
        values = [float(rows[0][f"{name}_predicted"]) for name in ("digit", "ink")]
        assert [float(predicted[0][name]) for name in ("digit", "ink")] == pytest.approx(values, abs=0.05), path
        assert float(predicted[0]["digit_low"]) < values[0] < float(predicted[0]["digit_high"])
        images = json.loads((tmp_path / "p.json").read_text())["images"]
        assert [each["output"] for each in images[0]["predictions"]] == ["digit", "ink", "time"]
        exact = [image["predictions"][2]["value"] for image in images]
        assert said.split("\t")[1] == "digit"
        times.append([float(row["time"]) for row in predicted])
        assert times[-1] == pytest.approx(exact, rel=0, abs=1e-3)  # printed; so two may be equal by chance
        assert len({*exact}) == len(rows) > 20 and not are_rounded(exact, of_times), path
    table_times = [float(row["time_predicted"]) for row in rows]
    assert not are_rounded(table_times, of_times)
    for answers in (*times[1:], table_times):
        assert answers == pytest.approx(times[0], rel=0, abs=0.1)
    shutil.copy(photos[0], tmp_path / "photo.jpg")
    shutil.copy(files[-1], tmp_path / "ages.onnx")
    monkeypatch.chdir(tmp_path)
    exec(block_of(ROOT / "docs/numbers.md", "onnxruntime"), {})
    digit, ink, _ = capsys.readouterr().out.splitlines()
    found = [float(text) for text in re.findall(r"-?\d+\.?\d*", digit + ink)]
    expected = [float(predicted[0][f"{name}{end}"]) for name in ("digit", "ink") for end in ("", "_low", "_high")]
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("is_standardized", [True, False])
def test_timms_folder_says_what_the_outputs_mean(trained, tmp_path, is_standardized):
    state, meant = read_torch(trained / "best.pth"), "not standardized"
    data = state["config"]
    if is_standardized:
        meant = f"digit = output x {data['DATA.TARGET_STD'][0]!r} + {data['DATA.TARGET_MEAN'][0]!r}"
    else:
        data |= {"DATA.TARGET_MEAN": [], "DATA.TARGET_STD": []}
    torch.save(state, tmp_path / "best.pth")
    typed("scripts/export.py", tmp_path / "best.pth", "-output", tmp_path / "hub", "-to", "hf").done()
    assert meant in (tmp_path / "hub" / "README.md").read_text()


def test_page_has_the_names_and_intervals_of_the_numbers(of_times, page):
    facts = json.loads((page / "model.json").read_text())
    calibration = read_torch(of_times / "best.pth")["calibration"]
    assert (facts["numbers"], facts["classes"]) == (True, ["digit", "ink", "time"])
    assert (facts["interval"], facts["limits"]) == (calibration["interval"], calibration["limits"])


def test_int8_compares_errors(of_times, page, tmp_path, monkeypatch):
    share_graph(monkeypatch, page / "model.onnx")
    words = (of_times / "best.pth", "-output", tmp_path / "a.onnx", "-int8", "-accept")
    said = typed("scripts/export.py", *words).done().stdout
    assert said.count("MAE") == 2 and "standard deviations (95% interval" in said


@pytest.mark.parametrize("flag", ["-top 2", "-into classes", "-unsure 0.5", "-unknown 0.9"])
def test_flags_of_classes_are_refused(trained, table, flag, here):
    photo = table.with_name("0.png")
    typed("scripts/predict.py", trained, photo, *flag.split()).refused(flag.split()[0], "numbers, not classes")


def test_runs_are_compared_by_the_errors_of_images(train, trained):
    """A run without training is worse, by a paired test."""
    other = train("TRAIN.MODEL_EMA=true", "TRAIN.BASE_LR=0", epochs=1)
    ended = typed("scripts/compare.py", "-json", trained, other)
    verdict = json.loads(ended.stdout)
    assert (ended.returncode, verdict["verdict"], verdict["metric"]) == (4, "worse", "mae")
    assert verdict["p"] < 0.01 and 0 < verdict["interval"][0] < verdict["difference"] < verdict["interval"][1]
    said = typed("scripts/compare.py", trained, other).done().stdout
    assert "best MAE" in said and "paired test with random signs" in said


@pytest.mark.long
def test_weights_without_settings_file_keep_the_scale_of_each_number(trained, table, tmp_path):
    """The columns have another order, so the score before the training is that of the run."""
    words = ["-pretrained", trained / "best.pth", "-data_path", table, "-output", tmp_path, "-epochs", 1]
    typed("main_single_gpu.py", *words, "-opts", "DATA.COLUMNS=[path,ink,digit]").done()
    folder = run_folder(tmp_path)
    before, then = epochs_of(folder)[0], json.loads((trained / "results.json").read_text())
    assert before["epoch"] == -1 and before["eval_mae"] == pytest.approx(then["value"], rel=1e-3)
    scales = [read_torch(each / "last.pth")["config"]["DATA.TARGET_MEAN"] for each in (trained, folder)]
    assert scales[0] == scales[1][::-1]


@pytest.mark.long
@pytest.mark.parametrize("there, here", [("numbers", "classes"), ("classes", "numbers")])
def test_head_of_another_task_starts_anew(train, trained, of_classes, table, tmp_path, there, here):
    """Even if its outputs have the names of the columns, or the same number."""
    if there == "numbers":
        words = ("-epochs", 1, "-output", tmp_path, "-pretrained", trained / "best.pth")
        started(table, table.with_name("classes.csv"), *words).done()
        folder = run_folder(tmp_path)
        assert read_torch(folder / "last.pth")["config"]["DATA.TARGET_MEAN"] == []
    else:
        folder = train(flags=("-pretrained", of_classes / "last.pth"), epochs=1)
    assert f"the weights were trained for {there}, not for {here}" in (folder / "log.txt").read_text()


@pytest.mark.parametrize("name", ["image", "digit_predicted"])
def test_columns_named_like_those_of_the_results_are_refused(table, tmp_path, name):
    data = table.with_name("names.csv")
    data.write_text(table.read_text().replace("ink", name, 1))
    options = (OPTIONS[0], f"DATA.COLUMNS=[path,digit,{name}]")
    started(table, data, "-output", tmp_path, "-opts", *options).refused("DATA.COLUMNS", name)


def test_teacher_with_numbers_in_another_order_is_converted(train, trained):
    """With the weight 1 for a teacher and no training, the loss is the mean squared difference to the teacher."""
    options = ("TRAIN.DISTILLATION_TYPE=soft", "TRAIN.DISTILLATION_ALPHA=1", f"TRAIN.TEACHER_MODEL={trained}")
    own = (f"MODEL.PRETRAINED={trained / 'best.pth'}", "TRAIN.BASE_LR=0")
    turned = epochs_of(train(*options, *own, "DATA.COLUMNS=[path,ink,digit]", "MODEL.DROPOUT=0", epochs=1))[-1]
    assert turned["train_loss"] == pytest.approx(0, abs=1e-5)


def test_teacher_of_classes_is_refused(table, of_classes):
    options = (*OPTIONS, "TRAIN.DISTILLATION_TYPE=soft", f"TRAIN.TEACHER_MODEL={of_classes}")
    started(table, table, "-opts", *options).refused("TRAIN.TEACHER_MODEL", "TRAIN.OBJECTIVE")


def test_check_describes_numbers_and_images_with_two_numbers(table, tmp_path):
    rows = table.read_text().splitlines()
    (tmp_path / "twice.csv").write_text("\n".join([*rows, rows[2].replace(",1,", ",8,")]) + "\n")
    options = (*OPTIONS, f"DATA.IMAGE_ROOT={table.parent}")
    said = started(table, tmp_path / "twice.csv", "-check", "-opts", *options).stdout
    assert "training: ink: " in said and "missing for" in said
    assert "digit 1.0" in said and "digit 8.0" in said and "in two numbers" in said


def test_column_that_only_unreadable_images_have_is_named(trained, table, tmp_path):
    data = table.with_name("rare.csv")
    rare = {f"bad{number}.png": number for number in range(10)}
    for name in rare:
        data.with_name(name).write_bytes(b"no image")
    rows = [f"{number}.png,{number % 7}," for number in range(30)] + [f"{name},1,{rare[name]}" for name in rare]
    data.write_text("\n".join(["path,age,rare", *rows]))
    options = (OPTIONS[0], "DATA.COLUMNS=[path,age,rare]", "DATA.MAX_BAD_FRACTION=0.9", "DATA.BATCH_SIZE=8")
    words = ("-pretrained", trained, "-output", tmp_path, "-opts", *options, "MODEL.NEW_CLASSIFIER=linear")
    started(table, data, *words).refused("DATA.COLUMNS", "rare")


def test_doctor_replays_large_numbers_as_they_were_trained(train, table):
    large = table.with_name("large.csv")
    rows = (f"{number}.png,{1e6 + 999 * number**2 % 1e5}" for number in range(COUNT))
    large.write_text("\n".join(["path,price", *rows]))
    folder = train("DATA.COLUMNS=[path,price]", epochs=1, data=large)
    said = typed("scripts/doctor.py", folder, "-amp_dtype", "float16").done().stdout
    assert "nothing breaks" in said and not (folder / "doctor.yaml").exists()


def test_doubtful_numbers_are_listed_first(trained, table, tmp_path):
    """Three digits with a wrong ink."""
    lines = table.read_text().splitlines()
    wrong = ("41", "82", "203")
    for number in wrong:
        path, digit, ink = lines[int(number) + 1].split(",")
        lines[int(number) + 1] = f"{path},{digit},{float(ink) + 300}"
    (tmp_path / "wrong.csv").write_text("\n".join(lines) + "\n")
    words = (trained / "best.pth", "-cfg", table.with_name("small.yaml"))
    words += ("-dataset", "csv", "-data_path", tmp_path / "wrong.csv")
    options = (*OPTIONS, f"DATA.IMAGE_ROOT={table.parent}")
    typed("scripts/labels.py", *words, "-no_copies", "-output", tmp_path / "found", "-opts", *options).done()
    rows = [row for row in rows_of(tmp_path / "found" / "labels.csv") if row["suggestion"].startswith("ink")]
    assert {row["image"] for row in rows[:3]} == {f"{number}.png" for number in wrong}
    words += ("-apply", tmp_path / "found" / "labels.csv", "-opts", *options)
    typed("scripts/labels.py", *words).refused("-apply", "CSV")


@pytest.mark.parametrize("judge", ["run", "features"])
def test_better_judge_finds_doubtful_numbers_of_a_run(trained, tmp_path, judge):
    """One of two judges knows all numbers and finds a wrong one; the other guesses."""
    folder = shutil.copytree(trained, tmp_path / "run")
    rows, rng = rows_of(folder / "predictions.csv"), np.random.default_rng(0)
    wrong, known = rows[7], [row for row in rows if row["digit"] and row["ink"]]
    for row in rows:
        for name in ("digit", "ink"):
            guess = float(row[name] or 0) + rng.normal() if judge == "run" else 1000 * rng.normal()
            row[f"{name}_predicted"] = guess
    if judge == "run":
        wrong["ink_predicted"] = float(wrong["ink"]) + 50
    write_table(folder / "predictions.csv", [*rows[0]], [[*row.values()] for row in rows])
    features = np.array([[float(row["digit"]), float(row["ink"])] for row in known])
    if judge == "run":
        features = rng.normal(size=(len(known), 8))
    columns = {"names": [row["image"] for row in known], "features": features.astype(np.float32)}
    arrays = {f"{part}_{name}": value for part in ("training", "validation") for name, value in columns.items()}
    np.savez(folder / "features.npz", **arrays)
    said = typed("scripts/labels.py", folder, "-no_copies", "-output", tmp_path / "found").done().stdout
    assert ("the trained model judges these images" in said) is (judge == "run")
    assert ("the features judge all images" in said) is (judge == "features")
    if judge == "run":
        rows = [row for row in rows_of(tmp_path / "found" / "labels.csv") if row["suggestion"].startswith("ink")]
        assert rows[0]["image"] == wrong["image"]


def test_run_without_features_judges_the_numbers_that_it_held_out(trained, tmp_path):
    assert not (trained / "features.npz").exists()
    said = typed("scripts/labels.py", trained, "-no_copies", "-output", tmp_path / "found").done().stdout
    count = len([row for row in rows_of(trained / "predictions.csv") if row["ink"]])
    assert f"on {count} images" in said and "-folds 5" in said


@pytest.mark.long
def test_weights_of_classes_judge_numbers(table, tmp_path):
    words = ("-dataset", "csv", "-data_path", table, "-image_size", 48, "-no_copies", "-output", tmp_path)
    said = typed("scripts/labels.py", "tf_efficientnet_lite0", *words, "-opts", *OPTIONS).done().stdout
    assert {row["suggestion"].partition(" ")[0] for row in rows_of(tmp_path / "labels.csv")} == {"digit", "ink"}
    assert "digit: mean error" in said and "ink: mean error" in said
