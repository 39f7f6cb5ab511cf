"""Draws what `explain` says about one block: its ops as boxes, the forward steps above them, the backward steps below.

    python docs/draw_plan.py            # writes docs/plan-light.svg and docs/plan-dark.svg
    python docs/draw_plan.py --png      # PNG instead, to look at

Needs matplotlib. Nothing in the picture is typed in: boxes, brackets, rules and bytes come from the explanation.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusible
from fusible import kernels, ops

HERE = Path(__file__).parent
#: Nicer names than those of the two ops that a Residual stands for.
NAMES = {"MakeExtraOutput": "fork", "AddExtraInput": "add", "BasicLinear": "GEMM", "Bias": "bias"}

LIGHT = {"back": "#ffffff", "ink": "#1f2328", "faint": "#656d76", "line": "#d0d7de", "box": "#f6f8fa",
         "forward": "#0969da", "backward": "#bc4c00", "kept": "#1a7f37"}  # fmt: skip
DARK = {"back": "#0d1117", "ink": "#e6edf3", "faint": "#8d96a0", "line": "#3d444d", "box": "#161b22",
        "forward": "#4493f8", "backward": "#f0883e", "kept": "#3fb950"}  # fmt: skip


def block() -> fusible.Sequential:
    """The block of the README."""
    return fusible.Sequential(
        ops.Residual(ops.RMSNorm(512), ops.Linear(512, 2048), ops.GELU(), ops.Linear(2048, 512)),
    )


class Span(NamedTuple):
    """One step: the first and last op that it covers, and the rule that runs it (empty: the op's own)."""

    first: int
    last: int
    rule: str


class Picture(NamedTuple):
    """What is drawn."""

    ops: tuple[str, ...]  # "0.1 BasicLinear", in chain order
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]  # in the order in which they run
    kept: dict[str, int]  # bytes per op

    def caption(self) -> str:
        """The picture in words, for those who cannot see it; it is stored in the file."""
        lines = ["A chain of operations: " + ", ".join(self.ops) + "."]
        for title, spans in (("Forward", self.forward), ("Backward", self.backward)):
            steps = [", ".join(self.ops[s.first : s.last + 1]) + (f" ({s.rule})" if s.rule else "") for s in spans]
            lines.append(f"{title}: " + "; ".join(steps) + ".")
        return " ".join(lines)


def picture() -> Picture:
    """Asks the block for its plan."""
    x = torch.empty(64, 512, requires_grad=True)
    with kernels.use("reference"):
        (part,) = block().explain(x).parts
    names = tuple(name for row in part.forward for name in row.ops.split(", "))

    def span(row: Any) -> Span:
        places = [names.index(name) for name in row.ops.split(", ")]
        return Span(places[0], places[-1], row.rule)

    kept: dict[str, int] = {}
    for row in part.kept:
        kept[row.op] = kept.get(row.op, 0) + (row.bytes or 0)
    return Picture(names, tuple(map(span, part.forward)), tuple(map(span, part.backward)), kept)


def draw(what: Picture, colors: dict[str, str], path: Path) -> None:
    """Writes one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "fusible", "font.family": "DejaVu Sans"})
    from matplotlib import pyplot as plt

    count = len(what.ops)
    figure, axes = plt.subplots(figsize=(10.4, 3.5), facecolor=colors["back"])
    axes.set_xlim(-1.12, count - 0.38)
    axes.set_ylim(-2.32, 2.05)
    axes.axis("off")
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    _boxes(axes, what, colors)
    for number, step in enumerate(what.forward, 1):
        _bracket(axes, step, number, colors["forward"], colors, base=0.56, tip=0.80)
    for number, step in enumerate(what.backward, 1):
        _bracket(axes, step, number, colors["backward"], colors, base=-0.84, tip=-1.08)
    for text, y, color in (("forward", 1.72, "forward"), ("backward", -2.08, "backward"), ("kept", -0.58, "kept")):
        axes.text(-1.08, y, text, color=colors[color], fontsize=10.5, fontweight="bold", va="center")
    _arrow(axes, (-0.30, 1.72), (count - 0.62, 1.72), colors["forward"])
    _arrow(axes, (count - 0.62, -2.08), (-0.30, -2.08), colors["backward"])
    figure.savefig(path, facecolor=colors["back"], dpi=160, metadata=_metadata(path, what))
    plt.close(figure)


def _metadata(path: Path, what: Picture) -> dict[str, Any]:
    return {"Date": None, "Description": what.caption()} if path.suffix == ".svg" else {}


def _boxes(axes: Any, what: Picture, colors: dict[str, str]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for place, op in enumerate(what.ops):
        op_path, name = op.split(" ", 1)
        if place + 1 < len(what.ops):
            _arrow(axes, (place + 0.42, 0.06), (place + 0.60, 0.06), colors["faint"])
        style = {"boxstyle": "round,pad=0,rounding_size=0.07", "linewidth": 1.1}
        axes.add_patch(FancyBboxPatch((place - 0.40, -0.32), 0.80, 0.76, fc=colors["box"], ec=colors["line"], **style))
        axes.text(place, 0.15, NAMES.get(name, name), color=colors["ink"], ha="center", va="center", fontsize=10)
        axes.text(place, -0.15, op_path, color=colors["faint"], ha="center", va="center", fontsize=8)
        size = what.kept.get(op)
        if size is not None:
            text = f"{size / 1024:.0f} KiB" if size >= 1024 else f"{size} B"
            axes.text(place, -0.58, text, color=colors["kept"], ha="center", va="center", fontsize=8.5)


def _bracket(axes: Any, step: Span, number: int, color: str, colors: dict[str, str], base: float, tip: float) -> None:
    """A bracket over (or under) the ops of a step, with its number and its rule."""
    left, right = step.first - 0.40, step.last + 0.40
    axes.plot([left, left, right, right], [base, tip, tip, base], color=color, linewidth=1.6 if step.rule else 1.0,
              solid_joinstyle="round", solid_capstyle="round", alpha=1 if step.rule else 0.65)  # fmt: skip
    middle, away = (step.first + step.last) / 2, 1 if tip > 0 else -1
    axes.text(
        middle, tip + away * 0.24, str(number), color=color, ha="center", va="center", fontsize=10, fontweight="bold"
    )
    if step.rule:
        axes.text(middle, tip + away * 0.53, step.rule, color=colors["ink"], ha="center", va="center", fontsize=9,
                  family="DejaVu Sans Mono")  # fmt: skip


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.annotate(
        "", end, start, arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", action="store_true", help="PNG instead of SVG")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to")
    options = parser.parse_args()
    what = picture()
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        path = options.out / f"plan-{name}.{'png' if options.png else 'svg'}"
        draw(what, colors, path)
        print(path)


if __name__ == "__main__":
    main()
