"""Proofs for blocks, ops and rules: `check`, `check_op`, `check_rule`. The library's own tests call these.

Each compares what runs fused with the plain formulas under ordinary autograd, and raises `AssertionError` that names the
first thing that differs: where, and by how much.

The one tolerance is in `fusible.tolerance`: in float64 a relative 1e-10 of the largest value; in any other dtype no
further from the float64 result than twice what plain torch is in that dtype.
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
from fusible.op import Op, Spec
from fusible.rule import Rule, RuleSet
from fusible.rules import NONE
from fusible.sequential import Sequential
from fusible.tolerance import compare, require, same

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
        real = dict(zip(self.names(), (*xs, *keywords.values(), *block.parameters()), strict=True))
        before = {name: (t._version, t.detach().clone()) for name, t in real.items()}
        torch.manual_seed(SEED)
        with self.hooks():
            outs = function(*xs, **keywords)
        outs = outs if isinstance(outs, tuple) else (outs,)
        douts = [self.layout(_like(out, place)) for place, out in enumerate(outs)]
        pairs = [(o, d) for place, (o, d) in enumerate(zip(outs, douts, strict=True)) if o.requires_grad and self.used(place)]
        copies = [d.clone() for _, d in pairs]
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [d for _, d in pairs])
        for name, (version, value) in before.items():
            require(real[name]._version == version and same(real[name], value), f"{name} was changed")
        for place, ((_, d), kept) in enumerate(zip(pairs, copies, strict=True)):
            require(same(d, kept), f"the incoming gradient {place} was changed")
        _check_gradients_own_memory(real, [d for _, d in pairs])
        if function is self.block:
            _check_shared_outputs_are_views(outs, real)
        return _Result(outs, self.names(), list(real.values()))

    def _wants(self, name: str, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and name not in self.frozen

    def compare(self, what: str) -> None:
        """Fused against `reference`, by the one tolerance."""
        fused = self.run(self.block, self.block, self.inputs, self.named)
        plain = self.run(self.block, self.block.reference, self.inputs, self.named)
        given = [*self.inputs, *self.named.values(), *self.block.parameters()]
        exact = plain if all(_is_exact(t) for t in given) else self._exact()
        for (name, a), (_, b), (_, c) in zip(fused.items(), plain.items(), exact.items(), strict=True):
            compare(f"{what}: {name}", a, b, c)

    def _exact(self) -> _Result:
        """`reference` in float64; parameters that are float64 already stay the ones there."""
        block = copy.deepcopy(self.block).double()
        named = {name: _double(t) for name, t in self.named.items()}
        return self.run(block, block.reference, [_double(t) for t in self.inputs], named)


def _check_gradients_own_memory(leaves: dict[str, Tensor], douts: Sequence[Tensor]) -> None:
    """No gradient is a view of an incoming one or of another (law 5)."""
    owners = {_memory(d): "an incoming gradient" for d in douts if d.numel()}
    for name, leaf in leaves.items():
        if leaf.grad is not None and leaf.grad.numel():
            owner = owners.setdefault(_memory(leaf.grad), f"the gradient of {name}")
            require(owner == f"the gradient of {name}", f"the gradient of {name} shares memory with {owner}")


def _check_shared_outputs_are_views(outs: Sequence[Tensor], inputs: dict[str, Tensor]) -> None:
    """An output that shares memory with an input or another output refuses to be changed in place (G4)."""
    owners = {_memory(t): name for name, t in inputs.items() if t.numel()}
    for place, out in enumerate(outs):
        owner = owners.setdefault(_memory(out), f"output {place}") if out.numel() else f"output {place}"
        if out.requires_grad and owner != f"output {place}":
            try:
                out.mul_(1)
            except RuntimeError:
                continue
            raise AssertionError(
                f"output {place} shares memory with {owner}, yet it can be changed in place; an op whose outputs may "
                f"share memory with its inputs must not say aliases = False"
            )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_exact(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64 or not tensor.is_floating_point()


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _like(out: Tensor, place: int) -> Tensor:
    """An incoming gradient: the same numbers for each dtype."""
    generator = torch.Generator().manual_seed(SEED + place)
    noise = torch.randint(-8, 9, out.shape, generator=generator) / 8  # exact in bfloat16 too
    return noise.to(out.dtype).to(out.device)


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
    gradients (`layouts`); with every frozen subset (`frozen`); with each output unused and alone; with a retained graph;
    under saved-tensor hooks; with no rows. Inputs, parameters and incoming gradients must stay untouched, no gradient may
    share memory with an incoming one or another, and an output that shares memory must refuse in-place changes.

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
    case = _Case(block, inputs, named)
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
        for case.frozen in _subsets(_differentiable(case)):
            case.compare(f"frozen {', '.join(sorted(case.frozen))}")
        case.frozen = set()
    if layouts:
        _check_layouts(case)
    if all(t.dim() > 1 for t in (*case.inputs, *case.named.values())):
        _Case(block, [t[:0] for t in case.inputs], {n: t[:0] for n, t in named.items()}).compare("zero rows")
    _check_retained(case)


def _check_layouts(case: _Case) -> None:
    for what, case.layout in _gradient_layouts().items():
        case.compare(what)
    case.layout = lambda grad: grad
    for what, change in _input_layouts().items():
        _Case(case.block, [change(t) for t in case.inputs], {n: change(t) for n, t in case.named.items()}).compare(what)
    strided = copy.deepcopy(case.block)
    for parameter in strided.parameters():
        parameter.data = torch.stack([parameter.data.mT if parameter.dim() > 1 else parameter.data] * 2, -1)[..., 0]
        parameter.data = parameter.data.mT if parameter.dim() > 1 else parameter.data
    _Case(strided, case.inputs, case.named).compare("strided parameters")


def _gradcheck(block: Sequential, inputs: Sequence[Tensor], named: dict[str, Tensor]) -> None:
    exact = copy.deepcopy(block).double()
    for parameter in exact.parameters():
        parameter.requires_grad_()
    xs = [_double(t.detach()).requires_grad_(t.is_floating_point()) for t in (*inputs, *named.values())]
    names = [name for name, _ in exact.named_parameters()]
    leaves = [*xs, *[p.detach().requires_grad_() for p in exact.parameters()]]

    def run(*tensors: Tensor) -> Any:
        torch.manual_seed(SEED)
        params = dict(zip(names, tensors[len(xs) :], strict=True))
        keywords = dict(zip(named, tensors[len(inputs) : len(xs)], strict=True))
        return torch.func.functional_call(exact, params, tensors[: len(inputs)], keywords)

    if any(leaf.requires_grad for leaf in leaves):
        torch.autograd.gradcheck(run, leaves)
        torch.autograd.gradgradcheck(run, leaves)


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
            equal = a is b if a is None or b is None else same(a, b)
            require(equal, "a second backward through a retained graph gives other gradients")


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
    shared = [name for name in op.extra_input_names() if name is not None]
    block = Sequential(op, rules=NONE, inputs=shared)
    if type(op).infer is not Op.infer:
        _check_infer(op, inputs)
    positional = inputs[: len(inputs) - len(shared)]
    named = dict(zip(shared, inputs[len(positional) :], strict=True))
    check(block, *positional, gradcheck=gradcheck, **named)


def _check_infer(op: Op, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outs = op(*[t.detach() for t in inputs])
    said = op.infer(*[Spec(tuple(t.shape), t.dtype, t.device) for t in inputs])
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
                compare(what, a, b, b.double() if b.is_floating_point() else b)
            else:
                require(type(a) is type(b), f"{what} is {a!r}, unfused {b!r}")


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
