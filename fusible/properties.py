"""What is proved of a block, op or rule, property by property: each one compares fused with the plain formulas.

`fusible.testing` runs them. A property raises `AssertionError` that names the first thing that differs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import executable
from fusible.codegen import records
from fusible.op import Op, Spec
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE
from fusible.sequential import Sequential
from fusible.tolerance import coarsest_dtype, compare, require, same
from fusible.trial import SEED, Trial, double, like, seed

__all__ = ["Property", "guarded", "of_block", "of_op", "of_rule", "of_sizes"]

Named = dict[str, Tensor]


class Property(NamedTuple):
    """One thing that must hold: its name, and a function that raises if it does not."""

    name: str
    check: Callable[[], None]


@contextlib.contextmanager
def guarded(block: Sequential) -> Iterator[None]:
    """Checks every run of every plan inside; random state and `requires_grad` come back, gradients are gone."""
    wanted = [(p, p.requires_grad) for p in block.parameters()]
    before, executable.CHECK_ALWAYS = executable.CHECK_ALWAYS, True
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        executable.CHECK_ALWAYS = before
        for parameter, wants in wanted:
            parameter.requires_grad_(wants).grad = None


# -- of a block --------------------------------------------------------------------------------------------------------

#: Frozen subsets are tried all up to this many differentiable tensors, else each alone and all but each.
MAX_SUBSETS_OF = 5
#: Finite differences are taken element by element up to this many, else along random directions.
MAX_BY_ELEMENT = 100

GRADIENT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "zero-stride incoming gradient": lambda d: d.flatten()[:1].squeeze(0).expand(d.shape) if d.numel() else d,
    "transposed incoming gradient": lambda d: d.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced incoming gradient": lambda d: torch.cat([d, d + 1], -1)[..., : d.shape[-1]] if d.dim() else d,
}
INPUT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed input": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced input": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded input": lambda x: x[:1].expand(x.shape) if x.is_floating_point() else x,
}


def of_block(
    block: Sequential, inputs: Sequence[Tensor], named: Named, layouts: bool = True, frozen: bool = True
) -> Iterator[Property]:
    """What holds of any block, in the order in which it is best looked at."""

    def compared(what: str, change: Callable[[Tensor], Tensor] = lambda t: t, **circumstances: Any) -> Property:
        def run() -> None:
            case = Trial(block, [change(t.detach()) for t in inputs], {n: change(t.detach()) for n, t in named.items()})
            for name, value in circumstances.items():
                setattr(case, name, value)
            case.compare(what)

        return Property(what, run)

    yield compared("as given")
    yield Property("grad mode off", torch.no_grad()(compared("grad mode off").check))
    case = Trial(block, inputs, named)
    count = len(case.run(block, block.reference, case.inputs, case.named).outputs)
    for place in range(count) if count > 1 else ():
        yield compared(f"output {place} unused", used=lambda p, place=place: p != place)
        yield compared(f"output {place} alone", used=lambda p, place=place: p == place)
    hooks = functools.partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t.clone(), lambda t: t)
    yield compared("under saved-tensor hooks", hooks=hooks)
    for names in _subsets(_differentiable(case)) if frozen else ():
        yield compared(f"frozen {', '.join(sorted(names))}", frozen=names)
    if layouts:
        for what, layout in GRADIENT_LAYOUTS.items():
            yield compared(what, layout=layout)
        for what, change in INPUT_LAYOUTS.items():
            yield compared(what, change)
        yield Property("strided parameters", functools.partial(_strided_parameters, case))
    rows = all(t.dim() > 1 for t in (*case.inputs, *case.named.values()))
    if rows and Trial(block, [t[:0] for t in inputs], {n: t[:0] for n, t in named.items()}).fits():
        yield compared("zero rows", lambda t: t[:0])
    yield Property("retained graph", functools.partial(_retained, case))
    yield Property("determinism", functools.partial(_deterministic, case))


def _subsets(names: Sequence[str]) -> Iterator[set[str]]:
    if len(names) <= MAX_SUBSETS_OF:
        for size in range(1, len(names) + 1):
            yield from (set(some) for some in itertools.combinations(names, size))
        return
    for name in names:
        yield {name}
        yield set(names) - {name}
    yield set(names)


def _differentiable(case: Trial) -> list[str]:
    tensors = [*case.inputs, *case.named.values(), *case.block.parameters()]
    return [name for name, t in zip(case.names(), tensors, strict=True) if t.is_floating_point()]


def _strided_parameters(case: Trial) -> None:
    strided = copy.deepcopy(case.block)
    for parameter in strided.parameters():
        parameter.data = torch.stack([parameter.data.mT if parameter.dim() > 1 else parameter.data] * 2, -1)[..., 0]
        parameter.data = parameter.data.mT if parameter.dim() > 1 else parameter.data
    Trial(strided, case.inputs, case.named).compare("strided parameters")


def _forward(case: Trial, factor: float) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that require grad, and what they depend on."""
    for parameter in case.block.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    xs = [(t * factor).requires_grad_() if t.is_floating_point() else t for t in case.inputs]
    seed()
    outs = case.block(*xs, **case.named)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
    return outs, [t for t in (*xs, *case.block.parameters()) if t.requires_grad]


