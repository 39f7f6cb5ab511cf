"""Forward: a residual addition and the norm behind it in one pass over the rows, also behind a linear layer."""

from __future__ import annotations

from fusible import kernels
from fusible.op import Out
from fusible.ops import AddExtraInput, BasicLinear, Bias, LayerNorm, MakeExtraOutput, RMSNorm
from fusible.rule import forward
from fusible.rules.linear_epilogue import in_dtype, one_dtype, same_extra

__all__ = ["add_norm", "linear_add_norm"]


def extra_like_stream(env):
    reason = f"the extra input is {env.extras[0]}, the stream {env.dtype}"
    yield env.extras[0] == env.dtype, reason, f"make the extra input {env.dtype}"


def add_and_norm(norm, x, extra, weight, bias):
    """(y, the norm's record, x + extra)."""
    ndim, zero_centered = len(norm.normalized_shape), norm.zero_centered_gamma
    if type(norm) is RMSNorm:
        y, rstd, total = kernels.add_rms_norm(x, extra, weight, norm.epsilon(x.dtype), ndim, zero_centered)
        return y, RMSNorm.Saved(total, rstd), total
    y, mean, rstd, total = kernels.add_layer_norm(x, extra, weight, bias, norm.eps, ndim, zero_centered)
    return y, LayerNorm.Saved(total, mean, rstd), total


@forward(aliases=False)
def add_norm(add: AddExtraInput, out: MakeExtraOutput | None, norm: RMSNorm | LayerNorm, /, x, extra, weight, bias):
    """The sum is written and normalised in one pass."""
    y, record, total = add_and_norm(norm, x, extra, weight, bias)
    return Out(y, *([] if out is None else [total]), norm=record)


@add_norm.requires
def _(add, out, norm, env):
    yield from extra_like_stream(env)


@forward(aliases=False)
def linear_add_norm(
    linear: BasicLinear,
    bias: Bias | None,
    add: AddExtraInput,
    out: MakeExtraOutput | None,
    norm: RMSNorm | LayerNorm,
    /,
    x,
    extra,
    weight,
    b,
    gain,
    shift,
    *,
    env,
):
    """The GEMM with its bias; the residual is added by the norm's pass, which reads the result anyway."""
    x, weight, b = in_dtype(env.out_dtype, x, weight, b)
    z = kernels.gemm(x, weight) if b is None else kernels.gemm_bias(x, weight, b)
    y, record, total = add_and_norm(norm, z, extra, gain, shift)
    return Out(y, *([] if out is None else [total]), linear=BasicLinear.Saved(x), norm=record)


@linear_add_norm.requires
def _(linear, bias, add, out, norm, env):
    yield from one_dtype(linear, bias, env)
    yield from same_extra(linear, env)
