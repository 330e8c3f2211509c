"""Contact sheets of images: their layout, and captions with any text."""

from importlib.util import find_spec

import numpy as np
import torch
from PIL import Image

from datasets.pixels import Pixels
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


def test_wide_captions_continue_on_the_next_line_between_words():
    letters, title = lettering(11), "Travel & Places -> Smileys & Emotion 0.93"
    lines = letters.wrap(title, 158)
    assert len(lines) == 2 and " ".join(lines) == title and all(letters.width(line) <= 158 for line in lines)
    for name in ("n02099601-golden_retriever 0.93", "unknown: Animalia_Chordata_Aves_Passeriformes 0.93"):
        parts = letters.wrap(name, 158)
        assert "".join(parts).replace(" ", "") == name.replace(" ", ""), "long names break after a separator"
        assert len(parts) > 1 and all(letters.width(part) <= 158 for part in parts)
    (path,) = letters.wrap("some/folder/with-a-very-long-name/photo-number-1234567.jpg", 158)
    assert "…" in path and path.endswith("1234567.jpg") and letters.width(path) <= 158
    many = letters.wrap("word " * 60 + "end", 158)
    assert len(many) == 3 and "…" in many[2] and many[2].endswith("end")
    pixels = np.zeros((8, 8, 3), np.uint8)
    one, two = (contact_sheet([Tile(pixels, [text, "x.png"])]) for text in ("cat", title))
    assert two.height == one.height + letters.height
    assert (np.asarray(two)[-GAP - letters.height :] < 128).any(), "the path is below the second line"


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


def test_pictures_of_a_batch_keep_height_and_width():
    batch = torch.arange(2 * 3 * 4 * 6, dtype=torch.uint8).reshape(2, 3, 4, 6)
    found = Pixels(3).pictures(batch)
    assert found.shape == (2, 4, 6, 3)
    assert (
        found[1][3, 5].tolist() == batch[1, :, 3, 5].tolist() and found[0][0, 5].tolist() == batch[0, :, 0, 5].tolist()
    )
