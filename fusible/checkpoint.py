"""A run of a chain that keeps its input alone: backward computes it again with its records, and differentiates."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from fusible.chain import Node
from fusible.executable import Executable
from fusible.infer import Specs
from fusible.op import Grads, Op, Out, Spec
from fusible.op import Saved as Record

__all__ = ["Checkpoint", "checkpoint_of"]

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


class Checkpoint(Op):
    """Several ops as one, which keeps their input: [..., i] -> [..., o]. Borrows their parameters.

    Forward runs a plan of its own that keeps nothing. Backward runs another with all records, and then its backward.
    Its ops draw no random numbers (`Op.repeats`), so that both give the same numbers, within rounding.
    """

    class Saved(Record):
        x: Tensor

    def __init__(
        self,
        nodes: tuple[Node, ...],
        sources: Sequence[tuple[dict[str, Any], str]],
        ahead: Executable,
        again: Executable,
    ) -> None:
        super().__init__()
        self.nodes = nodes  # in a tuple, so that they do not become submodules
        self.borrowed = list(sources)
        self.ahead = ahead
        self.again = again

    def sources(self) -> list[tuple[dict[str, Any], str]]:
        return self.borrowed

    def option_sources(self) -> list[tuple[dict[str, Any], str]]:
        """Every plain attribute of its ops: what forward read of them, backward reads again."""
        return [(node.op.__dict__, name) for node in self.nodes for name in _options(node.op)]

    def reference(self, x: Tensor, *params: Tensor) -> Tensor:
        given = {(id(owner), name): p for (owner, name), p in zip(self.borrowed, params, strict=True)}
        values: dict[int | None, Any] = {None: None, self.nodes[0].ins[0]: x}
        for node in self.nodes:
            own = [given[id(owner), name] for owner, name in node.op.sources()]
            outs = node.op.reference(*[values[value] for value in node.ins], *own)
            values.update(zip(node.outs, outs if isinstance(outs, tuple) else (outs,), strict=True))
        return values[self.nodes[-1].outs[0]]

    def fwd(self, x: Tensor, *params: Tensor) -> Out:
        (y,), _ = self.ahead.run([x, *params])
        return Out(y, saved=Checkpoint.Saved(x))

    def bwd(self, saved: Any, dy: Tensor, *params: Tensor) -> Grads:
        again, flat = self.again, [saved.x, *params]
        records = again.run(flat)[1]
        gradients = again.backward((True,), (dy,), records, [flat[place] for place in again.read])
        found = dict(zip(again.wanted, gradients, strict=True))
        names = type(self).signature.params
        return Grads(found.get(0), **{name: found.get(place) for place, name in enumerate(names, 1)})

    def infer(self, x: Spec, *, autocast: Any = None) -> Spec:
        specs: Any = Specs(self.nodes, autocast).propagate({self.nodes[0].ins[0]: x})  # type: ignore[dict-item]
        return specs[self.nodes[-1].outs[0]]


def _options(op: Op) -> list[str]:
    plain = (bool, int, float, str, tuple, type(None))
    return [name for name, value in op.__dict__.items()
            if isinstance(value, plain) and not name.startswith("_") and name != "training"]  # fmt: skip


@cache
def _kind(count: int) -> type[Checkpoint]:
    """The class of checkpoints with this many parameters, whose methods say so as those of any op do."""
    names = [f"p{place}" for place in range(count)]

    def reference(self: Checkpoint, x: Tensor, *params: Tensor) -> Tensor:
        return Checkpoint.reference(self, x, *params)

    def fwd(self: Checkpoint, x: Tensor, *params: Tensor) -> Out:
        return Checkpoint.fwd(self, x, *params)

    def bwd(self: Checkpoint, saved: Any, dy: Tensor, *params: Tensor) -> Grads:
        return Checkpoint.bwd(self, saved, dy, *params)

    methods: dict[str, Any] = {}
    function: Any
    for function, first in ((reference, ("self", "x")), (fwd, ("self", "x")), (bwd, ("self", "saved", "dy"))):
        arguments = [inspect.Parameter(name, _POSITIONAL) for name in (*first, *names)]
        function.__signature__ = inspect.Signature(arguments)
        methods[function.__name__] = function
    return type("Checkpoint", (Checkpoint,), {**methods, "__module__": __name__})


def checkpoint_of(
    nodes: tuple[Node, ...], sources: Sequence[tuple[dict[str, Any], str]], ahead: Executable, again: Executable
) -> Node:
    """The node that stands for a run. `ahead` runs it without records, `again` with them and backwards."""
    op = _kind(len(sources))(nodes, sources, ahead, again)
    first, last = nodes[0].path, nodes[-1].path
    path = first if first == last else f"{first}-{last}"
    return Node(op, path, f"Checkpoint (op {path})", (nodes[0].ins[0],), (nodes[-1].outs[0],))
