"""Converts the text of DATA.IMAGE_SIZE: the side of a square, or height x width."""

import re

from configs.schema import MAX_SIDE, Config, Shape


def to_image_size(text: str | list) -> int | str:
    """Convert 224, 224x320 or [224, 320] to a value of DATA.IMAGE_SIZE. Raise ValueError for other text."""
    sides = [*map(str, text)] if isinstance(text, list) else re.split("[x,]", text.strip().strip("[]()").lower())
    numbers = [int(side) if re.fullmatch(r"\s*\+?[0-9]{1,9}\s*", side) else 0 for side in sides]
    if len(numbers) > 2 or not all(1 <= number <= MAX_SIDE for number in numbers):
        raise ValueError("not one or two lengths")
    return Shape(numbers[0], numbers[-1]).size


def crop_ratio_of(config: Config) -> tuple[float, ...]:
    """Return the default of DATA.CROP_RATIO, times the width / height of the images, which would else be stretched."""
    shape = config.DATA.shape
    return tuple(limit * shape.width / shape.height for limit in config.DATA.CROP_RATIO)
