"""An explanation or a profile as a page: one HTML file that needs no network. The template is `page.html`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from fusible.explanation import Explanation, PartRow, StepRow, merged, show_bytes, total
from fusible.profile_report import Profile, StepTime
from fusible.report.text import show_flops, show_moves, show_time

__all__ = ["explanation_page", "profile_page", "write"]

#: Up to how many times its floor a step is called near it, and far from it beyond.
NEAR, FAR = 1.5, 3.0


@dataclass(frozen=True)
class Box:
    """A bracket over the ops that one step covers: columns `start` to `stop` of the grid."""

    start: int
    stop: int
    label: str
    level: str
    shown: str
    detail: str


@dataclass(frozen=True)
class Cell:
    """A table's cell, with the number that it is sorted by."""

    text: str
    sort: float | str


@dataclass(frozen=True)
class Grid:
    """A table of the page."""

    heading: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Section:
    """A chain, drawn and in tables, or a module that runs as it is."""

    title: str
    reason: str = ""
    ops: tuple[tuple[str, str, bool], ...] = ()
    forward: tuple[Box, ...] = ()
    backward: tuple[Box, ...] = ()
    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """What the template shows."""

    title: str
    kind: str
    summary: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    measured: bool
    calibrated: bool
    notes: tuple[str, ...] = field(default=())


