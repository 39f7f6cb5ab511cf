"""Proofs for blocks, ops and rules: `check`, `check_op`, `check_rule`. The library's own tests call these.

Each compares what runs fused with the plain formulas under ordinary autograd, and raises `AssertionError` that names the
first thing that differs: where, and by how much.

The one tolerance: in float64 a relative 1e-10 of the largest value; in any other dtype no further from the float64 result
than twice what plain torch is in that dtype.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import executable
from fusible.codegen import records
from fusible.op import Op
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE
from fusible.sequential import Sequential

__all__ = ["check", "check_op", "check_rule"]

#: Frozen subsets are tried all up to this many differentiable tensors, else each alone and all but each.
MAX_SUBSETS_OF = 5
SEED = 20


# -- running -----------------------------------------------------------------------------------------------------------


class _Result:
    """Outputs and gradients of one run, by name."""

    def __init__(self, outputs: Sequence[Tensor], names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        self.outputs = [out.detach() for out in outputs]
        self.grads = {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}

    def items(self) -> Iterator[tuple[str, Tensor | None]]:
        yield from ((f"output {place}", out) for place, out in enumerate(self.outputs))
        yield from ((f"gradient of {name}", grad) for name, grad in self.grads.items())


class _Case:
    """A block with inputs, run in either way with the same random numbers and incoming gradients."""

    def __init__(self, block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
        self.block = block
        self.inputs = [t.detach() for t in inputs]
        self.named = {name: t.detach() for name, t in named.items()}
        self.frozen: set[str] = set()
        self.used: Callable[[int], bool] = lambda place: True
        self.layout: Callable[[Tensor], Tensor] = lambda grad: grad
        self.hooks: Callable[[], Any] = contextlib.nullcontext

    def names(self) -> list[str]:
        extras = [f"input {place}" for place in range(len(self.inputs))]
        return [*extras, *self.named, *[name for name, _ in self.block.named_parameters()]]

    def run(self, block: Sequential, function: Callable[..., Any], inputs: Sequence[Tensor], named: dict) -> _Result:
        """One forward and backward; checks that nothing of the caller's was changed."""
        given = [*inputs, *named.values(), *block.parameters()]
        leaves = [t.detach().requires_grad_(self._wants(name, t)) for name, t in zip(self.names(), given, strict=True)]
        xs, params = leaves[: len(inputs)], leaves[len(inputs) + len(named) :]
        keywords = dict(zip(named, leaves[len(inputs) :], strict=False))
        for parameter, leaf in zip(block.parameters(), params, strict=True):
            parameter.grad = None
            parameter.requires_grad_(leaf.requires_grad)
        before = [(t, t._version, t.detach().clone()) for t in (*xs, *keywords.values(), *block.parameters())]
        torch.manual_seed(SEED)
        with self.hooks():
            outs = function(*xs, **keywords)
        outs = outs if isinstance(outs, tuple) else (outs,)
        douts = [self.layout(_like(out, place)) for place, out in enumerate(outs)]
        pairs = [(o, d) for place, (o, d) in enumerate(zip(outs, douts, strict=True)) if o.requires_grad and self.used(place)]
        copies = [d.clone() for _, d in pairs]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [d for _, d in pairs])
        for (tensor, version, value), name in zip(before, self.names(), strict=True):
            _require(tensor._version == version and _same(tensor, value), f"{name} was changed")
        for place, ((_, d), kept) in enumerate(zip(pairs, copies, strict=True)):
            _require(_same(d, kept), f"the incoming gradient {place} was changed")
        real = [*xs, *keywords.values(), *block.parameters()]
        for name, leaf in zip(self.names(), real, strict=True):
            for _, d in pairs:
                shares = leaf.grad is not None and leaf.grad.untyped_storage().data_ptr() == d.untyped_storage().data_ptr()
                _require(not shares or not d.numel(), f"the gradient of {name} shares memory with an incoming gradient")
        return _Result(outs, self.names(), real)

    def _wants(self, name: str, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and name not in self.frozen

    def compare(self, what: str) -> None:
        """Fused against `reference`, by the one tolerance."""
        fused = self.run(self.block, self.block, self.inputs, self.named)
        plain = self.run(self.block, self.block.reference, self.inputs, self.named)
        exact = self._exact()
        for (name, a), (_, b), (_, c) in zip(fused.items(), plain.items(), exact.items(), strict=True):
            _compare(f"{what}: {name}", a, b, c)

    def _exact(self) -> _Result:
        """`reference` in float64; parameters that are float64 already stay the ones there."""
        block = copy.deepcopy(self.block).double()
        named = {name: _double(t) for name, t in self.named.items()}
        return self.run(block, block.reference, [_double(t) for t in self.inputs], named)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _like(out: Tensor, place: int) -> Tensor:
    """An incoming gradient: the same numbers for each dtype."""
    generator = torch.Generator().manual_seed(SEED + place)
    noise = torch.randint(-8, 9, out.shape, generator=generator) / 8  # exact in bfloat16 too
    return noise.to(out.dtype).to(out.device)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num())) if a.is_floating_point() else bool(torch.equal(a, b))


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise AssertionError(text)


