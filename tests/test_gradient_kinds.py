"""Gradients of unusual kinds: batched, integer outputs, inference tensors, autocast, ops and rules that alias."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from test_gradient_backward import both_rules, every_case, leaves_of, same
from test_gradient_changes import Pair
from test_gradient_rules import values
from torch.nn import functional as F
from twins import CASES, RULES, close, tuple_of

import fusible
from fusible import Grads, Op, Out, ops

# -- batches of gradients ----------------------------------------------------------------------------------------------


@both_rules
@every_case
@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_batched_gradients(how, case, rules):
    pair = Pair(case, rules)
    results = []
    for twin in (False, True):
        run = pair.run("leaf", set(), twin)
        leaves = leaves_of(run)
        seeds = [
            torch.stack([values(5 * n + p) for n in range(4)]).view(4, *out.shape) for p, out in enumerate(run.outs)
        ]

        def pull(*seeds, run=run, leaves=leaves, **options):
            return torch.autograd.grad(run.outs, leaves, seeds, retain_graph=True, allow_unused=True, **options)

        batched = pull(*seeds, is_grads_batched=True) if how == "is_grads_batched" else torch.func.vmap(pull)(*seeds)
        one = pull(*[seed[2] for seed in seeds])
        same([grad if grad is None else grad[2] for grad in batched], one)
        results.append(batched)
    same(*results)


@both_rules
@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian_and_hessian(vectorize, rules):
    block, twin = CASES["residual"].make(RULES[rules])
    x = values(0)[:2]
    found = [
        [
            torch.autograd.functional.jacobian(module, x, vectorize=vectorize),
            torch.autograd.functional.hessian(lambda x, m=module: m(x).pow(3).sum(), x, vectorize=vectorize),
        ]
        for module in (block, twin)
    ]
    same(*found)


# -- outputs that no gradient comes from -------------------------------------------------------------------------------


class Where(Op):
    """Hands x on, and where it is positive out: as integers."""

    num_extra_outputs = 1

    def reference(self, x):
        return x * 2, (x > 0).long()


class FusedWhere(Where):
    def fwd(self, x):
        return Out(x * 2, (x > 0).long())

    def bwd(self, saved, dy, d_where):
        assert d_where is None
        return Grads(None if dy is None else dy * 2)


class Lookup(Op):
    """Rows of a table, by integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(5, 8, dtype=torch.float64))

    def reference(self, x, table):
        return F.embedding(x, table)


@pytest.mark.parametrize("kind", [Where, FusedWhere])
@both_rules
def test_integer_extra_output(kind, rules):
    block = fusible.Sequential(ops.Linear(8, 8), kind(), ops.SiLU(), rules=RULES[rules]).double()
    x = values(0).requires_grad_()
    y, where = block(x)
    assert y.requires_grad
    assert not where.requires_grad
    assert where.grad_fn is None
    h = block[0](x)
    assert torch.equal(where, (h > 0).long())
    y.sum().backward()
    close(x.grad, torch.autograd.grad(F.silu(h * 2).sum(), x)[0])
    where += 1


@both_rules
def test_integer_input(rules):
    block = fusible.Sequential(Lookup(), ops.RMSNorm(8), ops.MakeExtraOutput(), rules=RULES[rules]).double()
    x = torch.tensor([[0, 3, 3], [1, 0, 4]])
    y, _ = block(x)
    y.sum().backward()
    want = torch.autograd.grad(block[1](F.embedding(x, block[0].table)).sum(), block[0].table)[0]
    close(block[0].table.grad, want)


@both_rules
def test_output_from_before_the_first_trained_op(rules):
    """It depends on nothing that requires grad: no gradient, no node, and none of the block's memory."""
    block = fusible.Sequential(ops.SiLU(), ops.MakeExtraOutput(), ops.Linear(8, 8), rules=RULES[rules]).double()
    y, early = block(values(0))
    assert y.requires_grad
    assert not early.requires_grad
    assert early.is_leaf
    assert early.grad_fn is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        early.sum().backward()
    y.sum().backward()
    assert block[2].weight.grad is not None


@both_rules
def test_early_output_changed(rules):
    """The linear layer reads it for its weight's gradient, so a change raises."""
    block = fusible.Sequential(ops.SiLU(), ops.MakeExtraOutput(), ops.Linear(8, 8), rules=RULES[rules]).double()
    y, early = block(values(0))
    early.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- inference tensors -------------------------------------------------------------------------------------------------


