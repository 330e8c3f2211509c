"""The epochs of a run: train, evaluate, save, until the last one is done or something stops the run."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.values import flatten
from datasets import BadImages, Batch, EvalData, Window
from engine.checkpoint.async_saver import BEST, AsyncSaver
from engine.checkpoint.format import read_checkpoint
from engine.checkpoint.resume import comparable
from engine.checkpoint.rollback import BAD_BATCHES_FILE, find_before, write_bad_batches
from engine.checkpoint.sharded_saver import PIECES
from engine.diagnose.failing_batch import LastUpdate, save_overflow
from engine.evaluation.evaluate import evaluate_both, evaluate_saved
from engine.evaluation.scores import Best
from engine.plan import Plan
from engine.record.best_results import BestResults
from engine.session import Session
from engine.train.counters import EpochResult
from engine.train.epoch_loop import train_epoch
from engine.train.optim.schedule_free import averaged
from engine.train.stop_conditions import DONE, EARLY_STOP, TIME_IS_UP, BadImageLimit, NonFinite, Stopped, why_finished
from engine.train.trainer import Trainer
from utils import VERSION
from utils.errors import cause_of
from utils.signals import StopSignal
from utils.text import format_time


class Epochs:
    """Trains, evaluates and saves epoch by epoch; handles rollbacks, signals and the end of the run."""

    def __init__(
        self, session: Session, plan: Plan, trainer: Trainer, eval_data: EvalData, saver: AsyncSaver, stop: StopSignal
    ):
        self.session, self.plan, self.trainer, self.eval_data = session, plan, trainer, eval_data
        self.saver, self.stop = saver, stop
        self.config, self.process, self.log = plan.config, session.process, session.log
        self.validation = plan.validation
        self.last_update = next(each for each in trainer.callbacks if isinstance(each, LastUpdate))
        self.results = next(each for each in trainer.callbacks if isinstance(each, BestResults))
        limit = next(each for each in trainer.callbacks if isinstance(each, BadImageLimit))
        self.bad_training_images = limit.bad_images
        self.bad_eval_images = BadImages(eval_data.image_set, self.config.DATA.MAX_BAD_FRACTION, self.log.warn)
        self.failure = ""  # why the last save failed, in every process
        self.start = time.perf_counter()
        self.state = "training"  # how the run ended: as in status.json, or EARLY_STOP, or failed

    def run(self) -> int:
        """Returns the exit code."""
        self._find_best()
        self.saver.newest = {"epoch": self.trainer.epoch, "step": self.trainer.step}
        self.saver.on_saved = lambda: self._status("training")
        self.saver.on_saved()
        try:
            while not self._why_finished():
                try:
                    self._train_to_the_end()
                except NonFinite as error:
                    if not self._roll_back(error):
                        raise
            self._wait_for_disk()
        except Stopped as stopped:
            return self._stop(stopped.number)
        except NonFinite as error:
            self._wait_for_disk()
            reason = f"{error}{self._save_overflow()}"
            return self._end("stopped", f"stopped: {reason}", 3, reason=reason)
        finally:
            self.saver.wait()
        self.results.complete(
            lambda: evaluate_saved(self.session.path / BEST, self.trainer, self.eval_data, self.bad_eval_images)
        )
        why = self._why_finished()
        return self._end("done", why, 0, reason=None if why == DONE else EARLY_STOP)

    def _train_to_the_end(self) -> None:
        """Train from the current position to the last epoch."""
        trainer = self.trainer
        with contextlib.closing(trainer.data.windows(trainer.step, self.plan.num_updates, trainer.left_out)) as windows:
            noted = self._noting_bad_images(windows)
            while not self._why_finished():
                self._epoch(noted)

    def _why_finished(self) -> str:
        return why_finished(self.config.TRAIN, self.trainer.epoch, self.trainer.not_better)

    def _epoch(self, windows: Iterator[Window]) -> None:
        trainer, config = self.trainer, self.config
        first_step, start = trainer.step, time.perf_counter()
        report = train_epoch(trainer, windows, self.log, self.stop, self._save)
        trained = time.perf_counter()
        number, is_last = trainer.epoch + 1, trainer.epoch + 1 == config.TRAIN.NUM_EPOCHS
        found = {}
        if number % config.VALIDATE_FREQ == 0 or is_last:
            found = evaluate_both(trainer, self.eval_data, self.bad_eval_images)
        evaluated, scores = time.perf_counter(), {suffix: each.scores for suffix, each in found.items()}
        if scores:
            self._learn_of_saves()
        suffix, chosen = max(scores.items(), key=lambda item: item[1].rank, default=("", None))
        if chosen:
            trainer.preferred = f"state_dict{suffix}"
        is_best = chosen is not None and trainer.best.is_worse_than(chosen)
        if is_best:
            trainer.best = Best.of(chosen, number, suffix)
        num_images = (trainer.step - first_step) * trainer.data.global_batch
        images = found[suffix].images.gather(self.process) if is_best else None
        result = EpochResult(report, scores, num_images, trained - start, evaluated - trained, images)
        trainer.notify("on_epoch_end", result)
        trainer.end_epoch()
        if chosen:
            # Also where best.pth was there before a resume from an earlier state.
            trainer.not_better = 0 if trainer.best.epoch == number else trainer.not_better + 1
        also = [BEST] if is_best else []
        if config.KEEP_CHECKPOINTS and (number % config.SAVE_FREQ == 0 or is_last):
            also.append(f"checkpoint-{number}.pth")
        self._save(metric=chosen.value if chosen else None, also=also)

    def _noting_bad_images(self, windows: Iterator[Window]) -> Iterator[Window]:
        def note(batch: Batch) -> Batch:
            self.bad_training_images.note(batch.bad)
            return batch

        for window in windows:
            yield window._replace(batches=map(note, window.batches))

    def _roll_back(self, error: NonFinite) -> bool:
        """Roll back to the newest checkpoint before the streak. False if none is left."""
        trainer, streak, folder = self.trainer, error.streak, self.session.path
        if len(trainer.left_out) >= self.config.PRECISION.ROLLBACKS:
            return False
        self._wait_for_saver()
        path = self.process.first(lambda: find_before(folder, streak.start, self.log.warn))
        if path is None:
            return False
        trainer.roll_back(read_checkpoint(path, lazily=True), streak)
        self._find_best()
        left_out = trainer.left_out[-1]
        self.log.say(
            f"{error}; going back to {path}, after step {trainer.step}; updates {left_out.start} to {left_out.stop - 1} "
            f"are left out this time, and their images named in {BAD_BATCHES_FILE}"
        )
        if self.process.is_first:
            try:
                write_bad_batches(folder, trainer.data, trainer.left_out)
            except OSError as failure:
                self.log.warn(f"cannot write {folder / BAD_BATCHES_FILE} ({cause_of(failure)}); training continues")
        self._save()
        return True

    def _stop(self, number: int) -> int:
        """Save and end because of a signal or the time limit. Returns the exit code."""
        self._save()
        self._wait_for_disk()
        if number == TIME_IS_UP:
            why, facts, code = f"RUN.MAX_TIME, {self.config.START.MAX_TIME}, is nearly up", {"reason": "time limit"}, 0
        else:
            why, facts, code = f"told to stop (signal {number})", {"signal": number}, 128 + number
        saved = "" if self.failure else ", saved"
        return self._end("stopped", f"{why} after step {self.trainer.step}{saved}", code, **facts)

    def _status(self, state: str, **facts) -> None:
        """Write status.json: where the training is, what is on the disk, and the updates that the run leaves out."""
        saver = self.saver
        progress = describe_progress(self.plan, self.trainer, self.session.path, saver.newest, saver.best)
        self.session.status(state, **progress, **facts)

    def _save(self, metric: float | None = None, also: list[str] = ()) -> None:
        """Save last.pth, and under the names in `also`. A collective: returns when the state is copied."""
        with averaged(self.trainer.optimizer):
            self._save_state(self.trainer.state_dict() | self._describe_run(metric), also)

    def _save_state(self, state: dict, also: list[str]) -> None:
        parallel = self.trainer.parallel
        if parallel.is_sharded:
            rest, pieces = parallel.split_for_save(state)
            self.saver.save({**rest, PIECES: pieces}, also)
        else:
            self.process.first(lambda: self.saver.save(state, also))

    def _describe_run(self, metric: float | None) -> dict:
        """Architecture, classes and preprocessing under timm's names, for other programs."""
        config, data = self.config, self.config.DATA
        return {
            "arch": config.MODEL.NAME,
            "metric": metric,
            "version": 2,
            "halfstep_version": VERSION,
            "config": comparable(config, self.trainer.data.order),
            "seed": config.SEED,
            "class_names": list(self.plan.classes),
            "class_weights": self.plan.class_weights,
            "validation": self.validation,
            "split": self.plan.eval_set.split,
            "bad_images": list(self.bad_training_images.indices),
            "data": {
                "mean": list(data.IMAGENET_MEAN),
                "std": list(data.IMAGENET_STD),
                "crop_pct": data.CROP_PCT,
                "crop_mode": data.CROP_MODE,
                "input_size": [data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE],
                "interpolation": data.INTERPOLATION,
            },
        }

    def _wait_for_saver(self) -> None:
        self.process.first(self.saver.wait)
        self.saver.wait()  # in the other processes: sharded checkpoints

    def _find_best(self) -> None:
        """After a state was loaded: the best epoch that it knows counts only if its best.pth is there."""
        known = self.trainer.best
        self.saver.look()
        if not known.epoch:
            self.saver.best = Best()  # it is of what followed that state, or of other validation images
        self._learn_of_saves()
        if self.trainer.best != known:
            self.log.say(f"the best epoch was {known.epoch}, but {self.session.path / BEST}: {self._describe_best()}")

    def _learn_of_saves(self) -> None:
        """Wait for the saver: if best.pth could not be written, the best epoch is the one before, in every process."""
        self._wait_for_saver()
        self.trainer.best, self.failure = self.process.first(lambda: (self.saver.best, self.saver.failure))

    def _wait_for_disk(self) -> None:
        self._learn_of_saves()
        if self.process.is_first:
            share = self.saver.seconds / (time.perf_counter() - self.start)
            self.log.note(f"checkpointing blocked training for {self.saver.seconds:.3f} s, {share:.3%} of the run")

    def _save_overflow(self) -> str:
        """Save the last update's batch for the doctor. Returns advice to append to the reason for stopping."""
        trainer, parallel = self.trainer, self.trainer.parallel
        facts = {
            **parallel.gather_state({"state_dict": parallel.local_state(trainer.model)}),
            "config": flatten(self.config),
            "seed": self.config.SEED,
            "class_names": list(self.plan.classes),
            "class_weights": self.plan.class_weights,
            "amp_scaler": trainer.precision.state_dict(),
        }
        try:
            return "; " + save_overflow(self.session.path, self.process.rank, self.last_update, facts)
        except (OSError, RuntimeError) as error:
            self.log.warn(f"the batch it stopped on cannot be saved in {self.session.path} ({cause_of(error)})")
            return ""

    def _describe_best(self) -> str:
        return self.trainer.best.describe(has_ema=self.trainer.ema is not None)

    def _end(self, state: str, what: str, code: int, **facts) -> int:
        """Close the callbacks; say in status.json and in one line what is on the disk. Returns the exit code."""
        for callback in self.trainer.callbacks:
            callback.close()
        if self.failure:
            state, code = "save_failed", code or 1
            has_one = (self.session.path / "last.pth").exists()
            then = "then -resume auto goes on from the save before" if has_one else "there is no save to go on from"
            what += f", not saved ({self.failure}; {then})"
            facts["reason"] = "; ".join(filter(None, (facts.get("reason"), f"not saved: {self.failure}")))
        self._status(state, exit_code=code, eta_seconds=None, **facts)
        self.state = EARLY_STOP if facts.get("reason") == EARLY_STOP else "failed" if code == 3 else state
        seconds = time.perf_counter() - self.start
        lasted = f"{seconds:.1f} s" if seconds < 60 else format_time(seconds)
        files = {"weights": "last.pth", "curves": "loss.png", "logs": "log.txt"}
        things = ", ".join(name for name, file in files.items() if (self.session.path / file).exists())
        self.log.say(f"{what}; {self._describe_best()}; {lasted}; {things}: {self.session.path}")
        return code


def describe_progress(plan: Plan, trainer: Trainer, folder: Path, saved: dict[str, int], best: Best) -> dict[str, Any]:
    """For status.json: where the training is, and what is on the disk: `saved`, the last.pth, and `best`."""
    held = {best.metric: best.value, "epoch": best.epoch, "file": BEST} if best.epoch else None
    return {
        **saved,
        "position": {"epoch": trainer.epoch, "step": trainer.step},
        "total_epochs": plan.config.TRAIN.NUM_EPOCHS,
        "total_steps": plan.num_updates,
        "saved": saved if (folder / "last.pth").exists() else None,
        "best": held,
        "best_top1": held and held.get("top1"),
        "best_metric": held and best.metric,
        "best_epoch": held and best.epoch,
        "left_out": [[each.start, each.stop - 1] for each in trainer.left_out] or None,
    }
