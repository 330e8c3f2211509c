"""Contact sheets of images: their layout, and captions with any text."""

from importlib.util import find_spec

import numpy as np
from PIL import Image

from engine.predict.pictures import (
    GAP,
    Tile,
    contact_sheet,
    lettering,
    other_fonts,
    tiles_of,
    write_picture,
)

# Invalid bytes of a file name, letters of several alphabets, an emoji, control characters, an empty text, a long text.
TEXTS = ["plain", "photos/\udcff\udc80.jpg", "Katze 猫 кошка قطة", "🐈", "two\nlines\x00\t", "", "x" * 3000]


def test_contact_sheet_draws_any_text():
    pixels = np.zeros((8, 8, 3), np.uint8)
    without = contact_sheet([Tile(pixels, [""])])
    for text in TEXTS:
        sheet = contact_sheet([Tile(pixels, [text])], title=text)
        is_seen = (np.asarray(sheet)[-GAP - 15 :] < 128).sum() > 5
        assert is_seen == bool(text), text
    assert without.size == (158 + 2 * GAP, 158 + 2 * GAP + lettering(11).height)


def test_missing_letters_use_fallback_font(monkeypatch):
    fonts = find_spec("matplotlib").submodule_search_locations[0] + "/mpl-data/fonts/ttf/"
    letters, name = lettering(11), "cat \u1d81"  # STIX has this letter
    for found, is_drawn in (([fonts + "cmr10.ttf", fonts + "STIXGeneral.ttf", __file__], True), ([], False)):
        monkeypatch.setattr("matplotlib.font_manager.findSystemFonts", lambda found=found: found)
        other_fonts.cache_clear()
        pictures = [np.asarray(contact_sheet([], title=text)) for text in (name, "cat \U0010ffff")]
        assert np.array_equal(*pictures) != is_drawn and letters.fit(name, 200) == name
    other_fonts.cache_clear()


def test_unreadable_image_leaves_an_empty_tile(tmp_path):
    sheet = contact_sheet([Tile(None, ["cat.jpg", "cannot be read"])])
    write_picture(sheet, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.format == "PNG" and image.size == sheet.size
    assert [path.name for path in tmp_path.iterdir()] == ["sheet.png"]


def test_saved_sheet_gives_back_its_images_with_captions(tmp_path):
    tiles = [Tile(np.full((8, 4 * shade, 3), shade, np.uint8), [f"shade {shade}"]) for shade in (1, 2, 3)]
    write_picture(contact_sheet(tiles, num_columns=2), tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as sheet:
        found = [(np.unique(image).tolist(), caption) for image, caption in tiles_of(sheet)]
    assert found == [([shade], [f"shade {shade}"]) for shade in (1, 2, 3)]
