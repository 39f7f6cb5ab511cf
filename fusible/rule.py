"""Rules as data, and the one matcher: `@forward`, `@backward`, `@rewrite`, `RuleSet`, `cover`.

A rule's signature is its pattern: the positional-only parameters are the slots, in chain order, annotated with the op
they match (`X | None` optional, `X | Y` either). What follows is what the rule gets at run time. Slot names bind ops,
records and gradients, so two slots may have one type.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fusible.op import Env, Op, ReadsFor

__all__ = ["Rule", "RuleSet", "backward", "cover", "forward", "rewrite"]

FORWARD, BACKWARD, REWRITE = "forward", "backward", "rewrite"
Condition = Callable[..., Iterable[tuple[bool, str] | tuple[bool, str, str]]]


class Refusal(NamedTuple):
    """Why a rule does not apply, and the smallest change that would make it apply; empty where there is none."""

    reason: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.change}" if self.change else self.reason


class Slot(NamedTuple):
    """One place of a pattern."""

    name: str
    kinds: tuple[type[Op], ...]
    optional: bool

    @property
    def num_extras(self) -> int:
        return max(kind.num_extra_inputs for kind in self.kinds)

    @property
    def num_outputs(self) -> int:
        return max(kind.num_extra_outputs for kind in self.kinds)

    @property
    def num_params(self) -> int:
        return max(len(kind.signature.params) for kind in self.kinds)

    def __str__(self) -> str:
        return " | ".join([kind.__name__ for kind in self.kinds] + (["None"] if self.optional else []))


class Rule:
    """A function on a run of neighbouring ops, with its pattern and its conditions.

    Made by `forward`, `backward` or `rewrite`; immutable once its conditions are given. Pickles by qualified name and
    copies as itself.

    Attributes:
        name: the function's name, unique in a rule set and printed by `explain`.
        direction: `"forward"`, `"backward"` or `"rewrite"`.
        slots: the pattern.
        forgets: the record fields, as (slot, field), that a backward rule recomputes instead of reading.
        aliases: whether what it returns may share memory with what it gets; where this is False the fuser does not
        look.
    """

    def __init__(
        self, function: Callable[..., Any], direction: str, forgets: tuple[str, ...] = (), aliases: bool = True
    ) -> None:
        self.function = function
        self.direction = direction
        self.aliases = aliases
        self.name = self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__doc__ = function.__doc__
        arguments = list(inspect.signature(function).parameters.values())
        pattern = [a for a in arguments if a.kind is a.POSITIONAL_ONLY]
        keywords = {a.name for a in arguments if a.kind is a.KEYWORD_ONLY}
        self.takes_env, self.takes_into = "env" in keywords, "into" in keywords
        self.arguments = [a for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
        hints = typing.get_type_hints(function)
        self.slots = tuple(_slot(self, a.name, hints.get(a.name)) for a in pattern)
        self.forgets = tuple(_field(self, place) for place in forgets)
        self.conditions: list[Condition] = []
        self._check_arguments()

    def requires(self, condition: Condition) -> Condition:
        """Adds a generator of `(ok, reason)` or `(ok, reason, change)`, called with the slots' ops (`None` where
        absent) and `env`.

        It may read of an op's parameters only what is part of a plan's key: presence, dtype, device, shape and
        `requires_grad`. The reason says, in the user's words, why the rule does not apply; the change is the smallest
        one that would make it apply, as an instruction.
        """
        self.conditions.append(condition)
        return condition

    def renamed(self, name: str) -> Rule:
        """The same rule under another name, which may get further conditions. Bind it to that name in its module."""
        rule = object.__new__(Rule)
        rule.__dict__.update(self.__dict__, name=name, __name__=name, __qualname__=name, conditions=[*self.conditions])
        return rule

    def refusals(self, ops: Sequence[Op | None], env: Env) -> list[Refusal]:
        """The reasons why the rule declines these ops in this env; none if it applies."""
        answers = [answer for condition in self.conditions for answer in condition(*ops, env)]
        return [Refusal(*texts) for ok, *texts in answers if not ok]

    @property
    def num_extras(self) -> int:
        return sum(slot.num_extras for slot in self.slots)

    @property
    def num_outputs(self) -> int:
        return sum(slot.num_outputs for slot in self.slots)

    @property
    def num_params(self) -> int:
        return sum(slot.num_params for slot in self.slots)

    def optional_gradients(self) -> tuple[bool, ...]:
        """For `dy` and each extra output's gradient: whether the rule copes with its absence (defaults to `None`)."""
        first = len(self.slots)
        return tuple(a.default is None for a in self.arguments[first : first + 1 + self.num_outputs])

    def param_reads(self) -> tuple[frozenset[str] | None, ...]:
        """For each parameter argument of a backward rule: the gradients that read it, `None` for every one."""
        marks = [a.default for a in self.arguments[len(self.slots) + 1 + self.num_outputs :]]
        return tuple(mark.gradients if isinstance(mark, ReadsFor) else None for mark in marks)

    def _check_arguments(self) -> None:
        if not self.slots:
            raise TypeError(f"rule {self.name} has no slots: put the ops that it matches before a '/', as in "
                            f"def {self.name}(linear: BasicLinear, act: GELU, /, ...)")  # fmt: skip
        if all(slot.optional for slot in self.slots):
            raise TypeError(f"rule {self.name} has optional slots only; at least one must be required")
        counts = {
            FORWARD: (("x", 1), ("extra inputs", self.num_extras), ("parameters", self.num_params)),
            BACKWARD: (("records", len(self.slots)), ("dy", 1), ("gradients of extra outputs", self.num_outputs),
                       ("parameters", self.num_params)),
            REWRITE: (),
        }[self.direction]  # fmt: skip
        wanted = sum(count for _, count in counts)
        if len(self.arguments) != wanted:
            parts = ", ".join(f"{count} {what}" if count > 1 else what for what, count in counts if count)
            raise TypeError(
                f"rule {self.name} must take {wanted} arguments after the slots ({parts or 'none'}), "
                f"it takes {len(self.arguments)}: ({', '.join(a.name for a in self.arguments)})"
            )

    def __reduce__(self) -> str:
        return self.__qualname__

    def __copy__(self) -> Rule:
        return self

    def __deepcopy__(self, memo: Any) -> Rule:
        return self

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __repr__(self) -> str:
        return f"<{self.direction} rule {self.name}: {', '.join(map(str, self.slots))}>"


