"""Settings for a few photographs for which -check has no complaint, and the complaints of -check otherwise."""

from configs.load import load
from engine.quick_checks import OK, WARN
from tests.support.configs import SMALL
from tests.support.opened import open_sets

# -check has no complaint about a run with these settings.
CLEAN = SMALL.replace("digits", "imagefolder").replace("IMAGE_CHANNELS: 1", "IMAGE_CHANNELS: 3")
CLEAN = CLEAN.replace("1e-3", "1e-4").replace("BATCH_SIZE: 32", "BATCH_SIZE: 4")


def trouble(found: dict) -> dict[str, str]:
    """Return the complaints of -check, except that there are few images."""
    few = {"data": WARN}
    return {what: verdict for what, (verdict, _) in found.items() if verdict not in (OK, few.get(what))}


def sets_of(photos, *options, data_set="imagefolder"):
    (photos.parent / "clean.yaml").write_text(CLEAN)
    flags = ["-cfg", str(photos.parent / "clean.yaml"), "-data_path", str(photos), "-dataset", data_set]
    config = load([*flags, *(["-opts", *options] if options else [])]).config
    return config, *open_sets(config)
