"""Explains why a part of the images is empty."""

from configs.schema import Config
from datasets.types import ImageSet
from utils.errors import DataError


def empty_part_error(config: Config, part: str, whole: ImageSet) -> DataError:
    """Return an error that explains why a part is empty. `whole`: the validation images, or all images."""
    data, name = config.DATA, config.DATA.DATASET
    held_out = f"DATA.FOLD ({data.FOLD})" if data.FOLD else f"DATA.VAL_FRACTION ({data.VAL_FRACTION:g})"
    group = f"; each value of DATA.GROUP_BY ({data.GROUP_BY}) stays whole" if data.GROUP_BY else ""
    by_fraction = part == "validation" and data.VAL_FRACTION and not (data.FOLD or data.GROUP_BY)
    alone = ""
    if by_fraction and whole.count_classes().max(initial=0) == 1:
        alone = "; a class needs two images, so that one can be held out"
    return DataError(
        f"DATA.DATA_PATH: {data.DATA_PATH} has no {part} images for -dataset {name}; check the lists or folders there, "
        f"and {held_out} if the data has no validation part of its own{group}{alone} (layouts: docs/data.md)"
    )
