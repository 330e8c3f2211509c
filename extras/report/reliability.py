"""The report's section on calibration: how often the model is right at each confidence, before and after."""

import io
from pathlib import Path
from typing import Any

from engine.record.saved_files import read_json
from extras.report.image_results import CALIBRATION_KEY
from extras.report.page import Markup, element, picture, section
from extras.report.plot import DPI
from utils.errors import naming_damage
from utils.text import counted

SIZE, MARGINS = (4.5, 4.2), {"left": 0.14, "right": 0.97, "bottom": 0.12, "top": 0.93}  # inches, fractions
SMALLEST_POINT, LARGEST_POINT = 6, 160  # areas of the points of bins with no and with all images, in square points


def calibration_section(path: Path) -> Markup | None:
    """Return the section from results.json, or None if the file has no calibration."""
    record = read_json(path).get(CALIBRATION_KEY)
    if not record:
        return None
    with naming_damage(path):
        bins = {"before": record["bins_before"], "after": record["bins_after"]}
        text = (
            f"Expected calibration error on {counted(record['num_images'], 'validation image')}: "
            f"{record['ece_before']:.1%} before the calibration, {record['ece_after']:.1%} after it."
        )
        title = "reliability diagram"
        diagram = element("figure", picture(draw(bins, title), "png", f"{title}: {text}", "drawing"))
    how = (
        "On the dashed line a probability of 80% means that the model is right in 80% of these cases. Points below it "
        "are too confident. Larger points stand for more images. predict.py prints calibrated probabilities."
    )
    return section("Calibration", element("p", text), element("p", how, class_="soft"), diagram)


def draw(bins: dict[str, list[list[Any]]], title: str) -> bytes:
    """Return the reliability diagram as PNG. `bins`: {name of a curve: its [confidence, share right, number]}."""
    from matplotlib.figure import Figure  # unlike pyplot, Figure needs no screen

    figure = Figure(figsize=SIZE)
    axes = figure.subplots(gridspec_kw=MARGINS)
    axes.plot([0, 1], [0, 1], "--", color="gray", linewidth=1)
    for name, points in bins.items():
        confidences, shares, counts = zip(*points, strict=True)
        (line,) = axes.plot(confidences, shares, label=name, linewidth=1)
        areas = [LARGEST_POINT * each / sum(counts) + SMALLEST_POINT for each in counts]
        axes.scatter(confidences, shares, areas, color=line.get_color())
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="share of right answers")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="upper left")
    content = io.BytesIO()
    figure.savefig(content, dpi=DPI, format="png")
    return content.getvalue()
