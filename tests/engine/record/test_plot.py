"""The curves of a run as pictures: their axes, the best epoch, what is left out."""

import pytest
from matplotlib import pyplot as plt

from engine.record import plot
from engine.record.plot import plot_metrics


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """{file: the axes that were drawn into it}"""
    found = {}
    monkeypatch.setattr(plot, "save", lambda figure, path: found.update({path.name: figure.axes[0]}))
    yield found
    for axes in found.values():
        plt.close(axes.figure)


def epochs(*top1: float, top5: float = 99.0, **more: list[float]) -> list[dict]:
    return [
        {"epoch": number, "train_loss": 1.0, "eval_loss": 2.0 - number, "eval_top1": value, "eval_top5": top5}
        | {name: values[number] for name, values in more.items()}
        for number, value in enumerate(top1)
    ]


def marked(axes) -> tuple[float, float]:
    """Where the best epoch is marked."""
    (line,) = (line for line in axes.lines if line.get_label().startswith("best epoch"))
    return line.get_xdata()[0], line.get_ydata()[0]


@pytest.mark.parametrize("number", [1, 2, 3, 60])
def test_epochs_are_whole_numbers_on_the_axis_and_one_alone_is_seen(tmp_path, drawn, number):
    plot_metrics(epochs(*range(number)), tmp_path, "")
    for axes in drawn.values():
        ticks, (low, high) = axes.get_xticks(), axes.get_xlim()
        assert all(tick == int(tick) for tick in ticks) and any(low <= tick <= high for tick in ticks)
        assert all(line.get_marker() == "." for line in axes.lines[:2]) == (number < 40)


def test_the_best_epoch_is_marked_where_it_scored_best_raw_or_ema(tmp_path, drawn):
    plot_metrics(epochs(10, 30, 30, 20), tmp_path, "")
    assert marked(drawn["accuracy.png"]) == (3, 30), "of two that are equal the one of the smaller loss"
    assert marked(drawn["loss.png"]) == (3, 0)
    plot_metrics(epochs(10, 30, eval_top1_ema=[40, 20], eval_loss_ema=[1, 1]), tmp_path, "")
    assert marked(drawn["accuracy.png"]) == (1, 40) and marked(drawn["loss.png"]) == (1, 1)


def test_another_metric_that_decides_has_its_curve_and_the_mark(tmp_path, drawn):
    plot_metrics(epochs(10, 30, eval_macro_f1=[50, 40]), tmp_path, "", "macro_f1")
    assert marked(drawn["accuracy.png"]) == (1, 50)
    plot_metrics(epochs(30, 10), tmp_path, "", "loss")
    assert marked(drawn["loss.png"]) == (2, 1) and marked(drawn["accuracy.png"]) == (2, 10)


def test_a_top_5_that_every_image_reaches_is_not_drawn(tmp_path, drawn):
    for top5, is_drawn in ((100.0, False), (99.9, True)):
        plot_metrics(epochs(10, 30, top5=top5), tmp_path, "")
        assert any("top-5" in line.get_label() for line in drawn["accuracy.png"].lines) is is_drawn
