"""A first layer with more channels than its weights starts with one channel if its features predict clearly better."""

import signal

import numpy as np
import pytest
import timm
import torch

from tests.support.native_images import write
from tests.support.run_hash import run_hash
from tests.support.runs import run_folder, typed

pytestmark = pytest.mark.slow

NUM_IMAGES, CHANNELS, SIDE = 48, 4, 32
SETTINGS = """
DATA: {{DATASET: imagefolder, DATA_PATH: {photos}, PIXELS: native, IMAGE_CHANNELS: {channels}, IMAGE_SIZE: 32,
       BATCH_SIZE: 8, NUM_WORKERS: 0}}
MODEL: {{NAME: test_resnet, PRETRAINED: {weights}, NEW_CLASSIFIER: zeros}}
TRAIN: {{NUM_EPOCHS: 1, WARMUP_EPOCHS: 0, BASE_LR: 1e-12, MODEL_EMA: true}}
TRACK: []
REPORT: false
"""


def stripes(label: int, rng: np.random.Generator) -> np.ndarray:
    """Return horizontal or vertical stripes with noise, uint8 [SIDE, SIDE]."""
    wave = 100 * (np.arange(SIDE) // 4 % 2) + rng.integers(50, size=(SIDE, SIDE))
    return (wave.T if label else wave).astype(np.uint8)


def draw(folder, own: tuple[int, ...], channels: int = CHANNELS):
    """Draw images whose stripes show the class in the channels `own`, and in the others a class at random."""
    rng, parts = np.random.default_rng(0), {}
    for part in ("train", "val"):
        labels = [
            [number % 2 if each in own else rng.integers(2) for each in range(channels)] for number in range(NUM_IMAGES)
        ]
        parts[part] = [np.stack([stripes(label, rng) for label in row], axis=-1) for row in labels]
    return write(folder / "photos", parts)


@pytest.fixture
def start(tmp_path):
    """Return start(own, *words), which trains on such images.

    It returns the output and both first layers of best.pth.
    """
    torch.manual_seed(0)
    weights = timm.create_model("test_resnet", num_classes=5).state_dict()
    torch.save(weights, tmp_path / "rgb.pth")

    def start(own, *words, channels=CHANNELS):
        photos = draw(tmp_path, own, channels)
        (tmp_path / "x.yaml").write_text(
            SETTINGS.format(photos=photos, weights=tmp_path / "rgb.pth", channels=channels)
        )
        ended = typed("main_single_gpu.py", "-cfg", tmp_path / "x.yaml", "-output", tmp_path / "o", *words).done()
        state = torch.load(run_folder(tmp_path / "o") / "last.pth", weights_only=True)
        layers = [state[key]["conv1.0.weight"] for key in ("state_dict", "state_dict_ema")]
        return ended.printed, weights["conv1.0.weight"], layers

    return start


def test_layer_starts_with_the_only_channel_that_shows_the_class(start, tmp_path):
    said, rgb, layers = start((2,))
    assert "first layer: starts with channel 2; of 4 channels alone, channel 2 is the best" in said
    expected = torch.zeros_like(layers[0])
    expected[:, 2] = rgb.sum(1)
    for layer in layers:
        assert layer == pytest.approx(expected, abs=1e-6)


def test_layer_starts_with_all_channels_if_they_show_the_class(start):
    said, rgb, layers = start((0, 1, 2, 3))
    assert "first layer: starts with all channels" in said
    assert layers[0] == pytest.approx(rgb[:, [0, 1, 2, 0]] * 3 / 4, abs=1e-6)


@pytest.fixture
def train(tmp_path):
    """Return train(output, processes, **faults), which trains on images that show the class in all channels."""
    torch.manual_seed(0)
    torch.save(timm.create_model("test_resnet", num_classes=5).state_dict(), tmp_path / "rgb.pth")
    photos = draw(tmp_path, tuple(range(CHANNELS)))
    path = tmp_path / "x.yaml"
    path.write_text(SETTINGS.format(photos=photos, weights=tmp_path / "rgb.pth", channels=CHANNELS))

    def train(output, processes=1, **faults):
        script = f"main_{'single' if processes == 1 else 'multi'}_gpu.py"
        words = ["-cfg", str(path), "-output", str(output), "-resume", "auto", "-opts", "TRAIN.BASE_LR=1e-3"]
        faults = {"judge_no_labels": []} | faults
        return typed(script, *words, f"DATA.BATCH_SIZE={8 // processes}", processes=processes, faults=faults)

    return train


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_run_stopped_while_it_compares_starts_ends_with_the_same_bits(train, tmp_path, processes):
    """Stopped twice at each moment: the resumed run must be able to repeat the comparison too."""
    train(tmp_path / "unbroken", processes).done()
    expected = run_hash(run_folder(tmp_path / "unbroken"))
    moments = ["start-up", "first start of the first layer", "start with one channel", "features", "fit"]
    for moment in moments if processes == 1 else moments[2:3]:
        for _ in range(2):
            stopped = train(tmp_path / moment, processes, tell=[processes - 1, moment, signal.SIGTERM])
            assert set(stopped.codes) == {128 + signal.SIGTERM}, (moment, stopped.printed)
        ended = train(tmp_path / moment, processes).done()
        is_chosen = moment in ("features", "fit")
        assert ("first layer: starts with all channels" in ended.stdout) != is_chosen, moment
        folder = run_folder(tmp_path / moment)
        assert run_hash(folder) == expected, moment
        assert "rgb" not in torch.load(folder / "last.pth", weights_only=True), "only until a start is chosen"


@pytest.mark.long
def test_three_channels_keep_red_green_and_blue(start):
    said, rgb, layers = start((2,), channels=3)
    assert "first layer" not in said and layers[0] == pytest.approx(rgb, abs=1e-6)
