"""The preprocessing of images with the values of their files (DATA.PIXELS native), as it is saved with weights."""

from typing import Any

from configs.schema import Data

# {setting: its name in the preprocessing}
NATIVE = {"PIXELS": "pixels", "RANGE": "range", "RGB": "rgb", "CHANNEL_FILES": "channel_files"}


def native_facts(data: Data) -> dict[str, Any]:
    """Return the settings that are set, in plain values."""
    values = {key: getattr(data, name) for name, key in NATIVE.items()}
    return {key: [*value] if isinstance(value, tuple) else value for key, value in values.items() if value}
