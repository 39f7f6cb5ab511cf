"""Normalisations over trailing dimensions, forward and backward.

`x̂`: the normalised x, before the gain; g: the gain, which is the weight, or `1 + weight` if that is stored
zero-centred. Statistics have x's leading dimensions and a 1 for each normalised one. All arithmetic is done in float32
or, for float64 input, in float64; y and dx have x's dtype, parameters may have any. In backward a weight may be absent
although the op has one, if dx is not wanted; its gradient then has the dtype of the arithmetic. Only what is wanted is
computed.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fusible.kernels._dtype import to, wide
from fusible.kernels.registry import kernel

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


def _gain(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    weight = to(weight, dtype)
    return weight + 1 if zero_centered else weight


def _dims(x: Tensor, normalized_ndim: int) -> tuple[tuple[int, ...], float]:
    """The normalised dimensions, and 1 / the number of their elements."""
    if normalized_ndim == 1:
        return (-1,), 1 / (x.shape[-1] or 1)
    return tuple(range(-normalized_ndim, 0)), 1 / (prod(x.shape[-normalized_ndim:]) or 1)


def _scaled(x: Tensor, dims: tuple[int, ...], scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """`x inverse` with `inverse = rsqrt(scale sum x² + eps)` over `dims`, and `inverse`."""
    buffer = x * x
    # A Python number as operand costs more than a tensor filled with it.
    inverse = torch.add(buffer.new_full((), eps), buffer.sum(dims, True), alpha=scale).rsqrt_()
    return torch.mul(x, inverse, out=buffer), inverse


def _dscaled(dy: Tensor, xhat: Tensor, dot: Tensor, inverse: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """`(dy - scale x̂ dot) inverse`: the gradient of `x̂ = x inverse` to x, where `dot = sum dy x̂`."""
    return torch.addcmul(dy, xhat, dot, value=-scale, out=out).mul_(inverse)


@kernel
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, normalized_ndim: int = 1, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """`y = x rstd g` with `rstd = rsqrt(mean x² + eps)`. Returns (y, rstd)."""
    dtype = wide(x.dtype)
    y, rstd = _scaled(to(x, dtype), *_dims(x, normalized_ndim), eps)
    if weight is not None:
        y.mul_(_gain(weight, dtype, zero_centered))
    return to(y, x.dtype), rstd


@kernel
def drms_norm(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    zero_centered: bool = False,
    want_x: bool = True,
    want_weight: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """`dx = rstd (dy g - x̂ mean(dy g x̂))`, `dweight = sum dy x̂` over the leading dimensions. Returns (dx,
    dweight)."""
    dtype = rstd.dtype
    dy = to(dy, dtype)
    xhat = to(x, dtype) * rstd
    buffer = dy * xhat
    dx = dweight = None
    if want_weight:
        leading = tuple(range(x.dim() - normalized_ndim))
        dweight = buffer.sum(leading) if leading else buffer.clone()
        if weight is not None:
            dweight = to(dweight, weight.dtype)
    if want_x:
        dims, scale = _dims(x, normalized_ndim)
        if weight is not None:
            gain = _gain(weight, dtype, zero_centered)
            dot = buffer.mul_(gain).sum(dims, True)
            dy = torch.mul(dy, gain, out=buffer)
        else:
            dot = buffer.sum(dims, True)
        dx = to(_dscaled(dy, xhat, dot, rstd, scale, out=buffer), x.dtype)
    return dx, dweight


@kernel
def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`y = (x - mean) rstd g + bias` with `rstd = rsqrt(var x + eps)`. Returns (y, mean, rstd)."""
    dtype = wide(x.dtype)
    if weight is not None:
        weight = _gain(weight, dtype, zero_centered)
    if bias is not None:
        bias = to(bias, dtype)
    y, mean, rstd = torch.native_layer_norm(to(x, dtype), x.shape[-normalized_ndim:], weight, bias, eps)
    return to(y, x.dtype), mean, rstd


@kernel
def dlayer_norm(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    zero_centered: bool = False,
    want_x: bool = True,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`dx = rstd (dy g - mean(dy g) - x̂ mean(dy g x̂))`, `dweight = sum dy x̂`, `dbias = sum dy` over leading
    dimensions.

    Returns (dx, dweight, dbias), the last in the weight's dtype.
    """
    dtype = rstd.dtype
    shape = x.shape[-normalized_ndim:]
    if weight is not None:
        gain = _gain(weight, dtype, zero_centered)
    elif want_weight or want_bias:
        gain = rstd.new_ones(shape)
    else:
        gain = None
    wanted = [want_x, want_weight, want_bias]
    dx, *grads = _layer_norm_backward(to(dy, dtype), to(x, dtype), shape, mean, rstd, gain, gain, wanted)
    if weight is not None and weight.dtype is not dtype:
        grads = [None if grad is None else grad.to(weight.dtype) for grad in grads]
    return None if dx is None else to(dx, x.dtype), *grads


@kernel
def l2_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`y = x inverse` with `inverse = rsqrt(sum x² + eps)` over the last dimension. Returns (y, inverse)."""
    y, inverse = _scaled(to(x, wide(x.dtype)), (-1,), 1.0, eps)
    return to(y, x.dtype), inverse


@kernel
def dl2_norm(dy: Tensor, x: Tensor, inverse: Tensor) -> Tensor:
    """`dx = inverse (dy - y sum(dy y))`."""
    dy = to(dy, inverse.dtype)
    y = to(x, inverse.dtype) * inverse
    buffer = dy * y
    return to(_dscaled(dy, y, buffer.sum(-1, True), inverse, 1.0, out=buffer), x.dtype)
