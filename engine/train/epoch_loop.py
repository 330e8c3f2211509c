"""The updates of one epoch, from the trainer's position to its end, unless something stops the run."""

from collections.abc import Callable, Iterator

from datasets import Window
from engine.train.counters import Report
from engine.train.stop_conditions import TIME_IS_UP, Stopped
from engine.train.trainer import Trainer
from utils.log import Log
from utils.signals import StopSignal


def train_epoch(
    trainer: Trainer, windows: Iterator[Window], log: Log, stop: StopSignal, save: Callable[[], None]
) -> Report:
    """Train to the end of the epoch. Returns its report. Calls `save` every SAVE_STEPS updates."""
    config, per_epoch = trainer.config, trainer.data.steps_per_epoch
    done = trainer.step - trainer.epoch * per_epoch
    title = f"epoch {trainer.epoch + 1}/{config.TRAIN.NUM_EPOCHS}"
    images = trainer.data.global_batch
    log.start_bar(per_epoch * images, done * images, title)
    trainer.notify("on_epoch_start")
    try:
        for index in range(done, per_epoch):
            stop_if_requested(trainer, stop, updates_left=per_epoch - index)
            if any(trainer.step in each for each in trainer.left_out):
                trainer.leave_out()
            else:
                trainer.update(next(windows))
                if index % config.REPORT_FREQ == 0 or index == per_epoch - 1:
                    trainer.notify("on_report", trainer.report())
            log.move_bar(images)
            if config.SAVE_STEPS and trainer.step % config.SAVE_STEPS == 0 and index < per_epoch - 1:
                save()
    finally:
        log.end_bar()
    return trainer.report()


def stop_if_requested(trainer: Trainer, stop: StopSignal, updates_left: int) -> None:
    """Stop because of a signal or a callback, all processes after the same update."""
    is_requested = any([each.should_stop(trainer, updates_left) for each in trainer.callbacks])
    number = trainer.process.delayed_max(stop.number or is_requested * TIME_IS_UP)
    if number:
        raise Stopped(number)
