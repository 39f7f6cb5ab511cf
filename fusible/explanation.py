"""What a block or a model does with one kind of call: `Explanation`, as text, tables, plain data and a graph."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fusible.rule import Refusal

__all__ = ["Explanation", "KeptRow", "MissRow", "OpRow", "PartRow", "StepRow", "show_bytes"]


@dataclass(frozen=True)
class OpRow:
    """One op of a chain: its name, what it makes, as in `[8, 512] float32`, and whether it has nothing to do."""

    name: str
    output: str | None
    skipped: bool = False


@dataclass(frozen=True)
class StepRow:
    """One step of one pass. What is `None` is unknown, `seconds` also where the machine is not calibrated.

    Attributes:
        read, written: bytes of what enters and what is made, each memory once: the least that must be moved.
        traffic: bytes that its kernels move in all, intermediates too.
        flops: of matrix products and attention.
        seconds: the time predicted for it; `floor`, the least that moving its bytes and doing its FLOPs takes.
    """

    ops: str
    rule: str
    kernels: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    read: int | None = None
    written: int | None = None
    traffic: int | None = None
    flops: int | None = None
    seconds: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class KeptRow:
    """One field of one op's record; `bytes` is 0 where it is a tensor that is counted elsewhere, `None` if unknown."""

    op: str
    field: str
    bytes: int | None
    note: str


@dataclass(frozen=True)
class MissRow:
    """A rule that nearly applied, why it did not, and the smallest change that would make it apply."""

    direction: str
    rule: str
    ops: str
    refusals: tuple[Refusal, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(refusal.reason for refusal in self.refusals)

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(refusal.change for refusal in self.refusals if refusal.change)


@dataclass(frozen=True)
class PartRow:
    """A chain that runs as one node, or a module that runs as it is, for a `reason`; `path` is its block's in a
    model."""

    title: str
    reason: str = ""
    change: str = ""
    path: str = ""
    ops: tuple[OpRow, ...] = ()
    forward: tuple[StepRow, ...] = ()
    backward: tuple[StepRow, ...] = ()
    kept: tuple[KeptRow, ...] = ()
    misses: tuple[MissRow, ...] = ()
    strangers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""


def total(values: Iterable[Any]) -> Any:
    """The sum, or `None` if one is."""
    found = list(values)
    return None if None in found else sum(found)


def totals(rows: Iterable[StepRow]) -> dict[str, Any]:
    """Bytes, FLOPs and seconds of some steps together."""
    rows = list(rows)
    return {name: total(getattr(row, name) for row in rows)
            for name in ("read", "written", "traffic", "flops", "seconds", "floor")}  # fmt: skip


@dataclass(frozen=True)
class Explanation:
    """The plan of a block, or of each block of a model, for one kind of call, part by part.

    `str()` gives plain text; in a notebook it shows as tables. `source` is the generated code of both passes.
    `uncalibrated` says why there are no predicted times, and is empty where there are.
    """

    title: str
    parts: tuple[PartRow, ...]
    uncalibrated: str = ""
    notes: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return "\n\n".join(part.source for part in self.parts if part.source)

    @property
    def kept_bytes(self) -> int | None:
        """Bytes kept for backward, beside parameters; `None` if some are unknown."""
        return total(row.bytes for part in self.parts for row in part.kept)

    @property
    def unfused(self) -> tuple[str, ...]:
        """Each place that did not fuse, with its reason and the change that would make it fuse."""
        splits = [f"{where(part)}{part.title}: {Refusal(part.reason, part.change)}"
                  for part in self.parts if part.reason]  # fmt: skip
        misses = [f"{where(part)}{row.direction} rule {row.rule} on {row.ops}: {refusal}" for part in self.parts
                  for row in part.misses for refusal in row.refusals]  # fmt: skip
        strangers = [f"{where(part)}{op}: no rule names it" for part in self.parts for op in part.strangers]
        return (*splits, *misses, *strangers)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for `json.dumps`; docs/explaining.md lists its fields."""
        steps = {
            way: totals(row for part in self.parts for row in getattr(part, way)) for way in ("forward", "backward")
        }
        return {
            "title": self.title,
            "notes": list(self.notes),
            "uncalibrated": self.uncalibrated,
            "totals": {**steps, "kept": self.kept_bytes, "unfused": len(self.unfused)},
            "parts": [_part_data(part) for part in self.parts],
        }

    def to_mermaid(self) -> str:
        """A Mermaid flowchart: each op a node, each step of the forward pass a box around the ops that it covers."""
        from fusible.report.mermaid import flowchart

        return flowchart(self)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page, one file without need of a network: the chain drawn with its fused steps, and the tables.

        Needs the extra `cli`, for Jinja2: raises `ImportError` without it, and `OSError` if the file cannot be written.
        """
        from fusible.report.page import explanation_page, write

        write(explanation_page(self), path)

    def __str__(self) -> str:
        from fusible.report.text import text

        return text(self)

    def _repr_html_(self) -> str:
        from fusible.report.text import notebook

        return notebook(self)


def where(part: PartRow) -> str:
    """A part's block, where there is more than one."""
    return f"{part.path}: " if part.path else ""


def _part_data(part: PartRow) -> dict[str, Any]:
    data = asdict(part)
    data["misses"] = [
        {"direction": row.direction, "rule": row.rule, "ops": row.ops.split(", "),
         "refusals": [refusal._asdict() for refusal in row.refusals]}
        for row in part.misses
    ]  # fmt: skip
    for way in ("forward", "backward"):
        data[way] = {"steps": [_step_data(row) for row in getattr(part, way)], **totals(getattr(part, way))}
    data["kept_bytes"] = total(row.bytes for row in part.kept)
    return data


def _step_data(row: StepRow) -> dict[str, Any]:
    kernels = [kernel.removesuffix(")").split(" (") for kernel in row.kernels.split(", ") if kernel.endswith(")")]
    named = [{"name": name, "backend": backend} for name, backend in kernels]
    return {**asdict(row), "ops": row.ops.split(", "), "kernels": named}


def merged(parts: Iterable[PartRow]) -> list[tuple[PartRow, list[str]]]:
    """Parts that differ in their block's path alone, once each, with all these paths."""
    found: dict[PartRow, list[str]] = {}
    first: dict[PartRow, PartRow] = {}
    for part in parts:
        key = replace(part, path="")
        first.setdefault(key, part)
        found.setdefault(key, []).append(part.path)
    return [(first[key], paths) for key, paths in found.items()]


def show_bytes(size: float) -> str:
    """A size in the unit that keeps it short: `20 B`, `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def show_tensor(tensor: Any) -> str:
    """`[8, 512] float32`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def describe_input(specs: Iterable[torch.Tensor], wanted: Iterable[str]) -> str:
    """The first line of an explanation."""
    x, *others = specs
    extras = f", extra inputs {', '.join(show_tensor(spec) for spec in others)}" if others else ""
    return f"x {show_tensor(x)} on {x.device}{extras}; gradients of {', '.join(wanted) or 'nothing'}"
