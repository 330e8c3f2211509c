"""halfstep predict classifies the images of its command line like the run's evaluation."""

import io
import json
import os
import shutil

import pytest
import torch
from PIL import Image

from engine.open_model import config_of
from engine.predict.output import safe_names
from scripts import embed, export, predict
from tests.support.cases import cases_of, names_of, value_of
from tests.support.refusals import assert_names, refused
from tests.support.runs import rows_of, typed
from utils.errors import UserError

pytestmark = pytest.mark.slow


def type_in(*words, exit_with=0):
    """Run the script. Return its lines split at tabs, and its stderr."""
    ended = typed("scripts/predict.py", *words)
    assert ended.returncode == exit_with, ended.printed
    return [line.split("\t") for line in ended.stdout.splitlines()], ended.stderr


@pytest.mark.long
def test_every_prediction_output_matches_predictions_csv_of_the_run(trained, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.predict.output.PER_SHEET", 25)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    images = sorted(digits.glob("*/*.png"), key=lambda path: int(path.stem))
    files = ("-csv", tmp_path / "x.csv", "-json", tmp_path / "x.json", "-sheet", tmp_path / "x.jpg")
    words = (trained / "best.pth", *images, tmp_path / "broken.png", "-top", 99, "-amp")  # as in the run
    lines, err = type_in(*words, *files, exit_with=2)
    assert len(lines) == 90
    assert_names(err, tmp_path / "broken.png", "1 of 91 images")
    table, own_table = rows_of(tmp_path / "x.csv"), rows_of(trained / "predictions.csv")
    document = json.loads((tmp_path / "x.json").read_text())
    assert len(own_table) == len(document["images"]) == 90 and document["unreadable"] == [str(tmp_path / "broken.png")]
    for number, (path, *guesses) in enumerate(lines):
        shares = dict(zip(guesses[::2], map(float, guesses[1::2]), strict=True))
        own = own_table[number]  # any class with the largest logit, which is rounded here
        most_probable = [float(own["probability"])] * 2
        assert [max(shares.values()), shares[own["prediction"]]] == pytest.approx(most_probable, abs=1e-4)
        assert table[number]["image_path"] == path == str(images[number]) and sorted(shares) == list("0123456789")
    model, state = document["model"], torch.load(trained / "best.pth", weights_only=True)
    assert (model["weights"], model["key"]) == (str(trained / "best.pth"), state["preferred"])
    assert (model["classes"], model["epoch"]) == (list("0123456789"), 1)
    assert document["preprocessing"] == state["data"] | {"exif": "ignore"}
    with Image.open(tmp_path / "x.jpg") as first, Image.open(tmp_path / "x-4.jpg") as last:
        assert first.format == "JPEG" and first.height > last.height and first.width == last.width
    assert not (tmp_path / "x-5.jpg").exists()


def test_unreadable_image_has_one_name_in_all_messages(trained, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "broken.png").write_bytes(b"no picture")
    monkeypatch.chdir(tmp_path / "here")
    _, err = type_in(trained, "../broken.png", exit_with=2)
    assert "../broken.png" in err and "./../broken.png" not in err


def test_predict_writes_utf8_rows_and_never_overwrites_files(trained, digits, tmp_path):
    names = ["猫", "../x", "a/b", "A_B", "d", "..", "Ä", ".", "x y", "n"]
    (tmp_path / "names.txt").write_text("\n".join(names), encoding="utf-8")
    for number, image in enumerate(sorted(digits.glob("[0-9]/*.png"))[::12]):
        shutil.copy(image, tmp_path / "photos" / f"{number}.png") if number else (tmp_path / "photos").mkdir()
    lines, _ = type_in(trained, tmp_path / "photos", "-into", tmp_path / "new" / "folder")
    shares = [float(line[2]) for line in lines]
    limit = sorted(shares)[len(shares) // 2]
    words = [trained, tmp_path / "photos", "-classes", tmp_path / "names.txt", "-unsure", limit, "-top", 2]
    files = ["-csv", tmp_path / "x.csv", "-json", tmp_path / "x.json", "-into", tmp_path / "sorted"]
    (tmp_path / "sorted" / "unsure").mkdir(parents=True)
    users = tmp_path / "sorted" / "unsure" / f"{shares.index(min(shares)) + 1}.png"
    photo = tmp_path / "photos" / users.name
    users.write_bytes(bytes(photo.stat().st_size))  # another file of the same size and date
    shutil.copystat(photo, users)
    lines, _ = type_in(*words, *files, "-sheet", tmp_path / "x.png")
    table = rows_of(tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_bytes().startswith(b"\xef\xbb\xbfimage_path,class,")
    paths = [row["image_path"] for row in table]
    assert [int(os.path.basename(path)[:-4]) for path in paths] == list(range(1, len(paths) + 1)), "2 precedes 10"
    assert "猫" in (tmp_path / "x.json").read_text(encoding="utf-8")
    is_unsure = [float(row["probability"]) < limit for row in table]
    assert set(is_unsure) == {True, False}
    for found in ([row["unsure"] for row in table], [(line[5:] or [""])[0] for line in lines]):
        assert found == ["unsure" * each for each in is_unsure]
    listed = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["images"]
    assert [each.get("unsure", False) for each in listed] == is_unsure
    copies = [path for path in (tmp_path / "sorted").rglob("*.*") if path.is_file()]
    assert len(copies) == len(table) + 1 and {path.parent.parent for path in copies} == {tmp_path / "sorted"}
    assert len(list((tmp_path / "sorted" / "unsure").iterdir())) == sum(is_unsure) + 1
    assert not any(users.read_bytes())
    type_in(*words, *files)
    assert len([path for path in (tmp_path / "sorted").rglob("*.*") if path.is_file()]) == len(copies), (
        "no copies are added"
    )
    shutil.rmtree(tmp_path / "sorted" / "unsure")
    (tmp_path / "sorted" / "unsure").symlink_to(tmp_path / "photos")
    type_in(*words, *files, exit_with=2)  # it must not write through a link


def test_second_prediction_ignores_outputs_of_the_first(trained, digits, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number, image in enumerate(sorted(digits.glob("[0-9]/*.png"))[:3]):
        shutil.copy(image, photos / f"{number}.png")
    outputs = ["-into", photos / "sorted", "-sheet", photos / "sheet.png", "-attention", photos / "maps"]
    first, _ = type_in(trained, photos, *outputs)
    after = sorted(photos.rglob("*"))
    assert [line[0] for line in first] == [str(photos / f"{number}.png") for number in range(3)]
    for given in (photos, f"{photos}/**/*.png", f"{photos}/*"):
        lines, err = type_in(trained, given, *outputs)
        assert lines == first and sorted(photos.rglob("*")) == after
        assert_names(err, photos)
    lines, _ = type_in(trained, *sorted((photos / "sorted").glob("*")), *outputs)
    assert len(lines) == 3, "copies that are named explicitly are classified"
    typed("scripts/predict.py", trained, photos, "-into", photos / ".." / "photos").refused("no images")


def test_each_class_gets_a_unique_portable_folder_name():
    names = safe_names(["cat", "Cat", "../cat", "a/b", "a:b", "..", "", "x" * 300, "x" * 299, "猫", "nul\0"])
    assert list(names.values())[:7] == ["cat", "Cat-2", "_cat", "a_b", "a_b-2", "_", "_-2"]
    assert len({name.casefold() for name in names.values()}) == len(names) and max(map(len, names.values())) < 90


def test_raw_predictions_match_the_evaluation_of_raw_weights(trained, digits):
    lines, _ = type_in(trained / "last", *sorted(digits.glob("[0-9]")), "-raw", "-amp")  # the precision of the run
    right = sum(path.split("/")[-2] == name for path, name, _ in lines)
    (row,) = rows_of(trained / "metrics.csv")
    assert 100 * right / 90 == pytest.approx(float(row["eval_top1"]), abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "as_read", "crop_mode"),
    [
        ({"DATA.DATASET": "imagefolder", "DATA.EXIF": "ignore"}, "lying", "center"),
        ({"DATA.DATASET": "imagefolder", "DATA.EXIF": None}, "upright", "squash"),
    ],
)
def test_photos_are_rotated_and_cropped_as_in_training(trained, digits, tmp_path, settings, as_read, crop_mode):
    state = torch.load(trained / "last.pth", weights_only=True)
    with Image.open(digits / "4" / sorted(path.name for path in (digits / "4").iterdir())[0]) as upright:
        stored, exif = upright.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6
    stored.save(tmp_path / "lying.png")
    for name in ("tagged.png", "tagged.tif"):
        stored.save(tmp_path / name, exif=exif)
    upright.save(tmp_path / "upright.png")
    state["config"] |= settings
    state["data"] |= {"crop_mode": crop_mode}
    torch.save(state, tmp_path / "run.pth")
    images = [tmp_path / name for name in ("tagged.png", "tagged.tif", f"{as_read}.png")]
    tagged, as_tiff, same = type_in(tmp_path / "run.pth", *images, "-top", 3)[0]
    assert tagged[1:] == as_tiff[1:] == same[1:]
    assert config_of(state).DATA.CROP_MODE == (crop_mode or "center")


def test_predict_uses_best_or_last_checkpoint_of_a_given_run_folder(trained, digits, tmp_path):
    (tmp_path / "photos").mkdir()
    shutil.copy(sorted((digits / "3").iterdir())[0], tmp_path / "photos")
    for name in ("notes.txt", "more.txt", "raw.cr2"):
        (tmp_path / "photos" / name).write_text("")
    shutil.copy(trained / "last.pth", tmp_path)
    for folder, name in ((trained, "best.pth"), (tmp_path, "last.pth")):
        lines, err = type_in(folder, tmp_path / "photos")
        assert len(lines) == 1
        assert_names(err, folder / name, ".txt", 2, ".cr2", 1)  # other files are counted by ending


@pytest.mark.parametrize("flag", [None, "-ema", "-raw"])
def test_exported_file_predicts_like_its_checkpoint(trained, digits, tmp_path, flag):
    image = digits / "3"
    state = torch.load(trained / "best.pth", weights_only=True)
    state["preferred"] = {"-ema": "state_dict_ema", "-raw": "state_dict"}.get(flag, state["preferred"])
    torch.save(state, tmp_path / "best.pth")
    target = tmp_path / "vit.safetensors"
    assert export.main([str(trained), "-output", str(target), *filter(None, [flag])]) == 0
    assert type_in(target, image)[0] == type_in(tmp_path / "best.pth", image)[0]
    type_in(target, image, "-raw", exit_with=2 if flag == "-ema" else 0)


def test_flip_averaged_predictions_are_equal_for_image_and_mirror(trained, digits, tmp_path):
    image = sorted((digits / "4").iterdir())[0]
    with Image.open(image) as upright:
        upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "mirrored.png")
    Image.new("L", (8, 8), 9).save(tmp_path / "same.png")  # equal to its mirror image
    # With 9 pixels, a crop of 8 would be off-centre.
    images = (image, tmp_path / "mirrored.png", tmp_path / "same.png")
    words = (trained, *images, "-top", 10, "-amp", "false", "-opts", "DATA.CROP_PCT=1.0")
    plain, flipped = (type_in(*words, *more)[0] for more in ([], ["-flip"]))
    assert plain[0][1:] != plain[1][1:]
    assert flipped[0][1:] == flipped[1][1:] and flipped[2][1:] == plain[2][1:]


def test_predictions_are_in_float32_unless_amp_is_given(trained, digits):
    image = sorted((digits / "4").iterdir())[0]
    words = ("-top", 10, "-device", "cpu", "-batch_size", 1)
    more = ([], ["-amp"], ["-amp", "false"], ["-opts", "DATA.CROP_PCT=0.5"])
    plain, with_amp, without, cropped = (type_in(trained, image, *words, *each)[0] for each in more)
    assert plain == without != with_amp and cropped != plain


@pytest.mark.parametrize(
    ("words", "amp"),
    [("RUN -amp a b", "true"), ("-amp RUN a b", "true"), ("RUN a b -amp", "true"), ("RUN a -amp False b", "False")],
)
@pytest.mark.parametrize("image", ["a", "on", "no", "off", "yes"])
def test_amp_takes_no_image_as_its_value(words, amp, image):
    words = [image if word == "a" else word for word in words.split()]
    arguments = predict.parse(words)
    assert (arguments.model, arguments.images, arguments.amp) == ("RUN", [image, "b"], amp)
    single = embed.parse([word for word in words if word != "b"] + ["-output", "x.npz"])
    assert (single.model, str(single.photos), single.amp) == ("RUN", image, amp)


@pytest.mark.parametrize(
    "words",
    [
        "RUN -opts A=1 B=2 photos",
        "RUN -opts A=1 B=2 photos -raw",
        "-opts A=1 B=2 -raw RUN photos",
        "RUN photos -opts A=1 B=2",
        "RUN -opts A=1 -batch_size 2 photos -opts B=2",
    ],
)
def test_opts_take_no_photo_as_a_setting(here, words):
    (here / "photos").mkdir()
    arguments = predict.parse(words.split())
    assert (arguments.model, arguments.images, arguments.opts) == ("RUN", ["photos"], ["A=1", "B=2"])
    single = embed.parse([*words.split(), "-output", "x.npz"])
    assert (single.model, str(single.photos), single.opts) == ("RUN", "photos", ["A=1", "B=2"])


def test_word_after_opts_that_is_no_path_stays_a_wrong_setting(here):
    assert predict.parse(["RUN", "-opts", "A=1", "nope"]).opts == ["A=1", "nope"]


@pytest.mark.parametrize("words", cases_of("mistakes-of_predict"))
def test_predict_exits_with_2_and_an_error_for_each_mistake(trained, tmp_path, words):
    state = torch.load(trained / "last.pth", weights_only=True)
    state["config"] |= {"DATA.DATASET": "csv", "DATA.LABEL_SEPARATOR": "|"}
    torch.save(state, tmp_path / "several.pth")
    given = words.format(run=trained, empty=tmp_path).replace("(nothing)", "").split()
    lines, err = type_in(*given, exit_with=2)
    assert not lines and err.startswith("error: ")
    assert_names(err, *names_of("mistakes-of_predict", words))


@pytest.fixture
def found(here, monkeypatch):
    """Return a function that finds the images for these words, in a folder of images and lists."""
    images = "photos/b.jpg photos/a.png photos/in/c.jpg photos/in/deep/a.jpg photos/[1].jpg many/2.jpg many/10.jpg"
    for name in (*images.split(), "photos/in/notes.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    (here / "empty").mkdir()
    (here / "@odd.jpg").touch()
    (here / "files.txt").write_text("photos/b.jpg\n\n  photos/in\r\nphotos/b.jpg\nphotos/*.png\n")
    (here / "two.txt").write_text("gone.jpg\nphotos/a.png\nlost.jpg\n")
    (here / "blank.txt").write_text("\n\n")
    (here / "binary.txt").write_bytes(b"\xff\xd8\xff\xe0")
    monkeypatch.setattr("sys.stdin", io.StringIO("photos/a.png\n"))

    def find(words: str) -> list[str]:
        given, _, listed = words.replace("(nothing)", "").partition("-list ")
        return predict.find_images(given.split(), listed.split(), predict.Outputs())

    return find


@pytest.mark.parametrize("words", cases_of("images_to_predict"))
def test_prediction_inputs_keep_their_given_order(found, words):
    assert " ".join(found(words)) == value_of("images_to_predict", words)


@pytest.mark.parametrize("words", cases_of("mistakes-of_images_to_predict"))
def test_missing_prediction_images_are_named(found, words):
    with refused(UserError, *names_of("mistakes-of_images_to_predict", words)):
        found(words)
