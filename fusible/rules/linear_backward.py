"""Backward of a linear layer with what its GEMM can take along: another branch's gradient, a scale."""

from __future__ import annotations

from fusible import kernels
from fusible.op import NOWHERE, Grads, reads_for
from fusible.ops import BasicLinear, ConstantScale, MakeExtraOutput
from fusible.rule import backward

__all__ = ["dlinear_add", "dlinear_scale"]


@backward(aliases=False)
def dlinear_add(
    out: MakeExtraOutput, linear: BasicLinear, /, out_saved, linear_saved, dy, d_extra, weight=reads_for("x"), *,
    env, into=NOWHERE,
):  # fmt: skip
    """The GEMM for dx accumulates onto the gradient of the extra output."""
    dx = kernels.dgemm_x_add(dy, weight, d_extra)
    wanted = env.needs.linear.weight
    dw = kernels.dgemm_weight(dy, linear_saved.x, into.get("linear.weight")) if wanted else None
    return Grads(dx, linear={"weight": dw})


@dlinear_add.requires
def _(out, linear, env):
    yield from one_gemm_dtype(linear, env)


def one_gemm_dtype(linear, env):
    weight = linear.weight.dtype
    same = env.dtype == env.out_dtype == weight
    change = f"make x {weight}" if env.autocast is None else f"make x and the weight {env.autocast}, as autocast does"
    yield same, f"x is {env.dtype}, the weight {weight} and the result {env.out_dtype}", change


@backward(aliases=False)
def dlinear_scale(
    linear: BasicLinear, scale: ConstantScale, /, linear_saved, scale_saved, dy, weight=reads_for("x"), *, env
):
    """The GEMMs scale their products; the scaled gradient is never made."""
    dx = kernels.gemm_scale(dy, weight.t(), scale_saved.scale) if env.needs.x else None
    dw = None
    if env.needs.linear.weight:
        x = linear_saved.x
        dw = kernels.gemm_scale(_columns(dy), _columns(x), scale_saved.scale)
    return Grads(dx, linear={"weight": dw})


@dlinear_scale.requires
def _(linear, scale, env):
    yield from one_gemm_dtype(linear, env)


def _columns(x):
    """[..., k] -> [k, n]."""
    return x.flatten(0, -2).t() if x.dim() > 1 else x.unsqueeze(-1)
