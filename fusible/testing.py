"""Proofs for blocks, ops and rules: `check`, `check_op`, `check_rule`. The library's own tests call these.

Each compares what runs fused with the plain formulas under ordinary autograd, and raises `AssertionError` that names
the first thing that differs: where, and by how much.

The one tolerance is in `fusible.tolerance`: in float64 a relative 1e-10 of the largest value; in any other dtype no
further from the float64 result than twice what plain torch is in that dtype.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import executable
from fusible.codegen import records
from fusible.op import Op, Spec
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE
from fusible.sequential import Sequential
from fusible.tolerance import coarsest_dtype, compare, require, same
from fusible.trial import Trial, double, like, seed

__all__ = ["check", "check_op", "check_rule"]

#: Frozen subsets are tried all up to this many differentiable tensors, else each alone and all but each.
MAX_SUBSETS_OF = 5
#: Finite differences are taken element by element up to this many, else along random directions.
MAX_BY_ELEMENT = 100


def _gradient_layouts() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "zero-stride incoming gradient": lambda d: d.flatten()[:1].squeeze(0).expand(d.shape) if d.numel() else d,
        "transposed incoming gradient": lambda d: d.transpose(0, -1).contiguous().transpose(0, -1),
        "sliced incoming gradient": lambda d: torch.cat([d, d + 1], -1)[..., : d.shape[-1]] if d.dim() else d,
    }


def _input_layouts() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "transposed input": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        "sliced input": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
        "expanded input": lambda x: x[:1].expand(x.shape) if x.is_floating_point() else x,
    }


def _subsets(names: Sequence[str]) -> Iterator[set[str]]:
    if len(names) <= MAX_SUBSETS_OF:
        for size in range(1, len(names) + 1):
            yield from (set(some) for some in itertools.combinations(names, size))
        return
    for name in names:
        yield {name}
        yield set(names) - {name}
    yield set(names)


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
    gradients (`layouts`); with every frozen subset (`frozen`); with each output unused and alone; with a retained
    graph; under saved-tensor hooks; with no rows. Inputs, parameters and incoming gradients must stay untouched, no
    gradient may share memory with an incoming one or another, and an output that shares memory must refuse in-place
    changes.

    Args:
        block: any `Sequential`; it is left as it was, gradients aside, which it has none of afterwards.
        inputs, named: as for a call. They are not changed.
        gradcheck: also compare, in float64, with finite differences, and second derivatives with those of the first.

    Raises:
        AssertionError: naming what differs, where and by how much.
    """
    wanted = [(p, p.requires_grad) for p in block.parameters()]
    try:
        with _checked_always(), torch.random.fork_rng(devices=[]):
            _check(block, inputs, named, layouts, frozen)
            if gradcheck:
                _gradcheck(block, inputs, named)
    finally:
        for parameter, wants in wanted:
            parameter.requires_grad_(wants).grad = None


def _check(block: Sequential, inputs: Sequence[Tensor], named: dict, layouts: bool, frozen: bool) -> None:
    case = Trial(block, inputs, named)
    case.compare("as given")
    with torch.no_grad():
        case.compare("grad mode off")
    count = len(case.run(block, block.reference, case.inputs, case.named).outputs)
    for place in range(count) if count > 1 else ():
        case.used = lambda p, place=place: p != place  # type: ignore[misc]
        case.compare(f"output {place} unused")
        case.used = lambda p, place=place: p == place  # type: ignore[misc]
        case.compare(f"output {place} alone")
    case.used = lambda place: True
    case.hooks = lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)
    case.compare("under saved-tensor hooks")
    case.hooks = contextlib.nullcontext
    if frozen:
        for names in _subsets(_differentiable(case)):
            case.frozen = names
            case.compare(f"frozen {', '.join(sorted(case.frozen))}")
        case.frozen = set()
    if layouts:
        _check_layouts(case)
    if all(t.dim() > 1 for t in (*case.inputs, *case.named.values())):
        empty = Trial(block, [t[:0] for t in case.inputs], {n: t[:0] for n, t in named.items()})
        if empty.fits():
            empty.compare("zero rows")
    _check_retained(case)


def _check_layouts(case: Trial) -> None:
    for what, case.layout in _gradient_layouts().items():
        case.compare(what)
    case.layout = lambda grad: grad
    for what, change in _input_layouts().items():
        Trial(case.block, [change(t) for t in case.inputs], {n: change(t) for n, t in case.named.items()}).compare(what)
    strided = copy.deepcopy(case.block)
    for parameter in strided.parameters():
        parameter.data = torch.stack([parameter.data.mT if parameter.dim() > 1 else parameter.data] * 2, -1)[..., 0]
        parameter.data = parameter.data.mT if parameter.dim() > 1 else parameter.data
    Trial(strided, case.inputs, case.named).compare("strided parameters")


