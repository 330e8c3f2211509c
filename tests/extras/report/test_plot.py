"""The curves of a run: their contents, and when they are drawn."""

import errno
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from extras.report.plot import Plotter, figure_of, plots_of

pytestmark = pytest.mark.slow


def drawn(rows: list[dict], metric: str = "top1", steps: list[dict] = ()) -> dict:
    """Return {file: the axes that are drawn into it}."""
    return {plot.file: figure_of(plot, "title").axes[0] for plot in plots_of(rows, steps, metric)}


def epochs(*top1: float, top5: float = 99.0, **more: list[float]) -> list[dict]:
    return [
        {"epoch": number, "train_loss": 1.0, "eval_loss": 2.0 - number, "eval_top1": value, "eval_top5": top5}
        | {name: values[number] for name, values in more.items()}
        for number, value in enumerate(top1)
    ]


def marked(axes) -> tuple[float, float]:
    """Return the position of the mark for the best epoch."""
    (line,) = (line for line in axes.lines if line.get_label().startswith("best epoch"))
    return line.get_xdata()[0], line.get_ydata()[0]


@pytest.mark.parametrize("number", [1, 2, 3, 60])
def test_epoch_ticks_are_integers_and_only_short_curves_have_point_markers(number):
    for axes in drawn(epochs(*range(number))).values():
        ticks, (low, high) = axes.get_xticks(), axes.get_xlim()
        assert all(tick == int(tick) for tick in ticks) and any(low <= tick <= high for tick in ticks)
        assert all(line.get_marker() == "." for line in axes.lines[:2]) == (number < 40)
        assert (high - low == 1) == (number == 1)


@pytest.mark.parametrize(("number", "is_drawn"), [(1, False), (2, True)])
def test_learning_rate_and_gradient_norm_curves_need_two_updates(number, is_drawn):
    found = drawn(epochs(10), steps=[{"step": step, "lr": 0.1, "grad_norm": 1.0} for step in range(number)])
    assert ("lr.png" in found) is is_drawn and ("grad_norm.png" in found) is is_drawn


@pytest.mark.parametrize(
    ("rows", "metric", "in_accuracy", "in_loss"),
    [
        (epochs(10, 30, 30, 20), "top1", (3, 30), (3, 0)),  # among equal epochs, the one with the smaller loss is best
        (epochs(10, 30, eval_top1_ema=[40, 20], eval_loss_ema=[1, 1]), "top1", (1, 40), (1, 1)),
        (epochs(10, 30, eval_macro_f1=[50, 40]), "macro_f1", (1, 50), (1, 2)),
        (epochs(30, 10), "loss", (2, 10), (2, 1)),
    ],
)
def test_best_epoch_is_marked_in_curve_of_chosen_metric(rows, metric, in_accuracy, in_loss):
    found = drawn(rows, metric)
    assert marked(found["accuracy.png"]) == in_accuracy and marked(found["loss.png"]) == in_loss


@pytest.mark.parametrize(("top5", "is_drawn"), [(100.0, False), (99.9, True)])
def test_top5_curve_is_omitted_at_100_percent(top5, is_drawn):
    lines = drawn(epochs(10, 30, top5=top5))["accuracy.png"].lines
    assert any("top-5" in line.get_label() for line in lines) is is_drawn


@pytest.mark.parametrize(("scales", "is_drawn"), [((4.0, 4.0, 4.0), False), ((2.0, 1.0, 1.0), True)])
def test_curve_of_changing_loss_scale_shows_skipped_updates(scales, is_drawn):
    steps = [{"step": step, "loss_scale": scale, "skipped": step > 0} for step, scale in enumerate(scales)]
    found = drawn(epochs(10), steps=steps)
    assert ("loss_scale.png" in found) is is_drawn
    assert {axes.get_yscale() for file, axes in found.items() if file != "loss_scale.png"} == {"linear"}
    if is_drawn:
        axes = found["loss_scale.png"]
        scale, skipped = axes.lines
        assert (axes.get_yscale(), axes.yaxis.get_transform().base) == ("log", 2), "loss scales are powers of two"
        assert (scale.get_drawstyle(), list(scale.get_ydata())) == ("steps-post", list(scales))
        assert (skipped.get_label(), list(skipped.get_xdata())) == ("updates skipped", [1])


def test_full_disk_keeps_the_previous_curve_pictures(tmp_path, monkeypatch):
    rows = [{"epoch": 0, "train_loss": 2.0, "eval_top1": 10.0}]
    Plotter(tmp_path, "too early", "top1").draw(rows, [], now=False)
    assert not list(tmp_path.iterdir())
    Plotter(tmp_path, "late enough", "top1", seconds_between=0.0).draw(rows, [], now=False)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(path.name for path in before) == ["accuracy.png", "loss.png"]
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(OSError, match="No space"):
        Plotter(tmp_path, "after", "top1").draw([{"epoch": 0, "train_loss": 1.0}], [], now=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_curves_are_drawn_each_minute_and_at_end(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("extras.report.plot.time", SimpleNamespace(monotonic=lambda: clock[0]))
    plotter, rows, drawn_at = Plotter(tmp_path, "title", "top1"), epochs(10, 30), []
    for second, now in ((59, False), (61, False), (120, False), (122, False), (123, True)):
        clock[0] = second
        plotter.draw(rows, [], now)
        drawn_at += [second for _ in tmp_path.glob("loss.png")]
        (tmp_path / "loss.png").unlink(missing_ok=True)
    assert drawn_at == [61, 122, 123]
