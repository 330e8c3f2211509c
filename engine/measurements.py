"""Measurements of the training images that a run makes before it builds anything."""

from functools import partial

from configs.combinations import is_typed
from configs.load import LoadedConfig
from configs.tables import import_named
from datasets import ImageSet
from engine.checkpoint.resume import is_run
from utils.distributed import Process


def measure(
    loaded: LoadedConfig, process: Process, train: ImageSet | None, val: ImageSet, saved: dict, record: dict
) -> tuple[LoadedConfig, ImageSet | None, ImageSet]:
    """Return the settings and images after measurements of the training images. Collective.

    Images that load_image_sets returns have no limits of their pixels and no scale of their numbers before. `saved`: the
    checkpoint; `record`: the metadata of the weights.
    """
    began = saved.get("config", {}) if is_run(saved) else {}
    if named := loaded.config.task.measured:
        loaded, train, val = import_named("datasets", named)(loaded, began, record, train, val)
    if loaded.config.DATA.is_native:
        from datasets.pixels.native.statistics import with_statistics

        given = loaded, partial(is_typed, origins=loaded.origins), began, process
        loaded, train, val = with_statistics(*given, train, val)
    return loaded, train, val
