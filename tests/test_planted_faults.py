"""Faults that fused kernels really have, planted: `check_op` and `check_rule` find each and say what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fusible import Grads, Op, Out, Saved, backward, forward, kernels, ops, reads_for
from fusible.ops import GELU, BasicLinear, Bias, MakeExtraOutput, RMSNorm
from fusible.testing import check_op, check_rule

F32, F64 = torch.float32, torch.float64


def values(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(3)).to(dtype)


def linear(i: int = 6, o: int = 6) -> ops.Linear:
    made = ops.Linear(i, o).double()
    torch.nn.init.normal_(made.bias)
    return made


def biased() -> ops.Bias:
    made = ops.Bias(6).double()
    torch.nn.init.normal_(made.bias)
    return made


# -- faults of rules ---------------------------------------------------------------------------------------------------


@backward
def missing_weight_gradient(linear: BasicLinear, bias: Bias, /, linear_saved, bias_saved, dy, weight, b):
    dx = kernels.dgemm_x(dy, weight)
    return Grads(dx, linear={"weight": torch.zeros_like(weight)}, bias={"bias": kernels.dbias(dy)})


@backward
def no_weight_gradient(linear: BasicLinear, bias: Bias, /, linear_saved, bias_saved, dy, weight, b):
    return Grads(kernels.dgemm_x(dy, weight), bias={"bias": kernels.dbias(dy)})


@backward
def residual_added_before_the_norm(out: MakeExtraOutput, norm: RMSNorm, /, out_saved, norm_saved, dy, d_extra, weight):
    dx, dw = kernels.drms_norm(dy + d_extra, *norm_saved, weight)
    return Grads(dx, norm={"weight": dw})


@forward
def forgotten_record(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(kernels.gemm_bias(x, weight, b))


@forward
def wrong_record(bias: Bias, act: GELU, /, x, b):
    return Out(torch.nn.functional.gelu(x + b), act=GELU.Saved(x + 0))


@forward
def ignored_bias(linear: BasicLinear, bias: Bias, /, x, weight, b):
    return Out(kernels.gemm(x, weight), linear=BasicLinear.Saved(x))


# -- faults of ops -----------------------------------------------------------------------------------------------------


class Planted(Op):
    """An op that keeps its input."""

    aliases = False
    grad_aliases = False

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x):
        return torch.nn.functional.silu(x)

    def fwd(self, x):
        return Out(torch.nn.functional.silu(x), saved=self.Saved(x))

    def bwd(self, saved, dy):
        return Grads(kernels.dsilu(dy, saved.x))


class DroppedTail(Planted):
    def fwd(self, x):
        y = torch.nn.functional.silu(x)
        if x.dim() > 1:
            y[x.shape[0] // 4 * 4 :] = 0
        return Out(y, saved=self.Saved(x))


class OverwrittenGradient(Planted):
    def bwd(self, saved, dy):
        return Grads(dy.mul_(kernels.dsilu(torch.ones_like(dy), saved.x)))


class DenseGradient(Planted):
    """Reads the incoming gradient as if it were contiguous."""

    def bwd(self, saved, dy):
        flat = torch.as_strided(dy, dy.shape, torch.empty(dy.shape).stride()) if 0 not in dy.stride() else dy
        return Grads(kernels.dsilu(flat, saved.x))


class WrongHalf(Op):
    aliases = False
    grad_aliases = False

    class Saved(Saved):
        x: Tensor = reads_for("x")

    def reference(self, x):
        a, b = x.chunk(2, -1)
        return torch.nn.functional.silu(a) * b

    def fwd(self, x):
        return Out(kernels.swiglu(x), saved=self.Saved(x))

    def bwd(self, saved, dy):
        dx = kernels.dswiglu(dy, saved.x)
        return Grads(torch.cat(dx.chunk(2, -1)[::-1], -1))


class CancellingVariance(Op):
    aliases = False
    grad_aliases = False

    def reference(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred + centred.square().mean(-1, keepdim=True)

    def fwd(self, x):
        mean = x.mean(-1, keepdim=True)
        return Out(x - mean + ((x * x).mean(-1, keepdim=True) - mean * mean), saved=CancellingVariance.Saved(x, mean))

    class Saved(Saved):
        x: Tensor = reads_for("x")
        mean: Tensor = reads_for("x")

    def bwd(self, saved, dy):
        n = dy.shape[-1]
        total = dy.sum(-1, keepdim=True)
        return Grads(dy - total / n + total * (saved.x - saved.mean) * 2 / n)


class NarrowSum(Op):
    """A bias whose gradient is added up row by row in the dtype of the rows."""

    aliases = False

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(6, dtype=F64))

    def reference(self, x, bias):
        return x + bias.to(x.dtype)

    def fwd(self, x, bias):
        return Out(x + bias.to(x.dtype))

    def bwd(self, saved, dy, bias):
        total = torch.zeros(dy.shape[-1], dtype=dy.dtype)
        for row in dy.reshape(-1, dy.shape[-1]):
            total = total + row
        return Grads(dy, bias=total)


class SharedView(Op):
    """Both gradients are views of one memory."""

    num_extra_inputs = 1
    aliases = False
    grad_aliases = False

    def reference(self, x, other):
        return x + other

    def fwd(self, x, other):
        return Out(x + other)

    def bwd(self, saved, dy):
        both = dy.clone()
        return Grads(both, both.view_as(both))


class RedrawnMask(Op):
    aliases = False
    grad_aliases = False

    class Saved(Saved):
        mask: Tensor = reads_for("x")

    def reference(self, x):
        return torch.nn.functional.dropout(x, 0.5)

    def fwd(self, x):
        y, mask = torch.native_dropout(x, 0.5, True)
        return Out(y, saved=self.Saved(mask))

    def bwd(self, saved, dy):
        return Grads(torch.native_dropout(dy, 0.5, True)[0])

    def replay(self, saved, x):
        return x * saved.mask * 2


class OneRankOnly(Planted):
    """Takes x to be a matrix: what it subtracts is the mean of dimension 1."""

    def reference(self, x):
        return x - x.mean(-1, keepdim=True)

    def fwd(self, x):
        return Out(x - x.mean(min(1, x.dim() - 1), keepdim=True), saved=self.Saved(x))

    def bwd(self, saved, dy):
        return Grads(dy - dy.mean(-1, keepdim=True))


class ThroughFloat8(Planted):
    """Goes through fewer digits where it takes x to have a dtype that it has not."""

    def fwd(self, x):
        y = torch.nn.functional.silu(x)
        return Out(y.to(torch.float8_e5m2).to(x.dtype) if x.dtype is torch.float16 else y, saved=self.Saved(x))


class LeadingStride(Planted):
    """Heeds the strides of matrices alone."""

    def fwd(self, x):
        flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) if x.dim() > 2 else x
        return Out(torch.nn.functional.silu(flat), saved=self.Saved(x))


class OtherEachTime(Planted):
    """The last bits depend on how often it was called, as with sums in no fixed order."""

    calls = 0

    def fwd(self, x):
        type(self).calls += 1
        return Out(torch.nn.functional.silu(x) * (1 + 1e-13 * (self.calls % 2)), saved=self.Saved(x))


class Detached(Planted):
    """Formula and kernels agree, and are no derivative of each other."""

    def reference(self, x):
        return x * x.detach()

    def fwd(self, x):
        return Out(x * x, saved=self.Saved(x))

    def bwd(self, saved, dy):
        return Grads(dy * saved.x)


@backward
def agrees_with_a_wrong_formula(op: Detached, /, saved, dy):
    return Grads(dy * saved.x)


class Fault(NamedTuple):
    name: str
    run: Callable[[], None]
    message: str


FAULTS = [
    Fault("a weight gradient of zeros", lambda: check_rule(missing_weight_gradient, [linear()], values(3, 6)),
          r"gradient of 0.weight is off by .*; it is zero everywhere: a term or a gradient is missing"),
    Fault("a weight gradient that is not there", lambda: check_rule(no_weight_gradient, [linear()], values(3, 6)),
          r"rule no_weight_gradient on .*: returned no gradient for weight of Linear \(op 0\), though"),
    Fault("the residual's gradient added before the norm's backward",
          lambda: check_rule(residual_added_before_the_norm, [ops.MakeExtraOutput(), ops.RMSNorm(6).double()],
                             values(3, 6)),
          r"gradient of input 0 is off by"),
    Fault("tail rows dropped", lambda: check_op(DroppedTail(), values(8, 6), gradcheck=False),
          r"output 0 is off by .*; only from row 4 of 5 on: a tail is not handled"),
    Fault("the incoming gradient overwritten", lambda: check_op(OverwrittenGradient(), values(3, 6)),
          r"the incoming gradient 0 was changed"),
    Fault("strides ignored", lambda: check_op(DenseGradient(), values(3, 6), gradcheck=False),
          r"transposed incoming gradient: gradient of input 0 is off by .*; only with this layout: something takes the "
          r"incoming gradient to be contiguous"),
    Fault("the wrong half gated", lambda: check_op(WrongHalf(), values(3, 6)),
          r"gradient of input 0 is off by .*; the halves of the last dimension are swapped"),
    Fault("a forgotten record", lambda: check_rule(forgotten_record, [linear()], values(3, 6)),
          r"rule forgotten_record on .*: lacks the record of Linear \(op 0\)"),
    Fault("a record of the wrong value",
          lambda: check_rule(wrong_record, [biased(), ops.GELU()], values(3, 6)),
          r"rule wrong_record: record x of GELU \(op 1\) is off by .*; the difference is the same in each row: a bias"),
    Fault("a mean of squares that cancels", lambda: check_op(CancellingVariance(), values(3, 6)),
          r"large mean: output 0 is off by .*; only for values far from zero: a mean of squares cancels"),
    Fault("sums in bfloat16", lambda: check_op(NarrowSum(), values(3, 6)),
          r"700 rows in bfloat16: gradient of 0.bias is off by .*; only in few digits: a sum is accumulated"),
    Fault("a view handed out twice", lambda: check_op(SharedView(), values(3, 6), values(3, 6)),
          r"the gradient of input 1 shares memory with the gradient of input 0"),
    Fault("a mask redrawn in backward", lambda: check_op(RedrawnMask(), values(8, 6), gradcheck=False),
          r"gradient of input 0 is off by .*; zeros are in other places: a mask was drawn again"),
    Fault("a bias ignored", lambda: check_rule(ignored_bias, [linear()], values(3, 6)),
          r"output 0 is off by .*; the difference is the same in each row: a bias is left out, or added twice"),
    Fault("right for matrices alone", lambda: check_op(OneRankOnly(), values(3, 6)),
          r"rank 3: output 0 is off by .*; only for this rank: something takes x to be a matrix"),
    Fault("another dtype in between", lambda: check_op(ThroughFloat8(), values(3, 6)),
          r"as float16: output 0 is off by .*; only in float16: something goes through another dtype"),
    Fault("strides ignored beyond matrices", lambda: check_op(LeadingStride(), values(3, 6)),
          r"random case \d, leading \[.*\], memory order .*: output 0 is off by .*; only for these shapes, strides"),
    Fault("other bits each time", lambda: check_op(OtherEachTime(), values(3, 6)),
          r"determinism: two calls from one random state give other outputs: number 0 differs by .* at \("),
    Fault("a formula that is wrong as well",
          lambda: check_rule(agrees_with_a_wrong_formula, [Detached()], values(3, 6)),
          r"^finite differences: Jacobian mismatch for output 0 with respect to input 0"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_found_and_named(fault):
    with pytest.raises((AssertionError, TypeError), match=fault.message):
        fault.run()


def test_the_op_without_a_fault_passes():
    check_op(Planted(), values(3, 6))
