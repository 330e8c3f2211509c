"""Traces a few updates (-profile), for a trace viewer such as Perfetto."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule, supported_activities

from engine.train.callback import Callback
from engine.train.trainer import Trainer
from utils.errors import cause_of
from utils.text import warning

WARM_UPDATES = 5  # updates before tracing starts, because the first ones are not typical


class Profiler(Callback):
    """Traces `num_updates` updates of this process. The clock of the trainer names their phases."""

    def __init__(self, num_updates: int, path: Path, say: Callable[[str], None]):
        self._path, self._say = path, say
        self._profile = profile(
            activities=supported_activities(),
            # The first traced update is discarded, because it is slow.
            schedule=schedule(wait=WARM_UPDATES, warmup=1, active=num_updates, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._is_done = False
        self._profile.start()

    def on_update(self, trainer: Trainer) -> None:
        if not self._is_done:
            self._profile.step()

    def close(self) -> None:
        """Stop tracing, and write the trace so far."""
        if not self._is_done:
            self._profile.stop()
        if not self._is_done:
            self._say(f"PROFILE: the run ended before its update {WARM_UPDATES + 2}, so there is no trace")

    def _write(self, traced: profile) -> None:
        self._is_done = True
        try:
            traced.export_chrome_trace(str(self._path))
        except OSError as error:
            self._say(warning(f"cannot write {self._path} ({cause_of(error)}); training continues"))
        else:
            self._say(f"profile: {self._path}; open it at https://ui.perfetto.dev")
