"""The size of a resized image that covers a shape, square or not."""

from configs.schema import Shape


def covering_size(height: int, width: int, shape: Shape) -> tuple[int, int]:
    """Return the size of an image that is resized to the smallest that covers `shape`, with its own aspect ratio.

    Like timm, round down for a square and to the nearest number, or the even one of two, for other shapes.
    """
    fits_height = height * shape.width <= width * shape.height
    new, old = (shape.height, height) if fits_height else (shape.width, width)
    if shape.height == shape.width:
        return new * height // old, new * width // old
    return round_ratio(new * height, old), round_ratio(new * width, old)


def round_ratio(numerator: int, denominator: int) -> int:
    """Return the whole number nearest to a ratio, and of two that are equally near the even one, exactly."""
    whole, rest = divmod(numerator, denominator)
    return whole + (2 * rest + whole % 2 > denominator)
