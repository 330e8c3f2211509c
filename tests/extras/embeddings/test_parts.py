"""Features in files equal timm's, and a continued folder has the same bytes as an uninterrupted one."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer

from datasets.transforms.pixel_rules import PixelRules
from extras.embeddings import files
from extras.embeddings.photos import find_photos
from tests.extras.embeddings.conftest import draw, make_hub, make_photos
from tests.support.refusals import assert_names, flip
from tests.support.runs import run, typed
from utils.errors import ConfigError
from utils.files import locked
from utils.text import natural

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/embed.py"


def content(folder) -> dict[str, bytes]:
    """Return {name: bytes} of the files in a folder, without the lock."""
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.name != files.LOCK}


def table(path):
    """Return the rows of a part, or of all parts of a folder."""
    parts = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("part-*"))
    return pyarrow.concat_tables(map(read_part, parts))


def read_part(part: Path):
    if part.suffix == files.PARQUET:
        return pyarrow.parquet.read_table(part)
    found = np.load(part)
    columns = {"path": pyarrow.array(found["paths"].tolist(), pyarrow.string())}
    columns |= {"width": found["sizes"][:, 0], "height": found["sizes"][:, 1]}
    columns["features"] = pyarrow.array(found["features"].tolist(), pyarrow.list_(pyarrow.float32()))
    return pyarrow.table(columns).replace_schema_metadata({"halfstep": str(found["halfstep"])})


def features_in(folder) -> np.ndarray:
    return np.array(table(folder)["features"].to_pylist(), np.float32)


def theirs(model, folder, paths) -> np.ndarray:
    """Compute timm's features of images of the model's size."""
    pixels = [np.asarray(Image.open(Path(folder) / path).convert("RGB"), np.float32) / 255 for path in paths]
    images = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) - 0.4) / 0.2
    with torch.no_grad():
        return model.forward_head(model.forward_features(images), pre_logits=True).numpy()


@pytest.mark.parametrize(
    ("name", "num_classes"), [("vit_tiny_patch16_224", 3), ("vit_tiny_patch16_224", 0), ("test_resnet", 4)]
)
def test_features_equal_timm_features_of_the_same_pixels(here, photos, name, num_classes):
    model = make_hub(here / "hub", num_classes, name)
    typed(SCRIPT, "hub", photos, "-output", "features", "-part_size", 4).done()
    rows = table("features")
    assert rows["path"].to_pylist() == [*(f"{n}.png" for n in range(5)), *(f"more/{n}.png" for n in range(5, 10))]
    np.testing.assert_allclose(features_in("features"), theirs(model, photos, rows["path"].to_pylist()), atol=1e-5)
    assert sorted(content("features")) == ["_record.json", *(f"part-{n:05d}.npz" for n in range(3))]


def test_checkpoint_without_a_classifier_gives_the_same_features(here, trained, digits):
    state = torch.load(trained / "best.pth", weights_only=True)
    for key in ("state_dict", "state_dict_ema"):
        state[key] = {name: tensor for name, tensor in state[key].items() if not name.startswith("fc.")}
    torch.save(state, "features.pth")
    for weights, output in ((trained, "one"), ("features.pth", "other")):
        typed(SCRIPT, weights, digits / "3", "-output", output).done()
    np.testing.assert_array_equal(features_in("one"), features_in("other"))
    assert typed("scripts/predict.py", "features.pth", digits / "3").returncode == 2


def test_rows_have_sizes_and_files_have_metadata(here, hub):
    draw(here / "photos/wide.png", 0, (60, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed turned by 90 degrees
    Image.open("photos/wide.png").save("photos/turned.png", exif=exif)
    typed(SCRIPT, hub, "photos", "-output", "features").done()
    rows = table("features")
    assert [rows[name].to_pylist() for name in ("path", "width", "height")] == [
        ["turned.png", "wide.png"],
        [40, 60],
        [60, 40],
    ]
    facts = json.loads(rows.schema.metadata[b"halfstep"])
    assert facts == json.loads(Path("features/_record.json").read_text())
    assert facts["model"]["weights"] == "hub/model.safetensors" and facts["model"]["features"] == 24
    assert facts["preprocessing"]["mean"] == [0.4] * 3 and facts["images"]["count"] == 2


def test_npz_file_has_the_rows_of_the_parts(here, hub, photos, monkeypatch):
    typed(SCRIPT, hub, photos, "-output", "features").done()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)  # a single file needs no pyarrow
        for _ in range(2):  # its own file may be replaced
            typed(SCRIPT, hub, photos, "-output", "x.npz").done()
    rows, found = table("features"), np.load("x.npz")
    assert found["paths"].tolist() == rows["path"].to_pylist() and (found["sizes"] == 32).all()
    np.testing.assert_array_equal(found["features"], features_in("features"))
    assert json.loads(str(found["halfstep"]))["model"] == json.loads(Path("features/_record.json").read_text())["model"]


def test_folder_named_parquet_gets_parquet_files_with_the_same_rows(here, hub, photos, monkeypatch):
    typed(SCRIPT, hub, photos, "-output", "f.parquet", "-part_size", 4).done()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)
        typed(SCRIPT, hub, photos, "-output", "features", "-part_size", 4).done()
    assert sorted(content("f.parquet")) == ["_record.json", *(f"part-{n:05d}.parquet" for n in range(3))]
    assert str(table("f.parquet").schema.field("features").type).startswith("fixed_size_list<element: float>")
    assert table("f.parquet").select(["path", "width", "height"]) == table("features").select(
        ["path", "width", "height"]
    )
    np.testing.assert_array_equal(features_in("f.parquet"), features_in("features"))


def test_parquet_folder_with_any_name_is_continued_as_parquet(here, hub, photos):
    words = (hub, photos, "-part_size", 4, "-output")
    typed(SCRIPT, *words, "f.parquet").done()
    os.rename("f.parquet", "features")  # older versions wrote parquet files to a folder with any name
    before = content("features")
    os.remove("features/part-00001.parquet")
    flags = ("-near", "photos/0.png", "-sheet", "x.png")
    assert typed(SCRIPT, *words, "features", *flags).done().stdout == typed(SCRIPT, *words, "new", *flags).done().stdout
    assert content("features") == before


def test_unreadable_photos_have_no_row_and_leave_others_unchanged(here, hub, photos):
    typed(SCRIPT, hub, photos, "-output", "all", "-part_size", 4).done()
    for number in (2, 4, 5, 6):
        next(Path("photos").rglob(f"{number}.png")).write_bytes(b"no picture")
    draw(here / "photos/more/7.png", 99)
    ended = typed(SCRIPT, hub, photos, "-output", "some", "-part_size", 4)
    assert ended.returncode == 2
    assert_names(ended.stderr, "photos/2.png", "photos/more/6.png", "4 of 10 images")
    parts = [table(f"some/part-{number:05d}.npz")["path"].to_pylist() for number in range(3)]
    assert parts == [["0.png", "1.png", "3.png"], ["more/7.png"], ["more/8.png", "more/9.png"]]
    kept = [row for row, path in enumerate(table("all")["path"].to_pylist()) if path in sum(parts, [])]
    assert (features_in("some") != features_in("all")[kept]).any(1).tolist() == [False] * 3 + [True] + [False] * 2
    ended = typed(SCRIPT, hub, photos, "-output", "some", "-part_size", 4)
    assert ended.returncode == 2 and "4 of 10 images" in ended.stderr, "a finished folder counts them again"


def test_part_without_a_readable_photo_has_no_rows(here, hub, photos):
    for number in range(4):
        Path(f"photos/{number}.png").write_bytes(b"no picture")
    assert typed(SCRIPT, hub, photos, "-output", "features", "-part_size", 4).returncode == 2
    assert table("features/part-00000.npz").num_rows == 0 and table("features").num_rows == 6


def test_file_names_in_another_encoding_become_escapes(here, hub, photos):
    os.rename(b"photos/3.png", b"photos/3\xff.png")
    words = (hub, photos, "-near", "photos/0.png", "-sheet", "x.png", "-output", "features")
    for _ in range(2):
        ended = typed(SCRIPT, *words).done()
        assert "photos/3\\udcff.png" in ended.stdout
    assert "3\\xff.png" in table("features")["path"].to_pylist()


# --- continuing


def test_stopped_command_continues_with_the_first_missing_part(here, hub, photos, monkeypatch):
    words = (hub, photos, "-part_size", 3, "-output")
    typed(SCRIPT, *words, "whole").done()
    write, computed = files.PartFolder.write, []

    def stop_at_two(self, part, rows):
        if part == 2 and computed.count(2) == 0:
            computed.append(part)
            raise KeyboardInterrupt
        computed.append(part)
        write(self, part, rows)

    monkeypatch.setattr(files.PartFolder, "write", stop_at_two)
    assert typed(SCRIPT, *words, "features").returncode == 130
    os.remove("features/part-00000.npz")
    ended = typed(SCRIPT, here / hub, *words[1:], "features").done()  # another name of the same weights
    assert_names(ended.stderr, "features", "1 of 4 parts", "part-00000.npz")
    assert computed == [0, 1, 2, 0, 2, 3] and content("features") == content("whole")


@pytest.mark.parametrize(
    "options", [["DATA.NUM_WORKERS=0"], ["DATA.NUM_WORKERS=3"], ["DATA.NUM_WORKERS=2", "DATA.WORKERS=processes"]]
)
def test_number_of_loader_workers_does_not_change_the_bytes(here, hub, options):
    make_photos(here / "photos", 100)
    words = [hub, "photos", "-part_size", "40", "-batch_size", "16", "-output"]
    run(SCRIPT, *words, "one", cwd=here).done()
    run(SCRIPT, *words, "other", "-opts", *options, cwd=here).done()
    assert content("one") == content("other") and len(content("one")) == 4


def test_two_processes_write_the_same_bytes_as_one(here, hub, photos):
    Path("photos/more/8.png").write_bytes(b"no picture")
    words = [hub, photos, "-part_size", "3", "-output"]
    assert run(SCRIPT, *words, "one", cwd=here).returncode == 2
    near = ["-near", "photos/0.png", "-sheet", "x.png"]
    ended = run(SCRIPT, *words, "two", *near, cwd=here, processes=2)
    assert ended.codes == [2, 2] and content("one") == content("two")
    assert_names(ended.stderr, "2 processes", "1 of 10 images")
    assert len(ended.stdout.splitlines()) == 8, "only the first process prints"


def test_finished_folder_is_read_without_writing_to_it(here, hub, photos):
    typed(SCRIPT, hub, photos, "-output", "features").done()
    os.rename("photos", "moved")
    os.remove(f"features/{files.LOCK}")  # a new one would show that the command can write to the folder
    before = {path.name: path.stat().st_mtime_ns for path in Path("features").iterdir()}
    typed(SCRIPT, hub, "moved", "-output", "features").done()
    assert before == {path.name: path.stat().st_mtime_ns for path in Path("features").iterdir()}


# --- refusals


def other_weights():
    state = load_file("hub/model.safetensors")
    state["norm.bias"] += 1
    save_file(state, "hub/model.safetensors")


def other_version():
    record = json.loads(Path("features/_record.json").read_text())
    Path("features/_record.json").write_text(json.dumps(record | {"halfstep": "0.9"}))
    os.remove("features/part-00001.npz")


def change_preprocessing():
    known = json.loads(Path("hub/config.json").read_text())
    known["pretrained_cfg"]["crop_pct"] = 0.9
    Path("hub/config.json").write_text(json.dumps(known))


CHANGES = {
    "a photo is new": (lambda: draw(Path("photos/new.png"), 5), []),
    "a photo has another name": (lambda: os.rename("photos/0.png", "photos/00.png"), []),
    "other weights": (other_weights, []),
    "other preprocessing": (change_preprocessing, []),
    "another version": (other_version, []),
    "another batch size": (lambda: None, ["-batch_size", 2]),
    "another part size": (lambda: None, ["-part_size", 5]),
    "half precision": (lambda: None, ["-amp"]),
    "a damaged record": (lambda: Path("features/_record.json").write_text("{}"), []),
    "a damaged part": (lambda: flip(Path("features/part-00001.npz"), -6), []),
    "a part of another folder": (lambda: shutil.copy("others/part-00001.npz", "features"), []),
}


@pytest.mark.parametrize("case", CHANGES)
def test_folder_is_not_continued_after_a_change(here, hub, photos, case):
    make_hub(here / "other_hub", seed=1)
    typed(SCRIPT, "other_hub", photos, "-output", "others", "-part_size", 4).done()
    typed(SCRIPT, hub, photos, "-output", "features", "-part_size", 4).done()
    change, flags = CHANGES[case]
    change()
    before = content("features")
    ended = typed(
        SCRIPT, hub, photos, "-output", "features", *(flags if "-part_size" in flags else ["-part_size", 4, *flags])
    )
    ended.refused("-output", "features")
    assert content("features") == before


def test_output_that_cannot_be_written_is_refused(here, hub, photos, monkeypatch):
    os.makedirs("taken/other")
    Path("file").write_text("text")
    Path("table.npz").write_text("text")
    for output in ("taken", "file", "file/features", "table.npz", "nowhere/x.npz"):
        typed(SCRIPT, hub, photos, "-output", output).refused("-output", output.removesuffix("/x.npz"))
    assert os.listdir("taken") == ["other"] and Path("table.npz").read_text() == "text"
    monkeypatch.setattr(files, "MOST_IN_NPZ", 9)
    typed(SCRIPT, hub, photos, "-output", "x.npz").refused("-output", "x.npz", "10 photos", 9)


def test_folder_in_use_is_refused(here, hub, photos):
    typed(SCRIPT, hub, photos, "-output", "features").done()
    os.remove("features/part-00000.npz")
    with locked(here / "features" / files.LOCK):
        typed(SCRIPT, hub, photos, "-output", "features").refused("-output", "features")


def test_full_disk_is_reported_and_the_command_continues(here, hub, photos, monkeypatch):
    words = (hub, photos, "-output", "features", "-part_size", 4)

    def full(descriptor):
        if any(Path("features").glob(".part-00001*")):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        typed(SCRIPT, *words).refused("features/part-00001.npz", "disk full")
    assert sorted(content("features")) == ["_record.json", "part-00000.npz"]
    typed(SCRIPT, *words).done()


def test_missing_pyarrow_is_reported_with_both_remedies(hub, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    typed(SCRIPT, hub, photos, "-output", "features.parquet").refused("-output", "pip install pyarrow", ".npz")
    assert not Path("features.parquet").exists()


def test_model_without_features_is_refused(hub, photos, monkeypatch):
    forward_head = VisionTransformer.forward_head

    def without_features(model, tokens, pre_logits=False):
        if pre_logits:
            raise NotImplementedError("this head has no features")
        return forward_head(model, tokens)

    monkeypatch.setattr(VisionTransformer, "forward_head", without_features)
    typed(SCRIPT, hub, photos, "-output", "features").refused("hub/model.safetensors", "features")
    assert not Path("features").exists()


def test_unreachable_weights_of_timm_are_refused(here, photos, monkeypatch):
    unreachable = Mock(side_effect=OSError("no route to host"))
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: SimpleNamespace(head=unreachable))
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    typed(SCRIPT, "resnet10t.c3_in1k", photos, "-output", "features").refused("resnet10t.c3_in1k", "no route to host")


def test_model_for_grey_images_reads_colour_photos(here, hub, photos):
    typed(SCRIPT, hub, photos, "-output", "features", "-opts", "DATA.IMAGE_CHANNELS=1").done()
    facts = json.loads(Path("features/_record.json").read_text())
    assert facts["preprocessing"]["input_size"] == [1, 32, 32] and table("features").num_rows == 10


@pytest.mark.parametrize("folder", ["nowhere", "hub/config.json", "empty"])
def test_photos_argument_without_images_is_refused(here, hub, folder):
    os.makedirs("empty")
    typed(SCRIPT, hub, folder, "-output", "features").refused(folder)
    assert not Path("features").exists()


def test_photos_are_listed_in_the_order_of_predict(here):
    names = [
        "10.png",
        "9.png",
        "a 2/x.png",
        "a/x.png",
        "a-b/x.png",
        "007.png",
        "7.png",
        "é1.png",
        "x1y10.png",
        "x1y9.png",
    ]
    for name in names:
        path = here / "photos" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    found = find_photos("photos", here / "photos", print)
    assert [os.fsdecode(path) for path in found.paths.chunk(0, len(names))] == sorted(names, key=natural)
    assert list(found) == [str(here / "photos" / name) for name in sorted(names, key=natural)]
    assert isinstance(found.images(PixelRules(3)).name(0), str)
    with pytest.raises(ConfigError):
        find_photos("photos", here / "other", print)
