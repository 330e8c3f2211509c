"""Drawn layouts of class folders: every image has the class of its folder, in both parts."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.file_names import in_any_form, names
from tests.support.image_sets import load, png
from tests.support.properties import examples

PICTURE = png(0)


@st.composite
def parts(draw) -> dict[str, dict[str, str]]:
    """Draw {part: {path below it: class}}. Validation has some of the classes, in folders of either Unicode form."""
    classes = draw(st.lists(names(), min_size=2, max_size=3, unique=True))
    validated = draw(st.lists(st.sampled_from(classes), min_size=1, unique=True))
    found = {}
    for part, of_part in (("train", classes), ("val", validated)):
        above = draw(st.sampled_from(["", "photos/", "zip/photos/"]))  # an archive that was unpacked into a folder
        found[part] = {}
        for name in of_part:
            folder = draw(in_any_form(name))
            for number in range(draw(st.integers(1, 2))):
                inside = draw(st.sampled_from(["", "day/", "day 2/room/"]))
                found[part][f"{above}{folder}/{inside}{number}.png"] = name
    return found


@pytest.mark.slow
@given(parts(), st.sampled_from(["imagefolder", "imagenet2012"]))
@examples(25)
def test_every_image_has_the_class_of_its_folder(layout, dataset):
    with tempfile.TemporaryDirectory() as folder:
        for part, images in layout.items():
            for path in images:
                file = Path(folder, part, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(PICTURE)
        sets = dict(zip(layout, load(dataset, folder), strict=True))
        for part, images in layout.items():
            image_set = sets[part]
            assert image_set.classes == sorted({*layout["train"].values()})
            found = {
                image_set.name(index): image_set.classes[image_set.targets[index]] for index in range(len(image_set))
            }
            assert found == {f"{folder}/{part}/{path}": name for path, name in images.items()}
        for path in layout["train"]:
            Path(folder, "train", path).unlink()
        none, again = load(dataset, folder, evaluate=True)  # does not read training images
        assert none is None and again.targets.tolist() == sets["val"].targets.tolist()
