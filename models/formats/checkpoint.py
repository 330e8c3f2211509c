"""Finds and reads a checkpoint of a run, with everything in it."""

from pathlib import Path

from models.formats.adapters import merged
from models.formats.common import weights_of
from models.formats.files import find_file, format_of, read_weights, what_is_recorded
from models.formats.torch import read_torch
from utils.errors import ConfigError


def find_checkpoint(source: str | Path) -> Path | None:
    """The best.pth of a run's folder, else its last.pth; otherwise the file of that name."""
    inside = [Path(source) / name for name in ("best.pth", "last.pth")]
    return next((each for each in inside if each.is_file()), None) or find_file(source)


def read_checkpoint(source: str | Path, needed: set[str]) -> tuple[Path, dict]:
    """A checkpoint of one of our runs, and its path; `needed`: what is used of it."""
    path = find_checkpoint(source)
    if path is None:
        raise ConfigError(
            f"no checkpoint at {source}; give the folder of a run, or its best.pth, last.pth or checkpoint-N.pth"
        )
    state = read_torch(path) if format_of(path) == "torch" else {}
    if not (isinstance(state, dict) and needed <= state.keys()) and what_is_recorded(path):  # an export
        weights = read_weights(path)
        state = {weights.record.get("weights", "state_dict"): weights.state, **weights.record}
    if missing := needed - set(state if isinstance(state, dict) else ()):
        raise ConfigError(
            f"{path} is not a checkpoint of a run, without {', '.join(sorted(missing))}; give its best.pth, last.pth "
            "or checkpoint-N.pth"
        )
    return path, state


def chosen_weights(state: dict, path: Path, key: str | None = None) -> tuple[str, dict]:
    """Which weights of a checkpoint, those that scored better if `key` is None, and these, with adapters merged into them."""
    key = key or weights_of(state, path)[1]
    if not state.get(key):
        is_ema = key == "state_dict_ema"
        has = "no moving average, because its run had TRAIN.MODEL_EMA off" if is_ema else "only the moving average"
        raise ConfigError(f"{'-ema' if is_ema else '-raw'}: {path} has {has}; leave the flag out")
    return key, merged(state[key], state.get("config", {}))
