"""What to compute again in backward so that a block keeps no more than its memory budget allows.

Each rule that computes instead of keeping, and each run of ops that can run twice, is an option at its place in the
chain: so many bytes saved, so much time spent. The cheapest set of options that meets the budget is found exactly, by
dynamic programming over the chain, under the assumption that savings add up; the plan that results is then measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from fusible.chain import Chain, Node
from fusible.footprint import Footprint, measure
from fusible.infer import Specs
from fusible.op import Op, repeats
from fusible.ops import BasicLinear
from fusible.plan import Call, Choice, Plan, Step
from fusible.planner import Like, make_plan, refusals
from fusible.rule import BACKWARD, Rule, RuleSet, lay
from fusible.rules import NONE, activation_linear_recompute, gated_mlp, norm_linear_recompute

__all__ = ["Met", "Option", "Within", "options", "plan_within"]

#: The rules that compute again instead of keeping.
RULES: tuple[Rule, ...] = (activation_linear_recompute, norm_linear_recompute, gated_mlp)
#: Rows by which a fraction is decided, so that the plan does not depend on those of the call.
ROWS = 4096
#: Most points of (bytes, time) that are followed along the chain, and most plans tried for one budget.
MAX_POINTS = 256
MAX_TRIES = 6
#: A nominal machine, until it is calibrated: bytes moved and operations of a matrix product per second.
BYTES_RATE, FLOPS_RATE = 1e10, 1e11


class Within(RuleSet):
    """Rules, and how much may be kept for backward: a fraction of what is kept with no rules, or bytes.

    Bytes depend on the number of rows, so there each plan is made for a class of them: eight classes between a power of
    two and the next, named after the largest number of rows that is in it.
    """

    budget: float | int
    rows: int | None

    def __new__(cls, rules: Iterable[Rule], budget: float | int, rows: int | None = None) -> Within:
        self = tuple.__new__(cls, RuleSet(rules))
        self.budget = checked(budget)
        self.rows = rows
        return self

    def at(self, rows: int) -> Within:
        if isinstance(self.budget, float):
            return self
        step = 1 << max(0, rows.bit_length() - 4)
        return Within(self, self.budget, -(-rows // step) * step)

    def _key(self) -> tuple:
        return tuple(self), self.budget, self.rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Within) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return Within, (tuple(self), self.budget, self.rows)

    def __repr__(self) -> str:
        return f"Within({RuleSet(self)!r}, {self.budget})"


def checked(budget: Any) -> float | int:
    """A `memory_budget`. Raises `TypeError` and `ValueError` on what is none."""
    text = "memory_budget must be a fraction up to 1, as 0.5, or a number of bytes, as 200 * 2**20"
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{text}, got {budget!r} ({type(budget).__name__})")
    if isinstance(budget, int) and budget <= 1:
        raise ValueError(f"{text}, got {budget!r}; write {float(budget)} for a fraction")
    if isinstance(budget, float) and not 0 <= budget <= 1:
        raise ValueError(f"{text}, got {budget!r}; bytes must be an int")
    return budget


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
        return self.choice.rule.name if self.choice.rule else "segment"


class Met(NamedTuple):
    """How a budget is met: bytes kept unfused, without recomputation, and as planned, for rows or for as many as stand
    for any number."""

    budget: float | int
    rows: int | None
    unfused: int
    without: int
    kept: int
    chosen: tuple[Option, ...]
    runs: tuple[tuple[Node, ...], ...]  # the nodes of each chosen option


# -- options -----------------------------------------------------------------------------------------------------------


def options(plan: Plan, call: Call, found: Footprint) -> list[Option]:
    """Every recomputation that would save something, with the bytes and seconds that it would take by itself.

    `found` is the footprint of `plan`, made for `call` and with no recomputation by choice.
    """
    costs = [_seconds(node, plan) for node in plan.nodes]
    result = [*_by_rules(plan, call, found, costs), *_by_segments(plan, found, costs)]
    return [option for option in result if option.saves > 0]


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
            choice, seconds = _choice(rule, run), sum(costs[start : stop - 1])  # the last layer's result is not needed
            if rule.direction == BACKWARD:
                places = dict(zip([slot.name for slot in rule.slots], match.places, strict=True))
                forgotten = {(places[slot], name) for slot, name in rule.forgets}
                yield Option(choice, start, stop, _saved_by_fields(found, forgotten), seconds, False)
            else:
                yield Option(choice, start, stop, _saved_by_run(plan, found, start, stop), seconds, True)


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
            saves -= sum(_bytes(plan.specs[node.ins[0]]) for node in _forgetful(step)
                         if not start <= plan.index(node) < stop)  # fmt: skip
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


def _by_segments(plan: Plan, found: Footprint, costs: Sequence[float]) -> Iterator[Option]:
    """The runs of ops between two values of the stream that nothing else enters or leaves.

    One that saves no more than it would without its first or its last op is left out.
    """
    runs = {run: _saved_by_run(plan, found, *run) for run in _closed_runs(plan)}
    for (start, stop), saves in runs.items():
        if saves > max(runs.get((start + 1, stop), 0), runs.get((start, stop - 1), 0)):
            until = _needed_again(plan, start, stop)
            product = any(type(node.op) is BasicLinear for node in plan.nodes[start:until])
            yield Option(_choice(None, plan.nodes[start:stop]), start, stop, saves, sum(costs[start:until]), product)


def _needed_again(plan: Plan, start: int, stop: int) -> int:
    """Where the part of a run ends that must be computed again for its records."""
    while stop > start:
        op = plan.nodes[stop - 1].op
        if type(op).remember is not Op.remember:
            return stop - 1
        if type(op).Saved.fields:
            break
        stop -= 1
    return stop


def _closed_runs(plan: Plan) -> Iterator[tuple[int, int]]:
    """(start, stop) of the runs of ops that can be computed again and meet the others in the stream alone."""
    forever = len(plan.nodes)
    last_use = {value: index for index, node in enumerate(plan.nodes) for value in node.ins if value is not None}
    last_use.update(dict.fromkeys(plan.outputs, forever))
    again = [repeats(type(node.op)) and bool(plan.needs(node)) and plan.specs.get(node.outs[0]) is not None
             for node in plan.nodes]  # fmt: skip
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


def _seconds(node: Node, plan: Plan) -> float:
    """The time of one op's forward on a nominal machine."""
    specs = [plan.specs.get(value) for value in (*node.ins, *node.outs) if value is not None]
    moved = sum(_bytes(spec) for spec in specs if spec)
    flops = 0
    if type(node.op) is BasicLinear and specs[0] is not None:
        flops = 2 * prod(specs[0].shape) * node.op.sources()[0][0]["weight"].shape[0]
    return moved / BYTES_RATE + flops / FLOPS_RATE