@both_rules
@every_case
def test_first_called_without_gradients_then_trained(case, rules):
    """Nothing cached under `inference_mode` or `no_grad` is met again."""
    pair = Pair(case, rules)
    for mode in (torch.inference_mode, torch.no_grad):
        given = [values(place).requires_grad_() for place in range(1 + pair.spec.extras)]
        for _ in range(2):
            with mode():
                outs = tuple_of(pair.block(*given))
            assert not any(out.requires_grad for out in outs)
            runs = [pair.run("leaf", set(), twin) for twin in (False, True)]
            for run in runs:
                run.backward(run.loss())
            same(*[run.grads() for run in runs])


@both_rules
def test_inference_tensor_as_input(rules):
    """As in plain torch: it cannot be saved for backward, where nothing reads it it may come in."""
    with torch.inference_mode():
        x = values(0).clone()
    block, twin = CASES["bare linear"].make(RULES[rules])
    for module in (block, twin):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            module(x)
        module.requires_grad_(False)
    close(block(x), twin(x))
    add = fusible.Sequential(ops.AddExtraInput(), rules=RULES[rules])
    leaf = values(1).requires_grad_()
    add(x, leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


@both_rules
def test_block_built_in_inference_mode(rules):
    with torch.inference_mode():
        block = fusible.Sequential(ops.RMSNorm(8), ops.Linear(8, 8), ops.GELU(), rules=RULES[rules]).double()
        y = block(values(0))
        close(y, block.reference(values(0)))
    with torch.no_grad():
        close(block(values(0)), y)


# -- options that change between forward and backward ------------------------------------------------------------------

#: Recorded ones: backward uses what forward did. The others: backward raises. Never a gradient of something else.
RECORDED = {"ConstantScale(2.0)": ("scale", 3.0), "Dropout(0.5)": ("p", 0.1)}
FIXED = {
    "GELU()": ("approximate", "tanh"),
    "GEGLU()": ("approximate", "tanh"),
    "SwiGLU()": ("gate_first", False),
    "SwiGLU(interleave=2)": ("interleave", 1),
    "ClampedSwiGLU()": ("limit", 0.1),
    "ClampedSwiGLU(alpha=1.0)": ("alpha", 2.0),
    "ClampedSwiGLU(offset=1.0)": ("offset", 2.0),
    "SiTUGLU()": ("beta1", 1.0),
    "SiTUGLU(beta2=3.0)": ("beta2", 1.0),
    "RMSNorm(8)": ("zero_centered_gamma", True),
    "RMSNorm(8, eps=1e-3)": ("eps", 1.0),
    "LayerNorm(8)": ("zero_centered_gamma", True),
    "LayerNorm(8, eps=1e-3)": ("eps", 1.0),
    "L2Normalization()": ("eps", 1.0),
}


@both_rules
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("op", [*RECORDED, *FIXED])
def test_options_changed_between_forward_and_backward(op, twice, rules):
    def gradient(change: bool):
        block = fusible.Sequential(ops.Linear(8, 8), eval(f"ops.{op}"), ops.ReLU(), rules=RULES[rules]).double()
        with torch.no_grad():
            for place, parameter in enumerate(block.parameters()):
                parameter.copy_(values(place).flatten().repeat(4)[: parameter.numel()].view(parameter.shape))
        x = values(5).requires_grad_()
        torch.manual_seed(1)
        y = block(x)
        if change:
            setattr(block[1], *{**RECORDED, **FIXED}[op])
        return torch.autograd.grad(y.square().sum(), [x, *block.parameters()], create_graph=twice)

    want = gradient(False)
    if op in FIXED:
        with pytest.raises(RuntimeError, match=rf"\(op 1\): {FIXED[op][0]} was .* in forward and is"):
            gradient(True)
    else:
        same(gradient(True), want)


def test_options_changed_inside_a_rewrite():
    modules = [ops.Linear(8, 8, bias=False), ops.ClampedSwiGLU(), ops.Linear(4, 8, bias=False)]
    block = fusible.Sequential(*modules, rules=(fusible.rules.gated_mlp,)).double()
    y = block(values(0))
    block[1].limit = 0.1
    with pytest.raises(RuntimeError, match="in forward and is"):
        y.sum().backward()


# -- replayed under the forward's conditions ---------------------------------------------------------------------------


@both_rules
@pytest.mark.parametrize("case", ["mlp", "residual", "extra in"])
def test_double_backward_of_a_forward_under_autocast(case, rules):
    """The replay runs under the forward's autocast, wherever backward runs: as plain torch does."""
    pair = Pair(case, rules)
    block = pair.block.float()
    found = []
    for run in (block, block.reference):
        xs = [values(place).float().requires_grad_() for place in range(1 + pair.spec.extras)]
        with torch.autocast("cpu", torch.bfloat16):
            y = run(*xs)
        (g,) = torch.autograd.grad(y.float().square().sum(), xs[0], create_graph=True)
        found.append([g.detach(), *torch.autograd.grad(g.square().sum(), [xs[0], *list(block.parameters())[-1:]])])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).abs().max() <= 3e-2 * theirs.abs().max()


