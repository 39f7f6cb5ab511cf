"""An explanation as plain text, within 120 columns, and as tables in a notebook."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from fusible.explanation import Explanation, PartRow, StepRow, merged, show_bytes, total, totals
from fusible.rule import Refusal

WIDTH = 118
#: The widest a cell gets before it goes on in the next line.
WIDEST = {"ops": 42, "kernels": 34, "field": 48}


class Table(NamedTuple):
    heading: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def text(explanation: Explanation) -> str:
    """Parts that are alike but for their place in the model are shown once."""
    lines = [explanation.title]
    parts = merged(explanation.parts)
    for number, (part, paths) in enumerate(parts):
        title = f"part {number + 1}: {part.title}"
        if part.path:
            title = f"{_paths(paths)}: {part.title}"
        lines += ["", *_wrapped(title)] if len(parts) > 1 or part.path else []
        lines += _wrapped(str(Refusal(part.reason, part.change)), "  ") if part.reason else _part(part)
    if explanation.uncalibrated and any(part.forward for part in explanation.parts):
        lines += ["", *_wrapped(f"predicted time: not calibrated; {explanation.uncalibrated}")]
    return "\n".join([*lines, *([""] if explanation.notes else []), *(_lines(explanation.notes))])


def _lines(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in _wrapped(note)]


def _wrapped(line: str, indent: str = "") -> list[str]:
    return textwrap.wrap(line, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)


def _paths(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    return f"{', '.join(paths)} ({len(paths)} alike)" if len(paths) < 4 else (
        f"{paths[0]}, {paths[1]} to {paths[-1]} ({len(paths)} alike)"
    )  # fmt: skip


def _part(part: PartRow) -> list[str]:
    lines: list[str] = []
    for table in _tables(part):
        lines += ["", *_wrapped(table.heading), *_grid(table)]
    if part.misses:
        lines += ["", "not fused"]
        for row in part.misses:
            lines += _wrapped(f"{row.direction} {row.rule} on {row.ops}", "  ")
            lines += [line for refusal in row.refusals for line in _wrapped(str(refusal), "    ")]
    notes = _all_notes(part)
    return lines + ([""] if notes else []) + _lines(notes)


def _all_notes(part: PartRow) -> list[str]:
    return [*part.notes, *([f"no rule names: {', '.join(part.strangers)}"] if part.strangers else [])]


def _tables(part: PartRow) -> list[Table]:
    tables = []
    for heading, rows in (("forward", part.forward), ("backward, last step first", part.backward)):
        if rows:
            tables.append(_steps(heading, rows))
    if part.kept:
        size = total(row.bytes for row in part.kept)
        heading = f"kept for backward: {'unknown' if size is None else show_bytes(size)}"
        cells = [(row.op, row.field, "unknown" if row.bytes is None else show_bytes(row.bytes), row.note)
                 for row in part.kept]  # fmt: skip
        tables.append(Table(heading, ("op", "field", "bytes", ""), cells))
    return tables


def _steps(heading: str, rows: Sequence[StepRow]) -> Table:
    """The time column is left out where no time is known, FLOPs where there are none."""
    timed, products = any(row.seconds is not None for row in rows), any(row.flops for row in rows)
    header = ("step", "ops", "rule", "kernels", "moves", *(["FLOPs"] * products), *(["time"] * timed))
    cells = [
        (str(at + 1), row.ops, row.rule or "-", kernels_shown(row.kernels), show_moves(row.read, row.written),
         *([show_flops(row.flops)] * products), *([show_time(row.seconds)] * timed))
        for at, row in enumerate(rows)
    ]  # fmt: skip
    whole = totals(rows)
    if whole["read"] is not None:
        parts = [f"reads + writes {show_moves(whole['read'], whole['written'])}"]
        parts += [f"{show_flops(whole['flops'])}FLOP" if whole["flops"] >= 1000 else f"{whole['flops']} FLOP"]
        parts += [show_time(whole["seconds"])] if timed else []
        heading += f": {', '.join(parts)}"
    return Table(heading, header, cells)


def kernels_shown(kernels: str) -> str:
    """`a (cpu), b (cpu)` as `a, b (cpu)`."""
    names = kernels.split(", ")
    backends = {name.partition(" (")[2] for name in names}
    if len(names) == 1 or len(backends) > 1 or backends == {""}:
        return kernels
    return f"{', '.join(name.partition(' (')[0] for name in names)} ({backends.pop()}"


def show_moves(read: int | None, written: int | None) -> str:
    """Bytes read and written, in one unit: `2.0 + 1.0 MiB`."""
    if read is None or written is None:
        return "unknown"
    if not read and not written:
        return "-"
    size, unit = max(read, written), 1
    name = "B"
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 * unit or name == "GiB":
            break
        unit *= 1024
    shown = [f"{value / unit:.0f}" if unit == 1 else f"{value / unit:.1f}" for value in (read, written)]
    return f"{' + '.join(shown)} {name}"


def show_flops(flops: int | None) -> str:
    """`1.6 M`, `-` for none."""
    if flops is None:
        return "unknown"
    for name, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= unit:
            return f"{flops / unit:.1f} {name}"
    return str(flops) if flops else "-"


def show_time(seconds: float | None) -> str:
    """`1.23 ms`."""
    if seconds is None:
        return "unknown"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def _grid(table: Table) -> list[str]:
    rows = [_cells(table.header, row) for row in (table.header, *table.rows)]
    widths = [max(len(line) for row in rows for line in row[at]) for at in range(len(table.header))]
    lines = []
    for row in rows:
        for height in range(max(len(cell) for cell in row)):
            shown = [cell[height] if height < len(cell) else "" for cell in row]
            line = "  ".join(cell.ljust(width) for cell, width in zip(shown, widths, strict=True))
            lines.append(f"  {line}".rstrip())
    return lines


def _cells(header: Sequence[str], row: Sequence[str]) -> list[list[str]]:
    """Each cell's lines; lists of names break behind their commas."""
    return [_broken(cell, WIDEST.get(name, WIDTH)) for name, cell in zip(header, row, strict=True)]