def _slot(rule: Rule, name: str, hint: Any) -> Slot:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    kinds = tuple(option for option in options if option is not type(None))
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Op)):
            raise TypeError(f"rule {rule.name}: slot {name} must be annotated with an op class, got {hint!r}")
        if kind.expand is not Op.expand:
            raise TypeError(
                f"rule {rule.name}: slot {name} can never match {kind.__name__}, which stands for several ops in a "
                f"chain; give each of them a slot (explain() shows them; Linear is BasicLinear, then Bias)"
            )
    return Slot(name, kinds, len(kinds) < len(options))


def _field(rule: Rule, place: str) -> tuple[str, str]:
    slot_name, _, field = place.partition(".")
    for slot in rule.slots:
        if slot.name == slot_name and all(field in kind.Saved.fields for kind in slot.kinds):
            return slot_name, field
    raise TypeError(f"rule {rule.name} forgets {place!r}, but no slot of it has that field; write 'slot.field'")


def forward(function: Callable[..., Any] | None = None, *, aliases: bool = True) -> Any:
    """A rule for the forward pass: `f(*slots, /, x, *extra_inputs, *params) -> Out(y, *extra_outputs,
    slot=Saved(...))`.

    `aliases=False` promises that the outputs are in fresh memory, which saves the fuser a look at each call.
    """
    if function is not None:
        return Rule(function, FORWARD)
    return lambda function: Rule(function, FORWARD, aliases=aliases)


def backward(function: Callable[..., Any] | None = None, *, forgets: tuple[str, ...] = (), aliases: bool = True) -> Any:
    """A rule for the backward pass: `f(*slots, /, *records, dy, *d_extra_outputs, *params) -> Grads(dx,
    *d_extra_inputs,
    slot={...})`. `forgets=("slot.field",)` names record fields that it recomputes: they arrive as `None` and are not
    kept.

    `aliases=False` promises that no gradient is a view of an incoming one or of another.
    """
    if function is not None:
        return Rule(function, BACKWARD)
    return lambda function: Rule(function, BACKWARD, forgets, aliases)


def rewrite(function: Callable[..., Any]) -> Rule:
    """A rule that replaces several ops by one in both passes: `f(*slots, /) -> Op`, which borrows their parameters."""
    return Rule(function, REWRITE)


