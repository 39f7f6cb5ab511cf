"""Ops that have only `reference`: the fuser differentiates the formula inside its node, and all promises hold."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from test_gradient_rules import values
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from twins import RULES, close, tuple_of

import fusible
from fusible import Op, ops


class Scale(Op):
    """A parameter, and one that the formula does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def reference(self, x, g, unused):
        return torch.sin(x) * g


class Gate(Op):
    """An extra input and an extra output."""

    num_extra_inputs = 1
    num_extra_outputs = 1

    def reference(self, x, gate):
        return x * torch.sigmoid(gate), x + gate


class Route(Op):
    """A formula that looks at the data, which fake tensors cannot run."""

    def reference(self, x):
        return x.exp() if x.sum().item() > 0 else x.sin()


class Through(Op):
    """Returns its input itself."""

    def reference(self, x):
        return x


class Twice(Op):
    """In-place, on what it made itself."""

    def reference(self, x):
        y = x * 2
        return y.add_(x).relu_()


class Greedy(Op):
    """In-place, on what is not its own."""

    def reference(self, x):
        return x.mul_(2)


class Wide(Op):
    """A GEMM of its own, which autocast sees."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def reference(self, x, w):
        return F.linear(x, w)


class Clamp(Op):
    """A number that was not saved anywhere may change between the passes."""

    bound = 0.5

    def reference(self, x):
        return x.clamp(-self.bound, self.bound)


def plain(modules):
    """The ops one by one, under ordinary autograd."""

    def run(x, *extras):
        rest, outs = list(extras), []
        for op in modules:
            made = op(x, *[rest.pop(0) for _ in range(op.num_extra_inputs)])
            x, *more = made if isinstance(made, tuple) else (made,)
            outs += more
        return (x, *outs)

    return run


CHAINS = {
    "parameter": (lambda: [Scale()], 0),
    "between": (lambda: [ops.Linear(8, 8), Scale(), ops.SiLU(), ops.Linear(8, 8)], 0),
    "extras": (lambda: [ops.RMSNorm(8), Gate(), ops.GELU()], 1),
    "extras, twice": (lambda: [Gate(), Gate(), Scale()], 2),
    "data-dependent": (lambda: [ops.Linear(8, 8), Route(), ops.ReLU(), ops.MakeExtraOutput()], 0),
    "through": (lambda: [Through(), ops.Tanh(), Through()], 0),
    "in place": (lambda: [ops.Linear(8, 8), Twice(), ops.Tanh()], 0),
    "alone": (lambda: [Twice()], 0),
}
both_rules = pytest.mark.parametrize("rules", RULES)
every_chain = pytest.mark.parametrize("chain", CHAINS)


def make(chain: str, rules: str):
    """A block, the same ops run plainly, and the leaves of a call of each."""
    build, extras = CHAINS[chain]
    block = fusible.Sequential(*build(), rules=RULES[rules]).double()
    calls = []
    for run in (block, plain(list(block))):
        xs = [values(place).requires_grad_() for place in range(1 + extras)]
        calls.append((run, xs, [*xs, *block.parameters()]))
    return block, calls


def seeds(outs):
    return [values(10 + place) for place, _ in enumerate(outs)]


@pytest.mark.quick
@both_rules
@every_chain
def test_values_and_gradients(chain, rules):
    _, calls = make(chain, rules)
    found = []
    for run, xs, leaves in calls:
        outs = tuple_of(run(*xs))
        grads = torch.autograd.grad(outs, leaves, seeds(outs), allow_unused=True)
        found.append([*[out.detach() for out in outs], *grads])
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        close(a, b, f"result {number}")


@both_rules
@every_chain
def test_each_output_alone(chain, rules):
    _, calls = make(chain, rules)
    count = len(tuple_of(calls[0][0](*calls[0][1])))
    for used in range(count):
        found = []
        for run, xs, leaves in calls:
            out = tuple_of(run(*xs))[used]
            found.append(torch.autograd.grad(out, leaves, values(3), allow_unused=True))
        for a, b in zip(*found, strict=True):
            close(*[torch.zeros(1) if t is None else t for t in (a, b)] if (a is None) != (b is None) else (a, b))


@both_rules
@every_chain
def test_frozen(chain, rules):
    _, calls = make(chain, rules)
    everything = calls[0][2]
    for frozen in range(len(everything)):
        found = []
        for run, xs, leaves in calls:
            for place, leaf in enumerate(leaves):
                leaf.requires_grad_(place != frozen)
            outs = [out for out in tuple_of(run(*xs)) if out.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found.append(torch.autograd.grad(outs, wanted, seeds(outs), allow_unused=True) if outs and wanted else ())
        for a, b in zip(*found, strict=True):
            close(a, b)


@both_rules
@every_chain
def test_retained_and_double_backward(chain, rules):
    _, calls = make(chain, rules)
    found = []
    for run, xs, leaves in calls:
        outs = tuple_of(run(*xs))
        first = torch.autograd.grad(outs, leaves, seeds(outs), allow_unused=True, retain_graph=True)
        again = torch.autograd.grad(outs, leaves, seeds(outs), allow_unused=True, create_graph=True)
        for a, b in zip(first, again, strict=True):
            close(a, b if b is None else b.detach())
        total = sum((g * g).sum() for g in again if g is not None) + sum((leaf * leaf).sum() for leaf in leaves)
        found.append([*first, *torch.autograd.grad(total, leaves)])
    for a, b in zip(*found, strict=True):
        close(a, b)


@both_rules
@every_chain
def test_second_backward_raises(chain, rules):
    _, calls = make(chain, rules)
    run, xs, _ = calls[0]
    outs = tuple_of(run(*xs))
    torch.autograd.backward(outs, seeds(outs))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.backward(outs, seeds(outs))


@both_rules
@every_chain
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant, chain, rules):
    block, calls = make(chain, rules)
    found = []
    for run in (block, lambda *xs: checkpoint(block, *xs, use_reentrant=reentrant)):
        block.zero_grad()
        xs = [x.detach().requires_grad_() for x in calls[0][1]]
        outs = tuple_of(run(*xs))
        torch.autograd.backward(outs, seeds(outs))
        found.append([leaf.grad for leaf in (*xs, *block.parameters())])
    for a, b in zip(*found, strict=True):
        close(a, b)


@both_rules
def test_changed_input_raises(rules):
    """The formula's own graph reads it, and sees the change."""
    block = fusible.Sequential(Scale(), rules=RULES[rules])
    for change in (lambda x, op: x, lambda x, op: op.g):
        h = values(0).requires_grad_() * 1
        y = block(h)
        change(h, block[0]).detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@both_rules
