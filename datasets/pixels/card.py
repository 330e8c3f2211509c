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


def code_of(rules: PixelRules) -> str:
    turn = TURN * rules.applies_exif
    return PREPARE.format(turn=turn, background=rules.background, mode=MODES[rules.num_channels])


def sentence_of(rules: PixelRules) -> str:
    upright = "it is turned upright, and " * rules.applies_exif
    return f"`prepare` reads a photo as the run did: {upright}transparent pixels get the mean colour of the data."
