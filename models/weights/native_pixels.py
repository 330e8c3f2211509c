"""The preprocessing of images with the values of their files (DATA.PIXELS native), as it is saved with weights."""

from collections.abc import Mapping
from typing import Any

from configs.schema import Data

# {setting: its name in the preprocessing}
NATIVE = {"PIXELS": "pixels", "RANGE": "range", "RGB": "rgb", "CHANNEL_FILES": "channel_files"}


def facts_of_pixels(data: Data) -> dict[str, Any]:
    """Return the settings that differ from those of 8 bits, in plain values."""
    values = {key: getattr(data, name) for name, key in NATIVE.items() if getattr(data, name) != getattr(Data, name)}
    return {key: [*value] if isinstance(value, tuple) else value for key, value in values.items()}


def channels_of_colours(theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the channels that get the weights of red, green and blue. Without settings in `theirs`, weights have them."""
    has_colours = theirs.get("DATA.PIXELS", Data.PIXELS) == Data.PIXELS
    return tuple(settings.get("DATA.RGB", ())) * has_colours
