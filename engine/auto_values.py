"""Chooses the values of AMP and DATA.BATCH_SIZE if they are auto. A resumed run keeps those of its start."""

from dataclasses import replace

from configs.auto import with_amp, with_batch_size
from configs.schema import AUTO
from configs.values import SETTINGS
from engine.checkpoint.resume import is_run
from engine.plan import Inputs
from engine.precision import Precision
from utils.program import StopSignal

KEPT = "as at the start of this run"


def choose_values(inputs: Inputs, num_images: int, num_classes: int, stop: StopSignal | None = None) -> Inputs:
    """Return the inputs with a value for each setting that is auto. Collective. `num_images`: of the training set.

    The precision is chosen first, because the largest batch depends on it.
    """
    saved = inputs.saved.get("config", {}) if is_run(inputs.saved) else {}
    if inputs.config.AMP == AUTO:
        is_used, how = choose_precision(inputs, saved, num_images, num_classes)
        loaded = with_amp(inputs.loaded, is_used, how)
        inputs = replace(inputs, loaded=loaded, precision=Precision(loaded.config, inputs.process.device))
    if inputs.config.DATA.BATCH_SIZE == AUTO:
        number, how = saved.get("DATA.BATCH_SIZE"), KEPT
        if number is None:
            from engine.batch_size import find_batch_size

            number, how = find_batch_size(inputs, num_images, num_classes, stop)
        inputs = replace(inputs, loaded=with_batch_size(inputs.loaded, number, how))
    return inputs


def choose_precision(inputs: Inputs, saved: dict, num_images: int, num_classes: int) -> tuple[bool, str]:
    """Return the value of AMP, and why it was chosen. `saved`: the settings of the run to resume."""
    if "AMP" in saved:
        name = Precision(replace(inputs.config, AMP=saved["AMP"]), inputs.process.device).name
        return saved["AMP"], f"{name}, {KEPT}"
    from engine.batch_size import max_images
    from engine.update_times import choose_by_speed

    batch_size, process = inputs.config.DATA.BATCH_SIZE, inputs.process
    if batch_size == AUTO:
        largest = max_images(inputs.config, num_images, process.world_size)
        batch_size = min(SETTINGS["DATA.BATCH_SIZE"].default, largest)
    return choose_by_speed(inputs.config, num_classes, process, batch_size)
