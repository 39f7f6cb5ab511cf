"""Makes the parts of an `Explanation` of a block: plans each chain, and runs it on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusible import _torch, calibration
from fusible.chain import Node, Split
from fusible.codegen import records
from fusible.costs import Ran, floor, predict
from fusible.dry_run import DryRun, dry_run, without_data
from fusible.explanation import KeptRow, MissRow, OpRow, PartRow, StepRow, show_tensor
from fusible.fuser import OperationFuser
from fusible.infer import Specs
from fusible.op import Op, view
from fusible.ops import TWINS
from fusible.plan import Plan, Step

__all__ = ["explain_parts", "hooked_op"]


class Value:
    """A tensor of the caller's, or one that a part makes, as a plan sees it: all but its data."""

    def __init__(self, like: Any, requires_grad: bool, callers: bool = False) -> None:
        self.shape, self.dtype, self.device = torch.Size(like.shape), like.dtype, like.device
        self.requires_grad = requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)
        self.callers = callers
        self.data = without_data(like)

    def dim(self) -> int:
        return len(self.shape)


def explain_parts(
    parts: Sequence[Any], inputs: dict[int, Any], rules: Any, visit: Callable[[Any, tuple], None] | None = None
) -> tuple[PartRow, ...]:
    """Explains chains and splits in order. `inputs` maps value numbers of the first chain to tensors.

    `visit` is called with each chain's fuser and its inputs, which have no data.
    """
    rows = []
    values: dict[int, Any] = {value: Value(t, t.requires_grad, callers=True) for value, t in inputs.items()}
    x = values[0]
    machine = calibration.find()[0]
    for part in parts:
        if isinstance(part, Split):
            rows.append(PartRow(f"{type(part.module).__name__} (op {part.path}) runs as it is", part.reason))
            x = _through(part.module, x)
        elif x is None:
            rows.append(PartRow(_chain_title(part), "not planned: shapes behind the module before it are unknown"))
        else:
            given = (x, *[values[value] for value in part.chain.inputs[1:]])
            if visit is not None:
                visit(part, given)
            row, outs = _explain_chain(part, given, rules, machine)
            rows.append(row)
            x = outs[0]
            values.update(zip(part.chain.outputs[1:], outs[1:], strict=True))
    return tuple(rows)


def _chain_title(fuser: OperationFuser) -> str:
    paths = list(dict.fromkeys(node.path for node in fuser.chain.nodes))
    return f"ops {', '.join(paths)} run as one" if len(paths) > 1 else f"op {', '.join(paths)}"


# -- splits ------------------------------------------------------------------------------------------------------------


def _through(module: torch.nn.Module, x: Value | None) -> Value | None:
    """What a module returns, without running it or a hook; `None` if that cannot be told."""
    if x is None:
        return None
    op = hooked_op(module)
    if op is not None:
        node = Node(op, "", type(op).__name__, (0, *[None] * op.num_extra_inputs), (1,))
        spec = Specs((node,), None).propagate({0: x})[1]  # type: ignore[dict-item]
        return spec and Value(spec, torch.is_grad_enabled())
    if any(module_.__dict__[name] for module_ in module.modules() for name in _torch.MODULE_HOOKS):
        return None
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    mode = _torch.fake_mode()
    with mode, _torch.quiet_fakes():
        try:
            fakes = {name: _fake(tensor) for name, tensor in state.items()}
            made = torch.func.functional_call(module, fakes, (_fake(x),))
        except Exception:
            return None
    return Value(made, made.requires_grad) if isinstance(made, torch.Tensor) and made.dim() else None


def _fake(like: Any) -> torch.Tensor:
    return torch.empty(tuple(like.shape), dtype=like.dtype, device=like.device).requires_grad_(like.requires_grad)


def hooked_op(module: torch.nn.Module) -> Op | None:
    """The op that a module would be in a chain if it had no hooks, so that its formula tells what it returns."""
    kind = TWINS.get(type(module), type(module))
    if not issubclass(kind, Op) or "forward" in module.__dict__ or kind.num_extra_outputs:
        return None
    op = view(kind, module)
    fits = not op.present_inputs() and op.declines() is None
    return op if fits and all(name in owner for owner, name in op.sources()) else None


# -- chains ------------------------------------------------------------------------------------------------------------


