"""The picture of the demo: both loss curves, and their difference."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fusible.demo.result import Result

__all__ = ["draw"]

WIDE = {"color": "#9ecae1", "linewidth": 5.0, "solid_capstyle": "round"}
NARROW = {"color": "#08306b", "linewidth": 1.2, "linestyle": (0, (4, 2))}
GREY = "#555555"


def draw(result: Result, path: Path) -> None:
    """Writes the picture as PNG, without touching matplotlib's global state."""
    figure = Figure(figsize=(8, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps = range(1, result.common + 1)
    plain, fused = result.losses()
    top.plot(steps, plain, label="torch.nn", **WIDE)
    top.plot(steps, fused, label="fusible", **NARROW)
    top.set_ylabel("training loss (nats per character)")
    top.legend(frameon=False, loc="upper right")
    figure.suptitle("One character model, trained twice from the same weights", fontsize=13)
    bottom.axhline(0, color=WIDE["color"], linewidth=2.0)
    bottom.plot(steps, [f - p for p, f in zip(plain, fused, strict=True)], color=NARROW["color"], linewidth=1.0)
    bottom.set_ylabel("fusible − torch.nn\n(nats)")
    bottom.set_xlabel("training step")
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    for axes in (top, bottom):
        _quiet(axes)
    figure.savefig(path, format="png")


def _quiet(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