def _compare(what: str, fused: Tensor | None, plain: Tensor | None, exact: Tensor | None) -> None:
    if fused is None or plain is None or exact is None:
        _require(fused is None and plain is None, f"{what} is {_presence(fused)} fused, {_presence(plain)} in reference")
        return
    _require(fused.shape == plain.shape, f"{what} has shape {list(fused.shape)} fused, {list(plain.shape)} in reference")
    _require(fused.dtype == plain.dtype, f"{what} has dtype {fused.dtype} fused, {plain.dtype} in reference")
    if not fused.is_floating_point():
        _require(bool(torch.equal(fused, plain)), f"{what} differs from reference")
        return
    _require(bool(torch.equal(fused.isnan(), plain.isnan())), f"{what} is NaN elsewhere than in reference")
    error, limit = _error(fused, exact), _limit(plain, exact)
    if error > limit:
        place = _worst(fused, exact)
        raise AssertionError(
            f"{what} is off by {error:.3g} at {place}, allowed {limit:.3g} (fused {fused[place].item():.8g}, "
            f"reference {plain[place].item():.8g}, float64 {exact[place].item():.12g})"
        )


def _presence(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else "there"


def _error(got: Tensor, exact: Tensor) -> float:
    return _difference(got, exact).max().item() if got.numel() else 0.0


def _difference(got: Tensor, exact: Tensor) -> Tensor:
    difference = (got.double() - exact.double()).abs()
    return torch.where(got.double() == exact.double(), 0.0, difference).nan_to_num(0.0)


def _limit(plain: Tensor, exact: Tensor) -> float:
    finite = exact.double().abs()
    scale = finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0
    if plain.dtype == torch.float64:
        return 1e-10 * max(scale, 1e-3)
    return 2 * max(_error(plain, exact), torch.finfo(plain.dtype).eps * scale)


def _worst(got: Tensor, exact: Tensor) -> tuple[int, ...]:
    flat = int(_difference(got, exact).argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))


# -- variations --------------------------------------------------------------------------------------------------------


def _gradient_layouts() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "zero-stride incoming gradient": lambda d: d.flatten()[:1].squeeze(0).expand(d.shape) if d.numel() else d,
        "transposed incoming gradient": lambda d: d.transpose(0, -1).contiguous().transpose(0, -1),
        "sliced incoming gradient": lambda d: torch.cat([d, d + 1], -1)[..., : d.shape[-1]],
    }


def _input_layouts() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "transposed input": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        "sliced input": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        "every other row": lambda x: torch.stack([x, x], 0)[1] if x.dim() < 2 else torch.cat([x, x], 0).view(
            2, *x.shape).transpose(0, 1).contiguous().transpose(0, 1)[1],
        "expanded input": lambda x: x[:1].expand(x.shape) if x.dim() > 1 else x[:1].expand(x.shape),
    }  # fmt: skip


def _subsets(names: Sequence[str]) -> Iterator[set[str]]:
    if len(names) <= MAX_SUBSETS_OF:
        for size in range(1, len(names) + 1):
            yield from (set(some) for some in itertools.combinations(names, size))
        return
    for name in names:
        yield {name}
        yield set(names) - {name}
    yield set(names)


def check(block: Sequential, *inputs: Tensor, layouts: bool = True, frozen: bool = True, **named: Tensor) -> None:
    """Checks a block, fused as it is, against its plain formulas: values and every gradient.

    With the inputs as given; with strided, transposed and expanded inputs and incoming gradients (`layouts`); with every
    frozen subset (`frozen`); with each output unused; with a retained graph; under saved-tensor hooks; with no rows.
    Inputs, parameters and incoming gradients must stay untouched, and no gradient may share memory with an incoming one.

    Args:
        block: any `Sequential`; it is left as it was, gradients aside, which it has none of afterwards.
        inputs, named: as for a call. They are not changed.

    Raises:
        AssertionError: naming what differs, where and by how much.
    """
    wanted = [(p, p.requires_grad) for p in block.parameters()]
    try:
        with _checked_always(), torch.random.fork_rng(devices=[]):
            _check(block, inputs, named, layouts, frozen)
    finally:
        for parameter, wants in wanted:
            parameter.requires_grad_(wants).grad = None


