"""What `fuse` did: which modules run fused, which do not, and why."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

__all__ = ["Report", "Row"]


class Row(NamedTuple):
    """One module: its path in the model, its class, and what was done or why not."""

    path: str
    kind: str
    text: str


class Report:
    """What `fuse` did. Print it, or take it apart by `fused`, `declined`, `unknown` and `to_dict`.

    Attributes:
        model: name of the model's class.
        fused: modules that run fused; `text` says how many chains, over which children.
        declined: modules that have an adapter and run as they are; `text` is the reason.
        partial: fused modules of which a part is not; `text` is the reason.
        unknown: classes without an adapter, and how many modules of each run as they are.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.fused: list[Row] = []
        self.declined: list[Row] = []
        self.partial: list[Row] = []
        self.unknown: dict[str, int] = {}
        self._known: set[int] = set()

    def add(self, path: str, kind: type, fusion: Any, again: bool = False) -> None:
        """One module that has an adapter."""
        path = path or "the model"
        self._known |= {id(fusion.module), *(fusion.covered if fusion.forward is not None else ())}
        if fusion.forward is None:
            self.declined.append(Row(path, kind.__name__, fusion.reason))
            return
        covered = [name for name, inner in fusion.module.named_modules() if id(inner) in fusion.covered]
        shown = ", ".join(name for name in covered if not any(name.startswith(other + ".") for other in covered))
        self.fused.append(Row(path, kind.__name__, f"{'fused before: ' if again else ''}{shown or 'itself'}"))
        self.partial += [Row(path, kind.__name__, note) for note in fusion.notes]

    def close(self, model: torch.nn.Module) -> None:
        """Counts the modules that no adapter knows; containers that only hold others are left out."""
        for module in model.modules():
            holds = type(module) in (torch.nn.ModuleList, torch.nn.ModuleDict)
            if id(module) not in self._known and not holds:
                name = type(module).__name__
                self.unknown[name] = self.unknown.get(name, 0) + 1

    def reasons(self) -> str:
        """Why `strict` refuses."""
        rows = [f"{row.path} ({row.kind}): {row.text}" for row in (*self.declined, *self.partial)]
        return "; ".join(rows) or f"no class in it has an adapter ({', '.join(self.unknown) or 'it is empty'})"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("fused", "partial", "declined")}
        return {"model": self.model, **rows, "unknown": dict(self.unknown)}

    def __str__(self) -> str:
        count = len(self.fused)
        lines = [f"{self.model}: {count} module{'' if count == 1 else 's'} fused"]
        for title, rows in (("fused", self.fused), ("in part", self.partial), ("not fused", self.declined)):
            if rows:
                lines += ["", title, *_table(rows)]
        if self.unknown:
            names = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in sorted(self.unknown.items()))
            lines += ["", f"run as they are, for want of an adapter: {names}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.__str__().splitlines()[0]}>"


def _table(rows: list[Row]) -> list[str]:
    """Rows in columns; those that differ in the numbers of their paths alone are one line."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((re.sub(r"\d+", "*", row.path), row.kind, row.text), []).append(row)
    lines = [
        (found[0].path if len(found) == 1 else f"{shape} x{len(found)}", kind, text)
        for (shape, kind, text), found in groups.items()
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return [f"  {path:{widths[0]}}  {kind:{widths[1]}}  {text}".rstrip() for path, kind, text in lines]
