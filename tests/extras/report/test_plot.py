"""The curves of a run: their contents, and when they are drawn."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extras.report.plot import Plotter, figure_of, plots_of
from tests.support.properties import examples

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


NUMBER = st.none() | st.sampled_from([0.0, 1.0, 2.0, 100.0])
UPDATES = st.lists(
    st.fixed_dictionaries({name: NUMBER for name in ("lr", "grad_norm", "loss_scale", "skipped")}), max_size=8
)


@given(UPDATES)
@examples(100)
def test_curves_of_updates_have_every_known_value_and_mark_skips(rows):
    """Scales of 0 are unknown. A scale that never changes is not drawn."""
    steps = [{"step": 10 * number, **row} for number, row in enumerate(rows)]
    found = {plot.file: plot for plot in plots_of([], steps, "top1")}
    known = {
        name: {row["step"]: row[name] for row in steps if row[name] is not None}
        for name in ("lr", "grad_norm", "loss_scale")
    }
    scales = {step: scale for step, scale in known["loss_scale"].items() if scale}
    wanted = {f"{name}.png": known[name] for name in ("lr", "grad_norm") if len(known[name]) > 1}
    wanted |= {"loss_scale.png": scales} if len({*scales.values()}) > 1 else {}
    assert {file: dict(*plot.curves.values()) for file, plot in found.items()} == wanted
    for plot in found.values():
        ends = [*dict(*plot.curves.values()).values()]
        assert [float(word) for word in plot.text.split() if word.isdecimal()] == [ends[0], ends[-1]]
    if "loss_scale.png" in wanted:
        totals = [row["skipped"] or 0 for row in steps]
        more = {steps[n]["step"] for n in range(1, len(steps)) if totals[n] > totals[n - 1]}
        assert dict(found["loss_scale.png"].skipped) == {
            step: each for step, each in known["loss_scale"].items() if step in more
        }


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
