"""The curves of a run as pictures: their axes, the best epoch, what is left out."""

import pytest

from engine.record.plot import figure_of, plots_of


def drawn(rows: list[dict], metric: str = "top1", steps: list[dict] = ()) -> dict:
    """{file: the axes that are drawn into it}"""
    return {plot.file: figure_of(plot, "title").axes[0] for plot in plots_of(rows, steps, metric)}


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
def test_epochs_are_whole_numbers_on_the_axis_and_one_alone_is_seen(number):
    for axes in drawn(epochs(*range(number))).values():
        ticks, (low, high) = axes.get_xticks(), axes.get_xlim()
        assert all(tick == int(tick) for tick in ticks) and any(low <= tick <= high for tick in ticks)
        assert all(line.get_marker() == "." for line in axes.lines[:2]) == (number < 40)


@pytest.mark.parametrize(
    ("rows", "metric", "in_accuracy", "in_loss"),
    [
        (epochs(10, 30, 30, 20), "top1", (3, 30), (3, 0)),  # of two that are equal the one of the smaller loss
        (epochs(10, 30, eval_top1_ema=[40, 20], eval_loss_ema=[1, 1]), "top1", (1, 40), (1, 1)),
        (epochs(10, 30, eval_macro_f1=[50, 40]), "macro_f1", (1, 50), (1, 2)),
        (epochs(30, 10), "loss", (2, 10), (2, 1)),
    ],
)
def test_the_best_epoch_is_marked_in_the_curve_of_what_decides_raw_or_ema(rows, metric, in_accuracy, in_loss):
    found = drawn(rows, metric)
    assert marked(found["accuracy.png"]) == in_accuracy and marked(found["loss.png"]) == in_loss


@pytest.mark.parametrize(("top5", "is_drawn"), [(100.0, False), (99.9, True)])
def test_a_top_5_that_every_image_reaches_is_not_drawn(top5, is_drawn):
    lines = drawn(epochs(10, 30, top5=top5))["accuracy.png"].lines
    assert any("top-5" in line.get_label() for line in lines) is is_drawn


@pytest.mark.parametrize(("scales", "is_drawn"), [((4.0, 4.0, 4.0), False), ((4.0, 2.0, 2.0), True)])
def test_a_loss_scale_that_moves_is_drawn_with_the_skipped_updates(scales, is_drawn):
    steps = [{"step": step, "loss_scale": scale, "skipped": step > 0} for step, scale in enumerate(scales)]
    found = drawn(epochs(10), steps=steps)
    assert ("loss_scale.png" in found) is is_drawn
    if is_drawn:
        assert list(found["loss_scale.png"].lines[1].get_xdata()) == [1]