def _explain_chain(
    fuser: OperationFuser, given: tuple[Value, ...], rules: Any, machine: Any
) -> tuple[PartRow, list[Value | None]]:
    executable, flat, _ = fuser.find(given, rules)  # type: ignore[arg-type]
    if executable is None:
        return PartRow(_chain_title(fuser), "a parameter is a tensor subclass, so the plain formulas run"), [None]
    plan = executable.plan
    run = dry_run(executable, [value.data for value in given], flat[len(given) :])
    rows = [
        tuple(_step(step, found.get(id(step)), machine) for step in steps)
        for steps, found in ((plan.forward_steps, run.forward), (run.backward_steps, run.backward))
    ]
    row = PartRow(
        title=_chain_title(fuser),
        ops=_ops(plan),
        forward=rows[0],
        backward=rows[1],
        kept=tuple(_kept(plan, given, run)) if executable.trains else (),
        misses=tuple(
            MissRow(direction, miss.rule.name, ", ".join(_path(node) for node in nodes), miss.refusals)
            for direction, miss, nodes in plan.misses
        ),
        strangers=_strangers(plan),
        notes=_notes(plan),
        source="\n".join(run.source),
    )
    like = run.outputs if run.outputs is not None else [plan.specs.get(value) for value in plan.outputs]
    outs = []
    for out, depends in zip(like, plan.differentiable, strict=True):
        made = None if out is None else Value(out, depends and executable.trains)
        if made is not None:
            made.device = plan.device
        outs.append(made)
    return row, outs


def _step(step: Step, ran: Ran | None, machine: Any) -> StepRow:
    ops, rule = ", ".join(_path(node) for node in step.nodes), step.rule.name if step.rule else ""
    if ran is None:
        return StepRow(ops, rule, "unknown")
    cost = ran.cost
    return StepRow(
        ops,
        rule,
        ", ".join(ran.kernels) or "torch",
        tuple(show_tensor(spec) for spec in ran.inputs),
        tuple(show_tensor(spec) for spec in ran.outputs),
        cost.read,
        cost.written,
        sum(work.bytes for work in cost.work),
        cost.flops,
        predict(cost, machine) if machine else None,
        floor(cost, machine) if machine else None,
    )


def _path(node: Node) -> str:
    return f"{node.path} {type(node.op).__name__}"


def _ops(plan: Plan) -> tuple[OpRow, ...]:
    """The chain's ops, or those that rewrites made of it."""
    skipped = {id(node) for node in plan.skipped}
    rows = []
    for node in plan.nodes if plan.rewritten else plan.chain.nodes:
        spec = plan.specs.get(node.outs[0])
        rows.append(OpRow(_path(node), show_tensor(spec) if spec else None, id(node) in skipped))
    return tuple(rows)


def _kept(plan: Plan, given: Sequence[Value], run: DryRun) -> list[KeptRow]:
    if run.records is None:
        ran = [step for step in plan.forward_steps if id(step) in run.forward]
        # it raised, or what it returned does
        blind = plan.forward_steps[min(len(ran), len(plan.forward_steps) - 1)]
        note = f"shapes behind {', '.join(_path(node) for node in blind.nodes)} are unknown"
        return [KeptRow(_path(node), "", None, note) for node in records(plan)]
    rows = []
    inputs = zip(given, run.inputs, strict=True)
    seen = {_torch.storage_id(tensor): "the caller's" for value, tensor in inputs if value.callers}
    for node, record in zip(records(plan), run.records, strict=True):
        for field, value in zip(type(record).fields, record, strict=False):  # behind a graph come its tensors
            if not isinstance(value, torch.Tensor):
                if field == "graph":
                    rows.append(KeptRow(_path(node), "its autograd graph", None, "differentiated through reference"))
                continue
            note = seen.get(_torch.storage_id(value), "")
            seen.setdefault(_torch.storage_id(value), f"counted at {_path(node)}")
            size = 0 if note else value.untyped_storage().nbytes()
            rows.append(KeptRow(_path(node), f"{field} {show_tensor(value)}", size, note))
    return rows


def _strangers(plan: Plan) -> tuple[str, ...]:
    """The ops that no rule has a slot for, those aside that a rewrite made."""
    if not plan.call_rules:
        return ()
    own = [id(node.op) for node in plan.chain.nodes]
    strangers = [node for node in plan.nodes if id(node.op) in own and not plan.call_rules.names(type(node.op))]
    return tuple(_path(node) for node in strangers)


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [f"rewritten: {text}" for text in plan.rewritten]
    notes += plan.within.notes() if plan.within else ()
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