def test_changed_output_of_an_op_that_keeps_it(rules):
    class Exp(Op):
        def reference(self, x):
            return x.exp()

    y = fusible.Sequential(Exp(), rules=RULES[rules])(values(0).requires_grad_())
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@both_rules
@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_formula_that_writes_to_its_input_raises(mode, wants, rules):
    """Law 5: nothing of the caller's is written, without a word least of all."""
    block = fusible.Sequential(ops.MakeExtraOutput(), Greedy(), rules=RULES[rules])
    x = values(0).requires_grad_(wants)
    with mode(), pytest.raises(RuntimeError, match="in place|in-place operation"):
        block(x)


@both_rules
def test_autocast(rules):
    """The formula runs under the caller's autocast; gradients come in their tensors' dtypes."""
    block = fusible.Sequential(ops.Linear(8, 8), Wide(), ops.SiLU(), rules=RULES[rules])
    x = values(0).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
        want = plain(list(block))(x)[0]
    assert y.dtype == want.dtype == torch.bfloat16
    assert (y - want).abs().max() <= 2e-2 * want.abs().max()
    leaves = [x, *block.parameters()]
    mine = torch.autograd.grad(y, leaves, torch.ones_like(y))
    theirs = torch.autograd.grad(want, leaves, torch.ones_like(y))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


@both_rules
def test_double_backward_after_a_change_of_options_raises(rules):
    block = fusible.Sequential(Clamp(), ops.SiLU(), rules=RULES[rules])
    x = values(0).requires_grad_()
    y = block(x)
    block[0].bound = 0.1
    with pytest.raises(RuntimeError, match="gave other numbers the second time"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@both_rules
def test_double_backward_in_low_precision_minds_no_rounding(rules):
    """The replay rounds in another order than fused steps do; that is no other number."""
    block = fusible.Sequential(
        ops.Linear(64, 64), Through(), ops.SiLU(), ops.Linear(64, 8), Twice(), rules=RULES[rules]
    )
    x = torch.randn(33, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    (g,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), x)[0].isfinite().all()


@both_rules
def test_the_formula_runs_once_per_call(rules):
    calls = []

    class Counted(Op):
        def reference(self, x):
            calls.append(type(x))
            return x * 2

    block = fusible.Sequential(Counted(), rules=RULES[rules])
    x = values(0).requires_grad_()
    block(x)
    calls.clear()  # the first call also looks at shapes, without data
    block(x).sum().backward()
    assert calls == [torch.Tensor]


def test_no_second_graph_when_nothing_requires_grad():
    seen = []

    class Asked(Op):
        def reference(self, x):
            seen.append((torch.is_grad_enabled(), x.requires_grad))
            return x * 2

    fusible.Sequential(Asked())(values(0))
    assert seen[-1] == (False, False)


class WritesOverItsOwn(Op):
    """In-place, on what its own backward reads."""

    def reference(self, x):
        y = x.exp()
        y += 1
        return y


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_formula_that_writes_over_what_its_backward_reads_raises(context):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), context():
        fusible.Sequential(WritesOverItsOwn())(values(0).requires_grad_()).sum().backward()


class Counted(Op):
    """Counts how often its formula runs on data."""

    runs = 0

    def reference(self, x):
        Counted.runs += type(x) is torch.Tensor
        return x.sin() * x


def test_a_checkpoint_computes_each_formula_once_more():
    """Not once for each formula in it, as it would if each asked for its tensors by itself."""
    block = fusible.Sequential(Counted(), ops.SiLU(), Counted(), ops.Linear(8, 8), Counted()).double()
    x = values(0).requires_grad_()
    block(x)
    Counted.runs = 0
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert Counted.runs == 6
    close(x.grad, torch.autograd.grad(block(x).sum(), x)[0])


def test_selective_checkpoint():
    """What the policy saves is saved once and used once; dropout draws what it drew."""

    def policy(ctx, op, *args, **kwargs):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    block = fusible.Sequential(ops.Linear(8, 8), Counted(), ops.Dropout(0.5), ops.Linear(8, 8)).double()
    found = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False, context_fn=context)):
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        x = values(0).requires_grad_()
        block.zero_grad()
        torch.manual_seed(1)
        run(x).square().sum().backward()
        found.append([x.grad, *[p.grad for p in block.parameters()]])
    for a, b in zip(*found, strict=True):
        close(a, b)


def test_retained_graph_under_hooks():
    block = fusible.Sequential(Counted(), ops.Tanh(), Counted())
    x = values(0).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        y = block(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    close(first, torch.autograd.grad(y.sum(), x)[0])
    close(first, torch.autograd.grad(block.reference(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)
