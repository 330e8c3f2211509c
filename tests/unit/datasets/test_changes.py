"""The description of how images differ from those of a run."""

import pytest

from datasets.split.listed import describe_changed_images
from tests.support.image_sets import files_with


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ("cat/1 dog/2", "cat/1 dog/2", []),
        ("cat/1 dog/2", "dog/2 cat/1", ["the same images in another order"]),
        ("cat/1 dog/2", "cat/1 cat/2", ["1 image moved from dog to cat (2)"]),
        ("cat/a/1 dog/2", "dog/a/1 dog/2", ["1 image moved from cat to dog (a/1)"]),
        # With equal names in several folders, nobody knows which image is where.
        ("cat/1 dog/1", "ant/1 dog/1", ["1 image moved from cat to ant (1)"]),
        ("cat/1 dog/1", "ant/1", ["2 images gone (cat/1, dog/1)", "1 image new (ant/1)"]),
        (
            "cat/1 dog/1 dog/2",
            "ant/1 bee/1 bee/2",
            ["1 image moved from dog to bee (2)", "2 images gone", "2 images new"],
        ),
    ],
)
def test_an_image_moved_only_if_one_with_its_name_is_gone_and_one_is_new(tmp_path, then, now, changes):
    (tmp_path / "split.csv").write_text("\n".join(["image,part", *(f"{name},train" for name in then.split()), ""]))
    images = files_with("/", now.split(), [0] * len(now.split()), ["a"])
    found, is_only_added = describe_changed_images(tmp_path / "split.csv", images, images.take(images.targets[:0]))
    assert len(found) == len(changes) and all(map(str.startswith, found, changes)), found
    assert not is_only_added