def test_a_replay_sees_the_forwards_autocast():
    seen = []

    class Look(Op):
        def reference(self, x):
            seen.append(x.dtype)
            return x.sin()

    block = fusible.Sequential(ops.Linear(8, 8), Look())
    x = values(0).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block(x)
    seen.clear()
    torch.autograd.grad(y.float().sum(), x, create_graph=True)
    assert seen == [torch.bfloat16]
    y = block(x)
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    assert seen == [torch.float32]


@both_rules
@pytest.mark.parametrize("case", ["mlp", "residual", "named and kept"])
def test_backward_under_autocast_is_the_forwards(case, rules):
    """A forward in float32 has a backward in float32, whatever is on by then."""
    block, _ = CASES[case].make(RULES[rules], torch.float32)
    found = []
    for context in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)):
        x = values(0).float().requires_grad_()
        loss = sum(out.sum() for out in tuple_of(block(x)))
        with context():
            found.append(torch.autograd.grad(loss, [x, *block.parameters()]))
    for plain, under in zip(*found, strict=True):
        assert torch.equal(plain, under)


RELATED = {"the same": lambda x: x, "made of it": lambda x: x * 2, "a view of it": lambda x: x.flip(0).flip(0)[:]}


@both_rules
@pytest.mark.parametrize("relation", RELATED)
@pytest.mark.parametrize("case", ["extra in", "pre-norm"])
def test_inputs_that_depend_on_each_other(case, relation, rules):
    """Each input's gradient is its own part; autograd adds them up where they meet, in both orders of derivative."""
    results = []
    for module in CASES[case].make(RULES[rules]):
        x = values(0).requires_grad_()
        for h in (x, x * 1):
            outs = tuple_of(module(h, RELATED[relation](h)))
            (g,) = torch.autograd.grad([out.pow(3).sum() for out in outs], x, create_graph=True)
            results.append([g.detach(), torch.autograd.grad(g.square().sum(), x)[0]])
    for mine, theirs in zip(results[:2], results[2:], strict=True):
        same(mine, theirs)


@both_rules
@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case].extras and case != "dropout"])
def test_a_parameter_as_input(case, rules):
    """A learned input, or a weight of the block's own: as any other tensor."""
    block, twin = CASES[case].make(RULES[rules])
    learned = torch.nn.Parameter(values(0))
    results = []
    for module in (block, twin):
        leaves = [learned, *module.parameters()]
        squares = [p for p in module.parameters() if p.shape == (8, 8)]
        found = []
        for x in (learned, *(squares[:1] if "reshape" not in case else [])):
            outs = tuple_of(module(x))
            grads = torch.autograd.grad(
                [out.pow(2).sum() for out in outs], leaves, create_graph=True, allow_unused=True
            )
            total = sum((t * t).sum() for t in (*grads, *leaves) if t is not None)
            found += [g if g is None else g.detach() for g in grads]
            found += torch.autograd.grad(total, leaves)
        results.append(found)
    same(*results)


@both_rules
def test_one_weight_in_two_ops(rules):
    results = []
    for make in (functools.partial(fusible.Sequential, rules=RULES[rules]), torch.nn.Sequential):
        torch.manual_seed(3)
        modules = [torch.nn.Linear(8, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 8, bias=False)]
        modules[2].weight = modules[0].weight
        block = make(*modules).double()
        block = make(*block, block[1], block[0])
        weight, x = block[0].weight, values(0).requires_grad_()
        (g,) = torch.autograd.grad(block(x).square().sum(), weight, create_graph=True)
        results.append([g.detach(), *torch.autograd.grad(g.square().sum(), [weight, x])])
    same(*results)


