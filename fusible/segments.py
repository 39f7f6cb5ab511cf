"""Long chains become several autograd nodes, so that gradients of parameters leave while backward goes on.

A node hands its gradients to autograd when it ends. One node for a whole model would hold every gradient until then,
and hide them from those who wait for each: data parallel hooks that overlap communication with what is left of
backward, optimizers that step inside it. So a plan is cut between residual branches, where the stream alone crosses, or
the stream and its normalised copy. Forward is not cut: it runs as a whole, and the nodes are put behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusible.chain import Node
from fusible.plan import Cut, Plan, Step, params_read_by

__all__ = ["SEGMENT_BYTES", "find_cuts", "segments"]

#: A node is cut off when the gradients of its parameters take so much; a node costs about 20 us of host time.
SEGMENT_BYTES = 4 << 20


def find_cuts(plan: Plan, sizes: dict[int, int]) -> tuple[Cut, ...]:
    """Where to cut a plan; `sizes` holds the bytes of each parameter's gradient that is wanted."""
    inside = {at for step in plan.backward_steps for at in _inside(plan, step)}
    made = {value: at for at, node in enumerate(plan.nodes) for value in node.outs}
    read = {value: at for at, node in enumerate(plan.nodes) for value in node.ins if value is not None}
    left = sum(sizes.values())
    cuts: list[Cut] = []
    seen: set[int] = set()
    held = 0
    for at, node in enumerate(plan.nodes[:-1]):
        fresh = set(plan.params[at]) - seen
        seen |= fresh
        held += sum(sizes.get(value, 0) for value in fresh)
        if held < SEGMENT_BYTES or left - held < SEGMENT_BYTES or at in inside:
            continue
        crossing = tuple(value for value, maker in made.items() if maker <= at < read.get(value, -1))
        sources = tuple(_source(plan, value) for value in crossing)
        if None not in sources and _between_branches(node, crossing, plan.nodes, made):
            cuts.append(Cut(at + 1, crossing, sources))  # type: ignore[arg-type]
            left, held = left - held, 0
    return tuple(cuts)


def _source(plan: Plan, value: int) -> int | None:
    """The value that forward has in this one's place: itself, or what an op behind it that hands it on makes."""
    if any(value in step.makes for step in plan.forward_steps):
        return value
    behind = [out for node in plan.nodes if node.op.hands_on and node.ins[0] == value for out in node.outs]
    return next((source for out in behind if (source := _source(plan, out)) is not None), None)


def _inside(plan: Plan, step: Step) -> range:
    """The places behind which a cut would go through the step."""
    at = [plan.index(node) for node in step.nodes]
    return range(min(at), max(at))


def _between_branches(node: Node, crossing: Sequence[int], nodes: Sequence[Node], made: dict[int, int]) -> bool:
    """Whether the stream alone crosses behind `node`, or what a branch starts with beside its first op's result."""
    stream = node.outs[0]
    if stream not in crossing or len(crossing) > 2:
        return False
    if len(crossing) == 1:
        return True
    source = node.ins[0]
    (other,) = set(crossing) - {stream}
    return other == source or (source in made and other in nodes[made[source]].outs)


def segments(plan: Plan) -> list[Plan]:
    """The plan of each node, in chain order: the ops between two cuts, with what enters and leaves there."""
    starts = [0, *(cut.start for cut in plan.cuts)]
    stops = [*starts[1:], len(plan.nodes)]
    passed = [value for value in plan.outputs if value in plan.inputs]  # as the caller gave them
    parts = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        crossing = plan.cuts[number].values if number < len(plan.cuts) else ()
        made = {value for node in plan.nodes[start:stop] for value in node.outs}
        outputs = [value for value in plan.outputs if value in made or (value in passed and not start)]
        crossing = tuple(value for value in crossing if value in made)
        parts.append(_segment(plan, start, stop, (*outputs, *crossing)))
    return parts


def _segment(plan: Plan, start: int, stop: int, outputs: tuple[int, ...]) -> Plan:
    nodes = plan.nodes[start:stop]
    made = {value for node in nodes for value in node.outs}
    params = {at - start: plan.params[at] for at in range(start, stop)}
    taken = dict.fromkeys(v for node in nodes for v in node.ins if v is not None and v not in made)
    taken.update(dict.fromkeys(value for value in outputs if value not in made))
    used = dict.fromkeys(value for values in params.values() for value in values)
    steps = tuple(step for step in plan.backward_steps if start <= plan.index(step.nodes[0]) < stop)
    by_ops = {step: plan.op_by_op[step] for step in steps if step in plan.op_by_op}
    parts = [part for step in steps for part in (step, *by_ops.get(step, ()))]
    read = {value for part in parts for value, _ in params_read_by(plan, part)}
    segment = replace(
        plan,
        nodes=nodes,
        params=params,
        inputs=(*taken, *[value for value in used if value not in taken]),
        outputs=outputs,
        kept={at - start: plan.kept[at] for at in range(start, stop) if at in plan.kept},
        read=tuple(value for value in plan.read if value in read),
        forward_steps=(),
        backward_steps=steps,
        op_by_op=by_ops,
        cuts=(),
    )
    segment.finish()
    return segment


def num_inputs(plan: Plan, segment: Plan) -> int:
    """How many of a segment's inputs are no parameters: what enters it, and inputs of the block."""
    params = {value for values in plan.params.values() for value in values}
    return len([value for value in segment.inputs if value not in params])
