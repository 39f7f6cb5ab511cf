"""What `profile` returns: times of steps, of modules between chains, and of what is neither."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusible.explanation import show_bytes

__all__ = ["BlockTime", "Profile", "StepTime"]


#: What stands behind the time of a line that is no step.
NO_FIGURES = ("",) * 4


@dataclass(frozen=True)
class StepTime:
    """One step of one pass, or a module that runs as it is between two chains.

    Attributes:
        block: path of the block in the model; "" where the model is the block.
        kernels: those that it calls; `the module itself` for a module that runs as it is.
        seconds: the median over the rounds, all its calls in one round together.
        bytes: of the tensors that it takes and makes, each memory once; `None` for a module that runs as it is.
        copies: its time over that of a copy that moves as many bytes; `None` for a step with a matrix product, which is
        bound by arithmetic, and for a module that runs as it is.
        flops: of its matrix products; `None` for a module that runs as it is.
        floor: seconds that it takes at least, by this machine's calibration; `None` without one.
    """

    block: str
    direction: str
    ops: str
    rule: str
    kernels: str
    seconds: float
    bytes: int | None
    copies: float | None
    flops: int | None = None
    floor: float | None = None


@dataclass(frozen=True)
class BlockTime:
    """A block inside of a model: the median times of its chains and of the modules between them, with no step timed."""

    block: str
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Profile:
    """Where the time of a block or model goes, for one kind of call. `str()` gives a table; in a notebook it shows as
    one.

    Attributes:
        forward, backward: the whole's own median times in seconds, nothing inside timed; backward is 0 without
        gradients.
        steps: in the order in which they run, block by block.
        blocks: the blocks of a model; empty where the model is a block itself.
        copy_rate: bytes read and written per second by a copy of a large tensor, on as many threads.
        roofs: by this machine's calibration, (bytes per second of large copies, FLOPs per second of large products);
        `None` without one.
    """

    title: str
    steps: tuple[StepTime, ...]
    blocks: tuple[BlockTime, ...]
    forward: float
    backward: float
    copy_rate: float
    roofs: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """Of one forward and backward of the whole."""
        return self.forward + self.backward

    @property
    def elsewhere(self) -> float:
        """Seconds of a model outside of its blocks; 0 where the model is a block itself."""
        return self.seconds - sum(block.seconds for block in self.blocks) if self.blocks else 0.0

    @property
    def overhead(self) -> float:
        """Seconds of blocks that are no step's: plan lookup, autograd, what leaves and enters the blocks."""
        return self.seconds - self.elsewhere - sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "overhead": self.overhead, "elsewhere": self.elsewhere}

    _HEADER = ("block", "pass", "ops", "rule", "kernels", "time", "share", "bytes", "copies", "floor", "floors")

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            (step.block, step.direction, step.ops, step.rule or "-", step.kernels, *self._timed(step.seconds),
             "-" if step.bytes is None else show_bytes(step.bytes),
             "-" if step.copies is None else f"{step.copies:.1f}",
             "-" if step.floor is None else _time(step.floor),
             "-" if not step.floor else f"{step.seconds / step.floor:.1f}")
            for step in self.steps
        ]  # fmt: skip
        rows.append(("", "", "outside of steps", "", "", *self._timed(self.overhead), *NO_FIGURES))
        if self.blocks:
            rows += [(b.block, "", "the block", "", "", *self._timed(b.seconds), *NO_FIGURES) for b in self.blocks]
            rows.append(("", "", "everything else", "", "", *self._timed(self.elsewhere), *NO_FIGURES))
        whole = "the model" if self.blocks else "the block"
        rows.append(("", "", whole, "", "", _time(self.seconds), "100 %", *NO_FIGURES))
        return rows

    def _timed(self, seconds: float) -> tuple[str, str]:
        return _time(seconds), f"{100 * seconds / self.seconds:.0f} %"

    def _cells(self) -> list[tuple[str, ...]]:
        first = 0 if self.blocks else 1
        last = None if any(step.floor is not None for step in self.steps) else -2
        return [row[first:last] for row in (self._HEADER, *self._rows())]

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        note = f"copies: time over that of a copy of as many bytes, at {self.copy_rate / 1e9:.1f} GB/s"
        return "\n".join([self.title, "", *lines, "", note])

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page, one file without need of a network: the chain drawn, coloured by each step's distance from its
        floor, and the tables.

        Needs the extra `cli`, for Jinja2: raises `ImportError` without it, and `OSError` if the file cannot be written.
        """
        from fusible.report.page import profile_page, write

        write(profile_page(self), path)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the steps with matrix products under the machine's two roofs: FLOPs per byte against FLOPs per second.

        Raises `ValueError` without a calibration, and `ImportError` without matplotlib (the extra `cli`).
        """
        from fusible.charts import roofline

        if self.roofs is None:
            raise ValueError("plot: the roofs are not known; run python -m fusible calibrate, then profile again")
        roofline(self, path)

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        header, *rows = self._cells()
        body = "".join(line(row, "td") for row in rows)
        return f"<h3>{html.escape(self.title)}</h3><table>{line(header, 'th')}{body}</table>"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if abs(seconds) >= 1e-3 else f"{1e6 * seconds:.0f} us"
