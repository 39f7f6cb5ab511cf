"""A model run with each value and gradient of its blocks looked at, by the plain formulas or fused as it is.

Both ways number values alike, so what they show can be compared.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import executable
from fusible.chain import Node, Split
from fusible.codegen import records
from fusible.executable import Executable
from fusible.fuser import OperationFuser
from fusible.parts import Place, nodes_of, replaced
from fusible.plan import Plan, Step
from fusible.rules import NONE

__all__ = ["Key", "Label", "See", "formulas", "fused"]


class Key(NamedTuple):
    """What a tensor is: a value, the gradient of one, or a field of the record of the op that makes a value."""

    place: Place
    call: int
    kind: str  # "value", "gradient" or "record"
    value: int
    field: str = ""


class Label(NamedTuple):
    """What a tensor is to the user: the op that makes it and its name there.

    Attributes:
        op: by path and type; "" for what enters the chain.
        order: in which it comes about within its part and pass.
    """

    op: str
    name: str
    order: tuple[int, int]


See = Callable[[Key, Tensor, Any], None]
"""Called with what is seen: its key, the tensor, and its `Label` (formulas) or the `Step` that made it (fused)."""


def _op(node: Node) -> str:
    return f"{node.path} {type(node.op).__name__}"


# -- by the plain formulas ---------------------------------------------------------------------------------------------


def formulas(model: torch.nn.Module, see: See) -> contextlib.AbstractContextManager[None]:
    """Inside, the blocks of a model run each op's plain formula, under ordinary autograd."""
    return replaced(model, lambda place, part: part if isinstance(part, Split) else _Formulas(place, part, see))


class _Formulas:
    """Stands in for a chain."""

    def __init__(self, place: Place, fuser: OperationFuser, see: See) -> None:
        self.place, self.fuser, self.see = place, fuser, see
        self.chain = fuser.chain
        self.calls = 0

    def __call__(self, inputs: tuple[Tensor, ...], rules: Any) -> tuple[Tensor, ...] | None:
        found, flat, _ = self.fuser.find(inputs, NONE)
        if found is None:
            return None
        found.check_shapes(inputs)
        self.calls += 1
        plan, call = found.plan, self.calls
        labels = _labels(plan, len(inputs))
        self._show_records(found, flat, call)
        values: dict[int | None, Tensor | None] = {None: None}
        for place, (value, tensor) in enumerate(zip(plan.inputs, flat, strict=True)):
            seen = place < len(inputs)  # parameters are what they are
            values[value] = None if tensor is None else self._show(call, value, tensor, labels, seen)
        for index, node in enumerate(plan.nodes):
            arguments: list[Any] = [values[value] for value in (*node.ins, *plan.params[index])]
            outs = node.op.reference(*arguments)
            for value, out in zip(node.outs, outs if isinstance(outs, tuple) else (outs,), strict=True):
                values[value] = self._show(call, value, out, labels)
        return tuple(values[value] for value in plan.outputs)  # type: ignore[misc]

    def _show(
        self, call: int, value: int, tensor: Tensor, labels: dict[tuple[str, int], Label], seen: bool = True
    ) -> Tensor:
        """The tensor as one of its own, so that its gradient is that of this value alone."""
        if seen:
            self.see(Key(self.place, call, "value", value), tensor.detach(), labels["value", value])
        label = labels.get(("gradient", value))
        if label is None or not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        own = tensor.view_as(tensor)
        key = Key(self.place, call, "gradient", value)
        own.register_hook(lambda gradient: self.see(key, gradient, label))
        return own

    def _show_records(self, found: Executable, flat: Sequence[Any], call: int) -> None:
        """What each op keeps, where a fused step may show it although it hides the op's result."""
        if not found.trains:
            return
        device = found.plan.device
        forked = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=forked), torch.no_grad(), torch.autocast(device.type, enabled=False):
            kept = found.run(flat)[1]
        for node, record in zip(records(found.plan), kept, strict=True):
            for field, tensor in _fields(record):
                key = Key(self.place, call, "record", node.outs[0], field)
                self.see(key, tensor, Label(_op(node), f"record {field}", (found.plan.index(node), 1)))


def _fields(record: Any) -> list[tuple[str, Tensor]]:
    pairs = zip(type(record).fields, record, strict=False)  # behind a graph come its tensors
    return [(field, value) for field, value in pairs if isinstance(value, Tensor) and value.is_floating_point()]