def write(page: Page, path: str | os.PathLike[str]) -> None:
    """Renders a page into a file.

    Raises `ImportError`, naming the extra, where Jinja2 is missing, and `OSError` if the file cannot be written.
    """
    try:
        import jinja2
    except ImportError:
        raise ImportError("a page needs Jinja2; pip install 'fusible[cli]'") from None
    text = resources.files("fusible.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(text).render(page=page, near=NEAR, far=FAR)
    with open(path, "w", encoding="utf-8") as file:
        file.write(html)


# -- an explanation ----------------------------------------------------------------------------------------------------


def explanation_page(explanation: Explanation) -> Page:
    """The page of an explanation; parts that are alike but for their place are shown once."""
    rows = [row for part in explanation.parts for row in (*part.forward, *part.backward)]
    kept = explanation.kept_bytes
    summary = (
        ("steps", str(len(rows))),
        ("moved", _bytes(total(row.traffic for row in rows))),
        ("products", show_flops(total(row.flops for row in rows)) + "FLOP"),
        ("predicted time", show_time(total(row.seconds for row in rows)) if rows else "-"),
        ("kept for backward", _bytes(kept)),
        ("places not fused", str(len(explanation.unfused))),
    )
    sections = tuple(_section(part, paths) for part, paths in merged(explanation.parts))
    calibrated = not explanation.uncalibrated
    return Page(explanation.title, "explain", summary, sections, False, calibrated, tuple(explanation.notes))


def _section(part: PartRow, paths: Sequence[str]) -> Section:
    alike = f" ({len(paths)} alike)" if len(paths) > 1 else ""
    title = f"{len(part.ops)} ops run as one" if len(part.ops) > 8 else part.title
    title = f"{', '.join(paths)}: {title}{alike}" if part.path else title
    ops = tuple((op.name, op.output or "", op.skipped) for op in part.ops)
    places = _Places([op.name for op in part.ops])
    tables = [_steps(heading, rows) for heading, rows in (("Forward", part.forward), ("Backward", part.backward))
              if rows]  # fmt: skip
    if part.kept:
        rows = [(_text(k.op), _text(k.field), Cell(_bytes(k.bytes), k.bytes or 0), _text(k.note)) for k in part.kept]
        tables.append(Grid("Kept for backward", ("op", "field", "bytes", "note"), tuple(rows)))
    if part.misses:
        missed = [(_text(m.direction), _text(m.rule), _text(m.ops), _text("; ".join(m.reasons)),
                   _text("; ".join(m.changes))) for m in part.misses]  # fmt: skip
        tables.append(Grid("Not fused", ("pass", "rule", "ops", "reason", "smallest change"), tuple(missed)))
    strangers = (f"no rule names: {', '.join(part.strangers)}",) if part.strangers else ()
    reason = f"{part.reason}: {part.change}" if part.change else part.reason
    forward = tuple(places.box(row.ops, row.rule, row.seconds, row.floor, _about(row)) for row in part.forward)
    backward = tuple(places.box(row.ops, row.rule, row.seconds, row.floor, _about(row)) for row in part.backward)
    return Section(title, reason, ops, forward, backward, tuple(tables), (*part.notes, *strangers))


def _about(row: StepRow) -> str:
    parts = [row.ops, f"rule {row.rule}" if row.rule else "the op's own pass", f"kernels {row.kernels}",
             f"moves {show_moves(row.read, row.written)}", f"products {show_flops(row.flops)}FLOP",
             f"predicted {show_time(row.seconds)}, floor {show_time(row.floor)}"]  # fmt: skip
    return " · ".join(parts)


def _steps(heading: str, rows: Sequence[StepRow]) -> Grid:
    header = ("step", "ops", "rule", "kernels", "reads", "writes", "FLOPs", "predicted", "times floor")
    cells = [
        (Cell(str(number), number), _text(row.ops), _text(row.rule or "-"), _text(row.kernels), _size(row.read),
         _size(row.written), Cell(show_flops(row.flops), row.flops or 0), _time(row.seconds),
         _ratio(row.seconds, row.floor))
        for number, row in enumerate(rows, 1)
    ]  # fmt: skip
    return Grid(heading, header, tuple(cells))


# -- a profile ---------------------------------------------------------------------------------------------------------


def profile_page(profile: Profile) -> Page:
    """The page of a profile: the same drawing, coloured by measured times."""
    summary = (
        ("whole", show_time(profile.seconds)),
        ("forward", show_time(profile.forward)),
        ("backward", show_time(profile.backward)),
        ("outside of steps", show_time(profile.overhead)),
        *((("outside of blocks", show_time(profile.elsewhere)),) if profile.blocks else ()),
    )
    blocks = list(dict.fromkeys(step.block for step in profile.steps))
    sections = tuple(_profiled(block, [step for step in profile.steps if step.block == block]) for block in blocks)
    return Page(profile.title, "profile", summary, sections, True, profile.roofs is not None)


def _profiled(block: str, steps: Sequence[StepTime]) -> Section:
    ways = {way: [step for step in steps if step.direction == way] for way in ("forward", "backward")}
    names = [name for step in ways["forward"] for name in step.ops.split(", ")]
    places = _Places(names)
    header = ("step", "ops", "rule", "kernels", "time", "bytes", "copies", "times floor")
    tables = tuple(
        Grid(way.capitalize(), header, tuple(
            (Cell(str(n), n), _text(s.ops), _text(s.rule or "-"), _text(s.kernels), _time(s.seconds), _size(s.bytes),
             Cell("-" if s.copies is None else f"{s.copies:.1f}", s.copies or 0), _ratio(s.seconds, s.floor))
            for n, s in enumerate(rows, 1)))
        for way, rows in ways.items() if rows
    )  # fmt: skip
    boxes = {
        way: tuple(places.box(s.ops, s.rule, s.seconds, s.floor, _timed(s)) for s in rows) for way, rows in ways.items()
    }
    ops = tuple((name, "", False) for name in names)
    return Section(block or "the block", "", ops, boxes["forward"], boxes["backward"], tables)


def _timed(step: StepTime) -> str:
    parts = [step.ops, f"rule {step.rule}" if step.rule else "the op's own pass", f"kernels {step.kernels}",
             f"moves {_bytes(step.bytes)}",
             f"measured {show_time(step.seconds)}, floor {show_time(step.floor)}"]  # fmt: skip
    return " · ".join(parts)


# -- both --------------------------------------------------------------------------------------------------------------


class _Places:
    """The columns of a chain's ops."""

    def __init__(self, names: Iterable[str]) -> None:
        self.columns: dict[str, list[int]] = {}
        for column, name in enumerate(names, 1):
            self.columns.setdefault(name, []).append(column)

    def box(self, ops: str, rule: str, seconds: float | None, floor: float | None, detail: str) -> Box:
        columns = [column for name in ops.split(", ") for column in self.columns.get(name, [])]
        start, stop = (min(columns), max(columns) + 1) if columns else (1, 2)
        times = seconds / floor if seconds is not None and floor else None
        level = "unknown" if times is None else "near" if times <= NEAR else "far" if times > FAR else "middle"
        shown = show_time(seconds) if seconds is not None else ""
        return Box(
            start, stop, rule or ops.partition(" ")[2], level, shown + (f", {times:.1f}x" if times else ""), detail
        )


def _text(value: Any) -> Cell:
    return Cell(str(value), str(value))


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else show_bytes(size)


def _size(size: int | None) -> Cell:
    return Cell(_bytes(size), size or 0)


def _time(seconds: float | None) -> Cell:
    return Cell(show_time(seconds), seconds or 0)


def _ratio(seconds: float | None, floor: float | None) -> Cell:
    times = seconds / floor if seconds is not None and floor else None
    return Cell("-" if times is None else f"{times:.1f}", times or 0)
