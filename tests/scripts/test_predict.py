"""scripts/predict.py classifies as the evaluation of the run did, and says what it cannot read."""

import csv
import io
import json
import os
import shutil
import sys

import pytest
import torch
from PIL import Image

from datasets import load_image_sets
from engine.predict.classifier import config_of
from scripts import export, predict
from tests.support.configs import small_config
from tests.support.refusals import assert_names
from tests.support.runs import run, run_folder
from utils.program import exit_code


@pytest.fixture(scope="module")
def trained(tmp_path_factory, small_yaml):
    """The folder of a run over one epoch, with a running mean beside the weights."""
    output = tmp_path_factory.mktemp("trained")
    flags = ["-cfg", str(small_yaml), "-output", str(output), "-epochs", "1", "-amp"]
    result = run("main_single_gpu.py", *flags, "-opts", "TRAIN.MODEL_EMA=true", "TRAIN.MODEL_EMA_DECAY=0.8")
    assert result.returncode == 0, result.stderr
    return run_folder(output)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """The validation digits as files, DIGIT/NUMBER.png."""
    folder = tmp_path_factory.mktemp("digits")
    _, images = load_image_sets(small_config(folder))
    for index, target in enumerate(images.targets):
        path = folder / images.classes[target] / f"{index}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(images.read(index)[:, :, 0]).save(path)
    return folder