class RuleSet(tuple):
    """An ordered set of rules; earlier ones win. A tuple with `+`, whose rules have unique names."""

    def __new__(cls, rules: Iterable[Rule] = ()) -> RuleSet:
        rules = (rules,) if isinstance(rules, Rule) else tuple(rules)
        seen: dict[str, Rule] = {}
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"rules must be made by @forward, @backward or @rewrite, got {rule!r}")
            if seen.setdefault(rule.name, rule) is not rule:
                raise ValueError(f"two rules are called {rule.name}; rule names are unique in a set")
        return tuple.__new__(cls, dict.fromkeys(rules))

    def __add__(self, other: Iterable[Rule]) -> RuleSet:
        return RuleSet((*self, *other))

    def __radd__(self, other: Iterable[Rule]) -> RuleSet:
        return RuleSet((*other, *self))

    def names(self, kind: type[Op]) -> bool:
        """Whether a rule has a slot for this type of op."""
        return any(kind in slot.kinds for rule in self for slot in rule.slots)

    def of(self, direction: str) -> list[Rule]:
        return [rule for rule in self if rule.direction == direction]

    def __reduce__(self) -> Any:
        return RuleSet, (tuple(self),)

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(rule.name for rule in self)})"


class Match(NamedTuple):
    """A rule laid over ops `start` to `stop`; `places` has each slot's index in the chain, `None` where absent."""

    rule: Rule
    start: int
    stop: int
    places: tuple[int | None, ...]


class Miss(NamedTuple):
    """A rule that nearly applied, and why it did not."""

    rule: Rule
    start: int
    stop: int
    refusals: tuple[Refusal, ...]


def _lay(rule: Rule, ops: Sequence[Op], start: int) -> Match | None:
    """Lays the slots over the chain from `start`, if they fit."""
    places: list[int | None] = []
    at = start
    for slot in rule.slots:
        if at < len(ops) and type(ops[at]) in slot.kinds:
            places.append(at)
            at += 1
        elif slot.optional:
            places.append(None)
        else:
            return None
    return Match(rule, start, at, tuple(places))


def _nearly(rule: Rule, ops: Sequence[Op], start: int) -> tuple[int, int | Slot] | None:
    """Where the pattern would end, and what stands in its way: an op between two slots that only hands its input on,
    by its place, or a required slot between two others whose op is absent. `None` if more than that is missing."""
    places = [start]
    between: int | Slot | None = None
    if type(ops[start]) not in rule.slots[0].kinds:
        return None
    for number, slot in enumerate(rule.slots[1:], 1):
        at = places[-1] + 1
        if between == at:
            at += 1
        later = any(not other.optional for other in rule.slots[number + 1 :])
        if at < len(ops) and type(ops[at]) in slot.kinds:
            places.append(at)
        elif slot.optional:
            continue
        elif between is None and _aside(ops, at) and type(ops[at + 1]) in slot.kinds:
            between = at
            places.append(at + 1)
        elif between is None and later and len(places) > 1:
            between = slot
        else:
            return None
    return None if between is None else (places[-1] + 1, between)


def _aside(ops: Sequence[Op], at: int) -> bool:
    """Whether the op there calculates nothing and stands between two that do."""
    return at + 1 < len(ops) and not ops[at].calculates and ops[at - 1].calculates


def _structural(rule: Rule, ops: Sequence[Op], start: int) -> Miss | None:
    """A near miss of the pattern itself."""
    found = _nearly(rule, ops, start)
    if found is None:
        return None
    stop, between = found
    if isinstance(between, Slot):
        reason, change = f"{between} is missing inside the run", f"put one where slot {between.name} stands"
        if [kind.__name__ for kind in between.kinds] == ["Bias"]:
            change = "give the linear layer a bias"
    else:
        before, op, after = (type(ops[between + offset]).__name__ for offset in (-1, 0, 1))
        change = f"put it before {before}, behind {after}, or leave it out"
        hands_out = type(ops[between]).num_extra_outputs > 0
        what = "keeps the tensor between them" if hands_out else "stands between them"
        reason = f"{op} {what}, {before} and {after}"
        change = f"hand out what {after} makes instead, or nothing" if hands_out else change
    return Miss(rule, start, stop, (Refusal(reason, change),))


def cover(
    rules: Sequence[Rule], ops: Sequence[Op], refusals: Callable[[Match], list[Refusal]]
) -> Iterator[Match | Miss | int]:
    """Covers the chain from the left: at each op the first rule that matches and is not refused takes its run.

    Yields the matches, the near misses, and the index of each op that no rule took.
    """
    at = 0
    while at < len(ops):
        stop = at
        for rule in rules:
            match = _lay(rule, ops, at)
            if match is None:
                miss = _structural(rule, ops, at)
                if miss is not None:
                    yield miss
                continue
            reasons = refusals(match)
            if not reasons:
                yield match
                stop = match.stop
                break
            yield Miss(rule, at, match.stop, tuple(reasons))
        else:
            yield at
            stop = at + 1
        at = stop
