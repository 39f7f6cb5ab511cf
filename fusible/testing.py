"""Proofs for blocks, ops and rules: `check`, `check_op`, `check_rule`, and `report`, which the library's tests call.

Each compares what runs fused with the plain formulas under ordinary autograd, property by property. The first three
raise `AssertionError` that names the first thing that differs: where, by how much, and what is likely the cause;
`report` tries them all and says which hold.

The one tolerance is in `fusible.tolerance`: in float64 a relative 1e-10 of the largest value; in any other dtype no
further from the float64 result than twice what plain torch is in that dtype.
"""

from __future__ import annotations

import functools
import html
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fusible import properties
from fusible._progress import progress
from fusible.op import Op
from fusible.properties import Property, guarded
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE
from fusible.sequential import Sequential

__all__ = ["Finding", "Report", "check", "check_op", "check_rule", "report"]


def check(
    block: Sequential,
    *inputs: Tensor,
    layouts: bool = True,
    frozen: bool = True,
    gradcheck: bool = False,
    **named: Tensor,
) -> None:
    """Checks a block, fused as it is, against its plain formulas: values and every gradient.

    With the inputs as given; with grad mode off; with strided, transposed and expanded inputs, parameters and incoming
    gradients (`layouts`); with every frozen subset (`frozen`; of more than five tensors each alone and all but each);
    with each output unused and alone; with a retained graph; twice, for the same bits; under saved-tensor hooks; with
    no rows. Inputs, parameters and incoming gradients must stay untouched, no gradient may share memory with an
    incoming one or another, and an output that shares memory must refuse in-place changes.

    Args:
        block: any `Sequential`; it is left as it was, gradients aside, which it has none of afterwards.
        inputs, named: as for a call. They are not changed.
        gradcheck: also compare, in float64, with finite differences, and second derivatives with those of the first.

    Raises:
        AssertionError: naming what differs, where and by how much.
    """
    with guarded(block):
        for found in properties.of_block(block, inputs, named, layouts, frozen):
            found.check()
        if gradcheck:
            properties.gradcheck(block, inputs, named)


def check_op(op: Op, *inputs: Tensor, gradcheck: bool = True) -> None:
    """Checks an op alone: its `fwd` and `bwd` against its `reference`, as `check` does, and its `infer`.

    And with other numbers of rows, ranks 1 to 5, each floating dtype, values far from zero, many rows in bfloat16, and
    random shapes with random strides.

    Args:
        op: any op.
        inputs: `x` and the op's extra inputs, by position or, those that have a name, in that order too.
        gradcheck: also compare with finite differences, and the second derivative with those of the first.

    Raises:
        AssertionError: naming what differs, where and by how much.
    """
    block, found = _of_op(op, inputs, gradcheck)
    with guarded(block):
        for each in found:
            each.check()


def check_rule(rule: Rule, ops: Iterable[Any], *inputs: Tensor, gradcheck: bool = True, **named: Tensor) -> None:
    """Checks a rule on a chain of ops: it fires, its records equal the unfused ones, and what `check_op` tries holds.

    Args:
        rule: made by `@forward`, `@backward` or `@rewrite`.
        ops: the chain, or a `Sequential` of it.
        inputs, named: as for a call of the block; they should be such that gradients are wanted.
        gradcheck: also compare with finite differences in float64.

    Raises:
        AssertionError: the rule did not fire (with the reasons it gave), a record or a gradient differs.
    """
    block, found = _of_rule(rule, ops, inputs, named, gradcheck)
    with guarded(block):
        for each in found:
            each.check()


_Found = tuple[Sequential, Iterator[Property]]


def _of_block(block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor], gradcheck: bool) -> _Found:
    def found() -> Iterator[Property]:
        yield from properties.of_block(block, inputs, named)
        if gradcheck:
            yield Property("finite differences", functools.partial(properties.gradcheck, block, inputs, named))

    return block, found()


def _of_op(op: Op, inputs: Sequence[Tensor], gradcheck: bool) -> _Found:
    shared = [name for name in op.present_inputs() if name is not None]
    block = Sequential(op, rules=NONE, inputs=shared)
    positional = inputs[: len(inputs) - len(shared)]
    named = dict(zip(shared, inputs[len(positional) :], strict=True))

    def found() -> Iterator[Property]:
        yield from properties.of_op(op, inputs)
        yield from _of_block(block, positional, named, gradcheck)[1]
        yield from properties.of_sizes(block, positional, named)

    return block, found()