@both_rules
@every_case
def test_double_backward_under_saved_tensor_hooks(case, rules):
    """Right where backward reads the input, which the hooks then have; else one clear error."""
    pair = Pair(case, rules)
    results = []
    for twin in (False, True):
        with torch.autograd.graph.save_on_cpu():
            run = pair.run("non-leaf", set(), twin)
        leaves = leaves_of(run)
        try:
            grads = torch.autograd.grad([out.sum() for out in run.outs], leaves, create_graph=True, allow_unused=True)
            total = sum((g * g).sum() for g in grads if g is not None) + sum((leaf * leaf).sum() for leaf in leaves)
            results.append(torch.autograd.grad(total, leaves))
        except RuntimeError as error:
            assert not twin
            assert "not kept under saved-tensor hooks" in str(error)
            assert case in ("identity", "empty", "reshape", "make", "tanh", "pre-norm", "extra in")
            return
    same(*results)


# -- what shares memory ------------------------------------------------------------------------------------------------


class Half(Op):
    """The first half of x, a view of it."""

    class Saved(fusible.Saved):
        width: int

    def reference(self, x):
        return x[..., : x.shape[-1] // 2]

    def fwd(self, x):
        return Out(self.reference(x), saved=Half.Saved(x.shape[-1]))

    def bwd(self, saved, dy):
        return Grads(F.pad(dy, (0, saved.width - dy.shape[-1])))


class Both(Op):
    """Two halves, and as their gradients two views of one tensor."""

    num_extra_inputs = 1

    def reference(self, x, other):
        return torch.cat([x, other], -1)

    def fwd(self, x, other):
        return Out(self.reference(x, other))

    def bwd(self, saved, dy):
        return Grads(*dy.chunk(2, -1))


class BothCopied(Both):
    """As `Both`, its gradients in memory of their own."""

    grad_aliases = False

    def bwd(self, saved, dy):
        return Grads(*[half.clone() for half in dy.chunk(2, -1)])


@both_rules
def test_a_view_of_the_input_leaves_as_a_view(rules):
    block = fusible.Sequential(Half(), rules=RULES[rules])
    h = values(0).requires_grad_() * 1
    y = block(h)
    with pytest.raises(RuntimeError, match="is a view"):
        y.mul_(2)


@both_rules
def test_a_view_of_our_own_memory_may_be_changed(rules):
    block = fusible.Sequential(ops.Linear(8, 8), Half(), rules=RULES[rules]).double()
    x = values(0).requires_grad_()
    y = block(x)
    y.mul_(3)
    y.sum().backward()
    close(x.grad, 3 * torch.ones(3, 4, dtype=torch.float64) @ block[0].weight[:4])


@both_rules
def test_gradients_share_no_memory(rules):
    block = fusible.Sequential(Both(), rules=RULES[rules])
    a, b = values(0).requires_grad_(), values(1).requires_grad_()
    dy = torch.randn(3, 16, dtype=torch.float64)
    ga, gb = torch.autograd.grad(block(a, b), (a, b), dy)
    pointers = {t.untyped_storage().data_ptr() for t in (ga, gb, dy)}
    assert len(pointers) == 3
    assert torch.equal(torch.cat([ga, gb], -1), dy)


@fusible.forward
def no_scale(scale: ops.ConstantScale, /, x):
    """A scale of one is no work: hands x on, as no op of this kind does."""
    return Out(x, scale=ops.ConstantScale.Saved(1.0))


@fusible.backward
def halves(both: BothCopied, scale: ops.ConstantScale, /, both_saved, scale_saved, dy):
    return Grads(*dy.chunk(2, -1))


def test_a_forward_rule_that_hands_its_input_on():
    """Its ops promise fresh results; the rule does not. In-place changes still never get a gradient wrong."""
    block = fusible.Sequential(ops.ConstantScale(1.0), rules=(no_scale,))
    h = values(0).requires_grad_() * 1
    y = block(h)
    with pytest.raises(RuntimeError, match="is a view"):
        y.mul_(2)


def test_a_record_behind_a_forward_rule_that_hands_its_input_on():
    block = fusible.Sequential(ops.ConstantScale(1.0), ops.GELU(), rules=(no_scale,))
    h = values(0).requires_grad_() * 1
    y = block(h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_backward_rule_whose_gradients_share_memory():
    block = fusible.Sequential(BothCopied(), ops.ConstantScale(1.0), rules=(halves,))
    a, b = values(0).requires_grad_(), values(1).requires_grad_()
    dy = torch.randn(3, 16, dtype=torch.float64)
    ga, gb = torch.autograd.grad(block(a, b), (a, b), dy)
    assert len({t.untyped_storage().data_ptr() for t in (ga, gb, dy)}) == 3
