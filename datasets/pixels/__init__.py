"""Pixels: what image files become, and how a run stores, crops, normalizes and shows them. Only this file asks DATA.PIXELS.

eight_bits.py has the pixels of most runs, with rules.py, decode.py and resize.py; native/ has pixels with the values of their
files. A new kind of pixels is a subclass of Pixels and a row of KINDS (engine/export/__init__.py has one more table).
"""

from collections.abc import Mapping
from typing import Any

from configs.schema import Data
from configs.tables import import_named
from datasets.pixels.eight_bits import Pixels

NATIVE = "native.pixels.NativePixels"
# {value of DATA.PIXELS: file and class in this folder}
KINDS = {"8bit": "eight_bits.Pixels"} | dict.fromkeys(("native", "window", "uint8", "uint16", "float32"), NATIVE)


def pixels_of(data: Data) -> Pixels:
    """Return the pixels of a run."""
    return import_named("datasets.pixels", KINDS[data.PIXELS]).of(data)


def kind_of_pixels(settings: Mapping[str, Any]) -> type[Pixels]:
    """Return the class of the pixels of a saved run. Runs of older versions have 8 bits."""
    return import_named("datasets.pixels", KINDS[settings.get("DATA.PIXELS", "8bit")])
