"""Writes a trace of some updates for ui.perfetto.dev."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from engine.record.timing import Timing
from engine.train.trainer import Callback, Trainer
from utils.errors import cause_of

WARM_UPDATES = 5  # before tracing: the first updates are not typical


class Profiler(Callback):
    """Traces `num_updates` updates of this process."""

    def __init__(self, num_updates: int, path: Path, timing: Timing, say: Callable[[str], None]):
        self._path, self._timing, self._say = path, timing, say
        has_device = {
            ProfilerActivity.CUDA: torch.cuda.is_available(),
            ProfilerActivity.XPU: torch.xpu.is_available(),
        }
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *(activity for activity, there in has_device.items() if there)],
            # One warm-up update is traced and discarded, because tracing starts slowly.
            schedule=schedule(wait=WARM_UPDATES, warmup=1, active=num_updates, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._is_done = False
        timing.shows_ranges = True
        self._profile.start()

    def on_update(self, trainer: Trainer) -> None:
        if not self._is_done:
            self._profile.step()

    def close(self) -> None:
        """Write the trace so far."""
        if not self._is_done:
            self._profile.stop()
        if not self._is_done:
            self._say(f"PROFILE: the run ended before its update {WARM_UPDATES + 2}, so there is no trace")

    def _write(self, traced: profile) -> None:
        self._is_done, self._timing.shows_ranges = True, False
        try:
            traced.export_chrome_trace(str(self._path))
        except OSError as error:
            self._say(f"warning: cannot write {self._path} ({cause_of(error)}); training continues")
        else:
            self._say(f"profile: {self._path}; open it at https://ui.perfetto.dev")
