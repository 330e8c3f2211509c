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
        lengths = ", ".join(f"{each:,}" for each in data.TRAIN_TOKENS)
        text += f" in evaluation; in training, the maximum is drawn for each update from {lengths}"
    return text


CODE_FOR_TIMM = """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()  # or hf-hub:OWNER/NAME
data = timm.data.resolve_model_data_config(model)
transform = timm.data.create_transform(
    **data, is_training=False, naflex=True, patch_size={patch}, max_seq_len={tokens}, patchify=True
)
logits = model({{name: each[None] for name, each in transform(image).items()}})
"""


def code_for_timm(config: Config) -> str:
    """Return Python code that classifies an image with timm, for the model card of an export."""
    return CODE_FOR_TIMM.format(patch=patch_size_of(config), tokens=config.DATA.TOKENS)


def describe_shapes(config: Config, sides: np.ndarray, is_training: bool) -> str:
    """Return the text of -check's row about shapes. `sides`: height and width of each image, int [N, 2]."""
    if not len(sides):
        return "no image could be read"
    patch, length = patch_size_of(config), max(lengths_of(config.DATA)) if is_training else config.DATA.TOKENS
    chosen = sides[np.linspace(0, len(sides) - 1, min(MOST, len(sides))).astype(int)]
    sizes = np.array([size_of(height, width, patch, length) for height, width in chosen.tolist()])
    padding = 1 - (sizes.prod(axis=1) / (patch * patch * length)).mean()
    ratios = sides.max(axis=1) / sides.min(axis=1)
    # A square crop keeps the shorter side.
    lost = 1 - (1 / ratios).mean()
    height, width = sizes[np.argsort(chosen.prod(axis=1, dtype=np.int64), kind="stable")[len(chosen) // 2]].tolist()
    return (
        f"{(ratios > WIDE).mean():.1%} of the images are wider or taller than {WIDE}:1 (the most extreme is "
        f"{ratios.max():.3g}:1); a square crop would cut off {lost:.1%} of the average image; with at most "
        f"{counted(length, 'patch')} of {patch} x {patch}, the median image becomes {width} x {height}, and {padding:.1%} "
        "of the patches are padding"
    )
