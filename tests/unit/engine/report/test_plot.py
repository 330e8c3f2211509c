"""The curves of a run: their contents, and when they are drawn."""

from types import SimpleNamespace

import pytest

from engine.report.plot import Plotter, figure_of, plots_of

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


def test_curves_are_drawn_each_minute_and_at_end(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("engine.report.plot.time", SimpleNamespace(monotonic=lambda: clock[0]))
    plotter, rows, drawn_at = Plotter(tmp_path, "title", "top1"), epochs(10, 30), []
    for second, now in ((59, False), (61, False), (120, False), (122, False), (123, True)):
        clock[0] = second
        plotter.draw(rows, [], now)
        drawn_at += [second for _ in tmp_path.glob("loss.png")]
        (tmp_path / "loss.png").unlink(missing_ok=True)
    assert drawn_at == [61, 122, 123]
