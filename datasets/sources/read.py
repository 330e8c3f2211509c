"""read_source: from DATA.DATASET to the function that reads it. SOURCES (configs/tables.py) has a row for each of them.

Such a function gets the settings, and whether only the validation part is wanted. It returns the tables of training
images (None if they are not wanted and not read) and of validation images, or all images and None, to be divided.
"""

from collections.abc import Callable

from configs.schema import Config
from configs.tables import SOURCES
from datasets.image_set import Table
from utils.errors import ConfigError, did_you_mean
from utils.text import is_url


def read_source(config: Config, only_validation: bool, say: Callable[[str], None]) -> tuple[Table | None, Table | None]:
    """Read the data set. A source is imported only by the runs that read it. `say` reports a download."""
    match name := config.DATA.DATASET:
        case "imagenet2012":
            from datasets.sources.listing import read_imagenet

            return read_imagenet(config, only_validation)
        case "imagefolder":
            from datasets.sources.folder import read_image_folder

            return read_image_folder(config, only_validation)
        case "csv":
            from datasets.sources.csv_list import read_csv

            return read_csv(config, only_validation)
        case "shards" if is_url(config.DATA.DATA_PATH):
            from datasets.sources.remote import read_remote_shards

            return read_remote_shards(config, only_validation, say)
        case "shards":
            from datasets.sources.shards import read_shards

            return read_shards(config, only_validation)
        case "parquet":
            from datasets.sources.parquet import read_parquet

            return read_parquet(config, only_validation)
        case "caltech101" | "caltech256":
            from datasets.sources.folder import read_caltech

            return read_caltech(config), None
        case "digits" | "synthetic":
            return _read_without_files(config)
    if name in SOURCES or name.startswith("torchvision/"):
        from datasets.sources.torchvision_sets import read_torchvision

        return read_torchvision(config, only_validation, say)
    raise ConfigError(
        f"DATA.DATASET: unknown data set {name!r} (known: {', '.join(SOURCES)}){did_you_mean(name, SOURCES)}"
    )


def _read_without_files(config: Config) -> tuple[Table, Table | None]:
    if config.DATA.DATASET == "digits":
        from datasets.sources.arrays import read_digits

        return read_digits(), None
    from datasets.sources.synthetic import read_synthetic

    return read_synthetic(config)
