"""The stages of a run: the counts of its loop, and its actions when an error ends it."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from engine import stages
from engine.stages import Run, train, train_epoch
from tests.support.configs import small_config
from tests.support.trainers import Lines, make_trainer
from utils.log import Log


def make_run(callbacks: list[Mock]) -> Run:
    return Run(
        session=SimpleNamespace(log=Lines()),
        plan=None,
        trainer=SimpleNamespace(callbacks=callbacks, step=0),
        eval_data=None,
        bad_images=None,
        watchers=None,
        saves=None,
        stop=None,
    )


def test_callbacks_close_after_an_error_without_hiding_it(monkeypatch):
    callbacks = [Mock(), Mock(), Mock()]
    callbacks[1].close.side_effect = OSError("no pictures")
    run = make_run(callbacks)
    monkeypatch.setattr(stages, "train_or_stop", Mock(side_effect=RuntimeError("the cause")))
    with pytest.raises(RuntimeError, match="the cause"):
        train(run)
    assert [each.close.call_count for each in callbacks] == [1, 1, 1]
    assert "no pictures" in run.session.log.noted[0]


def test_keyboard_interrupt_ends_training_without_closing_callbacks(monkeypatch):
    """A user who presses Ctrl-C a second time does not want to wait for pictures."""
    callback = Mock()
    monkeypatch.setattr(stages, "train_or_stop", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(make_run([callback]))
    assert callback.close.call_count == 0


def test_excluded_updates_are_left_out_of_the_image_count(tmp_path):
    trainer = make_trainer(small_config(tmp_path))
    per_epoch, per_update = trainer.data.steps_per_epoch, trainer.data.global_batch
    trainer.left_out = [range(1, 4)]
    windows = trainer.data.windows(0, per_epoch, trainer.left_out)
    _, num_images = train_epoch(trainer, windows, Log(1), SimpleNamespace(number=0), Mock())
    windows.close()
    assert num_images == (per_epoch - 3) * per_update
    assert next(windows, None) is None and trainer.step == per_epoch