def _labels(plan: Plan, num_inputs: int) -> dict[tuple[str, int], Label]:
    """By (kind, value): values by the op that makes them, gradients by the first op that takes the value."""
    labels = {}
    for place, value in enumerate(plan.inputs[:num_inputs]):
        labels["value", value] = Label("", f"extra input {place - 1}" if place else "input", (-1, place))
    for index, node in enumerate(plan.nodes):
        for place, value in enumerate(node.outs):
            name = f"extra output {place - 1}" if place else "output"
            labels["value", value] = Label(_op(node), name, (index, 0))
            labels["gradient", value] = Label(_op(node), f"gradient of its {name}", (-index, -1))
    taken = set()
    for index, node in enumerate(plan.nodes):
        for place, (name, read) in enumerate(plan.gradients(node)):
            if read is not None and read not in taken:
                taken.add(read)
                labels["gradient", read] = Label(_op(node), f"gradient of {name}", (-index, -place))
    return labels


# -- fused -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fused(model: torch.nn.Module, see: See, covered: dict[tuple[Place, str, int], Step]) -> Any:
    """Inside, the blocks of a model run as they are, and what their steps take and return is seen.

    Args:
        covered: filled with the step that covers each op, by (place, direction, the op's first value).
    """
    tracer = _Tracer(see, covered)

    def stand_in(place: Place, part: Any) -> Any:
        return part if isinstance(part, Split) else _Fused(place, part, tracer)

    with replaced(model, stand_in), executable.observed(tracer.observe):
        yield


class _Tracer:
    """Knows which part runs now, forward or backward."""

    def __init__(self, see: See, covered: dict[tuple[Place, str, int], Step]) -> None:
        self.see, self.covered = see, covered
        self.running: list[tuple[Place, int]] = []
        self.calls: Counter[Place] = Counter()

    def observe(self, direction: str, step: Step) -> Callable[..., Any]:
        place, call = self.running[-1]
        self.covered.update(((place, direction, node.outs[0]), step) for node in step.nodes)
        return self._forward(place, call, step) if direction == "forward" else self._backward(place, call, step)

    def _forward(self, place: Place, call: int, step: Step) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = step.function(*arguments)
            for value, tensor in zip(step.makes, result.values, strict=True):
                self.see(Key(place, call, "value", value), tensor, step)
            plain = [t for t in (*arguments, *result.values) if isinstance(t, Tensor)]
            for slot, node in step.recorded:
                record = result.records.get(slot, ())
                for field, tensor in _fields(record) if record else ():
                    if not any(tensor is other for other in plain):
                        self.see(Key(place, call, "record", node.outs[0], field), tensor, step)
            return result

        return run

    def _backward(self, place: Place, call: int, step: Step) -> Callable[..., Any]:
        num_records = len(step.slots) if step.rule else 1

        def run(*arguments: Any, **into: Any) -> Any:
            for value, gradient in zip(step.arrives, arguments[num_records:], strict=False):  # behind come parameters
                if value is not None and gradient is not None:
                    self.see(Key(place, call, "gradient", value), gradient, step)
            return step.function(*arguments, **into)

        return run


class _Fused:
    """Stands in for a chain."""

    def __init__(self, place: Place, fuser: OperationFuser, tracer: _Tracer) -> None:
        self.place, self.fuser, self.tracer = place, fuser, tracer
        self.chain = fuser.chain

    def __call__(self, inputs: tuple[Tensor, ...], rules: Any) -> tuple[Tensor, ...] | None:
        found, _, _ = self.fuser.find(inputs, rules)
        if found is None:
            return None
        tracer = self.tracer
        tracer.calls[self.place] += 1
        at = self.place, tracer.calls[self.place]
        for value, tensor in zip(found.plan.inputs, inputs, strict=False):
            tracer.see(Key(*at, "value", value), tensor.detach(), None)
        tracer.running.append(at)
        try:
            outs = self.fuser(inputs, rules)
        finally:
            tracer.running.pop()
        entering = dict.fromkeys(value for value in found.plan.inputs if value in found.plan.wanted)
        for node in nodes_of(outs or (), inputs):
            self._watch(node, entering, at)
        return outs

    def _watch(self, node: Any, entering: dict[int, Tensor | None], at: tuple[Place, int]) -> None:
        """Lets the tracer know when this node's backward runs, and see the gradients that leave it.

        Args:
            entering: the gradients of the chain's inputs and parameters so far, which several nodes may add to.
        """
        tracer = self.tracer
        run: Executable = node.call[0]

        def end(gradients: tuple[Tensor | None, ...], _: Any) -> None:
            tracer.running.pop()
            for place, gradient in zip(run.wanted, gradients[-len(run.wanted) :], strict=True):
                value = run.plan.inputs[place]
                if gradient is not None and value in entering:
                    before = entering[value]
                    entering[value] = total = gradient if before is None else before + gradient
                    tracer.see(Key(*at, "gradient", value), total, None)

        node.register_prehook(lambda gradients: tracer.running.append(at))
        node.register_hook(end)
