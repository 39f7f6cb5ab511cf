"""What a plan is: the steps of both passes for one kind of call, and what is kept between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fusible.chain import Chain, Node
from fusible.op import Env, bwd_reads
from fusible.rule import Miss, Rule, RuleSet

__all__ = ["Call", "Cut", "Plan", "Step", "params_read_by"]


class Call(NamedTuple):
    """What a plan is made for: the tensors of one call, and the modes around it. A plan keeps none of the tensors."""

    inputs: tuple[torch.Tensor, ...]
    params: tuple[torch.Tensor | None, ...]
    rules: RuleSet
    grad_enabled: bool
    autocast: torch.dtype | None
    backend: str | None
    recipe: Any = None

    def wants_grad(self, tensor: torch.Tensor | None) -> bool:
        return self.grad_enabled and tensor is not None and tensor.requires_grad


@dataclass(frozen=True, eq=False)
class Step:
    """A run of neighbouring ops that one function covers in one pass: a rule, or an op's own `fwd` or `bwd`."""

    nodes: tuple[Node, ...]
    rule: Rule | None
    slots: tuple[Node | None, ...]
    env: Env
    function: Callable[..., Any]
    takes_into: bool = False  # whether it adds gradients of parameters to buffers that it is given

    @property
    def name(self) -> str:
        return self.rule.name if self.rule else type(self.nodes[0].op).__name__

    @property
    def ops(self) -> str:
        """The ops by path and type, as `explain` shows them."""
        return ", ".join(f"{node.path} {type(node.op).__name__}" for node in self.nodes)

    @property
    def makes(self) -> list[int]:
        """The values that a forward step makes: the stream, then the extra outputs in order."""
        return [self.nodes[-1].outs[0], *(value for node in self.nodes for value in node.outs[1:])]

    @property
    def arrives(self) -> list[int | None]:
        """The values whose gradients a backward step takes behind its records, `None` where a slot is absent."""
        if self.rule is None:
            return list(self.nodes[0].outs)
        result: list[int | None] = [self.nodes[-1].outs[0]]
        for slot, node in zip(self.rule.slots, self.slots, strict=True):
            own: list[int | None] = list(node.outs[1:]) if node else []
            result += own + [None] * (slot.num_outputs - len(own))
        return result

    @property
    def recorded(self) -> list[tuple[str, Node]]:
        """(name of its record, node) of each op that is there."""
        if self.rule is None:
            return [("saved", self.nodes[0])]
        return [(slot.name, node) for slot, node in zip(self.rule.slots, self.slots, strict=True) if node is not None]

    def __str__(self) -> str:
        ops = ", ".join(str(node) for node in self.nodes)
        return f"rule {self.rule.name} on {ops}" if self.rule else ops


class Cut(NamedTuple):
    """A place between two autograd nodes: the first op behind it, the values that cross it, and where forward has each.

    A forward step may cover ops on both sides and make a value under the number that it has behind a `MakeExtraOutput`.
    """

    start: int
    values: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(eq=False)
class Plan:
    """The steps of both passes for one kind of call, chosen once.

    Values are numbered as in the chain; each parameter is a value too. `resolved` maps a value to the one that it is
    when ops that do nothing are skipped.
    """

    chain: Chain
    call_rules: RuleSet
    recipe: Any
    autocast: torch.dtype | None
    device: torch.device
    nodes: tuple[Node, ...] = ()
    skipped: tuple[Node, ...] = ()
    params: dict[int, tuple[int, ...]] = field(default_factory=dict)  # per node index: values of its parameters
    inputs: tuple[int, ...] = ()  # values of the inputs, then of the parameters
    outputs: tuple[int, ...] = ()
    specs: dict[int, Any] = field(default_factory=dict)
    varying: frozenset[int] = frozenset()  # values whose last dimension differs between calls of this plan
    wanted: frozenset[int] = frozenset()  # values whose gradient is wanted
    kept: dict[int, tuple[str, ...]] = field(default_factory=dict)  # per node index: record fields kept for backward
    read: tuple[int, ...] = ()  # parameter values that backward reads
    accumulated: frozenset[int] = frozenset()  # parameter values whose gradient is added to their main_grad
    forward_steps: tuple[Step, ...] = ()
    backward_steps: tuple[Step, ...] = ()  # in chain order; they run from the last to the first
    op_by_op: dict[Step, tuple[Step, ...]] = field(default_factory=dict)  # for rules whose gradients may not all arrive
    dtypes: dict[int, torch.dtype | None] = field(default_factory=dict)  # per value, None where unknown
    cuts: tuple[Cut, ...] = ()  # places at which a long chain becomes several autograd nodes
    rewritten: tuple[str, ...] = ()
    misses: tuple[tuple[str, Miss, tuple[Node, ...]], ...] = ()

    def index(self, node: Node) -> int:
        return self._index[id(node)]

    def finish(self) -> None:
        """Indexes the nodes; again after they were changed."""
        self._index = {id(node): index for index, node in enumerate(self.nodes)}

    def gradients(self, node: Node) -> list[tuple[str, int | None]]:
        """The names of a node's gradients, each with the value it belongs to."""
        values = (*node.ins, *self.params[self.index(node)])
        return list(zip(type(node.op).signature.gradients, values, strict=True))

    def needs(self, node: Node) -> frozenset[str]:
        """The names of the gradients of a node that are wanted."""
        return frozenset(name for name, value in self.gradients(node) if value in self.wanted)

    @property
    def crossing(self) -> tuple[int, ...]:
        """The values that go from one autograd node of this plan to another."""
        return tuple(self._crossing())

    @property
    def crossing_sources(self) -> tuple[int, ...]:
        """For each value of `crossing`: the one that forward has in its place."""
        return tuple(self._crossing().values())

    def _crossing(self) -> dict[int, int]:
        return {value: source for cut in self.cuts for value, source in zip(cut.values, cut.sources, strict=True)}

    @property
    def live(self) -> list[Node]:
        """The nodes that need a backward."""
        return [node for node in self.nodes if self.needs(node)]

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """For each output: whether it depends on something whose gradient is wanted."""
        return tuple(value in self.wanted for value in self.outputs)


def params_read_by(plan: Plan, step: Step) -> list[tuple[int, int]]:
    """(value, position among the step's parameter arguments) of the parameters that a backward step reads."""
    result = []
    if step.rule is None:
        only = step.nodes[0]
        needs = plan.needs(only)
        kind: Any = type(only.op)
        readers = list(bwd_reads(kind).values())
        for position, (value, grads) in enumerate(zip(plan.params[plan.index(only)], readers, strict=True)):
            if grads is None or grads & needs:
                result.append((value, position))
        return result
    readers = list(step.rule.param_reads())
    position = 0
    for slot, node in zip(step.rule.slots, step.slots, strict=True):
        values = plan.params[plan.index(node)] if node else ()
        for offset, value in enumerate(values):
            grads = readers[position + offset]
            if grads is None or any(name in step.env.needs for name in grads):
                result.append((value, position + offset))
        position += slot.num_params
    return result
