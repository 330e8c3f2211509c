"""Draws docs/images/native-aspect.png:  python scripts/maintenance/draw_square_crops.py"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from configs.schema import Config, Data, Model  # noqa: E402
from datasets.transforms.crop import EvalTransform  # noqa: E402
from engine.predict.pictures import fitted, lettering  # noqa: E402

PAGE = ROOT / "docs/images/native-aspect.png"
TOKENS, PATCH, SIDE, GAP = 196, 16, 300, 16
COLUMNS = ("the photo", f"a square of {TOKENS} patches", f"DATA.TOKENS={TOKENS}")
SKY, FIELD, STEEL, RED, GLASS, INK = "#bcd7ee", "#8aa56b", "#3c4450", "#b3352d", "#f4e6a6", "#303030"


def draw_train() -> Image.Image:
    """Draw a train with an engine and four cars, 1600 x 400."""
    photo = Image.new("RGB", (1600, 400), SKY)
    draw = ImageDraw.Draw(photo)
    draw.rectangle((0, 300, 1600, 400), fill=FIELD)
    draw.rectangle((0, 312, 1600, 322), fill=STEEL)
    for number in range(5):
        left, is_engine = 60 + 300 * number, number == 0
        draw.rounded_rectangle((left, 150, left + 280, 290), 24, fill=STEEL if is_engine else RED)
        for window in range(1 if is_engine else 5):
            x = left + 24 + 50 * window
            draw.rectangle((x, 180, x + 32, 220), fill=GLASS)
        for wheel in (50, 110, 190, 240):
            draw.ellipse((left + wheel - 20, 280, left + wheel + 20, 320), fill=INK)
        draw.text((left + 150, 255), f"{7 - number}", fill="white", font=lettering(36).font, anchor="mm")
    return photo


def draw_receipt() -> Image.Image:
    """Draw a receipt, 400 x 1000."""
    photo = Image.new("RGB", (400, 1000), "#d8d2c6")
    draw, rng = ImageDraw.Draw(photo), np.random.default_rng(0)
    draw.rectangle((40, 30, 360, 970), fill="#fbfaf5")
    draw.text((200, 80), "MARKET", fill=INK, font=lettering(44).font, anchor="mm")
    for line in range(19):
        top = 150 + 40 * line
        draw.rectangle((64, top, 64 + int(rng.integers(90, 180)), top + 14), fill=INK)
        draw.rectangle((300 - int(rng.integers(0, 30)), top, 336, top + 14), fill=INK)
    draw.text((200, 935), "TOTAL 48.20", fill=RED, font=lettering(38).font, anchor="mm")
    return photo


def as_square(photo: Image.Image) -> Image.Image:
    """Return the square that evaluation cuts out without DATA.TOKENS, with its grid of patches."""
    side = round(TOKENS**0.5) * PATCH
    out = torch.empty((side, side, 3), dtype=torch.uint8).permute(2, 0, 1)
    EvalTransform(Data(IMAGE_SIZE=side))(np.array(photo), out)
    return with_grid(out.permute(1, 2, 0).numpy(), side // PATCH, side // PATCH)


def as_sequence(photo: Image.Image) -> Image.Image:
    """Return the picture that evaluation reads with DATA.TOKENS, with its grid of patches."""
    from extras.native_aspect.grids import grids_of, new_batch, pictures_of
    from extras.native_aspect.readers import EvalSequenceTransform

    config = Config(DATA=Data(TOKENS=TOKENS), MODEL=Model(PATCH_SIZE=PATCH))
    batch = new_batch(1, TOKENS, PATCH, 3)
    EvalSequenceTransform(config, PATCH)(np.array(photo), batch[0])
    return with_grid(pictures_of(batch)[0], *grids_of(batch)[0].tolist())


def with_grid(pixels: np.ndarray, rows: int, columns: int) -> Image.Image:
    """Return the picture at twice its size, with lines between its patches."""
    picture = Image.fromarray(pixels).resize((2 * pixels.shape[1], 2 * pixels.shape[0]))
    draw = ImageDraw.Draw(picture)
    for row in range(rows + 1):
        draw.line((0, 2 * PATCH * row, picture.width, 2 * PATCH * row), fill="white")
    for column in range(columns + 1):
        draw.line((2 * PATCH * column, 0, 2 * PATCH * column, picture.height), fill="white")
    return picture


def draw_page() -> Image.Image:
    """Draw a row for each photo: the photo, its square, and its sequence of patches."""
    letters, photos = lettering(13), (draw_train(), draw_receipt())
    rows = [(photo, as_square(photo), as_sequence(photo)) for photo in photos]
    heights = [max(fitted(np.array(each), SIDE).height for each in row) for row in rows]
    top = GAP + letters.height + GAP
    page = Image.new("RGB", (GAP + 3 * (SIDE + GAP), top + sum(heights) + GAP * len(rows)), "white")
    draw = ImageDraw.Draw(page)
    for column, title in enumerate(COLUMNS):
        letters.draw(draw, (GAP + column * (SIDE + GAP), GAP), title)
    for row, height in zip(rows, heights, strict=True):
        for column, picture in enumerate(row):
            small = fitted(np.array(picture), SIDE)
            page.paste(
                small, (GAP + column * (SIDE + GAP) + (SIDE - small.width) // 2, top + (height - small.height) // 2)
            )
        top += height + GAP
    return page


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    draw_page().quantize(64).save(PAGE, optimize=True)
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
