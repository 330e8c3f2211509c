"""Features in files equal timm's, and a file appears only when it is complete."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from datasets.pixels import Pixels
from datasets.sources.images import natural
from engine.features.embedder import find_photos
from tests.commands.embedding.conftest import make_hub, make_photos
from tests.support.image_sets import draw_patches
from tests.support.runs import run, typed
from utils.errors import ConfigError

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/embed.py"


def features_in(file) -> np.ndarray:
    return np.load(file)["features"]


def paths_in(file) -> list[str]:
    return np.load(file)["paths"].tolist()


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
    typed(SCRIPT, "hub", photos, "-output", "x.npz").done()
    assert paths_in("x.npz") == [*(f"{n}.png" for n in range(5)), *(f"more/{n}.png" for n in range(5, 10))]
    np.testing.assert_allclose(features_in("x.npz"), theirs(model, photos, paths_in("x.npz")), atol=1e-5)


@pytest.mark.long
def test_checkpoint_without_a_classifier_gives_the_same_features(here, trained, digits):
    state = torch.load(trained / "best.pth", weights_only=True)
    for key in ("state_dict", "state_dict_ema"):
        state[key] = {name: tensor for name, tensor in state[key].items() if not name.startswith("fc.")}
    torch.save(state, "features.pth")
    for weights, output in ((trained, "one.npz"), ("features.pth", "other.npz")):
        typed(SCRIPT, weights, digits / "3", "-output", output).done()
    np.testing.assert_array_equal(features_in("one.npz"), features_in("other.npz"))
    assert typed("scripts/predict.py", "features.pth", digits / "3").returncode == 2


def test_npz_and_parquet_have_the_same_rows_with_sizes_and_record(here, hub, monkeypatch):
    draw_patches(here / "photos/wide.png", 0, (60, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed turned by 90 degrees
    Image.open("photos/wide.png").save("photos/turned.png", exif=exif)
    for _ in range(2):  # its own file may be replaced
        typed(SCRIPT, hub, "photos", "-output", "x.parquet").done()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pyarrow", None)  # an .npz file needs no pyarrow
        for _ in range(2):
            typed(SCRIPT, hub, "photos", "-output", "x.npz").done()
    found, rows = np.load("x.npz"), pyarrow.parquet.read_table("x.parquet")
    assert found["paths"].tolist() == rows["path"].to_pylist() == ["turned.png", "wide.png"]
    assert found["sizes"].tolist() == np.transpose([rows["width"], rows["height"]]).tolist() == [[40, 60], [60, 40]]
    np.testing.assert_array_equal(found["features"], rows["features"].to_pylist())
    facts = json.loads(pyarrow.parquet.read_schema("x.parquet").metadata[b"halfstep"])
    assert facts == json.loads(str(found["halfstep"]))
    assert facts["model"]["weights"] == "hub/model.safetensors" and facts["model"]["features"] == 24
    assert facts["preprocessing"]["mean"] == [0.4] * 3 and facts["images"]["count"] == 2


def test_file_names_in_another_encoding_become_escapes(here, hub, photos):
    os.rename(b"photos/3.png", b"photos/3\xff.png")
    ended = typed(SCRIPT, hub, photos, "-near", "photos/0.png", "-sheet", "x.png", "-output", "x.npz").done()
    assert "photos/3\\udcff.png" in ended.stdout and "3\\xff.png" in paths_in("x.npz")


@pytest.mark.parametrize(
    "options", [["DATA.NUM_WORKERS=0"], ["DATA.NUM_WORKERS=3"], ["DATA.NUM_WORKERS=2", "DATA.WORKERS=processes"]]
)
def test_number_of_loader_workers_does_not_change_the_bytes(here, hub, options):
    make_photos(here / "photos", 100)
    words = [hub, "photos", "-batch_size", "16", "-output"]
    run(SCRIPT, *words, "one.npz", cwd=here).done()
    run(SCRIPT, *words, "other.npz", "-opts", *options, cwd=here).done()
    assert Path("one.npz").read_bytes() == Path("other.npz").read_bytes()


def test_output_that_cannot_be_written_is_refused(here, hub, photos):
    os.makedirs("folder.npz")
    for output in ("file", "taken.npz", "taken.parquet"):
        Path(output).write_text("text")
    for output in ("file", "taken.npz", "taken.parquet", "folder.npz", "nowhere/x.npz"):
        typed(SCRIPT, hub, photos, "-output", output).refused("-output", output.removesuffix("/x.npz"))
    assert Path("taken.npz").read_text() == "text"


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
    typed(SCRIPT, hub, photos, "-output", "features.npz").refused("hub/model.safetensors", "features")
    assert not Path("features.npz").exists()


def test_model_for_grey_images_reads_colour_photos(here, hub, photos):
    typed(SCRIPT, hub, photos, "-output", "x.npz", "-opts", "DATA.IMAGE_CHANNELS=1").done()
    facts = json.loads(str(np.load("x.npz")["halfstep"]))
    assert facts["preprocessing"]["input_size"] == [1, 32, 32] and len(paths_in("x.npz")) == 10


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
    assert found.paths == sorted(names, key=natural)
    assert list(found) == [str(here / "photos" / name) for name in sorted(names, key=natural)]
    assert isinstance(found.images(Pixels(3)).name(0), str)
    with pytest.raises(ConfigError):
        find_photos("photos", here / "other", print)
