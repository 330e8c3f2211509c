"""A few examples classify photos without training, and the most similar photos are found."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.features.embedder import normalized
from engine.features.nearest import NEAREST, TEMPERATURE, Examples
from engine.predict.guesses import Guess
from tests.commands.embedding.conftest import make_hub
from tests.support.cases import cases_of, names_of
from tests.support.image_sets import draw_patches
from tests.support.refusals import assert_names
from tests.support.runs import typed

pytestmark = pytest.mark.slow  # it trains runs and starts programs

SCRIPT = "scripts/embed.py"


def lines_of(*words) -> list[list[str]]:
    return [line.split("\t") for line in typed(SCRIPT, *words).done().stdout.splitlines()]


def score(photo, examples):
    """Compute the documented score of a class with plain loops."""
    cosines = [float(photo @ each / np.linalg.norm(photo) / np.linalg.norm(each)) for each in examples]
    nearest = sorted(cosines)[-NEAREST:]
    centre = np.mean([each / np.linalg.norm(each) for each in examples], axis=0)
    return (sum(nearest) / len(nearest) + float(photo @ centre / np.linalg.norm(photo) / np.linalg.norm(centre))) / 2


@pytest.mark.parametrize("counts", [(1, 1, 1), (5, 5, 5), (1, 4, 9)])
def test_class_score_is_mean_of_nearest_examples_and_centre(counts):
    rng = np.random.default_rng(0)
    by_class = [rng.normal(size=(count, 6)).astype(np.float32) for count in counts]
    photos = rng.normal(size=(7, 6)).astype(np.float32)
    owners = np.repeat(range(3), counts)
    examples = Examples(["a", "b", "c"], normalized(np.concatenate(by_class)), owners)
    expected = np.array([[score(photo, each) for each in by_class] for photo in photos])
    np.testing.assert_allclose(examples.scores(photos), expected, atol=1e-5)
    chances = np.exp(expected / TEMPERATURE)
    chances /= chances.sum(1, keepdims=True)
    for found, row in zip(examples.guesses(photos, 3), chances, strict=True):
        assert [each.number for each in found] == np.argsort(-row).tolist()
        assert [each.probability for each in found] == pytest.approx(np.sort(row)[::-1], abs=1e-4)


def test_first_class_wins_a_tie_and_zero_features_match_nothing():
    examples = Examples(["a", "b"], np.array([[1, 0], [1, 0]], np.float32), np.array([0, 1]))
    for photo in ([3, 4], [0, 0]):
        assert examples.guesses(np.array([photo], np.float32), 2) == [[Guess(0, "a", 0.5), Guess(1, "b", 0.5)]]


def test_copy_of_the_query_is_the_most_similar_photo(here, hub, photos):
    shutil.copy("photos/3.png", "photos/copy of 3.png")
    with Image.open("photos/3.png") as image:
        image.resize((40, 40)).save("photos/more/larger.png")
    found = lines_of(hub, photos, "-near", "photos/3.png", "-sheet", "x.png", "-top", 4)
    assert [path for path, _ in found[:2]] == ["photos/copy of 3.png", "photos/more/larger.png"] and len(found) == 4
    assert found[0][1] == "1.0000" and sorted(found, key=lambda line: -float(line[1])) == found
    assert "photos/3.png" not in [path for path, _ in found]
    with Image.open("x.png") as sheet:
        assert sheet.getpixel((10, 10)) == (0, 0, 0), "the query has a black frame"
    outside = here / "query.jpg"
    Image.open("photos/3.png").convert("RGB").save(outside, quality=95)
    found = lines_of(hub, photos, "-near", outside, "-sheet", "x.jpg", "-top", 99)
    assert {path for path, _ in found[:3]} == {"photos/copy of 3.png", "photos/3.png", "photos/more/larger.png"}
    assert len(found) == 12


def make_examples() -> None:
    for number, name in enumerate(("ant", "bee")):
        draw_patches(Path("examples", name, "1.png"), number)


def test_unreadable_example_is_named_and_left_out(here, hub, photos):
    make_examples()
    Path("examples/ant/2.png").write_bytes(b"no picture")
    ended = typed(SCRIPT, hub, photos, "-examples", "examples").done()
    assert_names(ended.stderr, "examples/ant/2.png")
    os.remove("examples/ant/1.png")
    typed(SCRIPT, hub, photos, "-examples", "examples").refused("-examples", "examples/ant")


@pytest.mark.parametrize("words", cases_of("embeddings-mistakes"))
def test_mistakes_on_the_command_line_are_refused(here, hub, photos, words):
    """Each case of the page is a command line. These files and folders exist."""
    make_examples()
    draw_patches(Path("one/ant/1.png"), 0)
    os.makedirs("empty_class/ant")
    draw_patches(Path("empty_class/bee/1.png"), 0)
    Path("broken.png").write_bytes(b"no picture")
    Path("theirs.csv").write_text("a,b\n")
    shutil.copy("photos/0.png", "theirs.png")
    before = sorted(str(path) for path in Path().rglob("*"))
    ended = typed(SCRIPT, *words.split())
    assert ended.returncode == 2 and "Traceback" not in ended.printed and not ended.stdout, ended.printed
    assert_names(ended.stderr[ended.stderr.index("error: ") :].strip(), *names_of("embeddings-mistakes", words))
    assert sorted(str(path) for path in Path().rglob("*")) == before


def test_weights_with_nan_outputs_are_refused(here, photos):
    model = make_hub(here / "hub")
    with torch.no_grad():
        model.norm.weight.fill_(1e38)
        model.norm.bias.fill_(3e38)
    from safetensors.torch import save_file

    save_file(model.state_dict(), "hub/model.safetensors")
    typed(SCRIPT, "hub", photos, "-output", "x.npz").refused("hub/model.safetensors", "not finite")
