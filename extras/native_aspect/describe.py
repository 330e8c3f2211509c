"""Lines about images at their own aspect ratio, for the log and -check."""

import numpy as np

from configs.schema import Config
from extras.native_aspect.grids import lengths_of, size_of
from extras.native_aspect.models import patch_size_of
from utils.text import counted

WIDE = 2  # an image is wide or tall if its longer side is more than this many times its shorter side
MOST = 2_000  # maximum number of sizes that -check computes; it samples larger data sets


def describe_sequences(config: Config) -> str:
    """Return the log line about the number of patches."""
    patch, data = patch_size_of(config), config.DATA
    text = f"images: own aspect ratio, at most {data.TOKENS:,} patches of {patch} x {patch}"
    if data.TRAIN_TOKENS:
        text += f"; training draws one of {', '.join(f'{each:,}' for each in data.TRAIN_TOKENS)} for each update"
    return text


def describe_shapes(config: Config, sides: np.ndarray) -> str:
    """Return the text of -check's row about shapes. `sides`: height and width of each image, int [N, 2]."""
    if not len(sides):
        return "no image could be read"
    patch, length = patch_size_of(config), max(lengths_of(config.DATA))
    chosen = sides[np.linspace(0, len(sides) - 1, min(MOST, len(sides))).astype(int)]
    sizes = np.array([size_of(height, width, patch, length) for height, width in chosen.tolist()])
    padding = 1 - (sizes.prod(axis=1) / (patch * patch * length)).mean()
    ratios = sides.max(axis=1) / sides.min(axis=1)
    # A square crop keeps the shorter side.
    lost = 1 - (1 / ratios).mean()
    height, width = np.median(sizes, axis=0).astype(int).tolist()
    return (
        f"{(ratios > WIDE).mean():.1%} are wider or taller than {WIDE}:1 (the most extreme {ratios.max():.3g}:1); a square "
        f"would cut off {lost:.1%} of the pixels; with at most {counted(length, 'patch')} of {patch} x {patch}, the median "
        f"image becomes {width} x {height}, and {padding:.1%} of the patches are padding"
    )
