"""What a block does with one kind of call: `Explanation`, made by `Sequential.explain`. Nothing is run."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusible import _torch
from fusible.chain import Node, Split
from fusible.codegen import backward_function, records
from fusible.executable import Executable
from fusible.fuser import OperationFuser
from fusible.infer import Specs
from fusible.kernels.registry import record_calls
from fusible.op import Op, view
from fusible.ops import TWINS
from fusible.plan import Plan, Step

__all__ = ["Explanation", "explain_parts"]


@dataclass(frozen=True)
class StepRow:
    """One step of one pass."""

    ops: str
    rule: str
    kernels: str


@dataclass(frozen=True)
class KeptRow:
    """One field of one op's record; `bytes` is 0 where it is a tensor that is counted elsewhere, `None` if unknown."""

    op: str
    field: str
    bytes: int | None
    note: str


@dataclass(frozen=True)
class MissRow:
    """A rule that nearly applied, and why it did not."""

    direction: str
    rule: str
    ops: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class PartRow:
    """A chain that runs as one node, or a module that runs as it is."""

    title: str
    reason: str = ""
    forward: tuple[StepRow, ...] = ()
    backward: tuple[StepRow, ...] = ()
    kept: tuple[KeptRow, ...] = ()
    misses: tuple[MissRow, ...] = ()
    strangers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Explanation:
    """The plan of a block for one kind of call, part by part.

    `str()` gives plain text; in a notebook it shows as tables. `source` is the generated code of both passes.
    """

    title: str
    parts: tuple[PartRow, ...]

    @property
    def source(self) -> str:
        return "\n\n".join(part.source for part in self.parts if part.source)

    @property
    def kept_bytes(self) -> int | None:
        """Bytes kept for backward, beside parameters; `None` if some are unknown."""
        sizes = [row.bytes for part in self.parts for row in part.kept]
        return None if None in sizes else sum(size for size in sizes if size)

    @property
    def unfused(self) -> tuple[str, ...]:
        """Each place that did not fuse, with its reason."""
        splits = [f"{part.title}: {part.reason}" for part in self.parts if part.reason]
        misses = [f"{row.direction} rule {row.rule} on {row.ops}: {reason}" for part in self.parts
                  for row in part.misses for reason in row.reasons]  # fmt: skip
        strangers = [f"{op}: no rule names it" for part in self.parts for op in part.strangers]
        return (*splits, *misses, *strangers)

    def __str__(self) -> str:
        lines = [self.title]
        for number, part in enumerate(self.parts):
            lines += ["", f"part {number + 1}: {part.title}"] if len(self.parts) > 1 else []
            lines += [f"  {part.reason}"] if part.reason else _part_text(part)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts = []
        for part in self.parts:
            parts.append(f"<h4>{html.escape(part.title)}</h4><p>{html.escape(part.reason)}</p>")
            for heading, header, rows in _tables(part):
                parts.append(f"<h5>{html.escape(heading)}</h5>{_html_table(header, rows)}")
            parts += [f"<p>{html.escape(note)}</p>" for note in _all_notes(part)]
        return f"<div><h3>{html.escape(self.title)}</h3>{''.join(parts)}</div>"


Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def _tables(part: PartRow) -> list[Table]:
    tables: list[Table] = []
    table: list[tuple[str, ...]]
    steps = ("step", "ops", "rule", "kernels")
    for heading, rows in (("forward", part.forward), ("backward, last step first", part.backward)):
        if rows:
            table = [(str(n + 1), row.ops, row.rule or "-", row.kernels) for n, row in enumerate(rows)]
            tables.append((heading, steps, table))
    if part.kept:
        sizes = [row.bytes for row in part.kept]
        total = "unknown" if None in sizes else show_bytes(sum(size for size in sizes if size))
        table = [(row.op, row.field, "unknown" if row.bytes is None else show_bytes(row.bytes), row.note)
                 for row in part.kept]  # fmt: skip
        tables.append((f"kept for backward: {total}", ("op", "field", "bytes", ""), table))
    if part.misses:
        table = [(row.direction, row.rule, row.ops, "; ".join(row.reasons)) for row in part.misses]
        tables.append(("not fused", ("pass", "rule", "ops", "reason"), table))
    return tables


