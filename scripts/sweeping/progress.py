"""What a person sees of a sweep: a line for each trial that ends, and on a terminal a bar with the best so far."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from scripts.sweeping.plan import Plan, Trial
from scripts.sweeping.results import DONE, Result, read_status

SECONDS_BETWEEN_LOOKS = 1.0


class Progress:
    """The bar stands on stderr, where a person looks at a terminal; the lines go to stdout."""

    def __init__(self, plan: Plan, results: Sequence[Result]):
        self.plan, self._looked, self._best = plan, 0.0, ""
        finished = sum(each.is_final for each in results)
        self._bar = tqdm(desc="trials", total=plan.num_trials, initial=finished, unit="trial", disable=None)
        if finished:
            self.say(f"{finished} of {plan.num_trials} trials are finished already")

    def say(self, line: str) -> None:
        tqdm.write(line)
        sys.stdout.flush()

    def warn(self, line: str) -> None:
        self.say(f"warning: {line}")

    def started(self, trial: Trial) -> None:
        self._looked = 0.0

    def ended(self, trial: Trial, result: Result, best: tuple[int, Result] | None) -> None:
        if result.is_final:
            self._bar.update()
        what = f"{result.metric} {result.best:.4g} in epoch {result.epoch}" if result.best is not None else ""
        if result.state != DONE:
            what = f"{result.state} ({result.reason})" if result.reason else result.state
        seconds = "" if result.seconds is None else f", {result.seconds:.0f} s"
        self.say(f"{trial.describe()}: {what}{seconds}")
        if best:
            self._best = f"best {best[1].best:.4g} (trial {best[0]})"

    def tick(self, folders: Sequence[Path]) -> None:
        """Move the bar, about once a second. `folders`: of the trials that run."""
        if self._bar.disable or time.monotonic() - self._looked < SECONDS_BETWEEN_LOOKS:
            return
        self._looked = time.monotonic()
        found = [read_status(folder) for folder in folders]  # not read_result, which tries the lock that a run may want
        epochs = (f" {each.get('epoch', 0)}/{each['total_epochs']}" if "total_epochs" in each else "" for each in found)
        now = " ".join(f"{folder.name}{of_it}" for folder, of_it in zip(folders, epochs, strict=True))
        self._bar.set_postfix_str(", ".join(filter(None, (now, self._best))))

    def close(self) -> None:
        self._bar.close()
