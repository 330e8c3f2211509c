"""Contact sheets of images: their layout, and captions with any text."""

from importlib.util import find_spec

import numpy as np
from PIL import Image

from engine.predict.pictures import (
    FRAME,
    GAP,
    Tile,
    contact_sheet,
    describe_missing,
    lettering,
    other_fonts,
    write_picture,
)

# Invalid bytes of a file name, letters of several alphabets, an emoji, control characters, an empty text, a long text.
TEXTS = ["plain", "photos/\udcff\udc80.jpg", "Katze 猫 кошка قطة", "🐈", "two\nlines\x00\t", "", "x" * 3000]


def test_contact_sheet_aligns_images_of_any_shape():
    shapes = [(8, 8), (8, 8, 1), (300, 200, 3), (60, 900, 3), (1, 900, 1), (150, 150, 3), (9, 9)]
    tiles = [
        Tile(np.full(shape, 80, np.uint8), ["a", "b"], frame="red" if number == 6 else None)
        for number, shape in enumerate(shapes)
    ]
    sheet = contact_sheet(tiles, num_columns=4, side=100)
    pixels, pitch = np.asarray(sheet), 100 + 2 * FRAME + GAP
    assert sheet.width == GAP + 4 * pitch and sheet.height > 2 * pitch
    for number in range(4):  # the middle of each image, and the gap before it
        left = GAP + number * pitch
        assert (pixels[GAP + FRAME + 50, left + FRAME + 50] == 80).all() and (pixels[GAP + 50, left - 1] == 255).all()
    red = (pixels == (255, 0, 0)).all(2)
    assert red.sum() == 108**2 - 100**2, "the frame must surround only one image"


def test_contact_sheet_enlarges_tiny_image_without_blur():
    sheet = contact_sheet([Tile(np.array([[0, 255], [255, 0]], np.uint8))], side=100)
    assert set(np.unique(np.asarray(sheet))) == {0, 255}


def test_contact_sheet_draws_any_text():
    pixels = np.zeros((8, 8, 3), np.uint8)
    without = contact_sheet([Tile(pixels, [""])])
    for text in TEXTS:
        sheet = contact_sheet([Tile(pixels, [text])], title=text)
        is_seen = (np.asarray(sheet)[-GAP - 15 :] < 128).sum() > 5
        assert is_seen == bool(text), text
    assert without.size == (158 + 2 * GAP, 158 + 2 * GAP + lettering(11).height)


def test_missing_letters_use_fallback_font_or_are_reported(monkeypatch):
    fonts = find_spec("matplotlib").submodule_search_locations[0] + "/mpl-data/fonts/ttf/"
    letters, name = lettering(11), "cat \u1d81"  # STIX has this letter
    for found, is_drawn in (([fonts + "cmr10.ttf", fonts + "STIXGeneral.ttf", __file__], True), ([], False)):
        monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda found=found: found)
        other_fonts.cache_clear()
        pictures = [np.asarray(contact_sheet([], title=text)) for text in (name, "cat \U0010ffff")]
        assert np.array_equal(*pictures) != is_drawn and letters.fit(name, 200) == name
        assert ("\u1d81" in describe_missing(["cat", name])) != is_drawn and not describe_missing(["cat", "кот"])
    other_fonts.cache_clear()


def test_long_caption_is_shortened_in_the_middle():
    letters, path = lettering(11), "photos/train/" + "cat/" * 100 + "0041.jpg"
    cut = letters.fit(path, 200)
    assert cut.startswith("photos") and cut.endswith("0041.jpg") and "…" in cut
    assert 150 < letters.width(cut) <= 200 and letters.fit("short", 200) == "short"


def test_unreadable_image_leaves_an_empty_tile(tmp_path):
    sheet = contact_sheet([Tile(None, ["cat.jpg", "cannot be read"])])
    write_picture(sheet, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.format == "PNG" and image.size == sheet.size
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]
