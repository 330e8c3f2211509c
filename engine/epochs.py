"""The epochs of a run: train, evaluate, record, save, until the last is done or something stops it."""

import contextlib
import time

from configs.duration import to_seconds
from datasets import BadImages, EvalData
from engine.checkpoint.async_saver import Saver
from engine.checkpoint.format import read_checkpoint
from engine.checkpoint.resume import comparable
from engine.checkpoint.rollback import NAME, find_before, write_bad_batches
from engine.checkpoint.sharded_saver import PIECES, ShardSaver
from engine.diagnose.auto_doctor import examine
from engine.diagnose.explain import explain
from engine.diagnose.failing_batch import save_overflow
from engine.evaluation import Scores, evaluate
from engine.parallel.sharding import is_sharded
from engine.report.recorder import Recorder, Seconds
from engine.session import Session
from engine.train.stop_conditions import TIME_IS_UP, NonFinite, Stopped, TimeLimit
from engine.train.trainer import Trainer


class Epochs:
    """Train, evaluate, record and save, until the last epoch is done or something stops it."""

    def __init__(self, session: Session, trainer: Trainer, eval_data: EvalData):
        self.session, self.trainer, self.eval_data = session, trainer, eval_data
        self.config, self.process, self.log = session.config, session.process, session.log
        self.bad_images = BadImages(eval_data.image_set, self.config.DATA.MAX_BAD_FRACTION, self.log.warn)
        self.recorder: Recorder | None = None
        self.saver = make_saver(session)
        self.saver.newest = {"epoch": trainer.epoch, "step": trainer.step}
        self.saver.on_saved = lambda: self._status("training")
        self.start = time.perf_counter()

    def run(self) -> int:
        """Returns the exit code."""
        if self.trainer.epoch >= self.config.TRAIN.NUM_EPOCHS:
            self.log.say(f"this run is finished already, after {self.trainer.epoch} epochs: nothing to do")
            return 0
        self.session.begin()
        if self.process.is_first:
            self.recorder = Recorder(self.session, self.trainer)
            if not is_sharded(self.config, self.process):  # it looks at a copy of the whole model
                self.trainer.on_skips = lambda: examine(self.session, self.trainer)
            if self.config.RUN.MAX_TIME:
                limit = TimeLimit(to_seconds(self.config.RUN.MAX_TIME), self.session.started)
                self.trainer.is_time_up = lambda num_left: limit.is_near(num_left, self.saver.longest)
        self.saver.on_saved()
        if self.config.PRECISION.EXPLAIN:
            explain(self.session, self.trainer)
        try:
            while self.trainer.epoch < self.config.TRAIN.NUM_EPOCHS:
                try:
                    self._train()
                except NonFinite as broken:
                    if not self._go_back(broken):
                        raise
            self._wait_for_disk()
        except Stopped as stopped:
            return self._stop(stopped.number)
        except NonFinite as stopped:
            self._wait_for_disk()
            reason = f"{stopped}{self._save_overflow()}"
            self._finish(f"stopped: {reason}")
            self._status("stopped", reason=reason)
            return 3
        finally:
            self.saver.wait()
        self._finish("done")
        self.session.status("done", best_top1=self.trainer.best[0], best_epoch=self.trainer.best[1])
        return 1 if self.saver.failed else 0

    def _train(self) -> None:
        """The epochs from where the trainer is to the last."""
        trainer, num_epochs = self.trainer, self.config.TRAIN.NUM_EPOCHS
        last_step = num_epochs * trainer.data.steps_per_epoch
        with contextlib.closing(trainer.data.windows(trainer.step, last_step, trainer.left_out)) as windows:
            while trainer.epoch < num_epochs:
                self._epoch(windows)

    def _go_back(self, broken: NonFinite) -> bool:
        """To the newest checkpoint from before the streak. False where there is none, or the run went back before."""
        trainer, streak, folder = self.trainer, broken.streak, self.session.path
        if len(trainer.left_out) >= self.config.PRECISION.ROLLBACKS:
            return False
        self._wait_for_saver()
        path = self.process.first(lambda: find_before(folder, streak.start, self.log.warn))
        if path is None:
            return False
        trainer.go_back(read_checkpoint(path, lazily=True), streak)
        left_out = trainer.left_out[-1]
        self.log.say(
            f"{broken}; going back to {path}, after step {trainer.step}; updates {left_out.start} to {left_out.stop - 1} "
            f"are left out this time, and their images named in {NAME}"
        )
        if self.recorder:
            self.recorder.close()
            self.recorder = Recorder(self.session, trainer)
            try:
                write_bad_batches(folder, trainer.data, trainer.left_out)
            except OSError as error:
                self.log.warn(f"cannot write {folder / NAME} ({error}); training goes on")
        self._save()
        return True

    def _stop(self, number: int) -> int:
        """Save and end, as a signal or the time asks for. Returns the exit code."""
        self._save()
        self._wait_for_disk()
        if number == TIME_IS_UP:
            why, facts, code = f"RUN.MAX_TIME, {self.config.RUN.MAX_TIME}, is nearly up", {"reason": "time limit"}, 0
        else:
            why, facts, code = f"told to stop (signal {number})", {"signal": number}, 128 + number
        self._finish(f"{why} after step {self.trainer.step}, {'not saved' if self.saver.failed else 'saved'}")
        self._status("stopped", **facts)
        return code or int(self.saver.failed)

    def _status(self, state: str, **facts) -> None:
        """status.json, with what is on the disk and which updates the run goes without."""
        left_out = [[each.start, each.stop - 1] for each in self.trainer.left_out]
        self.session.status(state, **facts, **self.saver.newest, **({"left_out": left_out} if left_out else {}))

    def _epoch(self, windows) -> None:
        trainer, config, seconds = self.trainer, self.config, Seconds()
        first_step = trainer.step
        report = trainer.train_epoch(windows, self._save)
        lr = trainer.schedule(max(trainer.step - 1, 0))
        seconds.training, seconds.images = seconds.lap(), (trainer.step - first_step) * trainer.data.global_batch
        number, is_last = trainer.epoch + 1, trainer.epoch + 1 == config.TRAIN.NUM_EPOCHS
        scores = self._evaluate() if number % config.VALIDATE_FREQ == 0 or is_last else {}
        seconds.evaluation = seconds.lap()
        chosen = scores.get("_ema") or scores.get("")
        is_best = chosen is not None and chosen.top1 > trainer.best[0]
        if is_best:
            trainer.best = (chosen.top1, number)
        if self.recorder:
            self.recorder.add(trainer, report, scores, lr, seconds)
        trainer.end_epoch()
        also = ["best.pth"] if is_best else []
        if number % config.SAVE_FREQ == 0 or is_last:
            also.append(f"checkpoint-{number}.pth")
        self._save(metric=chosen.top1 if chosen else None, also=also)

    def _evaluate(self) -> dict[str, Scores]:
        """Of the raw weights, and of their running mean beside them."""
        trainer = self.trainer
        models = {"": trainer.model} | ({"_ema": trainer.ema.model} if trainer.ema else {})
        return {
            suffix: evaluate(model, self.eval_data, trainer.normalize, trainer.precision, self.process, self.bad_images)
            for suffix, model in models.items()
        }

    def _save(self, metric: float | None = None, also: list[str] = ()) -> None:
        """last.pth, under other names as well where asked; all processes wait until the state is copied."""
        sharding = self.trainer.sharding
        state = self.trainer.state_dict() | describe_run(self.session, self.trainer, self.eval_data, metric)
        if self.config.DIST.CHECKPOINT == "sharded":
            rest, pieces = sharding.cut(state)
            self.saver.save({**rest, PIECES: pieces}, also)
        else:
            state = sharding.whole(state)
            self.process.first(lambda: self.saver.save(state, also))

    def _wait_for_saver(self) -> None:
        self.process.first(self.saver.wait)
        self.saver.wait()  # the others', if they have anything to write

    def _wait_for_disk(self) -> None:
        self._wait_for_saver()
        if self.process.is_first:
            share = self.saver.seconds / (time.perf_counter() - self.start)
            self.log.note(f"saving: training stood still for {self.saver.seconds:.3f} s, {share:.3%} of the run")

    def _save_overflow(self) -> str:
        """Keep what the last update met, for the doctor. Returns what to add to the reason for stopping."""
        trainer = self.trainer
        weights = {"state_dict": trainer.sharding.state_of(trainer.model)}
        facts = {
            **trainer.sharding.whole(weights),
            "config": self.session.settings,
            "seed": self.config.SEED,
            "class_names": list(self.eval_data.image_set.classes),
            "amp_scaler": trainer.precision.state_dict(),
        }
        try:
            return "; " + save_overflow(self.session.path, self.process.rank, trainer.shown, facts)
        except (OSError, RuntimeError) as error:
            self.log.warn(f"the batch it stopped on cannot be saved in {self.session.path} ({error})")
            return ""

    def _finish(self, reason: str) -> None:
        """Curves, and one line that says how it went and where things are."""
        if self.recorder:
            self.recorder.close()
        top1, epoch = self.trainer.best
        best = f"best validation top-1 {top1:.2f}% (epoch {epoch})" if epoch else "no evaluation yet"
        minutes, seconds = divmod(time.perf_counter() - self.start, 60)
        things = "weights, curves and logs" if (self.session.path / "last.pth").exists() else "logs"
        self.log.say(f"{reason}; {best}; {minutes:.0f} min {seconds:.1f} s; {things}: {self.session.path}")


def make_saver(session: Session) -> Saver:
    """What DIST.CHECKPOINT asks for. All processes make it together."""
    keep, process, log = session.config.KEEP_CHECKPOINTS, session.process, session.log
    if session.config.DIST.CHECKPOINT == "sharded":
        return ShardSaver(session.path, keep, process, log.warn if process.is_first else log.note)
    return Saver(session.path, keep, process.device, log.warn)


def describe_run(session: Session, trainer: Trainer, eval_data: EvalData, metric: float | None) -> dict:
    """What makes a checkpoint usable without this program: names as timm's, and how images were prepared."""
    config, data = session.config, session.config.DATA
    return {
        "arch": config.MODEL.NAME,
        "metric": metric,
        "version": 2,
        "config": comparable(session, trainer.data.order),
        "seed": config.SEED,
        "class_names": list(eval_data.image_set.classes),
        "data": {
            "mean": list(data.IMAGENET_MEAN),
            "std": list(data.IMAGENET_STD),
            "crop_pct": data.CROP_PCT,
            "input_size": [data.IMAGE_CHANNELS, data.IMAGE_SIZE, data.IMAGE_SIZE],
            "interpolation": data.INTERPOLATION,
        },
    }
