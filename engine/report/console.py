"""Log lines of the training in PaddleViT's format, and the figures on the progress bar."""

from configs.schema import Config
from engine.train.callbacks import Callback
from engine.train.counters import EpochResult, Report
from engine.train.trainer import Trainer
from utils.log import Log


class Console(Callback):
    """Logs the progress of the training. Accuracies in PaddleViT's format are fractions in [0, 1]."""

    def __init__(self, config: Config, log: Log):
        self._num_epochs, self._log = config.TRAIN.NUM_EPOCHS, log

    def on_report(self, trainer: Trainer, report: Report) -> None:
        steps_per_epoch = trainer.data.steps_per_epoch
        line = (
            f"Epoch[{report.epoch + 1:03d}/{self._num_epochs:03d}], "
            f"Step[{report.step % steps_per_epoch:04d}/{steps_per_epoch:04d}], Lr: {report.lr:.6f}, "
            f"Loss: {report.loss:.4f} ({report.mean_loss:.4f}), Avg Acc: {report.accuracy:.4f}"
        )
        if self._log.shows_bar:
            self._log.note(line)
            self._log.show_on_bar(
                loss=f"{report.mean_loss:.3f}", acc=f"{report.accuracy:.3f}", scale=f"{report.loss_scale:g}"
            )
        else:
            self._log.say(line)

    def on_epoch_end(self, trainer: Trainer, result: EpochResult) -> None:
        head, report = f"----- Epoch[{trainer.epoch + 1:03d}/{self._num_epochs:03d}], ", result.report
        self._log.say(
            f"{head}Train Loss: {report.mean_loss:.4f}, Train Acc: {report.accuracy:.4f}, "
            f"time: {result.training_seconds:.2f}"
        )
        for suffix, scores in result.scores.items():
            name = "EMA Validation" if suffix else "Validation"
            self._log.say(f"{head}{scores.describe(name)}, time: {result.evaluation_seconds:.2f}")
