"""What backward could compute again instead of keeping: each possible place, its bytes saved and its time spent.

A rule that forgets a record field or rewrites a run is one kind of option; the other is a run of ops that is run again
as a whole, from its input alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fusible import calibration
from fusible.calibration import Calibration
from fusible.chain import Node
from fusible.costs import Cost, Ran, Work, predict, watched
from fusible.dry_run import without_data
from fusible.footprint import Footprint
from fusible.op import Op, has_kernels
from fusible.ops import BasicLinear
from fusible.plan import Call, Choice, Plan, Step, remembers
from fusible.planner import own_step, refusals
from fusible.rule import BACKWARD, Rule, lay
from fusible.rules import activation_linear_recompute, gated_mlp, norm_linear_recompute

__all__ = ["Option", "options", "repeats", "show_run"]

#: The rules that compute again instead of keeping.
RULES: tuple[Rule, ...] = (activation_linear_recompute, norm_linear_recompute, gated_mlp)
#: The least share of what is kept that an option is worth its place for.
LEAST = 1e-3
#: A nominal machine, by which options are ranked where this one is not calibrated.
BYTES_RATE = 1e10
NOMINAL = Calibration({}, "", ((1, BYTES_RATE),), ((1, BYTES_RATE / 2),), {"float32": ((1, 1e11),)}, {}, 5e-6)


class Option(NamedTuple):
    """One recomputation at its place: `nodes[start:stop]` of the plan that it would change."""

    choice: Choice
    start: int
    stop: int
    saves: int  # bytes
    seconds: float
    product: bool  # whether a matrix product is computed again

    @property
    def name(self) -> str:
        return self.choice.rule.name if self.choice.rule else "checkpoint"

    def describe(self, run: Sequence[Node]) -> str:
        """`0.1 Bias, 0.2 GELU, 0.3 BasicLinear by activation_linear_recompute, no matrix product`."""
        ops = show_run(run)
        how = f"by {self.name}" if self.choice.rule else "as one checkpoint"
        return f"{ops} {how}, {'with matrix products' if self.product else 'no matrix product'}"


def show_run(run: Sequence[Node]) -> str:
    """The ops of a run, by path and name; of a long one the first and the last."""
    ops = [f"{node.path} {type(node.op).__name__}" for node in run]
    return ", ".join(ops) if len(ops) < 5 else f"{ops[0]} to {ops[-1]} ({len(ops)} ops)"


def options(plan: Plan, call: Call, found: Footprint) -> list[Option]:
    """Every recomputation that would save something, with the bytes and seconds that it would take by itself.

    `found` is the footprint of `plan`, made for `call` and with no recomputation by choice.
    """
    costs = _costs(plan, call)
    result = [*_by_rules(plan, call, found, costs), *_by_checkpoints(plan, found, costs)]
    return [option for option in result if option.saves > LEAST * found.kept]


def _by_rules(plan: Plan, call: Call, found: Footprint, costs: Sequence[float]) -> Iterator[Option]:
    ops = [node.op for node in plan.nodes]
    for rule in RULES:
        if rule in call.rules:
            continue  # it is applied wherever it can be
        for at in range(len(ops)):
            match = lay(rule, ops, at)
            if match is None:
                continue
            start, stop = match.start, match.stop
            run = plan.nodes[start:stop]
            if not all(plan.needs(node) for node in run) or refusals(plan, call, match):
                continue
            if rule.direction == BACKWARD:  # it makes again what the op before made
                places: Any = dict(zip([slot.name for slot in rule.slots], match.places, strict=True))
                forgotten = {(places[slot], name) for slot, name in rule.forgets}
                saves = _saved_by_fields(found, forgotten)
                seconds = sum(costs[place - 1] for place, _ in forgotten) + _torn(
                    plan, plan.backward_steps, start, stop
                )
                yield Option(_choice(rule, run), start, stop, saves, seconds, False)
            else:  # the last layer's result is not needed again
                saves, seconds = _saved_by_run(plan, found, start, stop), sum(costs[start : stop - 1])
                yield Option(_choice(rule, run), start, stop, saves, seconds, True)


def _choice(rule: Rule | None, run: Sequence[Node]) -> Choice:
    return Choice(rule, run[0].ins[0], run[-1].outs[0])  # type: ignore[arg-type]


def _saved_by_fields(found: Footprint, forgotten: set[tuple[Any, str]]) -> int:
    """Bytes that only these record fields hold."""
    return sum(memory.bytes for memory in found.memories.values() if forgotten.issuperset(memory.holders))


def _saved_by_run(plan: Plan, found: Footprint, start: int, stop: int) -> int:
    """Bytes that only the records of a run hold, less those of its input, if nothing else holds that."""
    inside = range(start, stop)
    saves = sum(memory.bytes for memory in found.memories.values()
                if all(index in inside for index, _ in memory.holders))  # fmt: skip
    for step in plan.backward_steps:  # rules that no longer apply keep what they forgot
        if any(start <= plan.index(node) < stop for node in step.nodes):
            outside = [node for node in _forgetful(step) if not start <= plan.index(node) < stop]
            saves -= sum([_bytes(_stream(plan, node)) for node in outside])
    enters: Any = plan.nodes[start].ins[0]
    memory = found.places.get(enters)
    if memory in [found.places[value] for value in plan.inputs if value in found.places]:
        return saves
    holder = found.memories.get(memory) if memory is not None else None
    if holder is not None and not all(index in inside for index, _ in holder.holders):
        return saves
    return saves - _bytes(plan.specs[enters])


def _forgetful(step: Step) -> list[Node]:
    """The nodes whose record a backward step does not need whole."""
    if step.rule is None:
        return []
    named = {slot.name: node for slot, node in zip(step.rule.slots, step.slots, strict=True)}
    return [node for name, _ in step.rule.forgets if (node := named[name]) is not None]


def _by_checkpoints(plan: Plan, found: Footprint, costs: Sequence[float]) -> Iterator[Option]:
    """The runs of ops between two values of the stream that nothing else enters or leaves.

    One that saves no more than it would without its first or its last op is left out.
    """
    runs = {run: _saved_by_run(plan, found, *run) for run in _closed_runs(plan)}
    for (start, stop), saves in runs.items():
        if saves > max(runs.get((start + 1, stop), 0), runs.get((start, stop - 1), 0)):
            until = _needed_again(plan, start, stop)
            product = any(type(node.op) is BasicLinear for node in plan.nodes[start:until])
            steps = (*plan.forward_steps, *plan.backward_steps)
            seconds = sum(costs[start:until]) + _torn(plan, steps, start, stop)
            yield Option(_choice(None, plan.nodes[start:stop]), start, stop, saves, seconds, product)


def _torn(plan: Plan, steps: Iterable[Step], start: int, stop: int) -> float:
    """Seconds lost because rules no longer reach over the ends of a run: what crosses is written and read again."""
    moved = 0
    for step in steps:
        places = [plan.index(node) for node in step.nodes]
        for end in (start, stop):
            if places[0] < end <= places[-1]:
                moved += 2 * _bytes(_stream(plan, plan.nodes[end]))
    return moved / BYTES_RATE


def repeats(kind: type[Op]) -> bool:
    """Whether an op may be computed again; one from outside of the library must say so itself, not by inheritance."""
    own = kind.__module__.startswith("fusible.") or "repeats" in kind.__dict__
    return kind.repeats and own and has_kernels(kind)


def _needed_again(plan: Plan, start: int, stop: int) -> int:
    """Where the part of a run ends that must be computed again for its records."""
    while stop > start:
        node = plan.nodes[stop - 1]
        if plan.kept.get(plan.index(node)):
            return stop - 1 if remembers(node.op) else stop
        stop -= 1
    return stop


def _closed_runs(plan: Plan) -> Iterator[tuple[int, int]]:
    """(start, stop) of the runs of ops that can be computed again and meet the others in the stream alone."""
    forever = len(plan.nodes)
    last_use = {value: index for index, node in enumerate(plan.nodes) for value in node.ins if value is not None}
    last_use.update(dict.fromkeys(plan.outputs, forever))
    again = [repeats(type(node.op)) and not node.op.accumulate_into_main_grad
             and plan.specs.get(node.outs[0]) is not None for node in plan.nodes]  # fmt: skip
    for start in range(len(plan.nodes)):
        enters = plan.nodes[start].ins[0]
        made: set[Any] = {enters}
        until = 0  # the last op that reads what the run makes, its result aside
        for index in range(start, len(plan.nodes)):
            node = plan.nodes[index]
            if not again[index] or not made.issuperset(value for value in node.ins if value is not None):
                break
            leaves, *extras = node.outs
            until = max([until, *[last_use.get(value, 0) for value in extras]])
            if until <= index and leaves in plan.wanted:
                yield start, index + 1
            until = max(until, last_use.get(leaves, 0))
            made.update(node.outs)


def _costs(plan: Plan, call: Call) -> list[float]:
    """Predicted seconds of each op's forward by itself."""
    machine = calibration.find()[0] or NOMINAL
    given = dict(zip(plan.inputs, (*call.inputs, *call.params), strict=True))
    return [predict(_cost(plan, call, node, given), machine) for node in plan.nodes]


def _cost(plan: Plan, call: Call, node: Node, given: dict[int, Any]) -> Cost:
    ran: list[Ran] = []
    specs = [None if value is None else plan.specs.get(value) for value in node.ins]
    params = [given[value] for value in plan.params[plan.index(node)]]
    try:
        tensors = [None if like is None else without_data(like) for like in (*specs, *params)]
        with torch.no_grad():
            watched(own_step(plan, call, node).function, plan.device.type, ran.append)(*tensors)
    except Exception:  # it needs data
        sizes = [_bytes(spec) for spec in specs if spec]
        return Cost(sum(sizes), sum(sizes), 0, (Work("", "torch", plan.specs[0].dtype, sum(sizes), sum(sizes), 0),))
    return ran[0].cost


def _stream(plan: Plan, node: Node) -> Any:
    """The spec of the stream where it enters a node."""
    return plan.specs[node.ins[0]]  # type: ignore[index]


def _bytes(spec: Any) -> int:
    return prod(spec.shape) * int(spec.dtype.itemsize)