def _backward(outs: list[Tensor], leaves: list[Tensor], retain: bool) -> tuple[Tensor | None, ...]:
    douts = [like(out, place) for place, out in enumerate(outs)]
    return torch.autograd.grad(outs, leaves, douts, retain_graph=retain, allow_unused=True)


def _retained(case: Trial) -> None:
    """A call in between, and a second backward of a retained graph, leave the gradients as they are."""
    outs, leaves = _forward(case, 1)
    if outs and leaves:
        alone = _backward(outs, leaves, False)
        outs, leaves = _forward(case, 1)
        _forward(case, -0.5)
        _all_same("a call in between changes the gradients", alone, _backward(outs, leaves, True))
        text = "a second backward through a retained graph gives other gradients"
        _all_same(text, alone, _backward(outs, leaves, False))


def _deterministic(case: Trial) -> None:
    """Two calls from one random state give the same bits."""
    results = []
    for _ in range(2):
        outs, leaves = _forward(case, 1)
        grads = _backward(outs, leaves, False) if outs and leaves else ()
        results.append(([out.detach().clone() for out in outs], grads))
    _all_same("determinism: two calls from one random state give other outputs", results[0][0], results[1][0])
    _all_same("determinism: two calls from one random state give other gradients", results[0][1], results[1][1])


