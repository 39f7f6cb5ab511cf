"""Pictures of reports, by matplotlib (the extra `cli`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

__all__ = ["error_growth", "roofline"]

PLAIN, FUSED, BEYOND = "#6b7280", "#2563eb", "#dc2626"
#: The smallest error that is drawn: the scale has no zero.
SMALLEST = 1e-18
#: Labels along an axis beyond which some are left out.
MOST_LABELS = 40

Path = str | os.PathLike[str]


def _figure(what: str, rows: int, size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib; install the extra: pip install 'fusible[cli]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, squeeze=False)[:, 0]


def error_growth(audit: Any, path: Path) -> None:
    """Draws an `Audit`: per pass the largest error of each result, plain and fused, on a logarithmic scale."""
    passes = [(name, [row for row in audit.rows if row.direction == name]) for name in ("forward", "backward")]
    passes = [(name, rows) for name, rows in passes if rows]
    longest = max((len(rows) for _, rows in passes), default=1)
    figure, axes = _figure("plot", len(passes) or 1, (min(max(8.0, 0.28 * longest), 24.0), 4.2 * (len(passes) or 1)))
    for axis, (name, rows) in zip(axes, passes, strict=True):
        _draw_errors(axis, name, rows)
    figure.suptitle(audit.title)
    figure.savefig(os.fspath(path), dpi=130)


def _draw_errors(axis: Any, name: str, rows: Sequence[Any]) -> None:
    places = range(len(rows))
    axis.plot(places, [max(row.plain_max, SMALLEST) for row in rows], "o-", color=PLAIN, label="plain", ms=4)
    seen = [(at, row) for at, row in enumerate(rows) if row.fused_max is not None]
    axis.plot([at for at, _ in seen], [max(row.fused_max, SMALLEST) for _, row in seen], "o-", color=FUSED,
              label="fused", ms=3, lw=1)  # fmt: skip
    beyond = [(at, row) for at, row in seen if not row.ok]
    if beyond:
        axis.plot([at for at, _ in beyond], [max(row.fused_max, SMALLEST) for _, row in beyond], "x", color=BEYOND,
                  label="beyond tolerance", ms=8, mew=2)  # fmt: skip
    errors = [e for row in rows for e in (row.plain_max, row.fused_max) if e]
    axis.set_yscale("log")
    axis.set_ylim(min(errors, default=1e-8) / 3, max(errors, default=1e-7) * 3)
    axis.set_ylabel("largest error / largest value")
    axis.set_title(name, loc="left")
    every = -(-len(rows) // MOST_LABELS)
    labels = [" ".join(part for part in (row.block, row.op, row.value) if part) for row in rows]
    axis.set_xticks(list(places)[::every], labels[::every], rotation=60, ha="right", fontsize=7, rotation_mode="anchor")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def roofline(profile: Any, path: Path) -> None:
    """Draws a `Profile`: each step with a matrix product as a point, FLOPs per byte against FLOPs per second."""
    figure, (axis,) = _figure("plot", 1, (9.0, 6.0))
    memory, products = profile.roofs
    steps = [step for step in profile.steps if step.flops and step.bytes and step.seconds > 0]
    ridge = products / memory
    intensities = [step.flops / step.bytes for step in steps] or [ridge]
    low, high = min(*intensities, ridge) / 4, max(*intensities, ridge) * 4
    axis.plot([low, ridge, high], [low * memory, products, products], color=PLAIN, lw=2)
    axis.annotate(f"copies, {memory / 1e9:.1f} GB/s", (low * 1.2, low * 1.2 * memory), fontsize=8, va="bottom")
    axis.annotate(f"products, {products / 1e9:.0f} GFLOP/s", (high, products), fontsize=8, ha="right", va="bottom")
    for step, intensity in zip(steps, intensities, strict=False):
        axis.plot(intensity, step.flops / step.seconds, "o", color=FUSED if step.direction == "forward" else BEYOND)
        label = f"{step.direction} {step.block} {step.ops}".replace("  ", " ")
        axis.annotate(label, (intensity, step.flops / step.seconds), (4, -9), textcoords="offset points", fontsize=6)
    axis.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOPs per second")
    axis.grid(alpha=0.3)
    figure.suptitle(profile.title)
    figure.savefig(os.fspath(path), dpi=130)