def _broken(cell: str, widest: int) -> list[str]:
    lines = [""]
    for piece in cell.split(", "):
        longer = f"{lines[-1]}, {piece}" if lines[-1] else piece
        if lines[-1] and len(longer) > widest:
            lines[-1] += ","
            lines.append(piece)
        else:
            lines[-1] = longer
    return lines


# -- notebook ----------------------------------------------------------------------------------------------------------


def notebook(explanation: Explanation) -> str:
    """Tables in HTML."""
    shown = []
    for part, paths in merged(explanation.parts):
        title = f"{_paths(paths)}: {part.title}" if part.path else part.title
        reason = str(Refusal(part.reason, part.change))
        shown.append(f"<h4>{html.escape(title)}</h4><p>{html.escape(reason)}</p>")
        tables = _tables(part)
        if part.misses:
            cells = [(row.direction, row.rule, row.ops, "; ".join(row.reasons), "; ".join(row.changes))
                     for row in part.misses]  # fmt: skip
            tables.append(Table("not fused", ("pass", "rule", "ops", "reason", "change"), cells))
        for table in tables:
            shown.append(f"<h5>{html.escape(table.heading)}</h5>{_html_table(table.header, table.rows)}")
        shown += [f"<p>{html.escape(note)}</p>" for note in _all_notes(part)]
    if explanation.uncalibrated:
        shown.append(f"<p>predicted time: not calibrated; {html.escape(explanation.uncalibrated)}</p>")
    shown += [f"<p>{html.escape(note)}</p>" for note in explanation.notes]
    return f"<div><h3>{html.escape(explanation.title)}</h3>{''.join(shown)}</div>"


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
