"""`check`, `check_op` and `check_rule` see faults: each fault that is planted here must raise, by its name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusible
from fusible import Grads, Op, Out, Saved, backward, forward, kernels, ops, rewrite
from fusible.ops import GELU, BasicLinear, Bias, ReLU
from fusible.testing import check, check_op, check_rule, report

F64 = torch.float64


class Scaled(Op):
    """`y = x g`, right; a fault overrides a method."""

    aliases = False
    grad_aliases = False

    class Saved(Saved):
        x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.g = torch.nn.Parameter(torch.randn(6))

    def reference(self, x, g):
        return x * g

    def fwd(self, x, g):
        return Out(x * g, saved=self.Saved(x))

    def bwd(self, saved, dy, g):
        return Grads(dy * g, g=self.dg(dy * saved.x))

    def dg(self, product):
        return product.flatten(0, -2).sum(0) if product.dim() > 1 else product.clone()

    def infer(self, x, *, autocast=None):
        return x


class Doubled(Op):
    """`y = x + x` without a parameter."""

    aliases = False
    grad_aliases = False

    def reference(self, x):
        return x + x

    def fwd(self, x):
        return Out(x + x)

    def bwd(self, saved, dy):
        return Grads(dy + dy)


class WithExtra(Op):
    num_extra_inputs = 1
    aliases = False
    grad_aliases = False

    def reference(self, x, extra):
        return x + extra

    def fwd(self, x, extra):
        return Out(x + extra)

    def bwd(self, saved, dy):
        return Grads(dy, dy)


class WithOutput(Op):
    """`y = 2x`, and `3x` as an extra output."""

    num_extra_outputs = 1
    aliases = False
    grad_aliases = False

    def reference(self, x):
        return x * 2, x * 3

    def fwd(self, x):
        return Out(x * 2, x * 3)

    def bwd(self, saved, dy, d_extra):
        return Grads(sum(d * f for d, f in ((dy, 2), (d_extra, 3)) if d is not None))


def strided_as_dense(t: Tensor) -> Tensor:
    """t's memory read in order, as if it had no strides: what a kernel does that forgets them."""
    flat = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return flat.repeat(1 + t.numel() // max(flat.numel(), 1))[: t.numel()].view(t.shape)


class Cached:
    """State of a call on the op, which another call overwrites."""

    def fwd(self, x, g):
        type(self).x = x
        return Out(x * g, saved=self.Saved(None))

    def bwd(self, saved, dy, g):
        return Grads(dy * g, g=self.dg(dy * type(self).x))


def fault(base: type[Op], **changed: object) -> type[Op]:
    return type("Faulty", (base,), changed)


def changed_in_place(self, saved, dy):
    return Grads(dy.mul_(2))


FAULTS = {
    "wrong value": (fault(Doubled, fwd=lambda self, x: Out(x + x + 1e-6)),
                    "as given: output 0 is off by 1e-06 at"),
    "wrong gradient": (fault(Doubled, bwd=lambda self, saved, dy: Grads(dy * 2.001)),
                       "as given: gradient of input 0 is off by"),
    "wrong weight gradient": (fault(Scaled, dg=lambda self, product: product.reshape(-1, 6).mean(0)),
                              "as given: gradient of 0.g is off by"),
    "gradients swapped": (fault(WithOutput, bwd=lambda self, saved, dy, d_extra: Grads(
                              sum(d * f for d, f in ((dy, 3), (d_extra, 2)) if d is not None))),
                          "gradient of input 0 is off by"),
    "an unused output forgotten": (
        fault(WithOutput, bwd=lambda self, saved, dy, d_extra: Grads(dy * (2 if d_extra is None else 5))),
        "NoneType|as given: gradient of input 0 is off by"),
    "an unused output's gradient": (
        fault(WithOutput, bwd=lambda self, saved, dy, d_extra: Grads(
            sum(d * f for d, f in ((dy, 2 if d_extra is not None else 4), (d_extra, 3)) if d is not None))),
        "output [01] (unused|alone): gradient of input 0 is off by"),
    "weight gradient missing": (fault(Scaled, bwd=lambda self, saved, dy, g: Grads(dy * g, g=None)),
                                r"returned no gradient for g of Faulty \(op 0\), though it is wanted"),
    "input gradient missing": (fault(Doubled, bwd=lambda self, saved, dy: Grads(None)),
                               "returned no gradient for x, though it is wanted"),
    "input changed": (fault(Doubled, fwd=lambda self, x: Out(x.mul_(2))), "input 0 was changed"),
    "input changed and restored": (fault(Doubled, fwd=lambda self, x: Out((x.mul_(2).clone(), x.div_(2))[0])),
                                   "input 0 was changed"),
    "extra input changed": (fault(WithExtra, fwd=lambda self, x, extra: Out(extra.add_(x))), "input 1 was changed"),
    "parameter changed": (
        fault(Scaled, fwd=lambda self, x, g: Out((x * g, g.detach().add_(1))[0], saved=self.Saved(x))),
        "0.g was changed"),
    "incoming gradient changed": (fault(Doubled, bwd=changed_in_place), "the incoming gradient 0 was changed"),
    "view of the incoming gradient": (fault(WithExtra, bwd=lambda self, saved, dy: Grads(dy.view_as(dy), dy.clone())),
                                      "gradient of input 0 shares memory with an incoming gradient"),
    "gradients that share memory": (
        fault(WithExtra, bwd=lambda self, saved, dy: Grads(*(lambda d: (d, d.view_as(d)))(dy.clone()))),
        "gradient of input 1 shares memory with the gradient of input 0"),
    "output is a view though it says not": (
        fault(Doubled, reference=lambda self, x: x, fwd=lambda self, x: Out(x.view_as(x)),
              bwd=lambda self, saved, dy: Grads(dy)),
        "output 0 shares memory with input 0, yet it can be changed in place"),
    "strides of the input ignored": (fault(Doubled, fwd=lambda self, x: Out(2 * strided_as_dense(x))),
                                     "transposed input: output 0 is off by"),
    "strides of the gradient ignored": (fault(Doubled, bwd=lambda self, saved, dy: Grads(2 * strided_as_dense(dy))),
                                        "zero-stride incoming gradient: gradient of input 0 is off by"),
    "strides of the parameter ignored": (
        fault(Scaled, fwd=lambda self, x, g: Out(x * strided_as_dense(g), saved=self.Saved(x))),
        "strided parameters: output 0 is off by"),
    "reads across rows": (fault(Doubled, fwd=lambda self, x: Out(x + x.roll(1, 0))), "as given: output 0 is off by"),
    "loses the last row": (
        fault(Scaled, bwd=lambda self, saved, dy, g: Grads(dy * g, g=self.dg((dy * saved.x)[: len(dy) // 2 * 2]))),
        "as given: gradient of 0.g is off by"),
    "no rows": (fault(Scaled, dg=lambda self, product: product.reshape(-1, 6).mean(0) * len(product)),
                "zero rows: gradient of 0.g is NaN elsewhere than in reference"),
    "frozen": (fault(Scaled, bwd=lambda self, saved, dy, g, *, env: Grads(
                   dy * g if env.needs.g else dy, g=self.dg(dy * saved.x))),
               "frozen 0.g: gradient of input 0 is off by"),
    "wrong dtype": (fault(Doubled, fwd=lambda self, x: Out((x + x).float())),
                    "forward returned torch.float32 with last dimension"),
    "wrong shape": (fault(Doubled, fwd=lambda self, x: Out((x + x)[:2])),
                    "output 0 has shape .* fused, .* in reference"),
    "wrong infer": (fault(Scaled, infer=lambda self, x, *, autocast=None: x._replace(shape=(9, *x.shape))),
                    r"output 0: infer says \[9, 3, 6\] torch.float64 on cpu, reference gives \[3, 6\]"),
    "uninitialised memory": (fault(Doubled, fwd=lambda self, x: Out(torch.empty_like(x))),
                             "output 0 is NaN elsewhere than in reference"),
    "state of a call on the op": (fault(Scaled, fwd=Cached.fwd, bwd=Cached.bwd),
                                  "a call in between changes the gradients"),
    "draws other random numbers": (
        fault(Doubled, reference=lambda self, x: x * torch.rand_like(x), fwd=lambda self, x: Out(x * torch.rand(1)),
              bwd=lambda self, saved, dy: Grads(dy)),
        "as given: output 0 is off by"),
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("name", ["Scaled", "Doubled", "WithExtra", "WithOutput"])
def test_right_ops_pass(name):
    op = globals()[name]()
    check_op(op.double(), *[torch.randn(3, 6, dtype=F64) for _ in range(1 + op.num_extra_inputs)])


@pytest.mark.quick
@pytest.mark.parametrize("name", FAULTS)
def test_check_op_sees(name):
    kind, text = FAULTS[name]
    op = kind().double()
    inputs = [torch.randn(3, 6, dtype=F64) for _ in range(1 + op.num_extra_inputs)]
    with pytest.raises((AssertionError, TypeError), match=text):
        check_op(op, *inputs, gradcheck=False)


@pytest.mark.quick
def test_gradcheck_sees_a_formula_that_autograd_differentiates_wrongly():
    """No row above: `reference` itself is wrong, so only finite differences tell."""

    class Detached(Op):
        def reference(self, x):
            return x * x.detach()

    check_op(Detached(), torch.randn(3, 6), gradcheck=False)
    with pytest.raises(
        AssertionError, match="^finite differences: Jacobian mismatch for output 0 with respect to input 0"
    ):
        check_op(Detached(), torch.randn(3, 6))


@pytest.mark.quick
def test_check_leaves_the_block_as_it_was():
    """No row: what `check` does to the caller."""
    block = fusible.Sequential(ops.Linear(6, 6), ops.Dropout(0.5))
    block[0].weight.requires_grad_(False)
    state = torch.get_rng_state()
    values = [p.clone() for p in block.parameters()]
    check(block, torch.randn(3, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.requires_grad for p in block.parameters()] == [False, True]
    assert [p.grad for p in block.parameters()] == [None, None]
    assert all(torch.equal(p, value) for p, value in zip(block.parameters(), values, strict=True))


def exp_off_by(factor: float):
    return lambda self, x: Out(x.exp() * (1 + factor))


@pytest.mark.quick
def test_the_tolerance():
    """No row: the numbers are the subject."""
    x = torch.randn(3, 64)
    off = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 0.05, torch.float16: 6e-3}
    for dtype, factor in off.items():
        kind = fault(Doubled, reference=lambda self, x: x.exp(), fwd=exp_off_by(factor))
        with pytest.raises(AssertionError, match=r"output 0 is off by .*, allowed .*fused .*, reference .*, float64"):
            check(fusible.Sequential(kind()), x.to(dtype))


# -- rules -------------------------------------------------------------------------------------------------------------


@forward
def wrong_value(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(x @ weight.t() + 2 * b, linear=BasicLinear.Saved(x))


@forward
def wrong_record(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(x @ weight.t() + b, linear=BasicLinear.Saved(x * 2))


@forward
def right(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(x @ weight.t() + b, linear=BasicLinear.Saved(x))


@forward
def writes_over_a_record(act: GELU, second: ReLU, /, x):
    y = kernels.relu_(kernels.gelu(x))
    return Out(y, act=GELU.Saved(x.clone().zero_()), second=ReLU.Saved(y))


@backward
def wrong_gradient(bias: Bias, act: GELU, /, bias_saved, act_saved, dy, b):
    dx = act.bwd(act_saved, dy).values[0]
    return Grads(dx, bias={"bias": dx[0]})


@backward
def changes_the_incoming_gradient(act: ReLU, /, act_saved, dy):
    return Grads(dy.mul_(act_saved.y > 0))


@rewrite
def another_op(first: GELU, second: ReLU, /):
    return ops.ReLU()


@backward(forgets=("linear.x",))
def forgets_what_it_reads(act: GELU, linear: BasicLinear, /, act_saved, linear_saved, dy, weight):
    return Grads(dy @ weight, linear={"weight": dy.t() @ linear_saved.x})


RULES = [
    (wrong_value, [ops.Linear(6, 4)], AssertionError, "as given: output 0 is off by"),
    (wrong_record, [ops.Linear(6, 4)], AssertionError,
     r"rule wrong_record: record x of Linear \(op 0\) is off by .*"),
    (writes_over_a_record, [ops.GELU(), ops.ReLU()], AssertionError,
     r"rule writes_over_a_record: record x of GELU \(op 0\) is off by"),
    (wrong_gradient, [ops.Linear(6, 4), ops.GELU()], AssertionError, "as given: gradient of 0.bias is off by"),
    (changes_the_incoming_gradient, [ops.ReLU()], AssertionError, "the incoming gradient 0 was changed"),
    (another_op, [ops.GELU(), ops.ReLU()], AssertionError, "as given: output 0 is off by"),
    (forgets_what_it_reads, [ops.GELU(), ops.Linear(6, 4)], TypeError, "NoneType"),
    (right, [ops.GELU(), ops.ReLU()], AssertionError, "rule right did not fire: "),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("rule", "chain", "error", "text"), RULES, ids=lambda v: getattr(v, "name", ""))
def test_check_rule_sees(rule, chain, error, text):
    with pytest.raises(error, match=text):
        check_rule(rule, [module.double() for module in chain], torch.randn(3, 6, dtype=F64))


@pytest.mark.quick
def test_check_rule_passes_a_right_rule():
    """No row: as a block, and as a list."""
    check_rule(right, [ops.Linear(6, 4)], torch.randn(3, 6))
    block = fusible.Sequential(ops.AddExtraInput("a"), ops.Linear(6, 4), inputs=("a",))
    check_rule(right, block, torch.randn(3, 6), a=torch.randn(3, 6))


# -- the report --------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_report_lists_every_property_of_what_is_right():
    made = report(fusible.Sequential(ops.Linear(6, 4), ops.GELU()), torch.randn(3, 6))
    assert made.ok, made
    names = [found.name for found in made.findings]
    assert names[:3] == ["as given", "grad mode off", "under saved-tensor hooks"]
    assert {"frozen 0.weight", "zero-stride incoming gradient", "zero rows", "retained graph", "determinism",
            "finite differences"} <= set(names)  # fmt: skip
    assert str(made).endswith(f"all {len(names)} properties hold")
    assert made.to_dict()["ok"] is True
    assert made._repr_html_().count("<tr>") == len(names)


@pytest.mark.quick
def test_a_report_goes_on_after_a_property_that_does_not_hold():
    kind, _ = FAULTS["wrong weight gradient"]
    made = report(kind().double(), torch.randn(3, 6, dtype=F64), gradcheck=False)
    failed = {found.name: found.message for found in made.failures}
    assert failed["as given"].startswith("gradient of 0.g is off by")
    assert "under saved-tensor hooks" in failed
    assert not {"frozen 0.g", "retained graph", "determinism"} & set(failed)
    assert not made.ok
    assert f"FAILED  as given: {failed['as given']}" in str(made)


@pytest.mark.quick
def test_a_report_of_a_rule_says_whether_it_fires_and_keeps_the_records():
    good = report(right, torch.randn(3, 6), ops=[ops.Linear(6, 4)], gradcheck=False)
    assert good.ok, good
    assert [found.name for found in good.findings][:2] == ["it fires", "equal records"]
    bad = report(wrong_record, torch.randn(3, 6), ops=[ops.Linear(6, 4)], gradcheck=False)
    assert "record x of Linear (op 0) is off by" in next(f.message for f in bad.failures)
    idle = report(right, torch.randn(3, 6), ops=[ops.GELU()], gradcheck=False)
    assert idle.failures[0].message == "rule right did not fire: 0 GELU: no rule names it"


@pytest.mark.quick
def test_a_block_needs_no_inputs_for_its_report():
    made = report(fusible.Sequential(ops.Linear(6, 8), ops.SwiGLU()), gradcheck=False)
    assert made.ok, made


@pytest.mark.quick
def test_what_cannot_be_reported():
    with pytest.raises(TypeError, match="^report: target must be a Sequential, an op or a rule, got Conv1d$"):
        report(torch.nn.Conv1d(1, 1, 1), torch.randn(3, 6))
    with pytest.raises(TypeError, match="^report: GELU needs inputs; pass them as for a call$"):
        report(ops.GELU())
    with pytest.raises(TypeError, match=r"^report: rule right needs a chain on which it fires; pass ops=\[...\]$"):
        report(right, torch.randn(3, 6))
