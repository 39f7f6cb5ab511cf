"""Straight-line functions for a plan: one forward, and one backward per set of arriving gradients.

Their source is what `explain(x).source` prints. A value is `v3`, its gradient `d3`, a record `r1` (numbered by op).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.profiler import record_function

from fusible.chain import Node
from fusible.graph_op import GraphSaved
from fusible.op import Saved, has_kernels
from fusible.plan import Plan, Step, params_read_by

__all__ = ["Function", "backward_function", "forward_function", "ranged"]


class Function:
    """A generated function: its source, and ways to bind the steps that it calls."""

    def __init__(self, lines: list[str], names: dict[str, Any], steps: dict[str, Step]) -> None:
        self.source = "\n".join(lines) + "\n"
        self.steps = steps
        self._code = compile(self.source, "<fusible plan>", "exec")
        self._names = names
        self.run = self.bind(lambda step: step.function)
        self._named: Callable[..., Any] | None = None

    def bind(self, function_of: Callable[[Step], Callable[..., Any]]) -> Callable[..., Any]:
        """The function, calling `function_of(step)` for each step."""
        space = {**self._names, **{name: function_of(step) for name, step in self.steps.items()}}
        exec(self._code, space)
        return space["run"]

    def named(self, direction: str) -> Callable[..., Any]:
        """The function with a range around each step that profilers show, bound once."""
        if self._named is None:
            self._named = self.bind(lambda step: ranged(direction, step, step.function))
        return self._named


def ranged(direction: str, step: Step, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function within a range that profilers show."""
    name = f"fusible {direction}: {_comment(step)}"

    def run(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return run


def saved_type(node: Node) -> type[Saved]:
    """The type of a node's record."""
    return type(node.op).Saved if has_kernels(type(node.op)) else GraphSaved


def records(plan: Plan) -> list[Node]:
    """The nodes with a record that is kept, in the order in which forward returns them."""
    return [node for node in plan.nodes if plan.kept.get(plan.index(node))]


# -- forward -----------------------------------------------------------------------------------------------------------


def forward_function(plan: Plan, want_records: bool) -> Function:
    """`run(*inputs, *params) -> (outputs, records)`, records as a list; what crosses cuts comes behind the outputs."""
    kept = {id(node) for node in records(plan)} if want_records else set()
    lines = [f"def run({', '.join(f'v{value}' for value in plan.inputs)}):"]
    names: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    last_use = _last_uses(plan)
    for number, step in enumerate(plan.forward_steps):
        steps[f"f{number}"] = step
        values = [f"v{value}" for value in step.makes]
        lines.append(f"    # {_comment(step)}")
        lines.append(f"    o = f{number}({', '.join(_forward_arguments(plan, step))})")
        lines.append(f"    {', '.join(values)}, = o.values")
        for slot, node in step.recorded:
            if id(node) in kept:
                lines.append(f"    r{plan.index(node)} = {_record(plan, node, slot, names)}")
        dead = [f"v{value}" for value in last_use.get(number, ())]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    outputs = "".join(f"v{value}, " for value in (*plan.outputs, *plan.crossing_sources))
    kept_names = ", ".join(f"r{plan.index(node)}" for node in records(plan) if id(node) in kept)
    lines.append(f"    return ({outputs}), [{kept_names}]")
    return Function(lines, names, steps)


def _comment(step: Step) -> str:
    return f"{step.ops}: {step.rule.name}" if step.rule else step.ops


def _forward_arguments(plan: Plan, step: Step) -> list[str]:
    extras: list[str] = []
    params: list[str] = []
    if step.rule is None:
        only = step.nodes[0]
        extras = [_name(value) for value in only.ins[1:]]
        params = [_name(value) for value in plan.params[plan.index(only)]]
    else:
        for slot, node in zip(step.rule.slots, step.slots, strict=True):
            extras += _padded([_name(value) for value in node.ins[1:]] if node else [], slot.num_extras)
            own = plan.params[plan.index(node)] if node else ()
            params += _padded([_name(value) for value in own], slot.num_params)
    return [_name(step.nodes[0].ins[0]), *extras, *params]


def _name(value: int | None) -> str:
    return "None" if value is None else f"v{value}"


def _padded(names: list[str], count: int) -> list[str]:
    return names + ["None"] * (count - len(names))


def _record(plan: Plan, node: Node, slot: str, names: dict[str, Any]) -> str:
    """The expression for a record with the fields that are kept."""
    kind, kept = saved_type(node), plan.kept[plan.index(node)]
    got = f'o.records["{slot}"]'
    if kept == kind.fields:
        return got
    names[f"R{plan.index(node)}"] = kind
    fields = ", ".join(f"{got}[{i}]" if name in kept else "None" for i, name in enumerate(kind.fields))
    return f"R{plan.index(node)}({fields})"


def _last_uses(plan: Plan) -> dict[int, list[int]]:
    """Per forward step: the values that are not used after it, and do not leave."""
    last: dict[int, int] = {}
    for number, step in enumerate(plan.forward_steps):
        for value in step.makes:
            last[value] = number
        taken = (step.nodes[0].ins[0], *(v for node in step.nodes for v in node.ins[1:]))
        last.update((value, number) for value in taken if value is not None)
    leaving = (*plan.outputs, *plan.crossing_sources)
    dead: dict[int, list[int]] = {}
    for value, number in last.items():
        if value not in leaving:
            dead.setdefault(number, []).append(value)
    return dead


# -- backward ----------------------------------------------------------------------------------------------------------


def backward_function(plan: Plan, arriving: Sequence[bool]) -> Function:
    """`run(douts, records, params) -> gradients of plan's inputs and parameters that are wanted`, in order.

    `douts` has one entry per output, `params` the parameters of `plan.read`. Where gradients are accumulated there is
    a fourth argument, their buffers in order of value; a gradient that is its buffer has been added to it.
    """
    return _Backward(plan, arriving).function()


class _Backward:
    def __init__(self, plan: Plan, arriving: Sequence[bool]) -> None:
        self.plan = plan
        buffers = sorted(plan.accumulated.intersection(plan.inputs))
        none = f", buffers=({'None, ' * len(buffers)})" if buffers else ""
        self.lines = [f"def run(douts, records, params{none}):"]
        if buffers:
            self.lines.append(f"    {', '.join(f'm{value}' for value in buffers)}, = buffers")
        self.names: dict[str, Any] = {}
        self.steps: dict[str, Step] = {}
        self.parts: dict[int, list[str]] = {}  # per value: the variables that hold parts of its gradient
        self.places = {id(node): place for place, node in enumerate(records(plan))}
        self.arriving = arriving
        uses = [value for values in plan.params.values() for value in values]
        self.once = {value for value in plan.accumulated if uses.count(value) == 1}
        dtypes = set(plan.dtypes.values())
        self.mixed = len([dtype for dtype in dtypes if dtype is None or dtype.is_floating_point]) > 1

    def function(self) -> Function:
        plan = self.plan
        douts = [f"d{place}_out" if here else "_" for place, here in enumerate(self.arriving)]
        self.lines.append(f"    {', '.join(douts)}, = douts")
        if plan.read:
            self.lines.append(f"    {', '.join(f'v{value}' for value in plan.read)}, = params")
        for place, (value, here) in enumerate(zip(plan.outputs, self.arriving, strict=True)):
            if here and value in plan.wanted:
                self.parts.setdefault(value, []).append(douts[place])
        for step in reversed(plan.backward_steps):
            self.step(step)
        leaving = [self.gradient(value) or "None" for value in plan.inputs if value in plan.wanted]
        self.lines.append(f"    return {', '.join(leaving)},")
        return Function(self.lines, self.names, self.steps)

    def step(self, step: Step) -> None:
        outs = step.arrives
        if not any(self.parts.get(value) for value in outs if value is not None):
            return
        if step.rule is not None and not self._covers(step, outs):
            for own in reversed(self.plan.op_by_op[step]):
                self.step(own)
            return
        gradients = [(value is not None and self.gradient(value)) or "None" for value in outs]
        records_, places = self._records(step)
        call = [*records_, *gradients] if step.rule else [records_[0], *gradients]
        name = f"b{len(self.steps)}"
        self.steps[name] = step
        self.lines.append(f"    # {_comment(step)}")
        self.lines.append(f"    g = {name}({', '.join([*call, *self._params(step), *self._into(step)])})")
        self._take(step)
        used = [g for g in gradients if g != "None"]
        self.lines.append(f"    del {', '.join(['g', *dict.fromkeys(used)])}")
        if places:
            self.lines.append(f"    {' = '.join(f'records[{place}]' for place in places)} = None")

    def _covers(self, step: Step, outs: Sequence[int | None]) -> bool:
        """Whether every gradient arrives that the rule cannot do without."""
        assert step.rule is not None
        optional = step.rule.optional_gradients()
        return all(value is None or self.parts.get(value) or may for value, may in zip(outs, optional, strict=True))

    def gradient(self, value: int) -> str | None:
        """The variable with a value's gradient, its parts added up."""
        parts = self.parts.get(value)
        if not parts:
            return None
        if len(parts) > 1:
            self.names["add"] = _add
            self.lines.append(f"    {parts[0]} = add({', '.join(parts)})")
            self.lines.append(f"    del {', '.join(parts[1:])}")
            self.parts[value] = parts[:1]
        return self.parts[value][0]

    def _records(self, step: Step) -> tuple[list[str], list[int]]:
        names: list[str] = []
        places: list[int] = []
        nodes: Sequence[Node | None] = step.slots if step.rule else step.nodes
        for node in nodes:
            if node is None:
                names.append("None")
            elif id(node) in self.places:
                places.append(self.places[id(node)])
                names.append(f"records[{places[-1]}]")
            else:
                kind = saved_type(node)
                self.names[f"E{self.plan.index(node)}"] = kind(*[None] * len(kind.fields))
                names.append(f"E{self.plan.index(node)}")
        return names, places

    def _params(self, step: Step) -> list[str]:
        count = step.rule.num_params if step.rule else len(self.plan.params[self.plan.index(step.nodes[0])])
        names = ["None"] * count
        for value, position in params_read_by(self.plan, step):
            if value in self.plan.read:
                names[position] = f"v{value}"
        return names

    def _into(self, step: Step) -> list[str]:
        """The buffers that the step may add gradients to; none for a parameter that other steps have gradients of."""
        entries = []
        for slot, node in step.recorded if step.takes_into else ():
            params = zip(type(node.op).signature.params, self.plan.params[self.plan.index(node)], strict=True)
            prefix = f"{slot}." if step.rule else ""
            entries += [f'"{prefix}{name}": m{value}' for name, value in params if value in self.once]
        return [f"into={{{', '.join(entries)}}}"] if entries else []

    def _take(self, step: Step) -> None:
        """Takes the wanted gradients out of `g`."""
        plan = self.plan
        stream = [step.nodes[0].ins[0], *_slot_extras(step)] if step.rule else list(step.nodes[0].ins)
        for place, value in enumerate(stream):
            self._keep(value, f"g.values[{place}]")
        for slot, node in step.recorded:
            params = zip(type(node.op).signature.params, plan.params[plan.index(node)], strict=True)
            for name, value in params:
                self._keep(value, f'g.params["{slot}"]["{name}"]' if step.rule else f'g.params["{name}"]')

    def _keep(self, value: int | None, expression: str) -> None:
        if value is None or value not in self.plan.wanted:
            return
        parts = self.parts.setdefault(value, [])
        name = f"d{value}_{len(parts)}" if parts else f"d{value}"
        parts.append(name)
        self.lines.append(f"    {name} = {expression}")
        dtype = self.plan.dtypes[value]
        if self.mixed and dtype is not None and value not in self.plan.accumulated:
            self.names["cast"] = _cast
            self.names[f"t{value}"] = dtype
            self.lines.append(f"    {name} = cast({name}, t{value})")


def _add(*gradients: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in fresh memory; a parameter that a formula did not use has no gradient."""
    there = [gradient for gradient in gradients if gradient is not None]
    return sum(there[1:], there[0]) if there else None


def _cast(gradient: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.dtype is dtype else gradient.to(dtype)


def _slot_extras(step: Step) -> list[int | None]:
    """The extra inputs by slot, `None` where the slot is absent."""
    assert step.rule is not None
    result: list[int | None] = []
    for slot, node in zip(step.rule.slots, step.slots, strict=True):
        own = list(node.ins[1:]) if node else []
        result += own + [None] * (slot.num_extras - len(own))
    return result
