"""What is kept of every epoch: the rows of metrics.csv, TensorBoard's files, the plots, and the lines of the log."""

import contextlib
import math
import resource
import time
from collections.abc import Iterator

import torch

from engine.evaluation import Scores
from engine.report.data_wait_advice import Advice
from engine.report.metrics import Metrics, StepRows
from engine.report.plot import Plotter
from engine.report.profiler import Profiler
from engine.report.timing import PHASES, shares
from engine.session import Session
from engine.train.trainer import Report, Trainer

STEP_COLUMNS = ("step", "epoch", "lr", "loss", "mean_loss", "grad_norm", "loss_scale", "skipped", "seconds")
TIME_COLUMNS = tuple(f"{name}_pct" for name in PHASES)


class Recorder:
    """Process 0's keeper of the run's figures."""

    def __init__(self, session: Session, trainer: Trainer):
        config = session.config
        self._log, self._session, self._phases = session.log, session, trainer.phases
        self._metrics = Metrics(session.path, trainer.epoch)
        self._steps = StepRows(session.path, trainer.step, STEP_COLUMNS + TIME_COLUMNS)
        self._advice = Advice(config, trainer.data.image_set, trainer.process)
        self._profiler = None
        if config.PROFILE:
            path = session.path / "trace.json.gz"
            self._profiler = Profiler(config.PROFILE, path, trainer.phases, session.log.say)
            trainer.on_update = self._profiler.step
        trainer.on_report = self.add_step
        trainer.on_shadow = self.add_shadow
        self._plotter = Plotter(session.path, f"{config.MODEL.NAME} on {config.DATA.DATASET}")
        self._board, self._first_step = None, trainer.step

    def add_step(self, row: dict) -> None:
        """Figures of one update, each REPORT_FREQ."""
        with self._told():
            self._steps.add(row)
            if self._session.config.TENSORBOARD:
                if self._board is None:
                    self._open_board()
                    self._phases.restart()  # half a second of importing is no phase of an update
                for name in ("lr", "loss", "grad_norm", "loss_scale", "skipped"):
                    self._open_board().add_scalar(f"step/{name}", row[name], row["step"])
                for name in PHASES:
                    if row[f"{name}_pct"] is not None:
                        self._open_board().add_scalar(f"time/{name}", row[f"{name}_pct"], row["step"])
        advice = self._advice.look_at(row)
        if advice:
            self._log.say(advice)

    def add_shadow(self, row: dict) -> None:
        """shadow.csv: how far half precision was off, update by update compared."""
        path = self._session.path / "shadow.csv"
        is_new = not path.exists()
        with self._told(), open(path, "a") as file:
            if is_new:
                print(*row, sep=",", file=file)
            print(*(f"{value:.10g}" for value in row.values()), sep=",", file=file)
        if self._session.config.TENSORBOARD:
            for name, value in row.items():
                if name != "step":
                    self._open_board().add_scalar(f"shadow/{name}", value, row["step"])

    def add(self, trainer: Trainer, report: Report, scores: dict[str, Scores], lr: float, seconds: "Seconds") -> None:
        """One finished epoch. `scores` holds "" (the raw weights) and "_ema", where they were evaluated."""
        row = {
            "epoch": trainer.epoch,
            "train_loss": finite(report.mean_loss),
            "eval_loss": None,
            "eval_top1": None,
            "eval_top5": None,
            "lr": lr,
            "train_top1": finite(100 * report.accuracy),
        }
        for suffix, each in scores.items():
            row[f"eval_loss{suffix}"] = finite(each.loss)
            row[f"eval_top1{suffix}"] = round(each.top1, 4)
            row[f"eval_top5{suffix}"] = round(each.top5, 4)
        times = shares(trainer.phase_seconds, trainer.process.device)
        row |= {
            "step": trainer.step,
            "images_per_s": round(seconds.images / max(seconds.training, 1e-9), 1),
            "data_wait_pct": times["data"],
            "memory_mb": round(peak_memory(trainer.process.device) / 2**20),
            "loss_scale": trainer.precision.scaler.get_scale(),
            "skipped": report.skipped,
            "grad_norm": round(report.mean_grad_norm, 6),
        }
        self._tell(row, report, seconds, times)
        with self._told():
            self._metrics.add(row)
            if self._session.config.TENSORBOARD:
                self._to_board(row)
            self._plotter.draw(self._metrics.rows, self._steps.rows, now=False)

    def _tell(self, row: dict, report: Report, seconds: "Seconds", times: dict[str, float | None]) -> None:
        """PaddleViT's lines, where accuracy is a share of 1, and two of ours."""
        head = f"----- Epoch[{row['epoch'] + 1:03d}/{self._session.config.TRAIN.NUM_EPOCHS:03d}], "
        self._log.say(
            f"{head}Train Loss: {report.mean_loss:.4f}, Train Acc: {report.accuracy:.4f}, time: {seconds.training:.2f}"
        )
        for suffix, name in (("", "Validation"), ("_ema", "EMA Validation")):
            if row.get(f"eval_top1{suffix}") is not None:
                self._log.say(
                    f"{head}{name} Loss: {row[f'eval_loss{suffix}']:.4f}, "
                    f"{name} Acc@1: {row[f'eval_top1{suffix}'] / 100:.4f}, "
                    f"{name} Acc@5: {row[f'eval_top5{suffix}'] / 100:.4f}, time: {seconds.evaluation:.2f}"
                )
        self._log.say(
            f"      {row['images_per_s']:g} images/s, {row['memory_mb']} MB, loss scale {row['loss_scale']:g}, "
            f"{row['skipped']} skipped"
        )
        names = {"data": "waiting for data"}
        parts = [f"{share:.1f}% {names.get(name, name)}" for name, share in times.items() if share is not None]
        self._log.say(f"      time: {', '.join(parts)}")

    def _open_board(self):
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # half a second: not before it is needed

            self._board = SummaryWriter(str(self._session.path / "tensorboard"), purge_step=self._first_step)
        return self._board

    def _to_board(self, row: dict) -> None:
        for name, value in row.items():
            if value is not None and name != "epoch":
                group = "train" if name.startswith("train") else "eval" if name.startswith("eval") else "run"
                self._open_board().add_scalar(f"{group}/{name.removeprefix(group + '_')}", value, row["epoch"])

    def close(self) -> None:
        if self._profiler:
            self._profiler.close()
        with self._told():
            self._plotter.draw(self._metrics.rows, self._steps.rows, now=True)
        with self._told():
            self._steps.close()
        if self._board is not None:
            with self._told():
                self._board.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A full disk must not end a run; rows that found no room are written with the next."""
        try:
            yield
        except OSError as error:
            self._log.warn(f"cannot write the figures of the run in {self._session.path} ({error}); training goes on")


def finite(value: float) -> float | None:
    """Rounded for a table; nothing where every update of the epoch was skipped, as JSON has no NaN."""
    return round(value, 6) if math.isfinite(value) else None


class Seconds:
    """How long the parts of one epoch took, by a clock that never jumps, and how many images this start trained on."""

    def __init__(self):
        self.training = self.evaluation = 0.0
        self.images = 0
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        self._last, passed = now, now - self._last
        return passed


def peak_memory(device: torch.device) -> int:
    """Bytes: of the device where it counts them, else of this process."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
