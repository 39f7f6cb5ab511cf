"""A residual addition and the norm behind it, in one pass each way. Arguments and formulas as in `norm.py`."""

from __future__ import annotations

from torch import Tensor

from fusible.kernels.norm import dlayer_norm, drms_norm, layer_norm, rms_norm
from fusible.kernels.registry import kernel


@kernel
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rms_norm(x + residual)`, both of one dtype. Returns (y, rstd, x + residual)."""
    total = x + residual
    y, rstd = rms_norm.body(total, weight, eps, normalized_ndim, zero_centered)
    return y, rstd, total


@kernel
def drms_norm_add(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor,
    zero_centered: bool = False,
    want_weight: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """`dx + extra`, where extra is the residual branch's gradient, of x's dtype. Returns (dx + extra, dweight)."""
    dx, dweight = drms_norm.body(dy, x, rstd, weight, zero_centered, True, want_weight, normalized_ndim)
    return dx.add_(extra), dweight


@kernel
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`layer_norm(x + residual)`, both of one dtype. Returns (y, mean, rstd, x + residual)."""
    total = x + residual
    return *layer_norm.body(total, weight, bias, eps, normalized_ndim, zero_centered), total


@kernel
def dlayer_norm_add(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`dx + extra`, as in `drms_norm_add`. Returns (dx + extra, dweight, dbias)."""
    dx, dweight, dbias = dlayer_norm.body(
        dy, x, mean, rstd, weight, zero_centered, True, want_weight, want_bias, normalized_ndim
    )
    return dx.add_(extra), dweight, dbias
