"""What to compute again in backward so that a block keeps no more than its memory budget allows.

Each rule that computes instead of keeping, and each run of ops that can run twice, is an option at its place in the
chain: so many bytes saved, so much time spent. The cheapest set of options that meets the budget is found exactly, by
dynamic programming over the chain, under the assumption that savings add up; the plan that results is then measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from fusible.chain import Chain, Node
from fusible.footprint import Footprint, measure
from fusible.infer import Specs
from fusible.options import Option, options
from fusible.plan import Call, Choice, Like, Plan
from fusible.planner import make_plan
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE

__all__ = ["Met", "Within", "checked", "plan_within", "unfused_bytes", "within"]

#: Rows by which a fraction is decided, so that the plan does not depend on those of the call.
ROWS = 4096
#: Most points of (bytes, time) that are followed along the chain, and most plans tried for one budget.
MAX_POINTS = 256
MAX_TRIES = 6


class Within(RuleSet):
    """Rules, and how much may be kept for backward: bytes, or a fraction of what is kept with no rules when every
    gradient is wanted.

    Bytes depend on the number of rows, so there each plan is made for a class of them: eight classes between a power of
    two and the next, named after the largest number of rows that is in it.
    """

    rows: int | None

    def __new__(cls, rules: Iterable[Rule], budget: float | int, rows: int | None = None) -> Within:
        self = tuple.__new__(cls, RuleSet(rules))
        self.budget = checked(budget)
        self.rows = rows
        return self

    def at(self, rows: int) -> Within:
        if self.budget is None or isinstance(self.budget, float):
            return self
        step = 1 << max(0, rows.bit_length() - 4)
        return Within(self, self.budget, -(-rows // step) * step)

    def _key(self) -> tuple:
        return tuple(self), self.budget, self.rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Within) and self._key() == other._key()

    def __ne__(self, other: object) -> bool:  # which tuple has of its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return Within, (tuple(self), self.budget, self.rows)

    def __repr__(self) -> str:
        return f"Within({RuleSet(self)!r}, {self.budget})"


@lru_cache(maxsize=64)
def within(rules: RuleSet, budget: float | int) -> Within:
    """The rules under a budget; one object for equal ones, by which a block finds its plans."""
    return Within(rules, budget)


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

    def notes(self) -> tuple[str, ...]:
        """What `explain` says of it."""
        if self.rows is None:
            share = max(1, self.unfused)
            reached = f"{self.kept / share:.1%} of what is kept unfused ({self.without / share:.1%} without it)"
        else:
            reached = f"{self.kept} bytes at {self.rows} rows ({self.without} without it, {self.unfused} unfused)"
        head = f"memory budget {self.budget}: {reached}"
        if not self.chosen:
            return (f"memory budget {self.budget}: nothing is computed again; {reached.partition(' (')[0]} kept",)
        return (
            head,
            *(f"computed again: {option.describe(run)}" for option, run in zip(self.chosen, self.runs, strict=True)),
        )


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
    the budget. Raises `ValueError` if nothing does, and where an op's shapes cannot be told before it runs. A chain
    that is not `alone` in its block is let off where nothing in it can be computed again.
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
        found, unfused = self._footprint(()), unfused_bytes(self.chain, self.sources, self.sized)
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

    def _footprint(self, choices: tuple[Choice, ...]) -> Footprint:
        found = self.tried.get(choices)
        if found is None:
            plan = make_plan(self.chain, self.sources, self.sized, choices)
            try:
                found = measure(plan, self.sized.inputs, self.sized.params, backward=False)
            except Exception as error:
                raise ValueError(
                    f"{self._who()}: what they keep cannot be told before it runs, for some op's formula needs data; "
                    f"take that op out of the block, or the budget away"
                ) from error
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

    def _who(self) -> str:
        return f"memory_budget={self.budget} for ops {', '.join(dict.fromkeys(n.path for n in self.chain.nodes))}"

    def _too_small(self, unfused: int, allowed: int, least: int) -> str:
        who = self._who()
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


def unfused_bytes(chain: Chain, sources: Sequence[tuple[dict, str]], call: Call) -> int:
    """What a chain keeps with no rules and every gradient wanted, so that freezing a parameter moves no budget."""

    def trained(tensor: Any) -> Any:
        return Like(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.dtype.is_floating_point)

    inputs: Any = tuple(trained(t) for t in call.inputs)
    params: Any = tuple(None if t is None else trained(t) for t in call.params)
    plain = call._replace(rules=NONE, grad_enabled=True, inputs=inputs, params=params)
    return measure(make_plan(chain, sources, plain), inputs, params, backward=False).kept


def sized(chain: Chain, call: Call, rows: int) -> tuple[Any, ...]:
    """The inputs of a call as they would be with this many rows, in the first of some shapes that all ops take."""

    def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (rows, shape[-1])

    def deep(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (-(-rows // max(1, prod(shape[1:-1]))), *shape[1:])

    def deeper(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (rows, *shape)

    for change in (flat, deep, deeper):
        inputs: tuple[Any, ...] = tuple(
            Like(change(tuple(t.shape)), t.dtype, t.device, t.requires_grad) for t in call.inputs
        )
        try:
            Specs(chain.nodes, call.autocast).propagate(dict(zip(chain.inputs, inputs, strict=True)))
        except ValueError:
            continue
        return inputs
    return call.inputs