def _all_same(text: str, some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
    for place, (a, b) in enumerate(zip(some, others, strict=True)):
        if a is None or b is None:
            require(a is b, text)
        elif not same(a, b):
            far = (a.double() - b.double()).abs().nan_to_num()
            at = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
            raise AssertionError(f"{text}: number {place} differs by {far[at].item():.3g} at {at}")


def gradcheck(block: Sequential, inputs: Sequence[Tensor], named: Named, second: bool = True) -> None:
    """Compares with finite differences in float64; and second derivatives with those of the first."""
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

    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        by_projection = sum(leaf.numel() for leaf in leaves) > MAX_BY_ELEMENT
        known = [*[f"input {place}" for place in range(len(inputs))], *named, *names]
        with _worded("finite differences", known):
            torch.autograd.gradcheck(run, leaves, fast_mode=by_projection)
        if second:
            with _worded("finite differences of the gradients", known):
                torch.autograd.gradgradcheck(run, leaves, fast_mode=by_projection)


@contextlib.contextmanager
def _worded(what: str, names: Sequence[str]) -> Iterator[None]:
    """Lets a comparison that fails say which tensor it is about."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"with respect to input (\d+)", lambda at: f"with respect to {names[int(at[1])]}", str(error))
        raise (AssertionError if "Jacobian mismatch" in text else RuntimeError)(f"{what}: {text}") from error


# -- of an op ----------------------------------------------------------------------------------------------------------


def of_op(op: Op, inputs: Sequence[Tensor]) -> Iterator[Property]:
    """What holds of an op beside what holds of the block of it alone: its `infer`."""
    if type(op).infer is not Op.infer:
        yield Property("infer", functools.partial(_check_infer, op, inputs))


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


# -- of sizes ----------------------------------------------------------------------------------------------------------

#: Numbers of rows that leave tails of every length; and how many it takes for a sum in a narrow dtype to stand still.
ROWS = (5, 16, 33, 1)
MANY_ROWS = 700
#: What is added to the inputs for the case of a large mean.
LARGE_MEAN = 4096.0
#: Leading dimensions of other ranks than that of a matrix.
LEADING: tuple[tuple[int, ...], ...] = ((), (2, 3), (3, 1, 2), (1, 2, 1, 2))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: How many random cases.
RANDOM = 6


def of_sizes(block: Sequential, inputs: Sequence[Tensor], named: Named) -> Iterator[Property]:
    """Other numbers of rows, ranks and dtypes, values far from zero, many rows in bfloat16, and random cases."""
    given = [*inputs, *named.values()]
    floating = all(t.is_floating_point() for t in given)
    rows = bool(given) and all(t.dim() > 1 and t.shape[0] for t in given)

    def changed(what: str, change: Callable[[Tensor], Tensor], **options: Any) -> Property:
        return Property(what, lambda: _compare_changed(what, block, inputs, named, change, **options))

    if rows:
        for count in ROWS:
            yield changed(f"{count} rows", functools.partial(_rows, rows=count))
        if floating:
            many = {"dtype": torch.bfloat16, "layout": lambda grad: grad + 1}  # for large sums
            yield changed(f"{MANY_ROWS} rows in bfloat16", functools.partial(_rows, rows=MANY_ROWS), **many)
    if floating:
        yield changed("large mean", lambda t: t + LARGE_MEAN)
        for dtype in DTYPES:
            yield changed(f"as {str(dtype).removeprefix('torch.')}", lambda t: t, dtype=dtype)
    if rows and all(t.dim() == 2 for t in given):
        for leading in LEADING:
            yield changed(f"rank {len(leading) + 1}", functools.partial(_led, leading=leading))
        for number in range(RANDOM):
            yield _random(changed, number, floating)


def _random(changed: Callable[..., Property], number: int, floating: bool) -> Property:
    """A case with leading dimensions, strides and a dtype drawn from a seed, which its name shows."""
    generator = torch.Generator().manual_seed(SEED + number)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    leading = tuple(draw(1, 8) for _ in range(draw(1, 4)))
    order = torch.randperm(len(leading) + 1, generator=generator).tolist()
    step = draw(1, 3)
    dtype = DTYPES[draw(0, len(DTYPES))] if floating else None

    def change(tensor: Tensor) -> Tensor:
        made = _led(tensor, leading).permute(order).contiguous()
        return made.repeat_interleave(step, -1)[..., ::step].permute([order.index(at) for at in range(len(order))])

    kind = f" {str(dtype).removeprefix('torch.')}" if dtype else ""
    what = f"random case {number}, leading {list(leading)}, memory order {order}, step {step}{kind}"
    return changed(what, change, dtype=dtype)


def _compare_changed(
    what: str,
    block: Sequential,
    inputs: Sequence[Tensor],
    named: Named,
    change: Callable[[Tensor], Tensor],
    layout: Callable[[Tensor], Tensor] = lambda grad: grad,
    dtype: torch.dtype | None = None,
) -> None:
    def made(tensor: Tensor) -> Tensor:
        return change(tensor.detach() if dtype is None else tensor.detach().to(dtype))

    block = block if dtype is None else copy.deepcopy(block).to(dtype)
    case = Trial(block, [made(t) for t in inputs], {name: made(t) for name, t in named.items()})
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


def _led(tensor: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Rows with these dimensions in front of the others."""
    count = functools.reduce(int.__mul__, leading, 1)
    return _rows(tensor, count).view(*leading, *tensor.shape[1:])


# -- of a rule ---------------------------------------------------------------------------------------------------------


def of_rule(rule: Rule, block: Sequential, inputs: Sequence[Tensor], named: Named) -> Iterator[Property]:
    """What holds of a rule on a block, which has no other, beside what holds of the block: it fires, equal records."""
    asked = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
    yield Property("it fires", functools.partial(_fires, rule, block, asked, named))
    if rule.direction == "forward":
        yield Property("equal records", functools.partial(_equal_records, block, rule, asked, named))


def _fires(rule: Rule, block: Sequential, inputs: Sequence[Tensor], named: Named) -> None:
    explanation = block.explain(*inputs, **named)  # type: ignore[arg-type]
    fired = [row.rule for part in explanation.parts for row in (*part.forward, *part.backward)]
    rewritten = [note for part in explanation.parts for note in part.notes if note.startswith("rewritten: ")]
    if rule.name not in fired and not any(rule.name in note for note in rewritten):
        reasons = "; ".join(explanation.unfused) or "its pattern does not occur"
        raise AssertionError(f"rule {rule.name} did not fire: {reasons}")


def _equal_records(block: Sequential, rule: Rule, inputs: Sequence[Tensor], named: Named) -> None:
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


def _records(block: Sequential, rules: RuleSet, inputs: Sequence[Tensor], named: Named) -> list[tuple[Any, Any]]:
    """(node, record) of a block that is one chain."""
    fuser_, values = block.single_chain(*inputs, **named)
    found, flat, _ = fuser_.find(values, rules)
    assert found is not None
    seed()
    with torch.no_grad():
        return list(zip(records(found.plan), found.run(flat)[1], strict=True))