def _check(block: Sequential, inputs: Sequence[Tensor], named: dict, layouts: bool, frozen: bool) -> None:
    case = _Case(block, inputs, named)
    case.compare("as given")
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
        for case.frozen in _subsets(_differentiable(case)):
            case.compare(f"frozen {', '.join(sorted(case.frozen))}")
        case.frozen = set()
    if layouts:
        for what, case.layout in _gradient_layouts().items():
            case.compare(what)
        case.layout = lambda grad: grad
        for what, change in _input_layouts().items():
            _Case(block, [change(t) for t in case.inputs], {n: change(t) for n, t in named.items()}).compare(what)
    if all(t.dim() > 1 for t in case.inputs):
        _Case(block, [t[:0] for t in case.inputs], {n: t[:0] for n, t in named.items()}).compare("zero rows")
    _check_retained(case)


def _differentiable(case: _Case) -> list[str]:
    tensors = [*case.inputs, *case.named.values(), *case.block.parameters()]
    return [name for name, t in zip(case.names(), tensors, strict=True) if t.is_floating_point()]


def _check_retained(case: _Case) -> None:
    """A second backward of a retained graph gives the same gradients."""
    xs = [t.detach().requires_grad_(t.is_floating_point()) for t in case.inputs]
    torch.manual_seed(SEED)
    outs = case.block(*xs, **case.named)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out.requires_grad]
    leaves = [t for t in (*xs, *case.block.parameters()) if t.requires_grad]
    douts = [_like(out, place) for place, out in enumerate(outs)]
    if outs and leaves:
        first = torch.autograd.grad(outs, leaves, douts, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(outs, leaves, douts, allow_unused=True)
        for a, b in zip(first, second, strict=True):
            same = a is b if a is None or b is None else _same(a, b)
            _require(same, "a second backward through a retained graph gives other gradients")


@contextlib.contextmanager
def _checked_always() -> Iterator[None]:
    before, executable.CHECK_ALWAYS = executable.CHECK_ALWAYS, True
    try:
        yield
    finally:
        executable.CHECK_ALWAYS = before


def check_op(op: Op, *inputs: Tensor, gradcheck: bool = True) -> None:
    """Checks an op alone: its `fwd` and `bwd` against its `reference`, as `check` does, and `gradcheck` in float64.

    Args:
        op: any op.
        inputs: `x` and the op's extra inputs.
        gradcheck: also compare with finite differences, and the second derivative with those of the first.
    """
    block = Sequential(op, rules=NONE, inputs=[name for name in op.extra_input_names() if name is not None])
    check(block, *inputs)
    if gradcheck:
        exact = copy.deepcopy(block).double()
        for parameter in exact.parameters():
            parameter.requires_grad_()
        xs = [_double(t.detach()).requires_grad_(t.is_floating_point()) for t in inputs]

        def run(*tensors: Tensor) -> Any:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(SEED)
                return torch.func.functional_call(exact, dict(zip(names, tensors[len(xs) :], strict=True)), tensors[: len(xs)])

        names = [name for name, _ in exact.named_parameters()]
        leaves = [*xs, *[p.detach().requires_grad_() for p in exact.parameters()]]
        torch.autograd.gradcheck(run, leaves)
        torch.autograd.gradgradcheck(run, leaves)


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
    explanation = block.explain(*asked, **named)
    fired = [row.rule for part in explanation.parts for row in (*part.forward, *part.backward)]
    rewritten = [note for part in explanation.parts for note in part.notes if note.startswith("rewritten: ")]
    if rule.name not in fired and not any(rule.name in note for note in rewritten):
        reasons = "; ".join(explanation.unfused) or "its pattern does not occur"
        raise AssertionError(f"rule {rule.name} did not fire: {reasons}")
    if rule.direction == "forward":
        _check_records(block, rule, asked, named)
    check(block, *inputs, **named)


def _check_records(block: Sequential, rule: Rule, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
    """Law 2: each record of a forward rule equals the unfused one."""
    fused, plain = _records(block, block.rules, inputs, named), _records(block, NONE, inputs, named)
    for (node, record), (_, other) in zip(fused, plain, strict=True):
        for field, a, b in zip(type(record).fields, record, other, strict=True):
            what = f"rule {rule.name}: record {field} of {node}"
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                _compare(what, a, b, b.double() if b.is_floating_point() else b)
            else:
                _require(type(a) is type(b), f"{what} is {a!r}, unfused {b!r}")


def _records(
    block: Sequential, rules: RuleSet, inputs: Sequence[Tensor], named: dict[str, Tensor]
) -> list[tuple[Any, Any]]:
    """(node, record) of a block that is one chain."""
    fuser_, values = block.single_chain(*inputs, **named)
    found, flat, _ = fuser_.find(values, rules)
    assert found is not None
    torch.manual_seed(SEED)
    with torch.no_grad():
        return list(zip(records(found.plan), found.run(flat)[1], strict=True))