@pytest.fixture
def typed(capsys):
    """Types a command; returns its exit code, its lines cut at the tabs, and what went to the error stream."""

    def type_in(*words):
        code = exit_code(predict.main, [str(word) for word in words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, [line.split("\t") for line in out.splitlines()], err

    return type_in


@pytest.mark.parametrize(("flags", "columns"), [([], ["eval_top1", "eval_top1_ema"]), (["-raw"], ["eval_top1"])])
def test_as_many_predictions_are_right_as_in_the_evaluation_of_the_run(trained, digits, typed, flags, columns):
    code, lines, _ = typed(trained / "last.pth", *sorted(digits.glob("[0-9]")), *flags)
    assert code == 0 and len(lines) == 359
    right = sum(path.split("/")[-2] == name for path, name, _ in lines)
    with open(trained / "metrics.csv") as file:
        (row,) = csv.DictReader(file)
    assert 100 * right / 359 == pytest.approx(max(float(row[name]) for name in columns), abs=1e-3)


def test_top_names_the_most_probable_first_and_the_table_says_the_same(trained, digits, typed, tmp_path):
    code, lines, _ = typed(trained / "last", digits / "3", "-top", 99, "-csv", tmp_path / "classes.csv")
    assert code == 0
    with open(tmp_path / "classes.csv") as file:
        rows = list(csv.DictReader(file))
    for number, (path, *guesses) in enumerate(lines):
        names, shares = guesses[::2], [float(share) for share in guesses[1::2]]
        assert sorted(names) == list("0123456789") and sum(shares) == pytest.approx(1, abs=1e-3)
        assert shares == sorted(shares, reverse=True)
        of_image = rows[10 * number : 10 * number + 10]
        assert {row["image_path"] for row in of_image} == {path}
        assert [(row["rank"], row["class"]) for row in of_image] == [(str(n + 1), name) for n, name in enumerate(names)]


def test_an_unreadable_image_is_named_the_others_go_on_and_the_exit_code_is_2(trained, digits, typed, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    good = sorted((digits / "5").iterdir())[:2]
    code, lines, err = typed(trained / "best.pth", good[0], broken, good[1])
    assert code == 2 and str(broken) in err and "1 of 3 images could not be read" in err
    assert [path for path, _, _ in lines] == [str(path) for path in good]


def test_photos_are_turned_as_the_run_of_the_checkpoint_did(trained, digits, typed, tmp_path):
    """Also those of older versions, which knew nothing of EXIF."""
    state = torch.load(trained / "last.pth", weights_only=True)
    with Image.open(digits / "4" / sorted(path.name for path in (digits / "4").iterdir())[0]) as upright:
        stored, exif = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    stored.save(tmp_path / "lying.png")
    stored.save(tmp_path / "tagged.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    del state["config"]["DATA.EXIF"]
    for dataset, as_read in (("digits", "lying"), ("imagefolder", "lying"), ("imagefolder", "upright")):
        if as_read == "upright":
            state["config"]["DATA.EXIF"] = None
        state["config"]["DATA.DATASET"] = dataset
        torch.save(state, tmp_path / "run.pth")
        tagged, same = typed(tmp_path / "run.pth", tmp_path / "tagged.png", tmp_path / f"{as_read}.png", "-top", 3)[1]
        assert tagged[1:] == same[1:]


def test_a_runs_folder_stands_for_its_best_checkpoint_else_its_last(trained, digits, typed, tmp_path):
    image = digits / "3"
    shutil.copy(trained / "last.pth", tmp_path)
    for folder, name in ((trained, "best.pth"), (tmp_path, "last.pth")):
        code, lines, err = typed(folder, image)
        assert code == 0 and str(folder / name) in err
        assert lines == typed(folder / name, image)[1]


def test_predictions_crop_as_the_checkpoint_says_and_those_of_older_versions_the_centre(trained):
    state = torch.load(trained / "best.pth", weights_only=True)
    data = state["data"]
    assert data.pop("crop_mode") == "center" == config_of({**state, "data": data}).DATA.CROP_MODE
    assert config_of({**state, "data": data | {"crop_mode": "squash"}}).DATA.CROP_MODE == "squash"


@pytest.mark.parametrize("key", [None, "state_dict_ema", "state_dict"])
def test_an_exported_file_predicts_as_the_checkpoint_that_it_was_made_of(trained, digits, typed, tmp_path, key):
    images = digits / "3", digits / "4"
    state = torch.load(trained / "best.pth", weights_only=True)
    state["preferred"] = key or state["preferred"]
    torch.save(state, tmp_path / "best.pth")
    target = tmp_path / "vit.safetensors"
    export.export(str(trained), target, key)
    expected = typed(tmp_path / "best.pth", *images)
    assert typed(target, *images)[:2] == expected[:2]
    assert typed(target, images[0], "-raw")[0] == (2 if key == "state_dict_ema" else 0)


def test_head_ends_it_without_a_word_and_a_table_is_written_all_the_same(trained, digits, tmp_path, monkeypatch):
    table = tmp_path / "classes.csv"
    for words in ([], ["-csv", str(table)]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w", buffering=1) as nobody:
            monkeypatch.setattr(sys, "stdout", nobody)
            errors = io.StringIO()
            monkeypatch.setattr(sys, "stderr", errors)
            assert exit_code(predict.main, [str(trained), str(digits / "3"), *words]) == 0
            assert "rror" not in errors.getvalue()
    assert len(table.read_text().splitlines()) == 1 + len(list((digits / "3").iterdir()))


def test_files_of_a_folder_that_are_no_images_are_counted_on_stderr(trained, digits, typed, tmp_path):
    shutil.copytree(digits / "4", tmp_path / "photos")
    for name in ("notes.txt", "more.txt", "raw.cr2"):
        (tmp_path / "photos" / name).write_text("")
    code, lines, err = typed(trained / "last.pth", tmp_path / "photos")
    assert code == 0 and len(lines) == len(list((digits / "4").iterdir()))
    assert_names(err, 3, ".txt", 2, ".cr2", 1)


def test_each_image_is_predicted_as_the_table_of_the_run_says(trained, digits, typed):
    images = sorted(digits.glob("*/*.png"), key=lambda path: int(path.stem))
    _, lines, _ = typed(trained, *images)
    with open(trained / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 359
    for (_, name, probability), row in zip(lines, rows, strict=True):
        assert name == row["prediction"]
        assert float(probability) == pytest.approx(float(row["probability"]), abs=1e-4)


def test_two_processes_write_what_one_writes_in_the_same_order(trained, digits, typed, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    seven, *images = [path for digit in "73" for path in sorted((digits / digit).iterdir())[:10]]
    images = [seven, *images, broken, seven]  # four batches of 7
    files = {"csv": "classes.csv", "json": "classes.json", "sheet": "sheet.png", "attention": "maps"}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    words = [str(word) for word in (trained, *images, "-top", 2, "-batch_size", 7)]
    one, two = ([f"-{flag}={tmp_path / folder / name}" for flag, name in files.items()] for folder in ("one", "two"))
    code, lines, _ = typed(*words, *one)
    ended = run("scripts/predict.py", *words, *two, processes=2)
    assert ended.codes == [2, 2] and code == 2, ended.stderr
    assert [line.split("\t") for line in ended.stdout.splitlines()] == lines and len(lines) == 21
    written = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(written) == len(lines) + 3 and len(set(written)) == len(written)
    for path in written:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes(), path


def test_the_json_document_has_model_preprocessing_and_predictions(trained, digits, typed, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"")
    image = sorted((digits / "3").iterdir())[0]
    words = (trained / "best.pth", tmp_path / "broken.png", image, "-top", 3, "-json", tmp_path / "x.json")
    _, ((path, *guesses),), _ = typed(*words)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["unreadable"] == [str(tmp_path / "broken.png")]
    assert found["model"]["classes"] == list("0123456789") and found["model"]["epoch"] == 1
    assert found["model"]["weights"] == str(trained / "best.pth")
    state = torch.load(trained / "best.pth", weights_only=True)
    assert found["model"]["key"] == state["preferred"]
    assert found["preprocessing"] == state["data"] | {"exif": "ignore"}
    ((listed),) = found["images"]
    assert listed["image_path"] == path == str(image)
    assert [each["class"] for each in listed["predictions"]] == guesses[::2]
    assert [each["number"] for each in listed["predictions"]] == [int(name) for name in guesses[::2]]
    assert [f"{each['probability']:.4f}" for each in listed["predictions"]] == guesses[1::2]


def test_thumbnails_fill_one_sheet_after_another(trained, digits, typed, tmp_path):
    images = sorted(digits.glob("[0-9]/*"))[:105]
    assert typed(trained, *images, "-sheet", tmp_path / "sheet.jpg")[0] == 0
    with Image.open(tmp_path / "sheet.jpg") as first, Image.open(tmp_path / "sheet-2.jpg") as second:
        assert first.format == "JPEG" and first.height > 5 * second.height and first.width > second.width
    assert not (tmp_path / "sheet-3.jpg").exists()


def test_the_mean_with_the_mirror_image_is_the_same_for_both(trained, digits, typed, tmp_path):
    image = sorted((digits / "4").iterdir())[0]
    with Image.open(image) as upright:
        upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "mirrored.png")
    # Of 9 pixels, a crop of 8 is not in the middle.
    words = (trained, image, tmp_path / "mirrored.png", "-top", 10, "-amp", "false", "-opts", "DATA.CROP_PCT=1.0")
    plain, flipped = (typed(*words, *more)[1] for more in ([], ["-flip"]))
    assert plain[0][1:] != plain[1][1:]
    assert flipped[0][1:] == flipped[1][1:]


def test_precision_batch_size_and_settings_are_those_of_the_command_line(trained, digits, typed):
    image = sorted((digits / "4").iterdir())[0]
    words = ("-top", 10, "-device", "cpu", "-batch_size", 1)
    lines = {more: typed(trained, image, *words, *more)[1] for more in ((), ("-amp",), ("-amp", "false"))}
    assert lines[()] == lines["-amp",] != lines["-amp", "false"]
    cropped = typed(trained, image, *words, "-opts", "DATA.CROP_PCT=0.5")[1]
    assert cropped != lines[()]


def test_a_bar_is_shown_on_a_terminal_only(trained, digits, typed, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert "%|" not in typed(trained, digits / "3")[2]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Terminal())
        assert exit_code(predict.main, [str(trained), str(digits / "3")]) == 0
        assert "%|" in sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: model"),
        (["{run}/last.pth"], "no images"),
        (["{run}/nothing.pth", "{run}/loss.png"], "no file at"),
        (["{run}/log.txt", "{run}/loss.png"], "log.txt"),
        (["{run}/last.pth", "nothing.png"], "nothing.png: no such image or folder"),
        (["{run}/last.pth", "{empty}"], "no images in this folder"),
        (["{run}/last.pth", "{run}/loss.png", "-top", "0"], "-top: 0"),
        (["{run}/last.pth", "{run}/loss.png", "-csv", "{empty}/not/there.csv"], "-csv: cannot write"),
        (["{run}/last.pth", "{run}/loss.png", "-csv", "{run}/loss.png"], "loss.png has the name of an image"),
        (["{run}/last.pth", "{run}/loss.png", "-topp", "3"], "-topp"),
        (["{run}/last.pth", "{run}/*.jpg"], "*.jpg"),
        (["{run}/last.pth", "-list", "{empty}/none.txt"], "none.txt"),
        (["vit_base_patch16_244", "{run}/loss.png"], "vit_base_patch16_224"),
        (["{run}/last.pth", "{run}/loss.png", "-sheet", "{empty}/sheet.pdf"], "-sheet"),
        (["{run}/last.pth", "{run}/loss.png", "-sheet", "{run}/loss.png"], "-sheet"),
        (["{run}/last.pth", "{run}/loss.png", "-attention", "{run}"], "-attention"),
        (["{run}/last.pth", "{run}/loss.png", "-attention", "{run}/log.txt"], "-attention"),
        (["{run}/last.pth", "{run}/loss.png", "-json", "{empty}"], "-json"),
        (["{run}/last.pth", "{run}/loss.png", "-opts", "MODEL.DEPTHS=3"], "MODEL.DEPTH"),
        (["{run}/last.pth", "{run}/loss.png", "-classes", "{run}/log.txt"], "-classes"),
        (["/", "{run}/loss.png"], "/ is a folder"),
        (["{run}", "{run}/loss.png", "-csv", "{run}/best.pth"], "best.pth is read"),
        (["{run}", "{run}/loss.png", "-cfg", "{run}/config.yaml", "-csv", "{run}/config.yaml"], "config.yaml is read"),
        (["{run}", "{run}/loss.png", "-csv", "{empty}/x", "-json", "{empty}/x"], "-csv"),
        (["{run}", "{run}/loss.png", "-csv", "/dev/stdout"], "a device"),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_a_message(trained, typed, tmp_path, words, message):
    code, lines, err = typed(*[word.format(run=trained, empty=tmp_path) for word in words])
    assert code == 2 and not lines and err.startswith("error: ") and message in err
