"""The part of a model card about photos of 8 bits: Python code that prepares them, and a sentence about it."""

from datasets.pixels.decode import MODES
from datasets.pixels.rules import PixelRules

PREPARE = """import numpy as np
from PIL import Image, ImageOps


def prepare(image):
{turn}    if image.mode.startswith("I"):  # 16 bits
        image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    image = image.convert("RGBA")
    background = Image.new("RGB", image.size, {background})
    background.paste(image, mask=image)
    return background.convert("{mode}")

"""
TURN = "    image = ImageOps.exif_transpose(image)\n"


def for_card(rules: PixelRules) -> tuple[str, str]:
    """Return the code and the sentence."""
    turn = TURN if rules.applies_exif else ""
    upright = "it is turned upright, and " if rules.applies_exif else ""
    code = PREPARE.format(turn=turn, background=rules.background, mode=MODES[rules.num_channels])
    return code, f"`prepare` reads a photo as the run did: {upright}transparent pixels get the mean colour of the data."
