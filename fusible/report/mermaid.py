"""An explanation as a Mermaid flowchart."""

from __future__ import annotations

import itertools

from fusible.explanation import Explanation, PartRow, StepRow, where


def flowchart(explanation: Explanation) -> str:
    """Ops as nodes in order, forward steps as boxes around them; modules that run as they are stand alone."""
    lines = ["flowchart TD"]
    last = ""
    for number, part in enumerate(explanation.parts):
        last = _part(lines, part, number, last)
    return "\n".join(lines)


def _part(lines: list[str], part: PartRow, number: int, last: str) -> str:
    """Adds one part, joined to the node that came last unless another block begins; returns its own last node."""
    if not part.forward:
        name = f"p{number}"
        lines.append(f'  {name}[["{_safe(where(part) + part.title)}"]]')
        names = [name]
    else:
        lines.append(f'  subgraph p{number}["{_safe(where(part) + part.title)}"]')
        names = [name for at, row in enumerate(part.forward) for name in _step(lines, row, f"p{number}s{at}")]
        lines.append("  end")
    joined = [last, *names] if last else names
    lines += [f"  {before} --> {after}" for before, after in itertools.pairwise(joined)]
    return names[-1]


def _step(lines: list[str], row: StepRow, name: str) -> list[str]:
    ops = row.ops.split(", ")
    lines.append(f'    subgraph {name}["{_safe(row.rule or row.kernels)}"]')
    lines += [f'      {name}o{at}["{_safe(op)}"]' for at, op in enumerate(ops)]
    lines.append("    end")
    return [f"{name}o{at}" for at in range(len(ops))]


def _safe(text: str) -> str:
    """Text inside quotes, with what Mermaid would read as markup as an entity."""
    for character, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(character, entity)
    return text
