"""A plan made executable: its generated functions, and what the autograd node must know of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fusible._torch import profiler_runs
from fusible.checked import check_memory, checked_backward, checked_forward
from fusible.codegen import Function, backward_function, forward_function, ranged, records
from fusible.graph_op import GraphSaved, check_replayed
from fusible.infer import Specs
from fusible.plan import Plan, Step
from fusible.segments import num_inputs, segments

__all__ = ["Executable"]

#: Shapes that one plan remembers as checked.
MAX_SHAPES = 256
#: Checks every run of every plan, not the first alone; the tests set it.
CHECK_ALWAYS = False
#: What runs in the place of each step (direction, step), while somebody profiles; looked at where `CHECK_ALWAYS` is
#: set.
OBSERVE: Callable[[str, Step], Callable[..., Any]] | None = None


@contextmanager
def observed(observe: Callable[[str, Step], Callable[..., Any]]) -> Iterator[None]:
    """Lets `observe(direction, step)` stand in for the functions of all steps that run, in any thread."""
    global CHECK_ALWAYS, OBSERVE
    before, CHECK_ALWAYS, OBSERVE = (CHECK_ALWAYS, OBSERVE), True, observe
    try:
        yield
    finally:
        CHECK_ALWAYS, OBSERVE = before


def _watched(direction: str, function_of: Callable[[Step], Callable[..., Any]]) -> Callable[[Step], Callable[..., Any]]:
    """What to bind on a first run, whose steps are checked and may be observed or profiled too."""
    observe = OBSERVE
    if observe is None:
        return (lambda step: ranged(direction, step, function_of(step))) if profiler_runs() else function_of
    return lambda step: observe(direction, replace(step, function=function_of(step)))


class Segment(NamedTuple):
    """A part of a plan that is an autograd node of its own. Places count the plan's inputs, its outputs, what
    crosses."""

    executable: Executable
    takes: list[int]
    gives: list[int]
    num_records: int


class Executable:
    """A plan with its generated functions, and what the autograd node must know of it."""

    def __init__(self, plan: Plan, num_inputs: int) -> None:
        self.plan = plan
        self.num_inputs = num_inputs
        self.constant = [place for place, depends in enumerate(plan.differentiable) if not depends]
        self.trains = any(plan.differentiable)
        self.wanted = [place for place, value in enumerate(plan.inputs) if value in plan.wanted]
        self.read = [plan.inputs.index(value) for value in plan.read]
        self.accumulating = self._accumulating()
        self.fixed = [source for node in plan.nodes for source in node.op.option_sources()]
        self.shapes: set[tuple] = set()
        self.checked = False
        self.backwards: dict[tuple[bool, ...], list] = {}
        self._find_aliases()
        self.segments = self._segments() if plan.cuts else []
        self.crossed: list[int] = []  # which inputs of a segment earlier ones make

    @functools.cached_property
    def forward(self) -> Any:
        return forward_function(self.plan, want_records=self.trains)

    def _accumulating(self) -> list[tuple[int, int, str]]:
        """For each parameter whose gradient is accumulated: its place among `wanted` and among the inputs, its name."""
        plan = self.plan
        names = {value: f"{name} of {node}" for node in reversed(plan.nodes) for name, value in plan.gradients(node)}
        places = [(at, place, plan.inputs[place]) for at, place in enumerate(self.wanted)]
        found = [(value, at, place) for at, place, value in places if value in plan.accumulated]
        return [(at, place, names[value]) for value, at, place in sorted(found)]

    def _segments(self) -> list[Segment]:
        """The parts of a plan that is cut, each an autograd node of its own."""
        plan = self.plan
        behind = len(plan.inputs), len(plan.inputs) + len(plan.outputs)
        pool = {value: place for place, value in enumerate(plan.inputs)}
        pool.update((value, behind[1] + place) for place, value in enumerate(plan.crossing))
        result = []
        first = 0
        for part in segments(plan):
            executable = Executable(part, num_inputs(plan, part))
            count = len(records(part))
            executable.exposed = [(place - first, took, made) for place, took, made in self.exposed
                                  if first <= place < first + count]  # fmt: skip
            executable.crossed = [at for at, value in enumerate(part.inputs) if value in plan.crossing]
            takes = [pool[value] for value in part.inputs]
            gives = [behind[0] + place for place, value in enumerate(plan.outputs) if value in part.outputs]
            gives += [pool[value] for value in part.outputs[len(gives) :]]
            result.append(Segment(executable, takes, gives, count))
            first += count
        return result

    def _find_aliases(self) -> None:
        """Which values may share memory, from what ops and rules declare."""
        plan = self.plan
        group: dict[int, int] = {value: value for value in plan.inputs}

        def merge(values: Sequence[int]) -> None:
            roots = {group.setdefault(value, value) for value in values}
            first = min(roots)
            for value, root in list(group.items()):
                if root in roots:
                    group[value] = first

        by_rule = {id(node) for step in plan.forward_steps if step.rule and step.rule.aliases for node in step.nodes}
        for index, node in enumerate(plan.nodes):
            ins = [value for value in (*node.ins, *plan.params[index]) if value is not None]
            for value in node.outs:
                group.setdefault(value, value)
            if type(node.op).aliases or id(node) in by_rule:
                merge([*ins, *node.outs])
        caller = list(plan.inputs)
        self.output_peers = [
            ([p for p, v in enumerate(caller) if group[v] == group[out]],
             [p for p, v in enumerate(plan.outputs) if p != place and group[v] == group[out]])
            for place, out in enumerate(plan.outputs)
        ]  # fmt: skip
        self.all_fresh = not any(inputs or outputs for inputs, outputs in self.output_peers)
        self.exposed = self._exposed(group)
        self.gradients_alias = any(type(node.op).grad_aliases for node in plan.live) or any(
            step.rule and step.rule.aliases for step in plan.backward_steps
        )

    def _exposed(self, group: dict[int, int]) -> list[tuple[int, list[int], list[int]]]:
        """Records that may hold a tensor of the caller's: (place, peers among the inputs, peers among the outputs).

        A record holds what its op takes or makes, or what is its own; `check_memory` sees to that.
        """
        plan = self.plan
        exposed = []
        for place, node in enumerate(records(plan)):
            near = {group[value] for value in (*node.ins, *node.outs) if value is not None}
            inputs = [p for p, v in enumerate(plan.inputs[: self.num_inputs]) if group[v] in near]
            outputs = [p for p, v in enumerate(plan.outputs) if group[v] in near]
            if inputs or outputs:
                exposed.append((place, inputs, outputs))
        return exposed

    def check_shapes(self, inputs: Sequence[Tensor]) -> None:
        """Raises `ValueError` if shapes that this plan has not seen do not fit the ops."""
        plan = self.plan
        Specs(plan.chain.nodes, plan.autocast).propagate(dict(zip(plan.chain.inputs, inputs, strict=True)))
        if len(self.shapes) >= MAX_SHAPES:
            self.shapes.clear()
        self.shapes.add(tuple([tensor.shape for tensor in inputs]))

    def run(self, flat: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], list]:
        """The forward pass on inputs and parameters, with grad mode and autocast off."""
        if self.checked and not CHECK_ALWAYS:
            return self.forward.named("forward")(*flat) if profiler_runs() else self.forward.run(*flat)
        if OBSERVE is not None and self.checked:
            return self.forward.bind(functools.partial(OBSERVE, "forward"))(*flat)
        check = self.forward.bind(_watched("forward", lambda step: checked_forward(step, self.plan, self.trains)))
        result = check(*flat)
        outs = result[0][: len(self.plan.outputs)]
        check_memory(self.plan, self.exposed, flat[: self.num_inputs], outs, result[1])
        self.checked = True
        return result

    def backward(
        self, arriving: tuple[bool, ...], douts: tuple, recs: list, params: Sequence[Tensor], *buffers: Sequence
    ) -> tuple:
        """The gradients of `wanted`, by the function for these arriving gradients; frees the records in `recs`.

        `buffers`, one sequence, comes where gradients are accumulated, in order of `accumulating`.
        """
        found = self.backwards.get(arriving)
        if found is None:
            self.backward_for(arriving)
            found = self.backwards[arriving]
        function, checked = found
        if checked and not CHECK_ALWAYS:
            run = function.named("backward") if profiler_runs() else function.run
            return run(douts, recs, params, *buffers)
        if OBSERVE is not None and checked:
            return function.bind(functools.partial(OBSERVE, "backward"))(douts, recs, params, *buffers)
        check = function.bind(_watched("backward", lambda step: checked_backward(step, self.plan)))
        result = check(douts, recs, params, *buffers)
        found[1] = True
        return result

    def backward_for(self, arriving: tuple[bool, ...]) -> Function:
        """The generated backward for these arriving gradients, made if it is new."""
        if arriving not in self.backwards:
            self.backwards[arriving] = [backward_function(self.plan, arriving), False]
        return self.backwards[arriving][0]

    def options(self) -> list[Any]:
        """The options that forward reads, which backward must find as they were."""
        return [attributes.get(name) for attributes, name in self.fixed]

    def holds_tensors(self, recs: Sequence[Any]) -> bool:
        """Whether there is anything in these records to free."""
        return any([isinstance(v, Tensor) or type(record) is GraphSaved for record in recs for v in record])  # noqa: C419 - hot

    def replay(self, flat: Sequence[Tensor | None], recs: Sequence[Any]) -> tuple[Tensor, ...]:
        """The outputs again, by the ops' plain formulas."""
        plan = self.plan
        values: dict[int | None, Tensor | None] = {None: None, **dict(zip(plan.inputs, flat, strict=True))}
        kept = {id(node): record for node, record in zip(records(plan), recs, strict=True)}
        for index, node in enumerate(plan.nodes):
            args: list[Any] = [values[value] for value in (*node.ins, *plan.params[index])]
            saved = kept.get(id(node))
            outs = node.op.replay(saved, *args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            if isinstance(saved, GraphSaved):
                check_replayed(node.op, saved, outs)
            values.update(zip(node.outs, outs, strict=True))
        return tuple(values[value] for value in plan.outputs)  # type: ignore[misc]