def _part_text(part: PartRow) -> list[str]:
    lines: list[str] = []
    for heading, header, rows in _tables(part):
        cells = [header, *rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines += ["", heading]
        lines += [
            "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
    notes = _all_notes(part)
    return lines + ([""] if notes else []) + notes


def _all_notes(part: PartRow) -> list[str]:
    return [*part.notes, *([f"no rule names: {', '.join(part.strangers)}"] if part.strangers else [])]


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


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


# -- making one --------------------------------------------------------------------------------------------------------


def explain_parts(parts: Sequence[Any], inputs: dict[int, Any], rules: Any) -> tuple[PartRow, ...]:
    """Explains chains and splits in order. `inputs` maps value numbers of the first chain to tensors."""
    rows = []
    mode = _torch.fake_mode()
    values = {value: _fake(mode, tensor) for value, tensor in inputs.items()}
    callers = frozenset(_torch.storage_id(value) for value in values.values())
    x = values[0]
    for part in parts:
        if isinstance(part, Split):
            rows.append(PartRow(f"{type(part.module).__name__} (op {part.path}) runs as it is", part.reason))
            x = _through(part.module, x, mode)
        elif x is None:
            rows.append(PartRow(_chain_title(part), "not planned: shapes behind the module before it are unknown"))
        else:
            fakes = (x, *[values[value] for value in part.chain.inputs[1:]])
            row, outs = _explain_chain(part, fakes, rules, mode, callers)
            rows.append(row)
            x = outs[0]
            values.update(zip(part.chain.outputs[1:], outs[1:], strict=True))
    return tuple(rows)


def _fake(mode: Any, like: Any) -> Any:
    with mode:
        fake = torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device)
    return fake.requires_grad_(bool(getattr(like, "requires_grad", False)))


def _chain_title(fuser: OperationFuser) -> str:
    paths = list(dict.fromkeys(node.path for node in fuser.chain.nodes))
    return f"ops {', '.join(paths)} run as one" if len(paths) > 1 else f"op {', '.join(paths)}"


def _through(module: torch.nn.Module, x: Any, mode: Any) -> Any:
    """A module's output on fake tensors; `None` if that cannot be told without running it, or a hook."""
    op = _hooked_op(module)
    if op is not None:
        spec = Specs((Node(op, "", type(op).__name__, (0,), (1,)),), None).propagate({0: x})[1]
        return spec and _fake(mode, spec).requires_grad_(torch.is_grad_enabled())
    if any(module_.__dict__[name] for module_ in module.modules() for name in _torch.MODULE_HOOKS):
        return None
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    try:
        fakes = {name: _fake(mode, tensor) for name, tensor in state.items()}
        with mode:
            return torch.func.functional_call(module, fakes, (x,))
    except Exception:
        return None


def _hooked_op(module: torch.nn.Module) -> Op | None:
    """The op that a module would be in a chain if it had no hooks, so that its formula tells what it returns."""
    kind = TWINS.get(type(module), type(module))
    if not issubclass(kind, Op) or "forward" in module.__dict__ or kind.num_extra_inputs or kind.num_extra_outputs:
        return None
    op = view(kind, module)
    return op if op.declines() is None and all(name in owner for owner, name in op.sources()) else None


def _explain_chain(
    fuser: OperationFuser, inputs: tuple, rules: Any, mode: Any, callers: frozenset[int]
) -> tuple[PartRow, list[Any]]:
    executable, flat, _ = fuser.find(inputs, rules)
    if executable is None:
        return PartRow(_chain_title(fuser), "a parameter is a tensor subclass, so the plain formulas run"), [None]
    plan = executable.plan
    kept: tuple[KeptRow, ...] = ()
    forward, backward = _Calls(), _Calls()
    source = [executable.forward.source]
    backward_steps: list[Step] = []
    try:
        with mode, torch.no_grad():
            fakes = [*inputs, *[None if t is None else _fake(mode, t) for t in flat[len(inputs) :]]]
            outs, recs = executable.forward.bind(forward.watch)(*fakes)
            outs = outs[: len(plan.outputs)]
    except Exception:
        outs, recs = None, None
    if executable.trains:
        function = backward_function(plan, plan.differentiable)
        backward_steps = list(function.steps.values())
        source.append(function.source)
        if outs is not None:
            kept = tuple(_kept(plan, callers, recs))
            with mode, torch.no_grad():
                douts = [torch.empty_like(out) if d else None for out, d in zip(outs, plan.differentiable, strict=True)]
                try:
                    function.bind(backward.watch)(douts, recs, [fakes[place] for place in executable.read])
                except Exception:
                    backward.known = False
        else:
            ran = [step for step in plan.forward_steps if id(step) in forward.calls]
            blind = plan.forward_steps[
                min(len(ran), len(plan.forward_steps) - 1)
            ]  # it raised, or what it returned does
            note = f"shapes behind {', '.join(_path(node) for node in blind.nodes)} are unknown"
            kept = tuple(KeptRow(_path(node), "", None, note) for node in records(plan))
    row = PartRow(
        title=_chain_title(fuser),
        forward=tuple(forward.row(step) for step in plan.forward_steps),
        backward=tuple(backward.row(step) for step in backward_steps),
        kept=kept,
        misses=tuple(_miss(direction, miss, nodes) for direction, miss, nodes in plan.misses),
        strangers=_strangers(plan),
        notes=_notes(plan),
        source="\n".join(source),
    )
    return row, _outputs(plan, executable, outs, mode)


def _outputs(plan: Plan, executable: Executable, outs: Any, mode: Any) -> list[Any]:
    like = outs if outs is not None else [plan.specs.get(value) for value in plan.outputs]
    grads = [d and executable.trains for d in plan.differentiable]
    return [
        None if out is None else _fake(mode, out).requires_grad_(grad) for out, grad in zip(like, grads, strict=True)
    ]


class _Calls:
    """Which kernels each step calls."""

    def __init__(self) -> None:
        self.calls: dict[int, list[str]] = {}
        self.known = True

    def watch(self, step: Step) -> Any:
        def run(*args: Any, **into: Any) -> Any:
            with record_calls() as calls:
                result = step.function(*args, **into)
            self.calls[id(step)] = [f"{name} ({backend})" for name, backend in calls]
            return result

        return run

    def row(self, step: Step) -> StepRow:
        kernels = self.calls.get(id(step))
        shown = "unknown" if kernels is None else ", ".join(kernels) or "torch"
        return StepRow(", ".join(_path(node) for node in step.nodes), step.rule.name if step.rule else "", shown)


def _path(node: Node) -> str:
    return f"{node.path} {type(node.op).__name__}"


def _kept(plan: Plan, callers: frozenset[int], recs: Sequence[Any]) -> list[KeptRow]:
    """`callers`: the memory that the caller holds anyway."""
    rows = []
    seen = dict.fromkeys(callers, "the caller's")
    for node, record in zip(records(plan), recs, strict=True):
        for field, value in zip(type(record).fields, record, strict=True):
            if not isinstance(value, torch.Tensor):
                if value is not None and field not in plan.kept[plan.index(node)]:
                    continue
                if field == "graph":
                    rows.append(KeptRow(_path(node), "its autograd graph", None, "differentiated through reference"))
                continue
            note = seen.get(_torch.storage_id(value), "")
            seen.setdefault(_torch.storage_id(value), f"counted at {_path(node)}")
            size = 0 if note else value.untyped_storage().nbytes()
            rows.append(KeptRow(_path(node), f"{field} {show_tensor(value)}", size, note))
    return rows


def _miss(direction: str, miss: Any, nodes: Sequence[Node]) -> MissRow:
    return MissRow(direction, miss.rule.name, ", ".join(_path(node) for node in nodes), miss.reasons)


def _strangers(plan: Plan) -> tuple[str, ...]:
    """The ops that no rule has a slot for, those aside that a rewrite made."""
    if not plan.call_rules:
        return ()
    own = [id(node.op) for node in plan.chain.nodes]
    strangers = [node for node in plan.nodes if id(node.op) in own and not plan.call_rules.names(type(node.op))]
    return tuple(_path(node) for node in strangers)


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [f"rewritten: {text}" for text in plan.rewritten]
    if plan.cuts:
        starts = ", ".join(_path(plan.nodes[cut.start]) for cut in plan.cuts)
        notes.append(
            f"{len(plan.cuts) + 1} autograd nodes, so that gradients leave early; a new one begins at {starts}"
        )
    if not plan.call_rules:
        notes.append("no rules: every op runs its own fwd and bwd")
    skipped = [_path(node) for node in plan.skipped]
    if skipped:
        notes.append(f"nothing to do: {', '.join(skipped)}")
    return tuple(notes)


def describe_input(specs: Sequence[Any], wanted: Sequence[str]) -> str:
    """The first line of an explanation."""
    extras = f", extra inputs {', '.join(show_tensor(spec) for spec in specs[1:])}" if len(specs) > 1 else ""
    return f"x {show_tensor(specs[0])} on {specs[0].device}{extras}; gradients of {', '.join(wanted) or 'nothing'}"
