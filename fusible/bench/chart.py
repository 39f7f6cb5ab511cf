"""The bar chart: per row, each peer's time over fusible's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from fusible.bench.results import Report
from fusible.bench.rows import PEERS

__all__ = ["draw"]

COLORS = {"eager": "#6baed6", "tuned": "#2171b5", "compile": "#fd8d3c"}
LABELS = {"eager": "eager", "tuned": "eager, tuned malloc", "compile": "torch.compile"}
GREY = "#555555"
#: On white, so that a target's mark does not cross them out.
FIGURES: dict[str, Any] = {
    "fontsize": 7,
    "color": GREY,
    "zorder": 5,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
}
BAR = 0.26


def draw(report: Report, path: Path) -> None:
    """Writes the picture, in the format that the path's suffix says, without touching matplotlib's global state."""
    rows = [result for result in report.rows if result.status != "failed"]
    peers = [peer for peer in PEERS if any(result.ratio(peer) is not None for result in rows)]
    figure = Figure(figsize=(9, 1.8 + len(rows) * (0.14 + 0.16 * max(len(peers), 1))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for offset, peer in enumerate(peers):
        shift = (offset - (len(peers) - 1) / 2) * BAR
        found = [(place, ratio, result.row.targets.of(peer)) for place, result in enumerate(rows)
                 if (ratio := result.ratio(peer)) is not None]  # fmt: skip
        places = [place + shift for place, _, _ in found]
        # Bars grow from 1: to the right where fusible is faster, to the left where it is slower.
        axes.barh(places, [ratio - 1 for _, ratio, _ in found], BAR, left=1, color=COLORS[peer], label=LABELS[peer])
        for y, (_, ratio, target) in zip(places, found, strict=True):
            text = f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"
            axes.annotate(text, (max(ratio, 1), y), (3, 0), textcoords="offset points", va="center", **FIGURES)
            if target is not None:
                axes.plot([target, target], [y - BAR / 2, y + BAR / 2], color="black", linewidth=1.4)
    _frame(figure, [result.row.name for result in rows], len(peers))
    figure.savefig(path, format=path.suffix.removeprefix(".").lower())


def _frame(figure: Figure, names: list[str], peers: int) -> None:
    axes = figure.axes[0]
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.8), max(high * 1.15, 2))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    ticks = [t for t in (0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500) if t <= axes.get_xlim()[1]]
    axes.set_xticks([t for t in ticks if t >= axes.get_xlim()[0]])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("time of the peer / time of fusible, forward + backward (logarithmic); black marks: targets")
    figure.suptitle("How many times faster than plain PyTorch", fontsize=13)
    if peers:
        figure.legend(loc="outside lower right", frameon=False, ncols=peers, fontsize=9)
