"""Replaces the value auto of settings by the value that a run chose, or by the default where nothing is trained."""

from dataclasses import replace

from configs.load import LoadedConfig
from configs.schema import AUTO, Config
from configs.values import SETTINGS


def with_batch_size(loaded: LoadedConfig, number: int, how: str) -> LoadedConfig:
    """Return a copy with a number instead of DATA.BATCH_SIZE auto. `how`: how the number was found, in words."""
    return _chosen(loaded, "DATA.BATCH_SIZE", loaded.config.changed("DATA", BATCH_SIZE=number), how)


def with_amp(loaded: LoadedConfig, is_used: bool, how: str) -> LoadedConfig:
    """Return a copy with true or false instead of AMP auto. `how`: why, in words."""
    return _chosen(loaded, "AMP", replace(loaded.config, AMP=is_used), how)


def _chosen(loaded: LoadedConfig, key: str, config: Config, how: str) -> LoadedConfig:
    return replace(loaded, config=config, origins=loaded.origins | {key: f"auto ({loaded.origins[key]}): {how}"})


def without_auto(loaded: LoadedConfig) -> LoadedConfig:
    """Return a copy with the defaults of batch size and AMP instead of auto, and notes.

    This is for programs that do not train.
    """
    notes = [*loaded.notes]
    if loaded.config.DATA.BATCH_SIZE == AUTO:
        default = SETTINGS["DATA.BATCH_SIZE"].default
        notes.append(f"DATA.BATCH_SIZE auto is for training only; using the default, {default}")
        loaded = with_batch_size(loaded, default, "the default")
    if loaded.config.AMP == AUTO:
        notes.append("AMP auto is for training only, because it times updates; using the default, float32")
        loaded = with_amp(loaded, False, "the default")
    return replace(loaded, notes=notes)