def _of_rule(
    rule: Rule, ops: Iterable[Any], inputs: Sequence[Tensor], named: dict[str, Tensor], gradcheck: bool
) -> _Found:
    modules = list(ops.children()) if isinstance(ops, Sequential) else list(ops)
    declared = ops.inputs if isinstance(ops, Sequential) else ()
    block = Sequential(*modules, rules=RuleSet((rule,)), inputs=declared)

    def found() -> Iterator[Property]:
        yield from properties.of_rule(rule, block, inputs, named)
        yield from properties.of_block(block, inputs, named)
        if gradcheck:  # double backward replays the formulas, so that it tells nothing of the rule
            differences = functools.partial(properties.gradcheck, block, inputs, named, second=False)
            yield Property("finite differences", differences)
        yield from properties.of_sizes(block, inputs, named)

    return block, found()


# -- all of it, as a report --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Whether one property holds.

    Attributes:
        message: what differs, where, by how much and why; empty where the property holds.
    """

    name: str
    ok: bool
    message: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What `report` found, property by property. `str()` gives text; in a notebook it shows as a table."""

    title: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether every property holds."""
        return all(found.ok for found in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The properties that do not hold, in the order in which they were tried."""
        return tuple(found for found in self.findings if not found.ok)

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**asdict(self), "ok": self.ok}

    def _verdict(self) -> str:
        count = len(self.findings)
        return f"all {count} properties hold" if self.ok else f"{len(self.failures)} of {count} properties do not hold"

    def __str__(self) -> str:
        lines = [f"{'ok    ' if found.ok else 'FAILED'}  {found.name}" + (f": {found.message}" if found.message else "")
                 for found in self.findings]  # fmt: skip
        return "\n".join([self.title, "", *lines, "", self._verdict()])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{'ok' if found.ok else 'failed'}</td><td>{html.escape(found.name)}</td>"
            f"<td>{html.escape(found.message)}</td></tr>"
            for found in self.findings
        )
        return f"<h3>{html.escape(self.title)}</h3><table>{rows}</table><p>{self._verdict()}</p>"


def report(
    target: Sequential | Op | Rule,
    *inputs: Tensor,
    ops: Iterable[Any] | None = None,
    gradcheck: bool = True,
    **named: Tensor,
) -> Report:
    """Tries every property of a block, an op or a rule, and reports which hold; nothing is raised for one that fails.

    Args:
        target: a `Sequential`, checked as `check` does; an op, as `check_op`; or a rule on `ops`, as `check_rule`.
        inputs, named: as for a call; a block may go without, and gets four rows of random numbers.
        ops: the chain of a rule, or a `Sequential` of it.
        gradcheck: also compare with finite differences in float64.

    Raises:
        TypeError: `target` is none of these, a rule comes without `ops`, an op or a rule without inputs.
    """
    if isinstance(target, Sequential):
        given, named = (inputs, named) if inputs else _made_up(target)
        title, (block, found) = f"{type(target).__name__}", _of_block(target, given, named, gradcheck)
    elif isinstance(target, (Op, Rule)) and not inputs:
        raise TypeError(f"report: {_name(target)} needs inputs; pass them as for a call")
    elif isinstance(target, Op):
        title, (block, found) = f"op {_name(target)}", _of_op(target, inputs, gradcheck)
    elif isinstance(target, Rule):
        if ops is None:
            raise TypeError(f"report: {_name(target)} needs a chain on which it fires; pass ops=[...]")
        title, (block, found) = f"rule {target.name}", _of_rule(target, ops, inputs, named, gradcheck)
    else:
        raise TypeError(f"report: target must be a Sequential, an op or a rule, got {_name(target)}")
    with guarded(block):
        return Report(title, tuple(_tried(title, found)))


def _tried(title: str, found: Iterator[Property]) -> Iterator[Finding]:
    tried = list(found)
    with progress(f"check of {title}", len(tried)) as advance:
        for each in tried:
            start, message = time.perf_counter(), ""
            try:
                each.check()
            except Exception as error:  # a kernel may fail in any way, and the others are to be tried too
                text = " ".join(str(error).split()).removeprefix(f"{each.name}: ")
                message = text if isinstance(error, AssertionError) else f"{type(error).__name__}: {text}"
            yield Finding(each.name, not message, message, time.perf_counter() - start)
            advance()


def _name(target: Any) -> str:
    return f"rule {target.name}" if isinstance(target, Rule) else type(target).__name__


def _made_up(block: Sequential) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Four rows for a block: as wide as its first op that says its width asks for."""
    x, extras, named = block.resolved().default_inputs()

    def rows(like: Tensor) -> Tensor:
        drawn = torch.randn(4, like.shape[-1], generator=torch.Generator().manual_seed(0))
        return drawn.to(like.device, like.dtype)

    return tuple(rows(t) for t in (x, *extras)), {name: rows(t) for name, t in named.items()}