def _bytes(spec: Any) -> int:
    return prod(spec.shape) * spec.dtype.itemsize


# -- choosing ----------------------------------------------------------------------------------------------------------


class _Point(NamedTuple):
    """Options chosen so far along the chain, as a linked list."""

    saves: int
    seconds: float
    option: Option | None = None
    before: Any = None

    def chosen(self) -> tuple[Option, ...]:
        own = (self.option,) if self.option else ()
        return (*(self.before.chosen() if self.before else ()), *own)


def _fronts(count: int, offered: Sequence[Option]) -> list[_Point]:
    """The sets of options that do not overlap and that none beats in both bytes and time, fewest bytes first."""
    fronts = [[_Point(0, 0.0)]]
    for stop in range(1, count + 1):
        points = list(fronts[-1])
        for option in offered:
            if option.stop == stop:
                points += [_Point(p.saves + option.saves, p.seconds + option.seconds, option, p)
                           for p in fronts[option.start]]  # fmt: skip
        fronts.append(_undominated(points))
    return fronts[-1]


def _undominated(points: list[_Point]) -> list[_Point]:
    points.sort(key=lambda p: (-p.saves, p.seconds))
    best: list[_Point] = []
    for point in points:
        if not best or point.seconds < best[-1].seconds:
            best.append(point)
    best.reverse()
    if len(best) > MAX_POINTS:
        best = [best[i * (len(best) - 1) // (MAX_POINTS - 1)] for i in range(MAX_POINTS)]
    return best


def plan_within(chain: Chain, sources: Sequence[tuple[dict, str]], call: Call, alone: bool) -> Plan:
    """The plan that keeps no more than `call.rules`, a `Within`, allows, at the least predicted cost.

    Recomputations that compute no matrix product again come first: others are looked at only where those do not meet
    the budget. Raises `ValueError` if nothing does, and where an op's shapes cannot be told before it runs. A chain that is
    not `alone` in its block is let off where nothing in it can be computed again.
    """
    return _Search(chain, sources, call, alone).plan()


class _Search:
    """The search for one plan."""

    def __init__(self, chain: Chain, sources: Sequence[tuple[dict, str]], call: Call, alone: bool) -> None:
        self.chain = chain
        self.alone = alone
        self.sources = sources
        self.call = call._replace(rules=RuleSet(call.rules))
        self.budget: Any = call.rules.budget
        self.rows: int | None = call.rules.rows  # type: ignore[attr-defined]
        self.sized = self.call._replace(inputs=sized(chain, call, self.rows or ROWS))
        self.tried: dict[tuple[Choice, ...], Footprint] = {}

    def plan(self) -> Plan:
        base = make_plan(self.chain, self.sources, self.sized)
        if not any(base.differentiable):
            return make_plan(self.chain, self.sources, self.call)
        found, unfused = self._footprint(()), self._unfused()
        allowed = int(self.budget * unfused) if isinstance(self.budget, float) else self.budget
        chosen: tuple[Option, ...] = ()
        if found.kept > allowed:
            offered = options(base, self.sized, found)
            chosen = self._choose(len(base.nodes), offered, found.kept, unfused, allowed)
        choices = tuple(option.choice for option in chosen)
        plan = make_plan(self.chain, self.sources, self.call, choices)
        runs = tuple(base.nodes[option.start : option.stop] for option in chosen)
        kept = self._footprint(choices).kept
        plan.within = Met(self.budget, self.rows, unfused, found.kept, kept, chosen, runs)
        return plan

    def _unfused(self) -> int:
        plain = self.sized._replace(rules=NONE)
        return measure(make_plan(self.chain, self.sources, plain), plain.inputs, plain.params, backward=False).kept

    def _footprint(self, choices: tuple[Choice, ...]) -> Footprint:
        found = self.tried.get(choices)
        if found is None:
            plan = make_plan(self.chain, self.sources, self.sized, choices)
            found = measure(plan, self.sized.inputs, self.sized.params, backward=False)
            self.tried[choices] = found
        return found

    def _choose(self, count: int, offered: list[Option], kept: int, unfused: int, allowed: int) -> tuple[Option, ...]:
        least = kept
        for some in ([option for option in offered if not option.product], offered):
            front = _fronts(count, some)
            wanted = kept - allowed
            for _ in range(MAX_TRIES):
                point = next((point for point in front if point.saves >= wanted), front[-1])
                chosen = point.chosen()
                reached = self._footprint(tuple(option.choice for option in chosen)).kept
                least = min(least, reached)
                if reached <= allowed:
                    return chosen
                if point is front[-1]:
                    break
                wanted = point.saves + reached - allowed  # savings did not add up
        if not offered and not self.alone:
            return ()
        raise ValueError(self._too_small(unfused, allowed, least))

    def _too_small(self, unfused: int, allowed: int, least: int) -> str:
        who = f"memory_budget={self.budget} for ops {', '.join(dict.fromkeys(n.path for n in self.chain.nodes))}"
        if isinstance(self.budget, float):
            share = -(-1000 * least // max(1, unfused)) / 1000
            return (
                f"{who}: at most {self.budget:.1%} of the bytes that they keep for backward unfused may be kept, but "
                f"the least that computing again reaches is {share:.1%}; give a budget of {share} or more"
            )
        return (
            f"{who}: at most {self.budget} bytes may be kept for backward, but at {self.rows} rows the least that "
            f"computing again reaches is {least}; give {least} bytes or more, or fewer rows"
        )


def sized(chain: Chain, call: Call, rows: int) -> tuple[Any, ...]:
    """The inputs of a call as they would be with this many rows, in the first of some shapes that all ops take."""

    def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (rows, shape[-1])

    def deep(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-(-rows // max(1, prod(shape[1:-1]))), *shape[1:])

    def deeper(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (rows, *shape)

    for change in (flat, deep, deeper):
        inputs = tuple(Like(change(tuple(t.shape)), t.dtype, t.device, t.requires_grad) for t in call.inputs)
        try:
            Specs(chain.nodes, call.autocast).propagate(dict(zip(chain.inputs, inputs, strict=True)))
        except ValueError:
            continue
        return inputs
    return call.inputs
