"""Rotary positions without a pass of their own over what does not turn.

Forward, the rotation writes over the fresh result of the linear layer before it, so that values are neither read nor
written. torch's attention reads its heads where they lie, so nothing is copied for it. Backward, the rotation back is
done while the gradients of queries, keys and values, which torch's attention returns one by one, are packed into one
tensor.
"""

from __future__ import annotations

from fusible import kernels
from fusible.op import Grads, Out
from fusible.ops import Attention, BasicLinear, Bias, Rotary
from fusible.rule import backward, forward
from fusible.rules.linear_epilogue import in_dtype, one_dtype

__all__ = ["dattention_rotary", "linear_rotary"]


@forward(aliases=False)
def linear_rotary(linear: BasicLinear, bias: Bias | None, rotary: Rotary, /, x, positions, weight, b, *, env):
    """The rotation writes over the GEMM's result."""
    x, weight, b = in_dtype(env.out_dtype, x, weight, b)
    y = kernels.gemm(x, weight) if b is None else kernels.gemm_bias(x, weight, b)
    y = kernels.rotate_(y, rotary.table(y, positions), rotary.heads, rotary.head_dim, rotary.interleaved)
    return Out(y, linear=BasicLinear.Saved(x), rotary=Rotary.Saved(y.shape[-2], positions))


@linear_rotary.requires
def _(linear, bias, rotary, env):
    yield from one_dtype(linear, bias, env)


@backward(aliases=False)
def dattention_rotary(rotary: Rotary, attention: Attention, /, rotary_saved, attention_saved, dy, *, env):
    """The gradients of the heads are rotated back while they are packed."""
    dq, dk, dv, dmask = attention.bwd_heads(attention_saved, dy, env.needs.attention.mask)
    x = attention_saved.x
    table = rotary.table(x, rotary_saved.positions)
    table = table if table.dim() == 2 else table.flatten(0, -3)
    dx = kernels.unrotate_pack(dq, dk, dv, table, rotary.heads, rotary.interleaved).view(x.shape)
    return Grads(dx, None, dmask, None)


@dattention_rotary.requires
def _(rotary, attention, env):
    yield env.needs.x, "x wants no gradient, so there is nothing to rotate back"
    heads = attention.heads + 2 * attention.kv_heads
    same = env.width == heads * rotary.head_dim
    yield same, f"Rotary turns heads of {rotary.head_dim}, Attention has heads of another size"