def _gradcheck(block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
    exact = copy.deepcopy(block).double()
    for parameter in exact.parameters():
        parameter.requires_grad_()
    xs = [double(t.detach()).requires_grad_(t.is_floating_point()) for t in (*inputs, *named.values())]
    names = [name for name, _ in exact.named_parameters()]
    leaves = [*xs, *[p.detach().requires_grad_() for p in exact.parameters()]]

    def run(*tensors: Tensor) -> Any:
        seed()
        params = dict(zip(names, tensors[len(xs) :], strict=True))
        keywords = dict(zip(named, tensors[len(inputs) : len(xs)], strict=True))
        return torch.func.functional_call(exact, params, tensors[: len(inputs)], keywords)

    if any(leaf.requires_grad for leaf in leaves):
        by_projection = sum(leaf.numel() for leaf in leaves) > MAX_BY_ELEMENT
        torch.autograd.gradcheck(run, leaves, fast_mode=by_projection)
        torch.autograd.gradgradcheck(run, leaves, fast_mode=by_projection)


def _differentiable(case: Trial) -> list[str]:
    tensors = [*case.inputs, *case.named.values(), *case.block.parameters()]
    return [name for name, t in zip(case.names(), tensors, strict=True) if t.is_floating_point()]


def _check_retained(case: Trial) -> None:
    """A call in between, and a second backward of a retained graph, leave the gradients as they are."""

    def forward(factor: float) -> tuple[list[Tensor], list[Tensor]]:
        xs = [(t * factor).requires_grad_() if t.is_floating_point() else t for t in case.inputs]
        seed()
        outs = case.block(*xs, **case.named)
        outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
        return outs, [t for t in (*xs, *case.block.parameters()) if t.requires_grad]

    def backward(outs: list[Tensor], leaves: list[Tensor], retain: bool) -> tuple[Tensor | None, ...]:
        douts = [like(out, place) for place, out in enumerate(outs)]
        return torch.autograd.grad(outs, leaves, douts, retain_graph=retain, allow_unused=True)

    outs, leaves = forward(1)
    if outs and leaves:
        alone = backward(outs, leaves, False)
        outs, leaves = forward(1)
        forward(-0.5)
        require(_all_same(alone, backward(outs, leaves, True)), "a call in between changes the gradients")
        text = "a second backward through a retained graph gives other gradients"
        require(_all_same(alone, backward(outs, leaves, False)), text)


def _all_same(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else same(a, b) for a, b in zip(some, others, strict=True))


@contextlib.contextmanager
def _checked_always() -> Iterator[None]:
    before, executable.CHECK_ALWAYS = executable.CHECK_ALWAYS, True
    try:
        yield
    finally:
        executable.CHECK_ALWAYS = before


def check_op(op: Op, *inputs: Tensor, gradcheck: bool = True) -> None:
    """Checks an op alone: its `fwd` and `bwd` against its `reference`, as `check` does, and its `infer`.

    Args:
        op: any op.
        inputs: `x` and the op's extra inputs, by position or, those that have a name, in that order too.
        gradcheck: also compare with finite differences, and the second derivative with those of the first.
    """
    shared = [name for name in op.present_inputs() if name is not None]
    block = Sequential(op, rules=NONE, inputs=shared)
    if type(op).infer is not Op.infer:
        _check_infer(op, inputs)
    positional = inputs[: len(inputs) - len(shared)]
    named = dict(zip(shared, inputs[len(positional) :], strict=True))
    check(block, *positional, gradcheck=gradcheck, **named)  # type: ignore[arg-type]
    _check_sizes(block, positional, named)


def _check_infer(op: Op, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outs = op(*[t.detach() for t in inputs])
    x, *extras = [Spec(tuple(t.shape), t.dtype, t.device) for t in inputs]
    said = op.infer(x, *op.placed(extras))
    outs = outs if isinstance(outs, tuple) else (outs,)
    for place, (spec, out) in enumerate(zip((said,) if isinstance(said, Spec) else said, outs, strict=True)):
        got = Spec(tuple(out.shape), out.dtype, out.device)
        require(spec == got, f"output {place}: infer says {_shown(spec)}, reference gives {_shown(got)}")


def _shown(spec: Spec) -> str:
    return f"{list(spec.shape)} {spec.dtype} on {spec.device}"


def check_rule(rule: Rule, ops: Iterable[Any], *inputs: Tensor, **named: Tensor) -> None:
    """Checks a rule on a chain of ops: it fires, its records equal the unfused ones, and `check` holds.

    Args:
        rule: made by `@forward`, `@backward` or `@rewrite`.
        ops: the chain, or a `Sequential` of it.
        inputs, named: as for a call of the block; they should be such that gradients are wanted.

    Raises:
        AssertionError: the rule did not fire (with the reasons it gave), a record or a gradient differs.
    """
    modules = list(ops.children()) if isinstance(ops, Sequential) else list(ops)
    declared = ops.inputs if isinstance(ops, Sequential) else ()
    block = Sequential(*modules, rules=RuleSet((rule,)), inputs=declared)
    asked = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    explanation = block.explain(*asked, **named)  # type: ignore[arg-type]
    fired = [row.rule for part in explanation.parts for row in (*part.forward, *part.backward)]
    rewritten = [note for part in explanation.parts for note in part.notes if note.startswith("rewritten: ")]
    if rule.name not in fired and not any(rule.name in note for note in rewritten):
        reasons = "; ".join(explanation.unfused) or "its pattern does not occur"
        raise AssertionError(f"rule {rule.name} did not fire: {reasons}")
    if rule.direction == "forward":
        _check_records(block, rule, asked, named)
    check(block, *inputs, **named)  # type: ignore[arg-type]
    _check_sizes(block, inputs, named)


#: Numbers of rows that leave tails of every length; and how many it takes for a sum in a narrow dtype to stand still.
ROWS = (5, 16, 33, 1)
MANY_ROWS = 700
#: What is added to the inputs for the case of a large mean.
LARGE_MEAN = 4096.0


def _check_sizes(block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
    """More and fewer rows, values far from zero, and many rows in bfloat16."""
    given = [*inputs, *named.values()]
    wanted = [(p, p.requires_grad) for p in block.parameters()]
    try:
        with _checked_always(), torch.random.fork_rng(devices=[]):
            if all(t.dim() > 1 and t.shape[0] for t in given) and given:
                for rows in ROWS:
                    _compare_changed(f"{rows} rows", block, inputs, named, functools.partial(_rows, rows=rows))
                if all(t.is_floating_point() for t in given):
                    narrow = copy.deepcopy(block).to(torch.bfloat16)
                    what = f"{MANY_ROWS} rows in bfloat16"
                    _compare_changed(what, narrow, inputs, named, _many_rows, lambda grad: grad + 1)  # for large sums
            if all(t.is_floating_point() for t in given):
                _compare_changed("large mean", block, inputs, named, lambda t: t + LARGE_MEAN)
    finally:
        for parameter, wants in wanted:
            parameter.requires_grad_(wants).grad = None


def _compare_changed(
    what: str,
    block: Sequential,
    inputs: Sequence[Tensor],
    named: dict[str, Tensor],
    change: Callable[[Tensor], Tensor],
    layout: Callable[[Tensor], Tensor] = lambda grad: grad,
) -> None:
    case = Trial(block, [change(t.detach()) for t in inputs], {name: change(t.detach()) for name, t in named.items()})
    case.layout = layout
    if case.fits():
        case.compare(what)


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """So many rows, those of the tensor again and again, each a little different."""
    repeated = tensor[torch.arange(rows) % tensor.shape[0]]
    if not tensor.is_floating_point():
        return repeated
    factor = 1 + (torch.arange(rows, device=tensor.device) % 7) / 8
    return repeated * factor.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))


def _many_rows(tensor: Tensor) -> Tensor:
    return _rows(tensor, MANY_ROWS).bfloat16()


def _check_records(block: Sequential, rule: Rule, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
    """Law 2: each record of a forward rule equals the unfused one, as far as the coarsest dtype in play can tell."""
    coarsest = coarsest_dtype([*inputs, *named.values(), *block.parameters()])
    fused, plain = _records(block, block.rules, inputs, named), _records(block, NONE, inputs, named)
    for (node, record), (_, other) in zip(fused, plain, strict=True):
        for field, a, b in zip(type(record).fields, record, other, strict=True):
            what = f"rule {rule.name}: record {field} of {node}"
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                exact = b.double()
                if b.is_floating_point():
                    a, b = a.to(coarsest), b.to(coarsest)
                compare(what, a, b, exact)
            else:
                require(type(a) is type(b), f"{what} is {a!r}, unfused {b!r}")


def _records(
    block: Sequential, rules: RuleSet, inputs: Sequence[Tensor], named: dict[str, Tensor]
) -> list[tuple[Any, Any]]:
    """(node, record) of a block that is one chain."""
    fuser_, values = block.single_chain(*inputs, **named)
    found, flat, _ = fuser_.find(values, rules)
    assert found is not None
    seed()
    with torch.no_grad():
        return list(zip(records(found.plan), found.run(flat)[1], strict=True))
