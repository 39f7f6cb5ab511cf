"""What `audit` returns: the error of each op, plain and fused, as a table, as data and as a picture."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Audit", "AuditRow"]


@dataclass(frozen=True)
class AuditRow:
    """One tensor: an op's result, a field of its record, or a gradient.

    Attributes:
        direction: `forward` or `backward`.
        block: path of the block in the model; "" for the model itself.
        call: which call of the block, from 1.
        op: the op by path and type; "" for what enters a chain or is outside of blocks.
        value: what it is: `output`, `record x`, `gradient of weight`.
        rule: the rule of the fused step that covers the op in this pass; "" where it runs by itself.
        plain_max, fused_max: largest error over the largest float64 value; fused `None` where a fused step hides it.
        plain_rms, fused_rms: root mean square of the error over that of the float64 values.
        excess: the largest error fused over what the tolerance allows; above 1 is beyond it.
    """

    direction: str
    block: str
    call: int
    op: str
    value: str
    rule: str
    plain_max: float
    plain_rms: float
    fused_max: float | None
    fused_rms: float | None
    excess: float | None

    @property
    def ratio(self) -> float | None:
        """The largest error fused over that of plain torch; `None` where it is hidden."""
        if self.fused_max is None:
            return None
        if self.plain_max:
            return self.fused_max / self.plain_max
        return math.inf if self.fused_max else 1.0

    @property
    def ok(self) -> bool:
        """Within the tolerance, or hidden."""
        return self.excess is None or self.excess <= 1

    def __str__(self) -> str:
        where = " ".join(part for part in (self.block, self.op) if part)
        rule = f", rule {self.rule}" if self.rule else ""
        return f"{self.direction}, {where + ': ' if where else ''}{self.value}{rule}"


_HEADER = ("pass", "block", "op", "value", "rule", "plain max", "rms", "fused max", "rms", "ratio", "tolerance")


@dataclass(frozen=True)
class Audit:
    """How errors grow in a model, plain and fused. `str()` gives a table; in a notebook it shows as one.

    Attributes:
        rows: in the order in which the values come about, forward then backward.
    """

    title: str
    rows: tuple[AuditRow, ...]

    @property
    def ok(self) -> bool:
        """Whether everything that can be seen is within the tolerance."""
        return all(row.ok for row in self.rows)

    @property
    def first(self) -> AuditRow | None:
        """The first row beyond the tolerance, where a fault begins; `None` if there is none."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def worst(self) -> AuditRow | None:
        """The row that comes nearest to the tolerance or goes furthest beyond it; `None` if fused steps hide all."""
        seen = [row for row in self.rows if row.excess is not None]
        return max(seen, key=lambda row: row.excess or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        rows = [{**asdict(row), "ratio": row.ratio, "ok": row.ok} for row in self.rows]
        return {"title": self.title, "ok": self.ok, "rows": rows}

    def _verdict(self) -> str:
        beyond = sum(not row.ok for row in self.rows)
        if not beyond:
            return "fused is within tolerance everywhere; nearest to it: " + _described(self.worst)
        return f"{beyond} of {len(self.rows)} rows are beyond tolerance; the first: {_described(self.first)}"

    def _cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        rows = [_cells(row) for row in self.rows]
        kept = [i for i in range(len(_HEADER)) if _HEADER[i] != "block" or any(row[i] for row in rows)]
        return tuple(_HEADER[i] for i in kept), [tuple(row[i] for i in kept) for row in rows]

    def __str__(self) -> str:
        header, rows = self._cells()
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                 for row in (header, *rows)]  # fmt: skip
        return "\n".join([self.title, "", *lines, "", self._verdict()])

    def _repr_html_(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        header, rows = self._cells()
        body = "".join(line(row, "td") for row in rows)
        return (
            f"<h3>{html.escape(self.title)}</h3><table>{line(header, 'th')}{body}</table>"
            f"<p>{html.escape(self._verdict())}</p>"
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws how the largest error grows, forward and backward, plain and fused: `.png`, `.svg` or `.pdf`.

        Raises `ImportError` without matplotlib (the extra `cli`).
        """
        from fusible.charts import error_growth

        error_growth(self, path)


def _described(row: AuditRow | None) -> str:
    if row is None:
        return "nothing is seen"
    errors = f"fused {_number(row.fused_max)}, plain {_number(row.plain_max)}"
    return f"{row} ({errors}, {_times(row.excess)} times what is allowed)"


def _cells(row: AuditRow) -> tuple[str, ...]:
    block = row.block + (f" (call {row.call})" if row.call > 1 else "")
    verdict = "hidden" if row.excess is None else "ok" if row.ok else "BEYOND"
    return (row.direction, block, row.op or "-", row.value, row.rule or "-",
            _number(row.plain_max), _number(row.plain_rms), _number(row.fused_max), _number(row.fused_rms),
            _times(row.ratio), verdict)  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}" if value else "0"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
