"""`memory_plan`: what a block keeps for backward, its peaks, and what computing again would save; nothing is run."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusible import calibration
from fusible.budget import unfused_bytes
from fusible.chain import Node
from fusible.explaining import explain_parts
from fusible.explanation import KeptRow, describe_input, show_bytes
from fusible.footprint import measure
from fusible.fuser import OperationFuser
from fusible.options import Option, options, show_run
from fusible.plan import Call, Plan
from fusible.planner import make_plan
from fusible.rule import RuleSet
from fusible.sequential import Sequential

__all__ = ["ChainMemory", "MemoryPlan", "Recomputation", "memory_plan"]


@dataclass(frozen=True)
class Recomputation:
    """Something that backward can compute again, so that it need not be kept.

    Attributes:
        ops: the run of ops that it concerns.
        how: the rule that does it, or `checkpoint`: the ops themselves, from their input alone.
        saves: bytes that would no longer be kept.
        seconds: predicted time that it adds to a backward; by nominal rates where the machine is not calibrated.
        product: whether a matrix product is computed again.
        chosen: whether the block's memory budget has chosen it.
    """

    ops: str
    how: str
    saves: int
    seconds: float
    product: bool
    chosen: bool


@dataclass(frozen=True)
class ChainMemory:
    """The memory of one chain, in bytes; that of its inputs and parameters is the caller's and not counted.

    Attributes:
        kept: the tensors kept for backward; `bytes` is 0 for one that is counted elsewhere, as its `note` says.
        kept_bytes: of all of them.
        unfused_bytes: what would be kept with no rules and every gradient wanted: what a `memory_budget` is a fraction
        of.
        output_bytes: of the outputs that no record holds too.
        forward_peak: the most alive at once in forward.
        backward_peak: the most alive at once in backward, with incoming gradients and those that leave, without the
        outputs; 0 without gradients.
        recomputations: each that is possible, from what is kept with no memory budget; runs may overlap.
        budget: how the block's memory budget is met.
        reason: why nothing of this is known.
    """

    title: str
    kept: tuple[KeptRow, ...] = ()
    kept_bytes: int = 0
    unfused_bytes: int = 0
    output_bytes: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    recomputations: tuple[Recomputation, ...] = ()
    budget: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a block, for one kind of call, chain by chain. `str()` gives tables; a notebook shows them.

    Where modules that are no ops split the block, what they hold is not counted.
    """

    title: str
    chains: tuple[ChainMemory, ...]
    calibrated: bool

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for backward, inputs and parameters aside."""
        return sum(chain.kept_bytes for chain in self.chains)

    @property
    def unfused_bytes(self) -> int:
        """The same with no rules and every gradient wanted."""
        return sum(chain.unfused_bytes for chain in self.chains)

    @property
    def forward_peak(self) -> int:
        """The most bytes alive at once in forward."""
        return self._peak([chain.forward_peak for chain in self.chains])

    @property
    def backward_peak(self) -> int:
        """The most bytes alive at once in backward, with incoming gradients and those that leave."""
        return self._peak([chain.backward_peak for chain in self.chains])

    def _peak(self, peaks: Sequence[int]) -> int:
        before = [sum(chain.kept_bytes for chain in self.chains[:place]) for place in range(len(self.chains))]
        return max((kept + peak for kept, peak in zip(before, peaks, strict=True)), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        totals = {name: getattr(self, name) for name in _TOTALS}
        return {**asdict(self), **totals}

    def __str__(self) -> str:
        lines = [self.title]
        for chain in self.chains:
            lines += ["", chain.title] if len(self.chains) > 1 else []
            lines += [f"  {chain.reason}"] if chain.reason else _text(chain, self.calibrated)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = [f"<h3>{html.escape(self.title)}</h3>"]
        for chain in self.chains:
            parts.append(f"<h4>{html.escape(chain.title)}</h4><p>{html.escape(chain.reason)}</p>")
            for heading, header, rows in [] if chain.reason else _tables(chain, self.calibrated):
                body = "".join(_html_row(row, "td") for row in rows)
                table = f"<table>{_html_row(header, 'th')}{body}</table>" if rows else ""
                parts.append(f"<h5>{html.escape(heading)}</h5>{table}")
            parts += [f"<p>{html.escape(note)}</p>" for note in chain.budget]
        return f"<div>{''.join(parts)}</div>"


_TOTALS = ("kept_bytes", "unfused_bytes", "forward_peak", "backward_peak")
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _html_row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _tables(chain: ChainMemory, calibrated: bool) -> list[Table]:
    head = f"kept for backward: {show_bytes(chain.kept_bytes)}, unfused {show_bytes(chain.unfused_bytes)}"
    peaks = f"peak of forward {show_bytes(chain.forward_peak)}, of backward {show_bytes(chain.backward_peak)}"
    tables: list[Table] = [
        (head, ("op", "field", "bytes", ""), [_kept_cells(row) for row in chain.kept]),
        (peaks, (), []),
    ]
    if chain.recomputations:
        times = "predicted" if calibrated else "by nominal rates, not calibrated"
        header = ("ops", "how", "saves", "costs", "products", "")
        rows = [_cells(row) for row in chain.recomputations]
        tables.append((f"what can be computed again (time {times})", header, rows))
    return tables


def _kept_cells(row: KeptRow) -> tuple[str, ...]:
    return row.op, row.field, "unknown" if row.bytes is None else show_bytes(row.bytes), row.note


def _cells(row: Recomputation) -> tuple[str, ...]:
    product, chosen = "yes" if row.product else "no", "chosen" if row.chosen else ""
    return row.ops, row.how, show_bytes(row.saves), _time(row.seconds), product, chosen


def _text(chain: ChainMemory, calibrated: bool) -> list[str]:
    lines: list[str] = []
    for heading, header, rows in _tables(chain, calibrated):
        lines += ["", heading]
        cells = [header, *rows] if rows else []
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))] if rows else []
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return lines + ([""] if chain.budget else []) + list(chain.budget)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


# -- making one --------------------------------------------------------------------------------------------------------


def memory_plan(block: Sequential, *inputs: Tensor, **named: Tensor) -> MemoryPlan:
    """The memory of a block before anything runs: what is kept for backward, peaks, possible recomputations.

    Args:
        inputs, named: as for a call; only shapes, dtypes, devices and `requires_grad` are looked at.

    Raises:
        TypeError, ValueError: as a call with these inputs would, a memory budget that cannot be met among it.
    """
    parts, values = block.parts(*inputs, **named)
    rules = block.rules_in_force()
    found: list[ChainMemory] = []

    def visit(fuser: OperationFuser, tensors: tuple) -> None:
        found.append(_chain_memory(fuser, tensors, rules))

    rows = explain_parts(parts, values, rules, visit)
    chains = [row for part, row in zip(parts, rows, strict=True) if isinstance(part, OperationFuser)]
    kept = [ChainMemory(**{**chain.__dict__, "title": row.title, "kept": row.kept})
            for chain, row in zip(found, chains, strict=False)]  # fmt: skip
    kept += [ChainMemory(row.title, reason=row.reason) for row in chains[len(found) :]]
    grad = torch.is_grad_enabled()
    trained = sum(p.requires_grad for p in block.parameters()) if grad else 0
    wanted = ["x"] if inputs[0].requires_grad and grad else []
    wanted += [f"{trained} parameter" + ("" if trained == 1 else "s")] if trained else []
    title = f"memory of {type(block).__name__} on {describe_input(values.values(), wanted)}"
    return MemoryPlan(title, tuple(kept), calibration.find()[0] is not None)


def _chain_memory(fuser: OperationFuser, tensors: tuple, rules: RuleSet) -> ChainMemory:
    executable, flat, grad = fuser.find(tensors, rules)
    if executable is None:
        return ChainMemory("", reason="a parameter is a tensor subclass, so the plain formulas run")
    plan: Plan = executable.plan
    params = flat[len(tensors) :]
    try:
        footprint = measure(plan, tensors, params)
    except Exception:
        return ChainMemory("", reason="not known: an op's formula cannot be asked without data")
    call = Call(tensors, tuple(params), RuleSet(rules), grad, plan.autocast, None)
    base = make_plan(fuser.chain, fuser.sources, call)
    free = measure(base, tensors, params, backward=False)
    chosen = [option.choice for option in plan.within.chosen] if plan.within else []
    offered = options(base, call, free) if executable.trains else []
    return ChainMemory(
        "",
        kept_bytes=footprint.kept,
        unfused_bytes=unfused_bytes(fuser.chain, fuser.sources, call),
        output_bytes=footprint.outputs,
        forward_peak=footprint.forward_peak,
        backward_peak=footprint.backward_peak,
        recomputations=tuple(_recomputation(o, base.nodes[o.start : o.stop], o.choice in chosen) for o in offered),
        budget=plan.within.notes() if plan.within else (),
    )


def _recomputation(option: Option, run: Sequence[Node], chosen: bool) -> Recomputation:
    return Recomputation(show_run(run), option.name, option.saves, option.seconds, option.product, chosen)
