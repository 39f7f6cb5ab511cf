"""A norm with what is around it in one pass: the residual addition before it, dropout before that, its output again.

Arguments and formulas as in `norm.py`. Where a kernel serves both norms, `mean` is `None` for RMSNorm.
"""

from __future__ import annotations

from torch import Tensor

from fusible.kernels.dropout import ddropout, dropout_add
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


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ndim: int, zero_centered: bool, center: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, mean, rstd)."""
    if center:
        return layer_norm.body(x, weight, bias, eps, ndim, zero_centered)
    y, rstd = rms_norm.body(x, weight, eps, ndim, zero_centered)
    return y, None, rstd


@kernel
def dropout_add_norm(
    x: Tensor,
    residual: Tensor,
    p: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    normalized_ndim: int = 1,
    zero_centered: bool = False,
    center: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """The norm of `total = dropout(x) + residual`: LayerNorm if `center`, else RMSNorm.

    Returns (y, mean, rstd, total, mask), the mask as of `dropout`.
    """
    total, mask = dropout_add.body(x, residual, p)
    return *_forward(total, weight, bias, eps, normalized_ndim, zero_centered, center), total, mask


def _backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor | None,
    zero_centered: bool,
    want_weight: bool,
    want_bias: bool,
    ndim: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx + extra, dweight, dbias)."""
    if mean is None:
        dx, dweight = drms_norm.body(dy, x, rstd, weight, zero_centered, True, want_weight, ndim)
        dbias = None
    else:
        dx, dweight, dbias = dlayer_norm.body(
            dy, x, mean, rstd, weight, zero_centered, True, want_weight, want_bias, ndim
        )
    return dx if extra is None else dx.add_(extra), dweight, dbias


def dnorm_add(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor | None,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`drms_norm_add` or `dlayer_norm_add`, or without extra plain `drms_norm` or `dlayer_norm`."""
    options = zero_centered, want_weight
    if mean is None:
        if extra is None:
            dx, dweight = drms_norm(dy, x, rstd, weight, zero_centered, True, want_weight, normalized_ndim)
        else:
            dx, dweight = drms_norm_add(dy, x, rstd, weight, extra, *options, normalized_ndim)
        return dx, dweight, None
    if extra is None:
        return dlayer_norm(dy, x, mean, rstd, weight, zero_centered, True, want_weight, want_bias, normalized_ndim)
    return dlayer_norm_add(dy, x, mean, rstd, weight, extra, *options, want_bias, normalized_ndim)


@kernel
def ddropout_add_norm(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    extra: Tensor | None,
    mask: Tensor,
    scale: float,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `dropout_add_norm`, x being the sum and extra its other gradient.

    Returns (gradient of what was dropped, gradient of the residual, dweight, dbias).
    """
    dx, dweight, dbias = _backward(
        dy, x, mean, rstd, weight, extra, zero_centered, want_weight, want_bias, normalized_ndim
    )
    return ddropout.body(dx, mask, scale), dx, dweight, dbias


@kernel
def dnorm_recompute(
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    extra: Tensor | None,
    zero_centered: bool = False,
    want_weight: bool = True,
    want_bias: bool = True,
    normalized_ndim: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """A norm's backward, and its output computed again. Returns (dx + extra, dweight, dbias, y)."""
    dx, dweight, dbias = _backward(
        dy, x, mean, rstd, weight, extra, zero_centered, want_weight, want_bias, normalized_ndim
    )
    return dx, dweight, dbias, normalized(x, mean, rstd, weight, bias, zero_centered)


def normalized(
    x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, zero_centered: bool
) -> Tensor:
    """`(x - mean) rstd g + b` in the dtype of rstd, rounded to x's."""
    wide = x.to(rstd.dtype)
    y = wide * rstd if mean is None else (wide - mean) * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + 1 if zero_centered else weight.to(y.dtype))
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)
