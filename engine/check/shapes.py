"""Checks whether DATA.IMAGE_SIZE has the shape of most images, and proposes a shape."""

import math
import re

import numpy as np

from configs.schema import Config, Data, Shape
from datasets.transforms.crop import EvalTransform
from engine.quick_checks import WARN, Finding
from utils.commands import page

FAR_FROM_SQUARE = 1.5  # a median of longer side / shorter side above this is reported
MOST = 0.8  # the share of images that must be wide, or tall
MOST_READ = 10_000  # images whose crops are computed
SAME_SHAPE = 1.25  # the largest ratio of two aspect ratios that count as the same shape
# Without patches: a multiple that most models take, and one for the sides of small images
USUAL_STEP, SMALL_STEP, SMALL_SIDE = 32, 8, 64


def check_shape(sides: np.ndarray, config: Config) -> Finding | None:
    """Report images of another shape than DATA.IMAGE_SIZE. `sides`: heights and widths [N, 2]."""
    if not len(sides):
        return None
    heights, widths, shape = *sides.T, config.DATA.shape
    ratio = float(np.median(widths / heights))
    shares = {"wide": (widths > heights).mean(), "tall": (widths < heights).mean()}
    word = max(shares, key=shares.get)
    elongation = float(np.median(sides.max(axis=1) / sides.min(axis=1)))
    change = ratio * shape.height / shape.width
    if shares[word] < MOST or elongation <= FAR_FROM_SQUARE or max(change, 1 / change) <= SAME_SHAPE:
        return None
    fitting = fitting_shape(ratio, config)
    text = f"{shares[word]:.0%} of the images are {word}, at the median {ratio:.2g} times as wide as high"
    where = f'{page("docs/data.md")}, "Images that are not square"'
    remedy = f"-image_size {fitting.size} shows nearly whole images to the model ({where})"
    return Finding("shape", f"{text}; {describe_loss(sides, config.DATA)}", WARN, remedy)


def describe_loss(sides: np.ndarray, data: Data) -> str:
    """Return what the images lose in evaluation, on average."""
    if data.CROP_MODE == "squash":
        return f"DATA.CROP_MODE squash distorts them to {data.shape}"
    if data.CROP_MODE == "border":
        return f"DATA.CROP_MODE border shrinks them to fit into {data.shape}"
    crop = EvalTransform(data)
    parts = (crop.seen(height, width) for height, width in sides[:: 1 + len(sides) // MOST_READ].tolist())
    share = np.mean([(right - left) * (bottom - top) for left, top, right, bottom in parts])
    return f"the crop of {data.shape} cuts off {1 - share:.0%} of an image"


def fitting_shape(ratio: float, config: Config) -> Shape:
    """Return the shape with about this width / height and as many pixels as DATA.IMAGE_SIZE, of whole patches."""
    pixels, model = math.prod(config.DATA.shape), config.MODEL
    height = math.sqrt(pixels / ratio)
    step = SMALL_STEP if min(height, height * ratio) < SMALL_SIDE else USUAL_STEP
    if model.TYPE == "vit":
        step = model.PATCH_SIZE
    elif match := re.search(r"patch([0-9]+)", model.NAME):
        step = int(match[1])
    return Shape(*(max(1, round(side / step)) * step for side in (height, height * ratio)))
