"""The images of a folder that was listed before the model, and so the kind of its pixels, was known."""

import pytest

from configs.tables import PIXEL_KINDS
from datasets.pixels import Pixels
from datasets.pixels.kinds import kind_of_pixels, readers
from datasets.pixels.native.pixels import NativePixels
from datasets.sources.folder import images_among


class Frames(NativePixels):
    """Another kind of pixels, with files of its own."""

    name, own_endings = "frames", (".npz", ".dcm")


@pytest.mark.parametrize(
    ("pixels", "kept", "words"),
    [
        (Pixels(3), ["2.tif"], ["3 files", "DATA.PIXELS=frames or native "]),
        (NativePixels(1), ["1.dcm", "2.tif", "3.DCM"], ["1 file", "DATA.PIXELS=frames "]),
        (Frames(1), ["1.dcm", "2.tif", "3.DCM", "4.npz"], []),
    ],
)
def test_files_that_only_other_pixels_read_are_left_out(monkeypatch, pixels, kept, words):
    kinds = {name: kind_of_pixels(name) for name in PIXEL_KINDS} | {"frames": Frames}
    monkeypatch.setattr("datasets.pixels.kinds.PIXEL_KINDS", (*PIXEL_KINDS, "frames"))
    monkeypatch.setattr("datasets.pixels.kinds.kind_of_pixels", kinds.get)
    monkeypatch.setattr("datasets.sources.folder.readers", readers.__wrapped__)
    reports = []
    assert images_among(["1.dcm", "2.tif", "3.DCM", "4.npz"], pixels, reports.append) == kept
    assert len(reports) == bool(words) and all(word in reports[0] for word in words)
